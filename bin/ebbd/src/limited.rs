//! What a VM's worker does about a limit on its resident memory.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::{Duration, Instant};

use ebb_api::{LimitRequest, LimitStatus};
use ebb_inspect::{NOTES_MAX, may_hold_note};
use ebb_units::{Bytes, Gfn};
use ebb_vm::pinning::pinning;

use crate::judge::Sources;
use crate::limit::{Left, Marks, floor_bytes};
use crate::limiter::Limiter;
use crate::open_files::OpenFiles;
use crate::problem::{Answer, failed, not_allowed};
use crate::status;
use crate::swap_room::WhenFull;
use crate::trouble::{self, Attempt, Trouble};
use crate::window::Windows;
use crate::worker::{Command, State};

/// So long it evicts before it looks at commands again.
pub const TURN: Duration = Duration::from_millis(50);

impl State {
    /// Sets the limit, or lifts it.
    pub fn set_limit(&mut self, request: LimitRequest) -> Answer<LimitStatus> {
        request.check()?;
        if self.held.record.share.is_some() {
            let name = &self.held.record.name;
            return Err(not_allowed(format!(
                "the pool says what its limit is: take it out first, ebb share {name} off"
            )));
        }
        if let Some(bytes) = request.bytes {
            self.may_limit(bytes, request.low_bytes)?;
            self.look_at_devices();
            self.may_evict()?;
            self.ask_in_flight()?;
            self.put_on_record(|record| record.evicts = true)?;
            self.held.pager.watch_all().map_err(failed("watching the VM's memory"))?;
            self.make_limiter()?;
        }
        self.put_on_record(|record| {
            record.limit_bytes = request.bytes;
            (record.low_bytes, record.high_bytes) = (request.low_bytes, request.high_bytes);
        })?;
        self.apply_limit();
        Ok(status::limit(self))
    }

    /// The limit on record.
    pub fn marks(&self) -> Option<Marks> {
        let record = &self.held.record;
        let limit_bytes = record.limit_bytes?;
        Some(Marks::new(limit_bytes, record.low_bytes, record.high_bytes))
    }

    fn may_limit(&self, bytes: u64, low_bytes: Option<u64>) -> Answer<()> {
        let memory_bytes = self.memory_bytes();
        let floor = floor_bytes(memory_bytes);
        if bytes < floor {
            return Err(not_allowed(format!(
                "a limit of {} is below what keeps this guest alive: give {} or more",
                Bytes(bytes),
                Bytes(floor)
            )));
        }
        if let Some(low) = low_bytes.filter(|low| *low < floor) {
            return Err(not_allowed(format!(
                "a low mark of {} is below what keeps this guest alive: give {} or more",
                Bytes(low),
                Bytes(floor)
            )));
        }
        if bytes >= memory_bytes {
            return Err(not_allowed(format!(
                "a limit of {} limits nothing: the VM has {}; `off` lifts the limit",
                Bytes(bytes),
                Bytes(memory_bytes)
            )));
        }
        Ok(())
    }

    /// Has faults wait a little above the limit on record. A VM that is taken up grows until its
    /// limit is held, which takes some answers of QEMU first.
    pub(crate) fn slow_faults(&self) {
        let Some(marks) = self.marks() else { return };
        let (tell, wait) = marks.pressure();
        self.held.pager.set_marks(tell, wait);
    }

    /// Begins to hold the limit on record, or ends it.
    pub(crate) fn apply_limit(&mut self) {
        (self.stuck, self.trouble) = (None, None);
        self.limiter.iter_mut().for_each(Limiter::rest);
        self.held.pager.limit_store_memory(self.compressed_bytes());
        self.held.pager.halt_above(u64::MAX);
        if self.marks().is_none() {
            (self.limiter, self.last_trouble) = (None, None);
            return self.held.pager.set_marks(u64::MAX, u64::MAX);
        }
        let (pressed, own) = (Arc::clone(&self.pressed), self.own.clone());
        self.held.pager.on_pressure(move || {
            if !pressed.swap(true, AcqRel) {
                // A worker that is gone evicts no more.
                let _ = own.send(Command::Pressure);
            }
        });
        self.hold_limit(&mut OpenFiles::default());
    }

    /// What a limit needs, if it is not there yet.
    fn make_limiter(&mut self) -> Answer<()> {
        if self.limiter.is_none() {
            let keeps_freed = self.held.record.settings.read_freed;
            let limiter = Limiter::new(&self.held.process, &self.held.pager, keeps_freed);
            self.limiter = Some(limiter.map_err(failed("QEMU's page table"))?);
        }
        Ok(())
    }

    /// What its compressed pages may take. Of a limit it is a part: the guest keeps what
    /// it needs to live, and half of the rest.
    fn compressed_bytes(&self) -> u64 {
        let wanted = self.held.record.compressed_bytes();
        let floor = floor_bytes(self.memory_bytes());
        let share = |marks: Marks| marks.limit_bytes.saturating_sub(floor) / 2;
        self.marks().map_or(wanted, |marks| wanted.min(share(marks)))
    }

