//! A guest that accesses memory at random, tracked by this process.

use ebb_heat::{Levels, Walk};
use ebb_units::Gfn;
use vmtest::tracked::Tracked;
use vmtest::{Guest, Host, Vm};
use vmtest_guest::spread;

use crate::interrupt;

/// Windows of a monitoring, as in the daemon.
pub const WINDOWS: u8 = 8;
/// Share of the program's accesses that go to hot pages. The others go to all pages.
const HOT_SHARE: f64 = 0.9;

/// The guest, and its program's memory.
pub struct Rig {
    // The fields are dropped in this order.
    pub tracked: Tracked,
    pub vm: Vm,
    /// Frame of each page of the program.
    frames: Vec<Gfn>,
}

/// The hot pages of a program: `count` ranks from `first` on.
#[derive(Clone, Copy)]
pub struct HotSet {
    pub first: u64,
    pub count: u64,
}

impl HotSet {
    /// Returns the share of all accesses that go to `hot` hot pages and `others` other pages, of a
    /// program with `pages` pages.
    pub fn share(self, hot: u64, others: u64, pages: u64) -> f64 {
        let cold = (1.0 - HOT_SHARE) / pages as f64;
        hot as f64 * (HOT_SHARE / self.count as f64 + cold) + others as f64 * cold
    }
}

impl Rig {
    /// Boots the guest. Its program has `program_mib` MiB of memory, of which one page is hot.
    pub fn start(program_mib: u64, cpus: u32) -> Rig {
        // An emulator keeps translations until page tables are switched. `pti=on` switches them
        // often.
        let guest =
            Guest::debian("6.1-cloud").append("pti=on transparent_hugepage=never").cpus(cpus);
        let vm = Host::new().qemu(guest);
        let tracked = Tracked::take(&vm);
        vm.guest(&format!("access a {program_mib}M hot 0 1"));
        let frames = vm.frames("accessframes a").into_iter().map(Gfn).collect();
        Rig { tracked, vm, frames }
    }

    /// Returns how many pages the program has.
    pub fn pages(&self) -> u64 {
        self.frames.len() as u64
    }

    /// Returns all frames of the program, in the order of its pages.
    pub fn frames(&self) -> &[Gfn] {
        &self.frames
    }

    /// Returns a part of the pages, apart from those with other numbers as far as they fit.
    pub fn hot_set(&self, percent: u64, number: u64) -> HotSet {
        let count = self.pages() * percent / 100;
        HotSet { first: number * count % self.pages(), count }
    }

    /// Makes these pages hot from now on.
    pub fn heat(&self, hot: HotSet) {
        self.vm.guest(&format!("accesslaw a hot {} {}", hot.first, hot.count));
    }

    /// Returns the frames of these pages, in order.
    pub fn hot_frames(&self, hot: HotSet) -> Vec<Gfn> {
        let ranks = hot.first..hot.first + hot.count;
        let page = |rank| spread::page(rank, self.pages()) as usize;
        let mut frames: Vec<Gfn> = ranks.map(|rank| self.frames[page(rank)]).collect();
        frames.sort_unstable();
        frames
    }

    /// Waits for `more` accesses. Returns how many were done in all, and in how many microseconds.
    pub fn progress(&self, more: u64) -> (u64, u64) {
        let answer = self.vm.guest(&format!("accesson a {more}"));
        let mut words = answer.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(accesses)), Some(Ok(us))) => (accesses, us),
            _ => panic!("accesson answers {answer:?}"),
        }
    }

    /// Does one monitoring, in which a window ends after `accesses` accesses. It calls `look` with
    /// 0 for the round that clears, and at the end of each window.
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

    /// Does one monitoring with a queue.
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
