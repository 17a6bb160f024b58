//! A guest that accesses memory at random, tracked by this process.

use ebb_heat::{Levels, Walk};
use ebb_units::Gfn;
use vmtest::tracked::Tracked;
use vmtest::{Guest, Host, Vm};

use super::spread;
use crate::interrupt;

/// Of a monitoring, as the daemon has them.
pub const WINDOWS: u8 = 8;
/// Of the program's accesses those to hot pages; the others are of all pages.
const HOT_SHARE: f64 = 0.9;

/// The guest, and its program's memory.
pub struct Rig {
    // Taken away in this order.
    pub tracked: Tracked,
    pub vm: Vm,
    /// By page of the program.
    frames: Vec<Gfn>,
}

/// The hot pages of a program: so many ranks from the first on.
#[derive(Clone, Copy)]
pub struct HotSet {
    pub first: u64,
    pub count: u64,
}

impl HotSet {
    /// The share of all accesses that go to so many hot pages and so many others, of a program
    /// with so many pages.
    pub fn share(self, hot: u64, others: u64, pages: u64) -> f64 {
        let cold = (1.0 - HOT_SHARE) / pages as f64;
        hot as f64 * (HOT_SHARE / self.count as f64 + cold) + others as f64 * cold
    }
}

impl Rig {
    /// Boots it. Its program has so much memory, of which one page is hot.
    pub fn start(program_mib: u64, cpus: u32) -> Rig {
        // An emulator keeps translations until page tables are switched, so they have to be.
        let guest =
            Guest::debian("6.1-cloud").append("pti=on transparent_hugepage=never").cpus(cpus);
        let vm = Host::new().qemu(guest);
        let tracked = Tracked::take(&vm);
        vm.guest(&format!("access a {program_mib}M hot 0 1"));
        let frames = vm.frames("accessframes a").into_iter().map(Gfn).collect();
        Rig { tracked, vm, frames }
    }

    /// Of the program.
    pub fn pages(&self) -> u64 {
        self.frames.len() as u64
    }

    /// All its frames, in the order of its pages.
    pub fn frames(&self) -> &[Gfn] {
        &self.frames
    }

    /// A part of the pages, apart from those with other numbers as far as they fit.
    pub fn hot_set(&self, percent: u64, number: u64) -> HotSet {
        let count = self.pages() * percent / 100;
        HotSet { first: number * count % self.pages(), count }
    }

    /// From now on these are hot.
    pub fn heat(&self, hot: HotSet) {
        self.vm.guest(&format!("accesslaw a hot {} {}", hot.first, hot.count));
    }

    /// Their frames, in order.
    pub fn hot_frames(&self, hot: HotSet) -> Vec<Gfn> {
        let ranks = hot.first..hot.first + hot.count;
        let page = |rank| spread::page(rank, self.pages()) as usize;
        let mut frames: Vec<Gfn> = ranks.map(|rank| self.frames[page(rank)]).collect();
        frames.sort_unstable();
        frames
    }

    /// Waits for so many accesses more: all that were done, and in how many microseconds.
    pub fn progress(&self, more: u64) -> (u64, u64) {
        let answer = self.vm.guest(&format!("accesson a {more}"));
        let mut words = answer.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(accesses)), Some(Ok(us))) => (accesses, us),
            _ => panic!("accesson answers {answer:?}"),
        }
    }

    /// One monitoring; a window ends when so many accesses were done. `look` is called for the
    /// round that clears, by 0, and at the end of each window.
    ///
    /// # Errors
    /// Somebody interrupts.
    pub fn windows(
        &self,
        windows: u8,
        accesses: u64,
        mut look: impl FnMut(u8),
    ) -> anyhow::Result<()> {
        look(0);
        for window in 1..=windows {
            interrupt::check()?;
            self.progress(accesses);
            look(window);
        }
        Ok(())
    }

    /// The same for a queue.
    ///
    /// # Errors
    /// Somebody interrupts.
    pub fn monitor(&self, levels: &mut Levels, windows: u8, accesses: u64) -> anyhow::Result<()> {
        self.windows(windows, accesses, |window| {
            let walk = match window {
                0 => {
                    levels.begin();
                    Walk::Full
                }
                _ => {
                    levels.next_window();
                    Walk::Pruned
                }
            };
            self.tracked.round(walk, levels);
        })
    }
}
