//! A monitoring under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_api::HeatTracker;
use ebb_heat::{Levels, Round, Walk};
use ebb_inspect::Guest;
use ebb_sys::page_idle::PageIdle;
use ebb_sys::pagemap::Pagemap;

/// One monitoring.
pub struct Run {
    pub by: By,
    pub why: String,
    pub levels: Levels,
    pub began: Instant,
    pub windows: u8,
    pub tracking: Duration,
    /// The rest of a round that was broken off; the next tick goes on with it.
    pub rest: Option<Walk>,
    /// How often the round was broken off.
    pub broken_off: u32,
    pub is_last: bool,
    /// The sums of all rounds.
    pub rounds: Round,
}

/// What tells which pages are used.
pub enum By {
    /// The guest's page tables.
    Guest(Arc<Guest>),
    /// The host's marks on the frames that the VMM has mapped.
    Idle(Pagemap, PageIdle),
    /// The VMM's page table.
    Vmm(Pagemap),
}

impl Run {
    /// Makes a monitoring that begins now.
    pub fn new(by: By, why: String, levels: Levels) -> Run {
        Run {
            by,
            why,
            levels,
            began: Instant::now(),
            windows: 0,
            tracking: Duration::ZERO,
            rest: None,
            broken_off: 0,
            is_last: false,
            rounds: Round::default(),
        }
    }

    /// Returns the tracker that tells which pages are used.
    pub fn tracker(&self) -> HeatTracker {
        match self.by {
            By::Guest(_) => HeatTracker::GuestTables,
            By::Idle(..) => HeatTracker::IdlePages,
            By::Vmm(_) => HeatTracker::VmmTable,
        }
    }

    /// Adds a round that ended, or was broken off (`None`), after `took`.
    pub fn add(&mut self, walk: Walk, round: Option<Round>, took: Duration) {
        self.tracking += took;
        let Some(round) = round else {
            (self.rest, self.broken_off) = (Some(walk), self.broken_off + 1);
            return;
        };
        (self.rest, self.broken_off) = (None, 0);
        let all = &mut self.rounds;
        all.tables += round.tables;
        all.pruned_tables += round.pruned_tables;
        all.cleared_entries += round.cleared_entries;
        all.is_truncated |= round.is_truncated;
    }
}
