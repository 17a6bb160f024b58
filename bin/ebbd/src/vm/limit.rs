//! A limit on the memory that a VM takes: what the worker does to keep it.

pub mod by_pilot;
mod conditions;
mod demand;
pub mod force;
pub mod in_flight;
pub mod share;
mod step;
mod store_failure;
#[cfg(test)]
mod tests;
mod vmm;

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_api::LimitRequest;
use ebb_pager::Evicted;
use ebb_reclaim::limit::is_no_room;
use ebb_reclaim::limit::limiter::Limiter;
use ebb_reclaim::limit::marks::{Left, Marks, floor_bytes};
use ebb_units::Gfn;
use ebb_vm::pinning::pinning;

use self::conditions::may_limit;
use self::demand::{Demand, Refills};
use self::in_flight::may_tell_in_flight;
use self::step::{HeatOf, evict_step};
use self::store_failure::{Attempt, StoreFailure, explain_saving, explain_to};
use super::context::VmContext;
use super::context::liveness::End;
use crate::model::api_error::{Answer, ApiError, failed};
use crate::support::open_files::OpenFiles;

pub use self::conditions::may_evict;

/// How long a turn of eviction lasts before the worker looks at commands again.
pub const TURN: Duration = Duration::from_millis(50);

/// The controller of one VM's limit.
#[derive(Default)]
pub struct Limit {
    /// Keeps the limit; `None` if there is no limit.
    limiter: Option<Limiter>,
    /// Why the limit is not kept.
    stuck: Option<String>,
    /// What failed when memory was to be evicted.
    failure: Option<StoreFailure>,
    /// What failed last since the limit was last kept.
    last_failure: Option<String>,
    /// What the VM asks of the pool.
    demand: Demand,
}

/// How a turn begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Nothing is evicted in this turn.
    Wait,
    /// Steps are made, by these marks.
    Go(Marks),
}

impl Limit {
    /// Puts the limit on record, or lifts it. [`Limit::apply`] must follow.
    ///
    /// # Errors
    /// The request makes no sense, or this VM cannot have such a limit; then nothing has changed.
    pub fn set(&mut self, cx: &mut VmContext, request: LimitRequest) -> Answer<()> {
        if let Some(bytes) = request.bytes {
            may_limit(cx, bytes, request.low_bytes)?;
            may_evict(cx)?;
            may_tell_in_flight(cx, &mut OpenFiles::default())?;
            cx.begin_to_evict()?;
            self.make_limiter(cx)?;
        }
        cx.record.change(|record| {
            (record.limit_bytes, record.is_piloted) = (request.bytes, false);
            record.piloted_compressed_bytes = None;
            (record.low_bytes, record.high_bytes) = (request.low_bytes, request.high_bytes);
        })
    }

    /// Begins to keep the limit on record, or stops keeping it. A turn must follow.
    pub fn apply(&mut self, cx: &mut VmContext) {
        (self.stuck, self.failure) = (None, None);
        cx.no_room = None;
        self.limiter.iter_mut().for_each(Limiter::end_search);
        if let Err(error) = limit_store_memory(cx) {
            tracing::warn!("it goes on with the compressed memory that it has: {error}");
        }
        if cx.marks().is_none() {
            (self.limiter, self.last_failure) = (None, None);
            return cx.pager.room().lift();
        }
        cx.pager.room().halt_above(u64::MAX);
        let mailbox = cx.mailbox.clone();
        cx.pager.room().on_pressure(move || mailbox.press());
        raise_marks(cx);
    }

    /// Handles a guest that was reset or runs another kernel. The old kernel's demand and what it
    /// kept in memory count no more. What was seen of uses stays: it is about frames, and new uses
    /// take its place as the hand comes around.
    pub fn on_reset(&mut self) {
        self.demand.on_reset();
        self.stuck = None;
        self.limiter.iter_mut().for_each(Limiter::end_search);
    }

