//! One round of a monitoring, by the guest's page tables or from outside the guest.

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use ebb_heat::{
    GuestTracker, HostPages, HostTracker, IdleTracker, Levels, PagerTables, Roots, Round,
    TrackError, Tracker, Walk,
};
use ebb_inspect::Guest;
use ebb_sys::page_idle::PageIdle;
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;

use crate::vm::context::VmContext;
use crate::vm::context::forgetting::Forgetting;
use crate::vm::context::liveness::{End, Liveness};

/// Makes a round by the guest's page tables. Returns `None` if it was broken off after `turn`,
/// because memory has to be evicted.
pub(super) fn guest_round(
    cx: &mut VmContext,
    guest: &Guest,
    (walk, turn): (Walk, Duration),
    (roots, levels): (&mut Roots, &mut Levels),
    ended: &mut Option<End>,
) -> Result<Option<Round>, TrackError> {
    let now = cx.guest.witness().filter(|now| now.note() == guest.note()).cloned();
    let guest = now.ok_or(TrackError::NotRunning)?;
    let VmContext { qmp, guest: known, reaching, pager, mailbox, .. } = cx;
    let (liveness, began) =
        (RefCell::new(Liveness::new(qmp, known, reaching, pager)), Instant::now());
    let goes_on = || {
        (!mailbox.is_pressed() || began.elapsed() < turn) && liveness.borrow_mut().hears_no_reset()
    };
    let tables = PagerTables::new(pager);
    let result = GuestTracker::new(&tables, &guest, roots, &goes_on).round(walk, levels);
    let liveness = liveness.into_inner();
    *ended = liveness.ended();
    match matches!(result, Err(TrackError::NotRunning)) && liveness.is_sound() {
        true => Ok(None),
        false => result.map(Some),
    }
}

/// Makes a round by idle page tracking, in at most `time`.
pub(super) fn idle_round(
    cx: &VmContext,
    (pagemap, idle): (&Pagemap, &PageIdle),
    (walk, time): (Walk, Duration),
    levels: &mut Levels,
) -> Result<Round, TrackError> {
    let (pages, began) = (Vmm(&cx.process, &cx.forgetting), Instant::now());
    let goes_on = || began.elapsed() <= time;
    IdleTracker::new(cx.pager.ram(), pagemap, idle, &pages, &goes_on).round(walk, levels)
}

/// Makes a round by the VMM's page table.
pub(super) fn vmm_round(
    cx: &VmContext,
    pagemap: &Pagemap,
    walk: Walk,
    levels: &mut Levels,
) -> Result<Round, TrackError> {
    let vmm = Vmm(&cx.process, &cx.forgetting);
    let mut tracker = HostTracker::new(cx.pager.ram(), pagemap, &vmm);
    tracker.round(walk, levels)
}

/// The VMM's page table, and how it is emptied.
struct Vmm<'a>(&'a Process, &'a Forgetting);

impl HostPages for Vmm<'_> {
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<()> {
        self.1.all(self.0, ranges)
    }
}
