//! What `ebb top` shows, and what keys do to it. It does no I/O and reads no clock: a message comes
//! in, and at most one thing is to be done.

mod change;
mod keys;

use ebb_api::{Top, TopVm, VmName};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

pub use self::change::Change;
pub use self::keys::KEYS;
use super::column::Sort;
use super::theme::Theme;
use super::trail::Trails;
use crate::clock::Clock;

/// What happens.
#[derive(Debug)]
pub enum Message {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// The daemon's answer, or why there is none.
    Figures(Result<Top, String>),
    /// Moments of the past, the one to show last, or why there are none.
    Past(Result<Vec<Top>, String>),
    /// What came of a change.
    Done(Result<String, String>),
    /// The terminal is gone, or somebody asks this program to end.
    End,
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// End the program.
    Quit,
    /// Have the daemon change something.
    Do(Change),
    /// Show the moment after the one that is shown, or the one before.
    Step { at_s: u64, is_forward: bool },
}

/// What the keys are for now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// The page.
    Page,
    /// The text by which VMs are filtered.
    Filter,
    /// The page of keys.
    Help,
    /// A new limit for a VM, as far as it is written.
    Limit(VmName, String),
    /// Whether to do this.
    Confirm(Change),
}

/// The page that is shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Page {
    /// All VMs.
    Table,
    /// One VM.
    Vm(VmName),
}

/// The state of the program.
pub struct App {
    pub theme: Theme,
    pub clock: Clock,
    /// Whether keys may change VMs.
    pub may_control: bool,
    /// The last figures.
    pub top: Option<Top>,
    /// Why there are no newer ones; none: they are the newest.
    pub silence: Option<String>,
    pub trails: Trails,
    /// How much of the past is remembered, in seconds; none: the present is shown.
    pub past_s: Option<u64>,
    pub page: Page,
    pub input: Input,
    pub filter: String,
    pub sort: Sort,
    /// The chosen VM; none: the first one that is shown.
    pub chosen: Option<VmName>,
    /// What is said about the last key.
    pub message: Option<String>,
    /// Whether a change is under way.
    pub is_busy: bool,
}

/// Longest filter.
const FILTER_MOST: usize = 64;

impl App {
    /// A program that has no figures yet.
    pub fn new(theme: Theme, clock: Clock, filter: String, may_control: bool) -> App {
        App {
            theme,
            clock,
            may_control,
            top: None,
            silence: None,
            trails: Trails::default(),
            past_s: None,
            page: Page::Table,
            input: Input::Page,
            filter,
            sort: Sort { by: None, is_reversed: false },
            chosen: None,
            message: None,
            is_busy: false,
        }
    }

    /// Takes a message. Returns what is to be done.
    pub fn on(&mut self, message: Message) -> Option<Effect> {
        match message {
            Message::End => return Some(Effect::Quit),
            Message::Resized => {}
            Message::Figures(Ok(top)) => {
                self.trails.add(&top);
                (self.top, self.silence) = (Some(top), None);
            }
            Message::Figures(Err(why)) => self.silence = Some(why),
            Message::Past(past) => {
                self.is_busy = false;
                self.show_past(past);
            }
            Message::Done(done) => {
                self.is_busy = false;
                self.message = Some(done.unwrap_or_else(|why| format!("not done: {why}")));
            }
            Message::Key(key) => return self.key(key),
        }
        None
    }

    fn show_past(&mut self, past: Result<Vec<Top>, String>) {
        match past.as_deref() {
            Ok([first, .., last] | [first @ last]) => {
                self.past_s = Some(last.at_unix_ms.saturating_sub(first.at_unix_ms) / 1000);
                self.top = Some(last.clone());
                self.trails = Trails::default();
                past.iter().flatten().for_each(|top| self.trails.add(top));
            }
            Ok([]) => self.message = Some("nothing is on record there".into()),
            Err(why) => self.message = Some(why.clone()),
        }
    }

    /// The VMs that are shown, sorted.
    pub fn shown(&self) -> Vec<&TopVm> {
        let all = self.top.iter().flat_map(|top| &top.vms);
        let filter = self.filter.to_lowercase();
        let mut shown: Vec<&TopVm> =
            all.filter(|vm| vm.name.as_str().to_lowercase().contains(&filter)).collect();
        self.sort.apply(&mut shown);
        shown
    }

    /// Where the chosen VM stands among those that are shown.
    pub fn chosen_at(&self, shown: &[&TopVm]) -> usize {
        let is_chosen = |vm: &&TopVm| Some(&vm.name) == self.chosen.as_ref();
        shown.iter().position(is_chosen).unwrap_or(0)
    }

    /// The VM that keys are about.
    pub fn subject(&self) -> Option<&TopVm> {
        match &self.page {
            Page::Vm(name) => self.vm(name),
            Page::Table => {
                let shown = self.shown();
                shown.get(self.chosen_at(&shown)).copied()
            }
        }
    }

    /// A VM by its name.
    pub fn vm(&self, name: &VmName) -> Option<&TopVm> {
        self.top.as_ref()?.vms.iter().find(|vm| vm.name == *name)
    }

    fn key(&mut self, key: KeyEvent) -> Option<Effect> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c' | 'C')) {
            return Some(Effect::Quit);
        }
        if is_control || key.modifiers.contains(KeyModifiers::ALT) {
            return None;
        }
        self.message = None;
        match std::mem::replace(&mut self.input, Input::Page) {
            Input::Page => self.page_key(key.code),
            Input::Help => (key.code == KeyCode::Char('q')).then_some(Effect::Quit),
            Input::Filter => {
                self.filter_key(key.code);
                None
            }
            Input::Limit(vm, text) => {
                self.limit_key(vm, text, key.code);
                None
            }
            Input::Confirm(change) => self.confirm_key(change, key.code),
        }
    }

    fn filter_key(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => return,
            KeyCode::Esc => {
                self.filter.clear();
                return;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter)
                if self.filter.len() < FILTER_MOST && letter.is_ascii_graphic() =>
            {
                self.filter.push(letter);
            }
            _ => {}
        }
        self.input = Input::Filter;
    }
}

#[cfg(test)]
mod tests;