    /// Makes the limiter, if there is none yet.
    fn make_limiter(&mut self, cx: &VmContext) -> Answer<()> {
        if self.limiter.is_none() {
            let keeps_freed = cx.record.settings.read_freed;
            let limiter = Limiter::new(&cx.process, &cx.pager, keeps_freed);
            self.limiter = Some(limiter.map_err(failed("QEMU's page table"))?);
        }
        Ok(())
    }

    /// Begins a turn. Steps follow as long as [`Limit::step`] has more to evict.
    pub fn begin_turn(&mut self, cx: &mut VmContext, open: &mut OpenFiles) -> Turn {
        cx.mailbox.look_at_pressure();
        let Some(marks) = cx.marks() else {
            self.limiter = None;
            return Turn::Wait;
        };
        if let Err(why) = self.make_limiter(cx) {
            return self.give_way(cx, &why);
        }
        if let Err(why) = may_evict(cx) {
            return self.give_way(cx, &why);
        }
        if let Err(why) = may_tell_in_flight(cx, open) {
            // The guest may tell once it is known: the next tick looks for it, unless touches wait.
            let may_tell_soon = cx.guest.is_due(&cx.pager) && !cx.waits();
            return if may_tell_soon { Turn::Wait } else { self.give_way(cx, &why) };
        }
        if self.failure.as_ref().is_some_and(StoreFailure::is_paused) {
            halt(cx, marks);
            return Turn::Wait;
        }
        Turn::Go(marks)
    }

    /// Has no fault wait, for the reason `why`: nobody may wait for room that is not looked for.
    fn give_way(&mut self, cx: &mut VmContext, why: &ApiError) -> Turn {
        self.stuck = Some(why.to_string());
        self.note_failure(cx, None);
        cx.pager.room().lift();
        Turn::Wait
    }

    /// Whether the guest is to be asked before the next step. `None`: no. `Some(false)`: its kernel
    /// is to be confirmed. `Some(true)`: also, because of pressure, what it says is free is to be
    /// reclaimed.
    pub fn asks_guest(&self, cx: &VmContext, marks: Marks) -> Option<bool> {
        let limiter = self.limiter.as_ref()?;
        let taken = cx.pager.residency().taken_bytes().ok()?;
        let is_relieved = taken <= marks.low_bytes;
        let asks = match is_relieved {
            true => limiter.is_sweep_due(&cx.pager),
            false => limiter.asks(marks, taken),
        };
        (asks && !cx.is_halted()).then_some(!is_relieved)
    }

    /// Makes a step of a turn that ends at `end`. Returns whether more is to be evicted, and why
    /// the guest's kernel does not run any more, if that was seen.
    pub fn step(
        &mut self,
        cx: &mut VmContext,
        marks: Marks,
        heat: HeatOf<'_>,
        end: Instant,
    ) -> (bool, Option<End>) {
        let mut ended = None;
        let result = self.evict(cx, marks, heat, end, &mut ended);
        let left = result.and_then(|left| write_back(cx, end).map(|()| left));
        (self.note(cx, left) != Left::Nothing, ended)
    }

    fn evict(
        &mut self,
        cx: &mut VmContext,
        marks: Marks,
        heat: HeatOf<'_>,
        end: Instant,
        ended: &mut Option<End>,
    ) -> io::Result<Left> {
        let Some(limiter) = &mut self.limiter else { return Ok(Left::Nothing) };
        if cx.pager.residency().taken_bytes()? <= marks.low_bytes {
            self.stuck = None;
            limiter.end_search();
            if !limiter.is_sweep_due(&cx.pager) {
                return Ok(Left::Nothing);
            }
        }
        cx.expect_refills()?;
        let left = evict_step(limiter, cx, marks, (heat, end), ended)?;
        let refused = limiter.refused.take();
        match (limiter.lacks_room().map(|error| explain_saving(cx, error)), &refused) {
            (Some(why), _) => self.tell(&why),
            (None, Some(error)) => self.last_failure = Some(explain_saving(cx, error)),
            (None, None) => {}
        }
        self.note_stuck(cx, marks)?;
        Ok(left)
    }

