//! Room below a VM's limit: when the evictor is told, which faults wait a little, and which wait
//! until there is room.
//!
//! First touches wait until there is room while nothing can be evicted: the VM must not take more
//! memory then. Evicted content that comes back does not wait: another page may take its place.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ebb_sys::uffd::Fault;
use ebb_units::{FRAME_BYTES, FrameRange};

use crate::fault::coming::Coming;
use crate::frames::Frames;
use crate::residency::Residency;

/// How often a fault of a VM at its limit waits [`ROOM_WAIT`] for room, before the VM exceeds the
/// limit.
const ROOM_WAITS: u32 = 400;
const ROOM_WAIT: Duration = Duration::from_micros(250);

/// Room below one VM's limit.
pub struct LimitRoom {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
    /// In bytes: with more taken than the first mark, the evictor is told; with more than the
    /// second, faults wait.
    marks: [AtomicU64; 2],
    /// Number of open gates for faults that wait a little.
    gates: AtomicU32,
    /// See [`LimitRoom::evictor_waits`].
    evictor_waits: Arc<AtomicBool>,
    halt: Halt,
    pressure: OnceLock<Box<dyn Fn() + Send + Sync>>,
    coming: Coming,
}

/// First touches that wait, and the bound that they wait for.
struct Halt {
    /// In bytes: with more than this taken, first touches wait; `u64::MAX`: they do not.
    above_bytes: AtomicU64,
    /// Number of open gates for first touches.
    gates: AtomicU32,
    /// Number of faults that were left to wait since all were last woken.
    waiting: Mutex<u64>,
}

impl Halt {
    fn new() -> Halt {
        let above_bytes = AtomicU64::new(u64::MAX);
        Halt { above_bytes, gates: AtomicU32::new(0), waiting: Mutex::new(0) }
    }

    fn waiting(&self) -> MutexGuard<'_, u64> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LimitRoom {
    /// Makes room without a limit.
    pub(crate) fn new(frames: &Arc<Frames>, residency: &Arc<Residency>) -> LimitRoom {
        LimitRoom {
            frames: Arc::clone(frames),
            residency: Arc::clone(residency),
            marks: [const { AtomicU64::new(u64::MAX) }; 2],
            gates: AtomicU32::new(0),
            evictor_waits: Arc::default(),
            halt: Halt::new(),
            pressure: OnceLock::new(),
            coming: Coming::default(),
        }
    }

    /// The frames that threads are bringing back now.
    pub(crate) fn coming(&self) -> &Coming {
        &self.coming
    }

    /// Sets the marks: with more than `tell_bytes` taken, the evictor is told; with more than
    /// `wait_bytes`, faults that take memory wait a little for room. `u64::MAX`: no limit.
    pub fn set_marks(&self, tell_bytes: u64, wait_bytes: u64) {
        for (mark, bytes) in self.marks.iter().zip([tell_bytes, wait_bytes]) {
            mark.store(bytes, Relaxed);
        }
    }

    /// The bytes that [`LimitRoom::set_marks`] set last; `u64::MAX` while a gate is open for these
    /// faults.
    pub fn marks(&self) -> (u64, u64) {
        if self.gates.load(Relaxed) > 0 {
            return (u64::MAX, u64::MAX);
        }
        let [tell, wait] = self.marks.each_ref().map(|mark| mark.load(Relaxed));
        (tell, wait)
    }

