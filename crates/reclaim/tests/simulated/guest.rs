//! A made-up guest under a limit: it uses frames, and a chooser says which ones to evict.

use std::fmt;
use std::time::{Duration, Instant};

use ebb_inspect::PageKind;
use ebb_reclaim::cost::Page;
use ebb_units::Gfn;

/// Duration of an access, by default.
const THINK: Duration = Duration::from_micros(5);
/// Duration of a fault for a frame that is resident and not mapped.
const MINOR: Duration = Duration::from_micros(1);
/// Duration of a fault for a non-resident frame.
const MAJOR: Duration = Duration::from_micros(100);
/// Frames read from the store at once, by default.
const CLUSTER: usize = 8;
/// Most frames to evict at once.
const STEP: usize = 4096;
/// Most steps to come down to the limit.
const STEPS: usize = 100;

/// Chooses what to evict.
pub trait Chooser {
    /// Returns about `want` frames.
    fn take(&mut self, guest: &mut Guest, want: usize, now: Instant) -> Vec<Gfn>;
}

/// A sequence of accesses.
pub trait Program {
    /// The next frame to use.
    fn next(&mut self, random: &mut Random, now: Instant) -> usize;
}

/// The guest's memory.
pub struct Guest {
    pub there: Vec<bool>,
    pub mapped: Vec<bool>,
    pub pages: Vec<Page>,
    /// Accesses since somebody took note of them, up to 255.
    pub used: Vec<u8>,
    limit: usize,
    pub resident: usize,
    /// Duration of an access.
    pub think: Duration,
    /// Frames read from the store at once.
    pub cluster: usize,
    pub now: Instant,
    pub figures: Figures,
}

/// Counters.
#[derive(Clone, Copy, Default)]
pub struct Figures {
    pub seconds: f64,
    /// Faults for resident frames.
    pub minor: u64,
    /// Faults for non-resident frames.
    pub major: u64,
    pub evicted: u64,
    /// Frames whose metadata was looked at.
    pub looked: u64,
    /// Entries of the VMM's page table that were looked at.
    pub entries: u64,
    /// How often something was forgotten.
    pub forgot: u64,
}

impl Figures {
    /// Frames looked at for each evicted frame.
    pub fn looks(&self) -> f64 {
        self.looked as f64 / self.evicted.max(1) as f64
    }

    fn since(self, before: Figures) -> Figures {
        Figures {
            seconds: self.seconds - before.seconds,
            minor: self.minor - before.minor,
            major: self.major - before.major,
            evicted: self.evicted - before.evicted,
            looked: self.looked - before.looked,
            entries: self.entries - before.entries,
            forgot: self.forgot - before.forgot,
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |count: u64| count as f64 / self.seconds;
        write!(
            f,
            "{:5.1} s, each with {:6.0} minor faults, {:5.0} major, {:6.0} evicted, {:.1} stops; \
             looks at {:5.1} frames and {:5.1} entries for each",
            self.seconds,
            each(self.minor),
            each(self.major),
            each(self.evicted),
            each(self.forgot),
            self.looks(),
            self.entries as f64 / self.evicted.max(1) as f64,
        )
    }
}

impl Guest {
    /// A guest that has not used any of its memory yet.
    pub fn new(pages: Vec<Page>, limit: usize) -> Guest {
        let count = pages.len();
        Guest {
            there: vec![false; count],
            mapped: vec![false; count],
            used: vec![0; count],
            pages,
            limit,
            resident: 0,
            think: THINK,
            cluster: CLUSTER,
            now: Instant::now(),
            figures: Figures::default(),
        }
    }

    /// Runs for a number of accesses. Returns the figures of the second half.
    pub fn run(
        mut self,
        mut program: impl Program,
        mut chooser: impl Chooser,
        accesses: u64,
    ) -> Figures {
        let (began, mut random) = (self.now, Random(0x9e37_79b9_7f4a_7c15));
        let mut first_half = Figures::default();
        for count in 0..accesses {
            if count == accesses / 2 {
                self.figures.seconds = self.now.duration_since(began).as_secs_f64();
                first_half = self.figures;
            }
            let at = program.next(&mut random, self.now);
            self.access(at);
            self.hold(&mut chooser);
        }
        self.figures.seconds = self.now.duration_since(began).as_secs_f64();
        self.figures.since(first_half)
    }

    fn access(&mut self, at: usize) {
        self.now += self.think;
        self.used[at] = self.used[at].saturating_add(1);
        if !self.there[at] {
            self.figures.major += 1;
            self.now += MAJOR;
            self.bring(at);
        } else if !self.mapped[at] {
            self.figures.minor += 1;
            self.now += MINOR;
        }
        self.mapped[at] = true;
    }

    /// Makes a frame resident. Anonymous memory comes with its neighbours, mapped.
    fn bring(&mut self, at: usize) {
        let (first, count) = match self.pages[at].kind {
            Some(PageKind::File) => (at, 1),
            _ => (at - at % self.cluster, self.cluster),
        };
        for at in first..(first + count).min(self.there.len()) {
            if !self.there[at] {
                (self.there[at], self.mapped[at]) = (true, true);
                self.resident += 1;
            }
        }
    }

    fn hold(&mut self, chooser: &mut impl Chooser) {
        let gap = (self.limit / 32).clamp(1024, 16384);
        let (high, low) = (self.limit - gap / 4, self.limit - gap / 4 - gap / 2);
        if self.resident <= low.midpoint(high) {
            return;
        }
        for _ in 0..STEPS {
            if self.resident <= low {
                return;
            }
            let want = (self.resident - low).next_multiple_of(512).min(STEP);
            for gfn in chooser.take(self, want, self.now) {
                let at = gfn.0 as usize;
                if self.there[at] {
                    (self.there[at], self.mapped[at]) = (false, false);
                    self.resident -= 1;
                    self.figures.evicted += 1;
                }
            }
        }
        panic!("it does not come down to its limit: {} of {}", self.resident, self.limit);
    }
}

/// Marsaglia's xorshift.
pub struct Random(pub u64);

impl Random {
    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}