    /// Notes why the limit is not kept, if nothing more may be evicted.
    fn note_stuck(&mut self, cx: &VmContext, marks: Marks) -> io::Result<()> {
        let Some(limiter) = &self.limiter else { return Ok(()) };
        let taken = cx.pager.residency().taken_bytes()?;
        let in_vain = taken > marks.limit_bytes && limiter.vain_mark(marks).is_some();
        self.stuck = match in_vain {
            true => Some(in_flight::out_of_reach(pinning(&cx.process)?.as_deref(), taken)),
            false => None,
        };
        Ok(())
    }

    /// Ends a turn. `more`: the next turn has more to do.
    pub fn end_turn(&mut self, cx: &VmContext, marks: Marks, more: bool) {
        halt(cx, marks);
        let vain = self.limiter.as_ref().and_then(|limiter| limiter.vain_mark(marks));
        let (tell, wait) = marks.for_faults(cx.waits(), self.failure.is_some(), vain);
        cx.pager.room().set_marks(tell, wait);
        if more {
            cx.mailbox.press();
        }
    }

    /// Makes room in the compressed memory of a VM without a limit, whose memory was evicted by
    /// force or under an earlier limit.
    pub fn write_back_unlimited(&mut self, cx: &mut VmContext) {
        if self.limiter.is_none() && !self.failure.as_ref().is_some_and(StoreFailure::is_paused) {
            let result = write_back(cx, Instant::now() + TURN);
            self.note(cx, result.map(|()| Left::Nothing));
        }
    }

    /// Notes what failed, or that nothing fails any more. Returns what is left to evict.
    fn note(&mut self, cx: &mut VmContext, result: io::Result<Left>) -> Left {
        let before = self.failure.take();
        match result {
            Ok(left) => {
                let over = || is_above(cx, |marks| marks.high_bytes);
                let why = self.last_failure.as_ref();
                let failure = store_failure::after_step(before, left, why, cx.may_wait(), over);
                self.note_failure(cx, failure);
                if self.failure.is_none() && !is_above(cx, |marks| marks.limit_bytes) {
                    self.last_failure = None;
                }
                left
            }
            Err(error) => {
                let why = explain_saving(cx, &error);
                self.tell(&why);
                let failure = match is_no_room(&error) {
                    true => StoreFailure::no_room(why),
                    false => StoreFailure::new(why, before),
                };
                self.note_failure(cx, Some(failure));
                Left::Nothing
            }
        }
    }

    /// Notes what is in the way of eviction, and for other controllers whether it is lack of room.
    fn note_failure(&mut self, cx: &mut VmContext, failure: Option<StoreFailure>) {
        let no_room = failure.as_ref().filter(|failure| failure.is_no_room());
        cx.no_room = no_room.map(|failure| failure.why().to_owned());
        self.failure = failure;
    }

    /// Logs a failure, once as long as it lasts.
    fn tell(&mut self, why: &String) {
        if self.last_failure.as_ref() != Some(why) {
            tracing::error!("{why}");
            self.last_failure = Some(why.clone());
        }
    }

    /// Returns why the limit is not kept, or why the guest waits for evicted content.
    /// `why_stopped`: why the guest is stopped because of devices.
    pub fn why_not_kept(&self, cx: &VmContext, why_stopped: Option<String>) -> Option<String> {
        why_not_read(cx)
            .map(|(why, _)| why)
            .or(why_stopped)
            .or_else(|| self.failure.as_ref().map(|failure| failure.why().into()))
            .or_else(|| self.stuck.clone())
            // It is being tried again: until the limit is kept, nobody can say that the failure is
            // over.
            .or_else(|| {
                self.last_failure.clone().filter(|_| is_above(cx, |marks| marks.limit_bytes))
            })
    }

    /// Whether nothing is to be evicted, so that there is time for other work.
    pub fn is_idle(&self) -> bool {
        self.limiter.is_none() || self.stuck.is_some()
    }

    /// Returns what was evicted since this process has managed the VM.
    pub fn evicted(&self) -> Evicted {
        self.limiter.as_ref().map(|limiter| limiter.total).unwrap_or_default()
    }

    /// Returns the bytes that the VMM and its guest work with; `None`: not known yet.
    pub fn active_bytes(&self) -> Option<u64> {
        self.limiter.as_ref()?.active_bytes()
    }