    /// While this is `true`, no fault waits for room: the evictor waits for the VMM, which such
    /// faults may hold up.
    pub fn evictor_waits(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.evictor_waits)
    }

    /// Sets the function that is told of pressure by the threads that serve faults. Takes effect
    /// once.
    pub fn on_pressure(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A second function would only be told of the same.
        let _ = self.pressure.set(Box::new(tell));
    }

    /// Whether there is a limit that eviction keeps.
    pub(crate) fn has_limit(&self) -> bool {
        self.marks().1 != u64::MAX
    }

    /// Whether faults should wait for room; tells the evictor above its mark.
    pub(crate) fn is_over_limit(&self) -> bool {
        let (tell_bytes, wait_bytes) = self.marks();
        if tell_bytes == u64::MAX {
            return false;
        }
        // This costs an fstat(2): about a microsecond.
        let Ok(bytes) = self.residency.taken_bytes() else { return false };
        if bytes > tell_bytes
            && let Some(tell) = self.pressure.get()
        {
            tell();
        }
        bytes > wait_bytes
    }

    /// Whether `bytes` more would pass the mark above which the evictor is told.
    pub(crate) fn is_short_of(&self, bytes: u64) -> bool {
        let (tell_bytes, _) = self.marks();
        let is_above = |taken: u64| taken.saturating_add(bytes) > tell_bytes;
        tell_bytes != u64::MAX && self.residency.taken_bytes().is_ok_and(is_above)
    }

    /// Whether the VM takes all that its limit lets it, so that something else has to go for what
    /// comes back.
    pub(crate) fn is_at_limit(&self) -> bool {
        let (tell_bytes, wait_bytes) = self.marks();
        // Eviction goes down to as far below its mark as the other one is above that. Where nobody
        // waits, it has nothing to evict.
        let above = if wait_bytes == u64::MAX { 0 } else { wait_bytes.saturating_sub(tell_bytes) };
        let low_bytes = tell_bytes.saturating_sub(above);
        let is_there = |taken: u64| taken >= low_bytes;
        tell_bytes != u64::MAX && self.residency.taken_bytes().is_ok_and(is_there)
    }

    /// Waits for the evictor to catch up, unless the evictor waits for the VMM.
    pub(crate) fn wait_for_room(&self) {
        for _ in 0..ROOM_WAITS {
            // A fault that holds the VMM up would wait for itself.
            if self.evictor_waits.load(Relaxed) || !self.is_over_limit() {
                return;
            }
            std::thread::sleep(ROOM_WAIT);
        }
    }

    /// Returns for how many frames there is room while faults do not wait: up to as far above the
    /// high mark as that is above the other mark.
    pub(crate) fn room(&self) -> u64 {
        let (tell, wait) = self.marks();
        if wait == u64::MAX {
            return u64::MAX;
        }
        let most = wait.saturating_add(wait.saturating_sub(tell));
        // If nobody can tell, nothing waits either.
        self.residency
            .taken_bytes()
            .map_or(u64::MAX, |taken| most.saturating_sub(taken) / FRAME_BYTES)
    }

    /// Has first touches wait from now on while more than `bytes` is taken. Wakes those that wait
    /// and need not any more. `u64::MAX`: none waits.
    pub fn halt_above(&self, bytes: u64) {
        self.halt.above_bytes.store(bytes, Release);
        self.wake_unless_halted();
    }

    /// Has no fault wait any more, until marks or a bound are set: nobody makes room.
    pub fn lift(&self) {
        self.set_marks(u64::MAX, u64::MAX);
        self.halt_above(u64::MAX);
    }

    /// Wakes the first touches that wait, unless they still must.
    fn wake_unless_halted(&self) {
        if self.is_halted() {
            return;
        }
        let mut waiting = self.halt.waiting();
        if *waiting > 0 {
            *waiting = 0;
            drop(waiting);
            // Each touches its frame again, and may have to wait again.
            self.frames.report("wake", self.frames.wake_all());
        }
    }

    /// The bytes that [`LimitRoom::halt_above`] set last; `u64::MAX` while a gate is open for first
    /// touches.
    pub fn halts_above(&self) -> u64 {
        match self.halt.gates.load(Acquire) {
            0 => self.halt.above_bytes.load(Acquire),
            _ => u64::MAX,
        }
    }

    /// Returns how many touches wait for room.
    pub fn waiting_touches(&self) -> u64 {
        *self.halt.waiting()
    }

    /// Whether the VM takes more than the bound above which first touches wait.
    fn is_halted(&self) -> bool {
        let above = self.halts_above();
        above != u64::MAX && self.residency.taken_bytes().is_ok_and(|taken| taken > above)
    }

    /// Leaves a first touch to wait; `false`: it must be served.
    pub(crate) fn leave_waiting(&self, fault: Fault) -> bool {
        let Some(gfn) = self.frames.ram().gpa(fault.address).map(|gpa| gpa.gfn()) else {
            return false;
        };
        // The frame may have come as another one's neighbour since the touch.
        let is_there = || !self.frames.ram().is_hole(FrameRange::new(gfn, 1)).unwrap_or(false);
        if fault.write_protected || self.frames.ledger().content(gfn).is_evicted() || is_there() {
            return false;
        }
        // Checked with the count locked: a thread that ends the wait afterwards finds this fault
        // counted.
        let mut waiting = self.halt.waiting();
        let waits = self.is_halted();
        *waiting += u64::from(waits);
        waits
    }

    /// Whether first touches may have to wait.
    pub(crate) fn may_halt(&self) -> bool {
        self.halts_above() != u64::MAX
    }
}

/// While this value lives, faults of a VM do not wait for room. What is set meanwhile holds once the
/// last gate is closed.
///
/// Who asks the VMM something opens a gate for first touches: the VMM may wait for the vCPU that
/// waits in one. Faults that wait a little need no gate for that: see [`LimitRoom::evictor_waits`].
pub struct OpenGate {
    room: Arc<LimitRoom>,
    for_faults: bool,
    for_touches: bool,
}

impl OpenGate {
    /// Opens a gate for faults that wait a little.
    pub fn for_faults(room: &Arc<LimitRoom>) -> OpenGate {
        OpenGate::new(room, true, false)
    }

    /// Opens a gate for first touches that wait until there is room.
    pub fn for_touches(room: &Arc<LimitRoom>) -> OpenGate {
        OpenGate::new(room, false, true)
    }

    fn new(room: &Arc<LimitRoom>, for_faults: bool, for_touches: bool) -> OpenGate {
        room.gates.fetch_add(u32::from(for_faults), Relaxed);
        room.halt.gates.fetch_add(u32::from(for_touches), AcqRel);
        room.wake_unless_halted();
        OpenGate { room: Arc::clone(room), for_faults, for_touches }
    }
}

impl Drop for OpenGate {
    fn drop(&mut self) {
        self.room.gates.fetch_sub(u32::from(self.for_faults), Relaxed);
        self.room.halt.gates.fetch_sub(u32::from(self.for_touches), AcqRel);
    }
}
