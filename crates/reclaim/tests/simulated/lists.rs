//! Least recently used by two lists, as in a kernel, but each access is seen at no cost.

use std::collections::VecDeque;
use std::time::Instant;

use ebb_units::Gfn;

use crate::guest::{Chooser, Guest};

pub struct Lists {
    is_listed: Vec<bool>,
    active: VecDeque<usize>,
    inactive: VecDeque<usize>,
}

impl Lists {
    pub fn new(frames: usize) -> Lists {
        let is_listed = vec![false; frames];
        Lists { is_listed, active: VecDeque::new(), inactive: VecDeque::new() }
    }

    /// The next frame to look at. Neither list is much longer than the other.
    fn next(&mut self) -> Option<usize> {
        while self.active.len() > self.inactive.len() {
            self.inactive.extend(self.active.pop_front());
        }
        self.inactive.pop_front()
    }
}

impl Chooser for Lists {
    fn take(&mut self, guest: &mut Guest, want: usize, _: Instant) -> Vec<Gfn> {
        for (at, is_listed) in self.is_listed.iter_mut().enumerate() {
            if guest.there[at] && !*is_listed {
                *is_listed = true;
                self.inactive.push_back(at);
            }
            // It reads accessed bits: no access takes a minor fault.
            guest.mapped[at] = guest.there[at];
        }
        let mut goes = Vec::new();
        while goes.len() < want
            && let Some(at) = self.next()
        {
            // The access that made it resident counts as one.
            match std::mem::take(&mut guest.used[at]) {
                0 | 1 => {
                    self.is_listed[at] = false;
                    goes.push(Gfn(at as u64));
                }
                _ => self.active.push_back(at),
            }
        }
        goes
    }
}
