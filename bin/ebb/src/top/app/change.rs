//! Changes of a VM by keys. Nothing is changed without `--control`, and without a question before.

use ebb_api::VmName;
use ebb_units::Bytes;
use ratatui::crossterm::event::KeyCode;

use super::{App, Effect, Input};
use crate::args::SizeOrOff;

/// Longest text of a limit.
const LIMIT_MOST: usize = 16;

/// What the daemon is to change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Whether the pilot leaves a VM as it is.
    Hold { vm: VmName, hold: bool },
    /// A VM's limit; none: no limit.
    Limit { vm: VmName, bytes: Option<u64> },
}

impl Change {
    /// The question before it.
    pub fn question(&self) -> String {
        match self {
            Change::Hold { vm, hold: true } => format!("have the pilot leave {vm} as it is"),
            Change::Hold { vm, hold: false } => format!("let the pilot change {vm} again"),
            Change::Limit { vm, bytes: Some(bytes) } => {
                format!("set the limit of {vm} to {}, and keep the pilot off it", Bytes(*bytes))
            }
            Change::Limit { vm, bytes: None } => format!("lift the limit of {vm}"),
        }
    }

    /// What is said after it.
    pub fn done(&self) -> String {
        match self {
            Change::Hold { vm, hold: true } => format!("{vm} is held"),
            Change::Hold { vm, hold: false } => format!("{vm} is no longer held"),
            Change::Limit { vm, bytes: Some(bytes) } => {
                format!("{vm} has a limit of {}", Bytes(*bytes))
            }
            Change::Limit { vm, bytes: None } => format!("{vm} has no limit"),
        }
    }
}

impl App {
    pub(super) fn ask_hold(&mut self) {
        if let Some((vm, hold)) = self.changeable() {
            self.input = Input::Confirm(Change::Hold { vm, hold: !hold });
        }
    }

    pub(super) fn ask_limit(&mut self) {
        if let Some((vm, _)) = self.changeable() {
            self.input = Input::Limit(vm, String::new());
        }
    }

    /// The VM that may be changed now, and whether it is held. Says why none may be.
    fn changeable(&mut self) -> Option<(VmName, bool)> {
        let why = match () {
            () if !self.may_control => "only looking: `ebb top --control` may change VMs",
            () if self.is_busy => "the last change is under way",
            () if self.silence.is_some() => "the daemon does not answer",
            () => match self.subject() {
                Some(vm) => return Some((vm.name.clone(), vm.hold)),
                None => "there is no VM to change",
            },
        };
        self.message = Some(why.into());
        None
    }

    pub(super) fn limit_key(&mut self, vm: VmName, mut text: String, key: KeyCode) {
        match key {
            KeyCode::Esc => return,
            KeyCode::Enter => match text.parse::<SizeOrOff>() {
                Ok(SizeOrOff(size)) => {
                    let bytes = size.map(|size| size.0);
                    self.input = Input::Confirm(Change::Limit { vm, bytes });
                    return;
                }
                Err(why) => self.message = Some(why),
            },
            KeyCode::Backspace => drop(text.pop()),
            KeyCode::Char(letter) if text.len() < LIMIT_MOST && letter.is_ascii_graphic() => {
                text.push(letter);
            }
            _ => {}
        }
        self.input = Input::Limit(vm, text);
    }

    pub(super) fn confirm_key(&mut self, change: Change, key: KeyCode) -> Option<Effect> {
        match key {
            KeyCode::Char('y' | 'Y') => {
                self.is_busy = true;
                self.message = Some("under way".into());
                Some(Effect::Do(change))
            }
            _ => {
                self.message = Some("nothing is changed".into());
                None
            }
        }
    }
}
