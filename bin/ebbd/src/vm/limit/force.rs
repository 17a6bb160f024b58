//! Evicting by force, used or not, as `ebb evict` asks.

use std::cell::RefCell;
use std::io;
use std::time::Instant;

use ebb_api::EvictReport;
use ebb_pager::{Evicted, Grain, Pager};
use ebb_reclaim::limit::judge::{Known, Sources};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use super::in_flight::{may_tell_in_flight, nothing_more};
use super::store_failure::{Attempt, explain_to};
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::support::nanoseconds::nanoseconds;
use crate::support::open_files::OpenFiles;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::{End, Liveness};

/// Huge frames to evict by force before QEMU is asked again whether the guest still runs.
const STEP_PIECES: usize = 8;

/// Prepares an eviction by force. Returns why the guest's metadata tells what is in flight, if it
/// does.
///
/// # Errors
/// Nobody tells what is in flight, or memory in use cannot be evicted.
pub fn prepare(cx: &mut VmContext) -> Answer<Option<String>> {
    let pinned = may_tell_in_flight(cx, &mut OpenFiles::default())?;
    cx.begin_to_evict()?;
    cx.expect_refills().map_err(failed("the refill threads"))?;
    Ok(pinned)
}

/// An eviction by force: from the bottom of RAM up, huge frame by huge frame. Metadata and the note
/// stay resident, because they are read in place.
pub struct ByForce {
    pieces: std::vec::IntoIter<FrameRange>,
    want_bytes: u64,
    /// The VMM pins memory: the guest's metadata tells what is in flight.
    pins: bool,
    /// What was evicted so far.
    done: Evicted,
}

impl ByForce {
    /// Makes an eviction of `want_bytes`.
    pub fn new(cx: &VmContext, want_bytes: u64, pins: bool) -> ByForce {
        let regions = cx.pager.ram().regions();
        let pieces: Vec<_> = regions.flat_map(|region| region.frames().by_huge()).collect();
        ByForce { pieces: pieces.into_iter(), want_bytes, pins, done: Evicted::default() }
    }

    /// Reports what was evicted since `began`. `blocked`: what came in the way. `pinned`: see
    /// [`prepare`].
    pub fn report(
        &self,
        began: Instant,
        blocked: Option<String>,
        pinned: Option<&str>,
    ) -> EvictReport {
        let saved_bytes = self.saved_bytes();
        let stopped_by = match blocked {
            Some(why) => why,
            None if saved_bytes >= self.want_bytes => "the amount asked for was reached".into(),
            None => nothing_more(pinned),
        };
        EvictReport {
            saved_bytes,
            saved_frames: self.done.frames(),
            abandoned: self.done.abandoned,
            duration_ns: nanoseconds(began.elapsed()),
            stopped_by,
        }
    }

    /// Returns the bytes evicted so far.
    pub fn saved_bytes(&self) -> u64 {
        self.done.frames() * FRAME_BYTES
    }

    /// Returns the bytes still to evict.
    fn left(&self) -> u64 {
        self.want_bytes.saturating_sub(self.saved_bytes())
    }

    /// Makes a step. Returns whether there may be another one, or the store's error in words. Also
    /// returns why the guest's kernel does not run any more, if that was seen; that may be seen
    /// before the store fails.
    pub fn step(&mut self, cx: &mut VmContext) -> (Answer<bool>, Option<End>) {
        let step: Vec<FrameRange> = self.pieces.by_ref().take(STEP_PIECES).collect();
        if self.left() == 0 || step.is_empty() {
            return (Ok(false), None);
        }
        let mut ended = None;
        let result = self.evict(cx, &step, &mut ended);
        let result = result.map_err(|error| not_allowed(explain_to(cx, Attempt::Save, &error)));
        (result.map(|()| true), ended)
    }

    fn evict(
        &mut self,
        cx: &mut VmContext,
        pieces: &[FrameRange],
        ended: &mut Option<End>,
    ) -> io::Result<()> {
        let VmContext { qmp, guest: known, reaching, pager, process, .. } = cx;
        let hears_late = !qmp.hears_at_once();
        let liveness = RefCell::new(Liveness::new(qmp, known, reaching, pager));
        let still_runs = || liveness.borrow_mut().runs_at_once();
        // If nothing is pinned, nobody has to be asked.
        let guest = known.guest().ok().filter(|_| self.pins);
        let of = Sources {
            process,
            guest: guest.map(|guest| (guest, &still_runs as &dyn Fn() -> bool)),
            pins: self.pins,
            hears_late,
        };
        let judge = Known::new(of, pager, &[]);
        let view = pager.view();
        let may_go = |gfn: &Gfn| {
            !known.needs(*gfn) && guest.is_none_or(|guest| guest.looks_settled(&view, *gfn))
        };
        let mut result = Ok(());
        for piece in pieces {
            let there = with_memory(pager, *piece);
            let each = there.iter().flat_map(|run| run.frames());
            let frames: Vec<Gfn> = each.filter(may_go).collect();
            match pager.evictor().evict(&frames, &judge) {
                Ok(more) => self.done.add(more),
                Err(error) => result = Err(error),
            }
            if result.is_err() || self.left() == 0 {
                break;
            }
        }
        *ended = liveness.borrow().ended();
        result
    }
}

/// Returns those frames of a huge frame that have memory. Frames that go together are returned
/// together, if any of them has.
fn with_memory(pager: &Pager, piece: FrameRange) -> Vec<FrameRange> {
    // The file of memory that was unplugged meanwhile tells nothing.
    let there = pager.ram().populated_in(piece).unwrap_or_else(|error| {
        tracing::debug!("{piece:?}: which frames are resident: {error}");
        Vec::new()
    });
    match pager.folios().grain_of(piece.start.huge()) {
        Grain::Huge if !there.is_empty() => vec![piece],
        _ => there,
    }
}
