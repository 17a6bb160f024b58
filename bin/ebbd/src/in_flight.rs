//! Whether requests of the VMM may write to memory that is about to be evicted.

use std::cell::RefCell;
use std::sync::Arc;

use ebb_pager::Evicted;
use ebb_units::{Bytes, FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::pinning::pinning_of;

use crate::judge::{Known, Sources};
use crate::open_files::OpenFiles;
use crate::problem::{Answer, Refused, failed, not_allowed};
use crate::trouble::Attempt;
use crate::worker::State;

/// Huge frames evicted by force before QEMU is asked anew whether the guest still runs.
const STEP_PIECES: usize = 8;
/// What nobody tells the end of a request for.
const STAYS: &str = "its kernel's own memory, file pages with buffers and large pages of \
                     processes stay in memory";

impl State {
    /// Why requests may write past a protection, if they may. Then the guest tells which
    /// frames are in flight. Of descriptors opened since they were listed the judge finds out, once
    /// frames are protected.
    ///
    /// # Errors
    /// The guest is not known, so nobody tells.
    pub(crate) fn may_tell_in_flight(&self, open: &mut OpenFiles) -> Answer<Option<String>> {
        let process = &self.held.process;
        let why = open.of(process).and_then(|open| pinning_of(process, open));
        let why = why.map_err(failed("QEMU's descriptors"))?;
        match (why, self.insight.guest()) {
            (Some(why), Err(unknown)) => Err(not_allowed(format!(
                "{why}, and nobody tells which reads still write to memory that is to be evicted, \
                 since the guest is not trusted ({unknown}): try again once it is, start QEMU with \
                 cache=writeback, or give the disk by `ebb run --disk`"
            ))),
            (why, _) => Ok(why),
        }
    }

    /// The same for a command: an unknown guest is asked anew who it is.
    pub(crate) fn ask_in_flight(&mut self) -> Answer<()> {
        if self.insight.guest().is_err() {
            self.confirm();
        }
        self.may_tell_in_flight(&mut OpenFiles::default()).map(drop)
    }

    /// What the user is to know of it, where memory in use is evicted.
    pub(crate) fn in_flight_warning(&self) -> Option<String> {
        if !self.held.record.evicts {
            return None;
        }
        match self.may_tell_in_flight(&mut OpenFiles::default()) {
            Ok(why) => why.map(|why| format!("{why}: {STAYS}")),
            Err(why) => Some(why.to_string()),
        }
    }

    /// Evicts from the bottom of RAM up, huge frame by huge frame. Metadata and
    /// the note stay: they are read in place.
    /// Also tells what came in the way meanwhile.
    pub(crate) fn evict_by_force(
        &mut self,
        want_bytes: u64,
        pins: bool,
    ) -> Answer<(Evicted, Option<Refused>)> {
        let pager = Arc::clone(&self.held.pager);
        let mut pieces = pager.ram().regions().flat_map(|region| region.frames().by_huge());
        let mut done = Evicted::default();
        loop {
            let left = want_bytes.saturating_sub(done.frames() * FRAME_BYTES);
            let step: Vec<FrameRange> = pieces.by_ref().take(STEP_PIECES).collect();
            if left == 0 || step.is_empty() {
                return Ok((done, None));
            }
            if !self.is_as_seen() {
                self.look_at_devices();
                if let Err(why) = self.may_evict() {
                    return Ok((done, Some(why)));
                }
            }
            done.add(self.evict_step(&step, left, pins)?);
        }
    }

    fn evict_step(
        &mut self,
        pieces: &[FrameRange],
        want_bytes: u64,
        pins: bool,
    ) -> Answer<Evicted> {
        let pulse = RefCell::new(self.pulse());
        let still_runs = || pulse.borrow_mut().beats_at_once();
        let pager = &self.held.pager;
        // Where nothing is pinned, nobody has to be asked.
        let guest = self.insight.guest().ok().filter(|_| pins);
        let of = Sources {
            process: &self.held.process,
            guest: guest.map(|guest| (guest, &still_runs as &dyn Fn() -> bool)),
            pins,
        };
        let known = Known { of, pager, free: &[] };
        let view = pager.view();
        let may_go = |gfn: &Gfn| {
            !self.is_needed(*gfn) && guest.is_none_or(|guest| guest.looks_settled(&view, *gfn))
        };
        let (mut done, mut result) = (Evicted::default(), Ok(()));
        for piece in pieces {
            let frames: Vec<Gfn> = piece.frames().filter(may_go).collect();
            match pager.evict(&frames, &known) {
                Ok(more) => done.add(more),
                Err(error) => result = Err(not_allowed(self.explain(Attempt::Save, &error))),
            }
            if result.is_err() || done.frames() * FRAME_BYTES >= want_bytes {
                break;
            }
        }
        self.end_pulse(pulse.into_inner());
        result.map(|()| done)
    }

    /// Why nothing more goes.
    pub(crate) fn nothing_more(&self, pinned: Option<&str>) -> String {
        let told = "nothing more can be evicted now";
        pinned.map_or(told.into(), |why| format!("{told}: {why}, and so {STAYS}"))
    }

    /// Why a limit is not held, though all was evicted that can be.
    pub(crate) fn out_of_reach(&self, pinned: Option<&str>, taken_bytes: u64) -> String {
        let why = self.nothing_more(pinned);
        format!("{why}; it takes {}: raise the limit above that", Bytes(taken_bytes))
    }
}