    /// Returns the bytes that the guest's kernel has in memory for itself, as far as that was seen.
    pub fn kernel_bytes(&self) -> Option<u64> {
        self.limiter.as_ref().map(Limiter::kernel_bytes)
    }

    /// Returns what the VM asks of the pool, and whether a monitoring is to begin now that tells
    /// what it needs. `held_bytes`: what it has. `monitored`: when the last monitoring began.
    pub fn demand(
        &mut self,
        cx: &VmContext,
        held_bytes: u64,
        monitored: Option<Instant>,
    ) -> (Option<u64>, bool) {
        let counters = cx.pager.counters();
        let refills = Refills {
            touched: counters.refilled_frames.load(Relaxed),
            ahead: counters.ahead_frames.load(Relaxed),
        };
        // A VM that may have all of its memory gets no more by asking.
        let Some(limit_bytes) = cx.record.limit_bytes else { return (None, false) };
        let now = Instant::now();
        let asks = self.demand.look(now, refills, held_bytes.min(limit_bytes), monitored);
        (asks, self.demand.wants_monitoring(now, monitored))
    }

    /// Notes what the VMM has mapped, before somebody else empties its page table.
    ///
    /// # Errors
    /// As reading the pagemap.
    pub fn note_mapped(&mut self, cx: &VmContext) -> io::Result<()> {
        self.limiter.as_mut().map_or(Ok(()), |limiter| limiter.note_mapped(&cx.pager))
    }
}

/// Returns why the guest waits for evicted content, and for which frame; `None`: it does not.
pub fn why_not_read(cx: &VmContext) -> Option<(String, Gfn)> {
    let (error, gfn) = cx.pager.faults().failed()?;
    Some((explain_to(cx, Attempt::Load, &error), gfn))
}

/// Has faults wait a little above the high mark of the limit on record. To be called before the
/// faults of a recovered VM are served: keeping its limit needs some answers of QEMU first.
pub fn slow_faults(cx: &VmContext) {
    let Some(marks) = cx.marks() else { return };
    let (tell, wait) = marks.pressure();
    cx.pager.room().set_marks(tell, wait);
}

/// Lets faults go on at once that wait for room below a lower limit: the turn that follows may take
/// long. Only a turn lowers the marks, because it makes the room.
fn raise_marks(cx: &VmContext) {
    let Some((tell, wait)) = cx.marks().map(Marks::pressure) else { return };
    if wait > cx.pager.room().marks().1 {
        cx.pager.room().set_marks(tell, wait);
    }
}

/// Has compressed pages take no more memory than they may.
fn limit_store_memory(cx: &VmContext) -> io::Result<()> {
    cx.pager.residency().limit_store_memory(compressed_bytes(cx))
}

/// Returns how much memory compressed pages may take, in bytes. It is part of the limit, if there
/// is one: the guest keeps what it needs to live, and half of the rest.
fn compressed_bytes(cx: &VmContext) -> u64 {
    let wanted = cx.record.compressed_bytes();
    let floor = floor_bytes(cx.memory_bytes());
    let share = |marks: Marks| marks.limit_bytes.saturating_sub(floor) / 2;
    cx.marks().map_or(wanted, |marks| wanted.min(share(marks)))
}

/// Whether the VM takes more than the limit, or one of its marks, allows.
pub fn is_above(cx: &VmContext, mark: impl FnOnce(Marks) -> u64) -> bool {
    let taken = cx.pager.residency().taken_bytes();
    cx.marks().zip(taken.ok()).is_some_and(|(marks, taken)| taken > mark(marks))
}

/// Has first touches wait if they are to, and lets them go on if there is room.
fn halt(cx: &VmContext, marks: Marks) {
    let above = if cx.waits() { marks.high_bytes } else { u64::MAX };
    cx.pager.room().halt_above(above);
}

/// Makes room in compressed memory, until `end` at most.
fn write_back(cx: &VmContext, end: Instant) -> io::Result<()> {
    while cx.pager.evictor().write_back()? > 0 && Instant::now() < end {}
    Ok(())
}