    /// Evicts for a while, if more than the limit allows is resident.
    pub(crate) fn hold_limit(&mut self, open: &mut OpenFiles) {
        self.pressed.store(false, Release);
        self.glance_at_devices();
        let Some(marks) = self.marks() else { return self.limiter = None };
        if let Err(why) = self.make_limiter() {
            self.stuck = Some(why.to_string());
            return self.held.pager.set_marks(u64::MAX, u64::MAX);
        }
        let Some(mut limiter) = self.limiter.take() else { return };
        let may = self.note_disks().and_then(|()| self.may_evict());
        if let Err(why) = may.and_then(|()| self.may_tell_in_flight(open).map(drop)) {
            // Nobody waits for room that is not looked for.
            (self.stuck, self.trouble) = (Some(why.to_string()), None);
            self.limiter = Some(limiter);
            self.held.pager.halt_above(u64::MAX);
            return self.held.pager.set_marks(u64::MAX, u64::MAX);
        }
        if self.trouble.as_ref().is_some_and(Trouble::rests) {
            self.limiter = Some(limiter);
            return self.halt(marks);
        }
        let end = Instant::now() + TURN;
        let mut more = true;
        while more && Instant::now() < end && self.is_as_seen() {
            let result = self.limit_step(&mut limiter, marks, end);
            let left = result.and_then(|left| self.write_back(end).map(|()| left));
            more = self.note(left) != Left::Nothing;
        }
        self.halt(marks);
        let in_the_way = self.trouble.is_some();
        let (tell, wait) = marks.for_faults(self.waits(), in_the_way, limiter.vain_mark(marks));
        self.held.pager.set_marks(tell, wait);
        self.limiter = Some(limiter);
        if more && !self.pressed.swap(true, AcqRel) {
            // This is the thread that reads it.
            let _ = self.own.send(Command::Pressure);
        }
    }

    /// Whether the guest's first touches wait until the store has room.
    pub(crate) fn waits(&self) -> bool {
        self.may_wait() && self.trouble.as_ref().is_some_and(Trouble::is_no_room)
    }

    /// Whether they do where it has none.
    fn may_wait(&self) -> bool {
        let when_full = self.held.record.settings.when_swap_is_full;
        when_full == WhenFull::Wait && self.marks().is_some()
    }

    /// What there is no room for, and what to do.
    pub(crate) fn why_it_waits(&self) -> &str {
        self.trouble.as_ref().map_or("", Trouble::why)
    }

    /// Whether it takes more than the limit, or one of its marks, allows.
    fn is_above(&self, mark: impl FnOnce(Marks) -> u64) -> bool {
        let taken = self.held.pager.taken_bytes();
        self.marks().zip(taken.ok()).is_some_and(|(marks, taken)| taken > mark(marks))
    }

    /// Whether QEMU itself may wait for room, and so answers nobody.
    pub(crate) fn is_halted(&self) -> bool {
        self.waits() && self.held.pager.waiting_touches() > 0
    }

    /// Has first touches wait where they are to, and go on where there is room.
    fn halt(&self, marks: Marks) {
        let above = if self.waits() { marks.high_bytes } else { u64::MAX };
        self.held.pager.halt_above(above);
    }

    /// Makes room in compressed memory, until `end` at most.
    fn write_back(&self, end: Instant) -> std::io::Result<()> {
        while self.held.pager.write_back()? > 0 && Instant::now() < end {}
        Ok(())
    }

    /// The same for a VM without a limit, of which memory was evicted by force or before.
    pub(crate) fn write_back_unlimited(&mut self) {
        if self.limiter.is_none() && !self.trouble.as_ref().is_some_and(Trouble::rests) {
            let result = self.write_back(Instant::now() + TURN);
            self.note(result.map(|()| Left::Nothing));
        }
    }

    /// Notes what failed, or that nothing does any more; what is left to do.
    fn note(&mut self, result: std::io::Result<Left>) -> Left {
        let before = self.trouble.take();
        match result {
            Ok(left) => {
                let over = || self.is_above(|marks| marks.high_bytes);
                let why = self.last_trouble.as_ref();
                self.trouble = trouble::after_step(before, left, why, self.may_wait(), over);
                if self.trouble.is_none() && !self.is_above(|marks| marks.limit_bytes) {
                    self.last_trouble = None;
                }
                left
            }
            Err(error) => {
                let no_room = trouble::is_no_room(&error);
                let why = self.explain_saving(&error);
                self.tell(&why);
                self.trouble = Some(match no_room {
                    true => Trouble::no_room(why),
                    false => Trouble::new(why, before),
                });
                Left::Nothing
            }
        }
    }

    /// Tells of trouble, once as long as it lasts.
    fn tell(&mut self, why: &String) {
        if self.last_trouble.as_ref() != Some(why) {
            tracing::error!("{}: {why}", self.held.record.name);
            self.last_trouble = Some(why.clone());
        }
    }

