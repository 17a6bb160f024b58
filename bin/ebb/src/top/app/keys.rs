//! What keys do on the pages.

use ratatui::crossterm::event::KeyCode;

use super::{App, Effect, Input, Page};

/// VMs that a key for a page goes over.
const PAGE: usize = 10;

/// Keys and what they do, for the page of keys.
pub const KEYS: [(&str, &str); 10] = [
    ("/", "show only VMs with a text in their names; Esc shows all"),
    ("Up, Down", "choose a VM; also j and k, PgUp, PgDn, Home, End"),
    ("Enter", "show the VM and its last minutes; Esc goes back"),
    ("s, S", "sort by the next column, or by the one before"),
    ("r", "reverse the order"),
    ("h", "have the pilot leave the VM as it is, or no longer (--control)"),
    ("l", "change the VM's limit (--control)"),
    ("Left, Right", "go back or forward in history (--at)"),
    ("?", "this page"),
    ("q", "end; also Ctrl-C"),
];

impl App {
    pub(super) fn page_key(&mut self, key: KeyCode) -> Option<Effect> {
        match key {
            KeyCode::Char('q') => return Some(Effect::Quit),
            KeyCode::Char('?') | KeyCode::F(1) => self.input = Input::Help,
            KeyCode::Char('h') => self.ask_hold(),
            KeyCode::Char('l') => self.ask_limit(),
            KeyCode::Up | KeyCode::Char('k') => self.choose(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.choose(|at, _| at.saturating_add(1)),
            KeyCode::PageUp => self.choose(|at, _| at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.choose(|at, _| at.saturating_add(PAGE)),
            KeyCode::Home => self.choose(|_, _| 0),
            KeyCode::End => self.choose(|_, count| count),
            KeyCode::Left => return self.step(false),
            KeyCode::Right => return self.step(true),
            _ => match self.page {
                Page::Table => self.table_key(key),
                Page::Vm(_) => self.vm_key(key),
            },
        }
        None
    }

    /// Goes to another moment of the past.
    fn step(&mut self, is_forward: bool) -> Option<Effect> {
        let (Some(_), Some(top), false) = (self.past_s, &self.top, self.is_busy) else {
            return None;
        };
        self.is_busy = true;
        Some(Effect::Step { at_s: top.at_unix_ms / 1000, is_forward })
    }

    fn table_key(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('/') => self.input = Input::Filter,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('s') => self.sort = self.sort.turned(true),
            KeyCode::Char('S') => self.sort = self.sort.turned(false),
            KeyCode::Char('r') => self.sort.is_reversed = !self.sort.is_reversed,
            KeyCode::Enter => {
                if let Some(name) = self.subject().map(|vm| vm.name.clone()) {
                    self.chosen = Some(name.clone());
                    self.page = Page::Vm(name);
                }
            }
            _ => {}
        }
    }

    fn vm_key(&mut self, key: KeyCode) {
        if matches!(key, KeyCode::Esc | KeyCode::Backspace | KeyCode::Enter) {
            self.page = Page::Table;
        }
    }

    /// Chooses another one of the VMs that are shown, from where the chosen one stands, and how
    /// many there are.
    fn choose(&mut self, to: impl FnOnce(usize, usize) -> usize) {
        let shown = self.shown();
        let to = to(self.chosen_at(&shown), shown.len()).min(shown.len().saturating_sub(1));
        let Some(name) = shown.get(to).map(|vm| vm.name.clone()) else { return };
        if let Page::Vm(shown) = &mut self.page {
            *shown = name.clone();
        }
        self.chosen = Some(name);
    }
}
