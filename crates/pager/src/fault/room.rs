//! Room for what a VM takes under its limit: who is told, who waits a little, and who waits until
//! there is some.
//!
//! First touches that wait until there is room: nobody is to take more memory while none of it
//! can be evicted. What comes back from where it is does not wait: another page may have its place.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ebb_sys::uffd::Fault;
use ebb_units::{FRAME_BYTES, FrameRange};

use crate::fault::coming::Coming;
use crate::frames::Frames;
use crate::residency::Residency;

/// A VM at its limit waits so long for room, then goes beyond it.
const ROOM_WAITS: u32 = 400;
const ROOM_WAIT: Duration = Duration::from_micros(250);

/// Of one VM.
pub struct Room {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
    /// Taken above the first, whoever evicts is told; above the second, faults wait.
    marks: [AtomicU64; 2],
    /// See [`Room::evictor_waits`].
    evictor_waits: Arc<AtomicBool>,
    halt: Halt,
    pressure: OnceLock<Box<dyn Fn() + Send + Sync>>,
    coming: Coming,
}

/// Who waits, and for what.
struct Halt {
    /// With more than this taken, first touches wait; `u64::MAX`: they do not.
    above_bytes: AtomicU64,
    /// So many faults were left to wait since all were last woken.
    waiting: Mutex<u64>,
}

impl Halt {
    fn new() -> Halt {
        Halt { above_bytes: AtomicU64::new(u64::MAX), waiting: Mutex::new(0) }
    }

    fn waiting(&self) -> MutexGuard<'_, u64> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Room {
    /// Without a limit.
    pub(crate) fn new(frames: &Arc<Frames>, residency: &Arc<Residency>) -> Room {
        Room {
            frames: Arc::clone(frames),
            residency: Arc::clone(residency),
            marks: [const { AtomicU64::new(u64::MAX) }; 2],
            evictor_waits: Arc::default(),
            halt: Halt::new(),
            pressure: OnceLock::new(),
            coming: Coming::default(),
        }
    }

    /// What threads that saw room at once bring together.
    pub(crate) fn coming(&self) -> &Coming {
        &self.coming
    }

    /// When more than `tell_bytes` are taken, whoever evicts is told; when more than
    /// `wait_bytes`, faults that take memory wait a little for it. `u64::MAX`: no limit.
    pub fn set_marks(&self, tell_bytes: u64, wait_bytes: u64) {
        for (mark, bytes) in self.marks.iter().zip([tell_bytes, wait_bytes]) {
            mark.store(bytes, Relaxed);
        }
    }

    /// What [`Room::set_marks`] set last.
    pub fn marks(&self) -> (u64, u64) {
        let [tell, wait] = self.marks.each_ref().map(|mark| mark.load(Relaxed));
        (tell, wait)
    }

    /// While this says `true`, no fault waits for room: whoever evicts waits for the VMM, which may
    /// be held up by such faults.
    pub fn evictor_waits(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.evictor_waits)
    }

    /// Who is told of pressure, from the threads that serve faults; once.
    pub fn on_pressure(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A second one would only be told of the same.
        let _ = self.pressure.set(Box::new(tell));
    }

    /// Whether somebody evicts what is too much.
    pub(crate) fn has_limit(&self) -> bool {
        self.marks[1].load(Relaxed) != u64::MAX
    }

    /// Whether faults should wait for room; whoever evicts is told in time.
    pub(crate) fn is_over_limit(&self) -> bool {
        let (tell_bytes, wait_bytes) = self.marks();
        if tell_bytes == u64::MAX {
            return false;
        }
        // As fstat(2): about a microsecond.
        let Ok(bytes) = self.residency.taken_bytes() else { return false };
        if bytes > tell_bytes
            && let Some(tell) = self.pressure.get()
        {
            tell();
        }
        bytes > wait_bytes
    }

    /// Whether so much more would have whoever evicts begin.
    pub(crate) fn is_short_of(&self, bytes: u64) -> bool {
        let (tell_bytes, _) = self.marks();
        let is_above = |taken: u64| taken.saturating_add(bytes) > tell_bytes;
        tell_bytes != u64::MAX && self.residency.taken_bytes().is_ok_and(is_above)
    }

    /// Has whoever evicts catch up first, unless that one waits for the VMM.
    pub(crate) fn wait_for_room(&self) {
        for _ in 0..ROOM_WAITS {
            // Who holds the VMM up would wait for itself.
            if self.evictor_waits.load(Relaxed) || !self.is_over_limit() {
                return;
            }
            std::thread::sleep(ROOM_WAIT);
        }
    }

    /// For so many frames there is room while faults do not wait: as far above the high mark as that is
    /// above the other one.
    pub(crate) fn room(&self) -> u64 {
        let (tell, wait) = self.marks();
        if wait == u64::MAX {
            return u64::MAX;
        }
        let most = wait.saturating_add(wait.saturating_sub(tell));
        // Who cannot tell does not wait, either.
        self.residency
            .taken_bytes()
            .map_or(u64::MAX, |taken| most.saturating_sub(taken) / FRAME_BYTES)
    }

    /// With more than so much taken, first touches wait from now on; those that wait and need
    /// not any more are woken. `u64::MAX`: nobody waits.
    pub fn halt_above(&self, bytes: u64) {
        self.halt.above_bytes.store(bytes, Release);
        if self.is_halted() {
            return;
        }
        let mut waiting = self.halt.waiting();
        if *waiting > 0 {
            *waiting = 0;
            drop(waiting);
            // Each touches its frame again, and may come to wait again.
            self.frames.report("wake", self.frames.wake_all());
        }
    }

    /// What [`Room::halt_above`] was told last.
    pub fn halts_above(&self) -> u64 {
        self.halt.above_bytes.load(Acquire)
    }

    /// How many touches wait for room.
    pub fn waiting_touches(&self) -> u64 {
        *self.halt.waiting()
    }

    /// Whether more is taken than first touches may have.
    fn is_halted(&self) -> bool {
        let above = self.halt.above_bytes.load(Acquire);
        above != u64::MAX && self.residency.taken_bytes().is_ok_and(|taken| taken > above)
    }

    /// Leaves a first touch to wait; `false`: it is to be served.
    pub(crate) fn leave_waiting(&self, fault: Fault) -> bool {
        let Some(gfn) = self.frames.ram().gpa(fault.address).map(|gpa| gpa.gfn()) else {
            return false;
        };
        // It may have come as another one's neighbour since it was touched.
        let is_there = || !self.frames.ram().is_hole(FrameRange::new(gfn, 1)).unwrap_or(false);
        if fault.write_protected || self.frames.ledger().content(gfn).is_elsewhere() || is_there() {
            return false;
        }
        // Looked at with the count locked: who ends the wait after this finds it counted.
        let mut waiting = self.halt.waiting();
        let waits = self.is_halted();
        *waiting += u64::from(waits);
        waits
    }

    /// Whether first touches may have to wait.
    pub(crate) fn may_halt(&self) -> bool {
        self.halt.above_bytes.load(Relaxed) != u64::MAX
    }
}
