//! A VM beside those that a test disturbs, whose guest uses evicted memory all the time.

use crate::vm::{AccessTimes, Vm};

/// Accesses for which times are taken at least: nearly 200 times.
const WATCHED: u64 = 50_000;
/// By this factor times may exceed those of a calm while: threads also wait for a processor that
/// the disturbed VM uses. Who waits for the disturbed VM itself waits for seconds.
const FACTOR: u64 = 10;
/// A shorter 99th percentile of a calm while counts as this, in microseconds.
const P99_LEAST_US: u64 = 10_000;
/// A shorter longest time of a calm while counts as this, in microseconds.
const LONGEST_LEAST_US: u64 = 100_000;

/// A VM whose guest uses memory of which a part is evicted.
pub struct Neighbour(Vm);

impl Neighbour {
    /// Has the guest of a VM under a limit read and write 40 MiB at random until the end.
    pub fn new(vm: Vm) -> Neighbour {
        vm.guest("access beside 40M hot 0 10240");
        let neighbour = Neighbour(vm);
        // By then, as much of it is evicted as ever will be.
        neighbour.times(|| ());
        neighbour
    }

    /// The VM.
    pub fn vm(&self) -> &Vm {
        &self.0
    }

    /// Returns how long accesses take while `work` runs, and for a while after it.
    pub fn times(&self, work: impl FnOnce()) -> AccessTimes {
        // No access is under way then that began before.
        self.0.guest("accesson beside 512");
        self.0.access_times("beside");
        work();
        self.0.guest(&format!("accesson beside {WATCHED}"));
        self.0.access_times("beside")
    }

    /// Ends the accesses, and checks the memory that they used.
    ///
    /// # Panics
    /// A byte of it is wrong.
    pub fn stop(&self) {
        let stopped = self.0.guest("accessstop beside");
        assert!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
    }
}

impl AccessTimes {
    /// Checks that nobody has waited for the VM that was disturbed.
    ///
    /// # Panics
    /// Accesses took much longer than in a calm while.
    pub fn assert_unhindered(self, calm: AccessTimes, by: &str) {
        let most = |calm_us: u64, least_us: u64| calm_us.max(least_us) * FACTOR;
        let is_unhindered = self.p99_us <= most(calm.p99_us, P99_LEAST_US)
            && self.longest_us <= most(calm.longest_us, LONGEST_LEAST_US);
        assert!(is_unhindered, "{by}: {self:?}, and in a calm while {calm:?}");
    }
}