    /// Why nothing was saved, the same in all turns in which it is tried again.
    fn explain_saving(&self, error: &std::io::Error) -> String {
        let is_limited = self.marks().is_some();
        let when_full = self.held.record.settings.when_swap_is_full;
        self.explain(Attempt::to_save(error, is_limited, when_full), error)
    }

    /// Why the limit is not held, or the guest waits for what was evicted.
    pub fn what_is_stuck(&self) -> Option<String> {
        let reading = self.held.pager.failure();
        { reading.map(|error| self.explain(Attempt::Load, &error)) }
            .or_else(|| self.why_it_rests())
            .or_else(|| self.trouble.as_ref().map(|trouble| trouble.why().into()))
            .or_else(|| self.stuck.clone())
            // It is being tried again: until the limit holds nobody can say that it is over.
            .or_else(|| {
                self.last_trouble.clone().filter(|_| self.is_above(|marks| marks.limit_bytes))
            })
    }

    /// Once its disks were used a successor must wait for them before it evicts: they
    /// have rings in the guest's memory, which it does not know of.
    ///
    /// # Errors
    /// It is not on record: nothing may be evicted.
    pub(crate) fn note_disks(&mut self) -> Answer<()> {
        let any = !self.held.record.disks.is_empty();
        if any && !self.held.record.disks_used && self.held.disks.shared.any_used() {
            self.put_on_record(|record| record.disks_used = true)?;
        }
        Ok(())
    }

    fn limit_step(
        &mut self,
        limiter: &mut Limiter,
        marks: Marks,
        end: Instant,
    ) -> std::io::Result<Left> {
        let taken = self.held.pager.taken_bytes()?;
        let relieved = taken <= marks.low_bytes;
        if relieved {
            self.stuck = None;
            limiter.rest();
            if !limiter.is_sweep_due(&self.held.pager) {
                return Ok(Left::Nothing);
            }
        }
        self.expect_refills()?;
        if (relieved || limiter.asks(marks, taken)) && !self.is_halted() {
            // QEMU may wait for the vCPU whose fault waits for room.
            let (tell, wait) = self.held.pager.marks();
            self.held.pager.set_marks(u64::MAX, u64::MAX);
            self.ask_guest(relieved);
            self.held.pager.set_marks(tell, wait);
            if !relieved && self.held.pager.taken_bytes()? <= marks.low_bytes {
                return Ok(Left::Nothing);
            }
        }
        let pulse = RefCell::new(self.pulse());
        let still_runs = || pulse.borrow_mut().beats_at_once();
        let result = self.limit_step_with(limiter, marks, end, &still_runs);
        self.end_pulse(pulse.into_inner());
        result
    }

    /// Sees to it that the guest's kernel is the one that runs, for its word to count, and under
    /// pressure takes what it says is free.
    fn ask_guest(&mut self, relieved: bool) {
        if self.insight.guest().is_ok() || self.insight.is_due() {
            self.confirm();
        }
        if !relieved {
            self.take_what_is_free();
        }
    }

    fn limit_step_with(
        &mut self,
        limiter: &mut Limiter,
        marks: Marks,
        end: Instant,
        still_runs: &dyn Fn() -> bool,
    ) -> std::io::Result<Left> {
        let held = &self.held;
        let pinned = pinning(&held.process)?;
        let guest = self.insight.guest().ok().map(|guest| (guest, still_runs));
        let of = Sources { process: &held.process, guest, pins: pinned.is_some() };
        // Of a kernel that is not known its note must be there to know it by. Anybody can
        // write one: of so many the note is looked for, no more stay.
        let (view, notes) = (held.pager.view(), Cell::new(0));
        let is_note = |gfn| {
            let found = guest.is_none() && notes.get() < NOTES_MAX && may_hold_note(&view, gfn);
            notes.set(notes.get() + usize::from(found));
            found
        };
        let stays =
            |gfn| of.pins && guest.is_none_or(|(guest, _)| !guest.looks_settled(&view, gfn));
        let spare = |gfn: Gfn| self.is_needed(gfn) || is_note(gfn) || stays(gfn);
        let heat = self.monitor.recent_heat();
        let heat = |gfn: Gfn| heat.map_or(0, |heat| heat.of(gfn));
        let has_disk = held.disks.shared.tracked_blocks() > 0;
        let (pager, pagemap) = (&held.pager, limiter.pagemap());
        let mut windows = Windows::new(of, pager, &pagemap, &spare, &heat, has_disk);
        let left = limiter.step(&mut windows, marks, end)?;
        let refused = limiter.refused.take();
        match (limiter.lacks_room(), &refused) {
            (Some(error), _) => self.tell(&self.explain_saving(error)),
            (None, Some(error)) => self.last_trouble = Some(self.explain_saving(error)),
            (None, None) => {}
        }
        let taken = self.held.pager.taken_bytes()?;
        let over = taken > marks.limit_bytes;
        let in_vain = over && limiter.vain_mark(marks).is_some();
        self.stuck = in_vain.then(|| self.out_of_reach(pinned.as_deref(), taken));
        Ok(left)
    }
}
