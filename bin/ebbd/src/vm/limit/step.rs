//! One step of the limiter: what it is given to choose frames by.

use std::cell::{Cell, RefCell};
use std::io;
use std::time::Instant;

use ebb_inspect::{NOTES_MAX, RECORDS_MAX, may_hold_note, may_hold_record};
use ebb_reclaim::limit::judge::Sources;
use ebb_reclaim::limit::limiter::Limiter;
use ebb_reclaim::limit::marks::{Left, Marks};
use ebb_reclaim::limit::windows::Windows;
use ebb_units::Gfn;
use ebb_vm::pinning::pinning;

use super::vmm::Forgetful;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::{End, Liveness};

/// A function that tells how hot a frame is.
pub type HeatOf<'a> = &'a dyn Fn(Gfn) -> usize;

/// Makes one step of the limiter, while the guest runs. `ended` gets why the guest's kernel does
/// not run any more, if that was seen.
pub(super) fn evict_step(
    limiter: &mut Limiter,
    cx: &mut VmContext,
    marks: Marks,
    (heat, end): (HeatOf<'_>, Instant),
    ended: &mut Option<End>,
) -> io::Result<Left> {
    let VmContext { qmp, guest, reaching, pager, process, forgetting, disks, .. } = cx;
    let hears_late = !qmp.hears_at_once();
    let liveness = RefCell::new(Liveness::new(qmp, guest, reaching, pager));
    let still_runs = || liveness.borrow_mut().runs_at_once();
    let pins = pinning(process)?.is_some();
    let known = guest.guest().ok().map(|guest| (guest, &still_runs as &dyn Fn() -> bool));
    let of = Sources { process, guest: known, pins, hears_late };
    // An unknown kernel can only be known by its note or its registration, so frames that may hold
    // one stay resident. Anybody can write them, so no more of them stay than a search looks at.
    let (view, is_known) = (pager.view(), guest.kernel().is_ok());
    let (notes, records) = (Cell::new(0), Cell::new(0));
    let is_one = |count: &Cell<usize>, most, may_hold: &dyn Fn() -> bool| {
        let found = count.get() < most && may_hold();
        count.set(count.get() + usize::from(found));
        found
    };
    let may_tell = |gfn| {
        !is_known
            && (is_one(&notes, NOTES_MAX, &|| may_hold_note(&view, gfn))
                || is_one(&records, RECORDS_MAX, &|| may_hold_record(&view, gfn)))
    };
    let stays = |gfn| pins && known.is_none_or(|(guest, _)| !guest.looks_settled(&view, gfn));
    let spare = |gfn: Gfn| guest.needs(gfn) || may_tell(gfn) || stays(gfn);
    let has_disk = disks.shared.tracked_blocks() > 0;
    let (pagemap, vmm) = (limiter.pagemap(), Forgetful(process, forgetting));
    let mut windows = Windows::new(of, (&**pager, &vmm), &pagemap, &spare, heat, has_disk);
    let left = limiter.step(&mut windows, marks, end);
    drop(windows);
    *ended = liveness.borrow().ended();
    left
}
