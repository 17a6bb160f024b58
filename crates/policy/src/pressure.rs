//! Whether the host is short of memory (*host pressure*), so that a VM is to give free memory back,
//! and when it is asked.
//!
//! Pressure begins once less memory is available than the VM's threshold. It also begins once tasks
//! of the host wait for memory for a part of the time while less than four times the threshold is
//! available: with more, they wait for something that free memory of guests does not mend. It ends
//! once both have eased by a margin. So what a reclaim itself changes does not turn it off and on
//! again.
//!
//! ```text
//! available    0 ............ begin ........ end ..............>
//!              pressure begins |  as it was  | pressure ends
//!                              |<- margin -->|
//!
//! margin       1/8 of begin, at most half of the way from begin to all memory
//! ```
//!
//! V-Probe's reclaim is triggered by host events, "like the memory pressure" (Wang et al., ATC'23,
//! section 4.3). The paper does not say by which figures.

#[cfg(test)]
mod tests;

use std::fmt;
use std::iter;
use std::time::Duration;

use ebb_units::Bytes;

/// Pressure ends this part of its threshold above the threshold, if there is so much room.
const MARGIN_PART: u64 = 8;
/// Tasks that wait count below so many times the threshold.
const STALL_TIMES: u64 = 4;
/// Shortest time between two requests to a VM.
const PAUSE: Duration = Duration::from_secs(1);
/// The same after a request for which the VM had nothing to give.
const PAUSE_OF_EMPTY: Duration = Duration::from_secs(5);

/// A bound of memory: the host's own, or that of a control group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Whose it is, as messages name it.
    pub name: String,
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What is left of it, in bytes.
    pub available_bytes: u64,
}

/// The host's memory at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// All memory of the host.
    pub host: Budget,
    /// Control groups that bound it further.
    pub groups: Vec<Budget>,
    /// In how many thousandths of the time some task of the host waited for memory lately. `None`:
    /// the kernel does not tell.
    pub stall_permille: Option<u32>,
}

/// Available memory below which there is pressure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Below {
    /// A part of all memory, in percent. 0: waiting tasks alone count, whatever is available.
    Percent(u32),
    /// So many bytes, or all memory if that is less. 0: as with percent.
    Bytes(u64),
}

/// What counts as pressure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thresholds {
    /// Available memory.
    pub below: Below,
    /// Thousandths of the time in which some task waits for memory. `None`: waits do not count.
    pub stall_permille: Option<u32>,
}

impl Below {
    /// The threshold in bytes, for a bound of so many bytes.
    pub fn of(self, total_bytes: u64) -> u64 {
        let bytes = match self {
            Below::Percent(percent) => {
                let bytes = u128::from(total_bytes) * u128::from(percent) / 100;
                u64::try_from(bytes).unwrap_or(u64::MAX)
            }
            Below::Bytes(bytes) => bytes,
        };
        bytes.min(total_bytes)
    }
}

/// The host's pressure as one VM takes it.
#[derive(Default, Debug)]
pub struct HostPressure {
    is_on: bool,
    /// Whether too little is available.
    is_short: bool,
    next: Option<Duration>,
}

impl HostPressure {
    /// Looks at the host's memory. Returns why there is pressure, with the figures; `None`: there is
    /// none.
    pub fn look(&mut self, memory: &HostMemory, thresholds: Thresholds) -> Option<String> {
        let Thresholds { below, stall_permille } = thresholds;
        let begin = |budget: &Budget| below.of(budget.total_bytes);
        let short = memory.bounds().map(|budget| (budget, self.mark(budget, begin(budget))));
        let short = { short }.find(|(budget, mark)| budget.available_bytes < *mark);
        let counts = memory.bounds().any(|budget| self.may_stall(budget, begin(budget)));
        let stalls = stall_permille.filter(|&most| counts && self.is_stalled(memory, most));
        self.is_short = short.is_some();
        self.is_on = self.is_short || stalls.is_some();
        self.is_on.then(|| memory.told(short, stalls))
    }

    /// Whether there was pressure at the last look only because tasks waited.
    pub fn is_by_stalls(&self) -> bool {
        self.is_on && !self.is_short
    }

    /// The mark below which there is pressure: where it begins or, once it has begun, where it
    /// ends.
    fn mark(&self, budget: &Budget, begin: u64) -> u64 {
        let room = budget.total_bytes.saturating_sub(begin);
        match self.is_on && budget.available_bytes >= begin {
            true => begin.saturating_add((begin / MARGIN_PART).min(room / 2)),
            false => begin,
        }
    }

    /// Whether so little is available that waiting tasks count.
    fn may_stall(&self, budget: &Budget, begin: u64) -> bool {
        let near = begin.saturating_mul(STALL_TIMES);
        begin == 0 || budget.available_bytes < self.mark(budget, near)
    }

    /// Whether tasks wait too long. Once there is pressure, half of that is too long.
    fn is_stalled(&self, memory: &HostMemory, most_permille: u32) -> bool {
        let scale = if self.is_on { 2 } else { 1 };
        let stall = memory.stall_permille.unwrap_or(0).saturating_mul(scale);
        most_permille > 0 && stall >= most_permille
    }

    /// Whether the VM may be asked to reclaim. `now`: the time since any fixed moment; it must not
    /// go backwards.
    pub fn is_due(&self, now: Duration) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Notes that the VM was asked, and what it gave back.
    pub fn asked(&mut self, now: Duration, reclaimed_bytes: u64) {
        let pause = if reclaimed_bytes > 0 { PAUSE } else { PAUSE_OF_EMPTY };
        self.next = Some(now + pause);
    }
}

impl HostMemory {
    /// The host's own memory, and that of control groups.
    pub fn bounds(&self) -> impl Iterator<Item = &Budget> {
        iter::once(&self.host).chain(&self.groups)
    }

    /// The figures: of a budget that is below a mark, else of the host.
    fn told(&self, short: Option<(&Budget, u64)>, stalls: Option<u32>) -> String {
        let budget = short.map_or(&self.host, |(budget, _)| budget);
        let below = short.map(|(_, mark)| format!(" below {}", Bytes(mark))).unwrap_or_default();
        let over = stalls.map(|most| format!(" over {}", Percent(most))).unwrap_or_default();
        let psi = { self.stall_permille }
            .map(|permille| format!(", PSI some {}{over}", Percent(permille)))
            .unwrap_or_default();
        format!("{}: available {}{below}{psi}", budget.name, Bytes(budget.available_bytes))
    }
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(None, None))
    }
}

/// Thousandths, printed in percent.
struct Percent(u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 10, self.0 % 10) {
            (whole, 0) => write!(f, "{whole} %"),
            (whole, tenth) => write!(f, "{whole}.{tenth} %"),
        }
    }
}
