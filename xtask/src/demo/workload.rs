//! What the guest does: the same in every run, at the same times.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use vmtest::Vm;

use crate::interrupt;

/// Size of one piece of memory or file, as in `fill a 100M`.
const PIECE: &str = "100M";
const PIECE_BYTES: u64 = 100 << 20;
/// Time from one piece to the next, slow enough to follow by eye.
const PIECE_EVERY: Duration = Duration::from_millis(350);
/// Time from one question to the next, while the guest rests, about how much memory it uses.
const ASK_EVERY: Duration = Duration::from_millis(400);

/// Shortest rest after a free, also if the guest is late: the demo shows what becomes of freed
/// memory.
const REST_AFTER_FREE: Duration = Duration::from_millis(2500);

/// A part of the work: `verb` for pieces `name0`, `name1`, ... and then a rest.
struct Stage {
    label: &'static str,
    verb: &'static str,
    name: &'static str,
    pieces: u64,
    lasts: Duration,
}

const fn stage(
    label: &'static str,
    (verb, name, pieces): (&'static str, &'static str, u64),
    seconds: u64,
) -> Stage {
    Stage { label, verb, name, pieces, lasts: Duration::from_secs(seconds) }
}

impl Stage {
    fn takes(&self) -> bool {
        matches!(self.verb, "fill" | "files")
    }

    fn checks(&self) -> bool {
        matches!(self.verb, "check" | "checkfiles")
    }

    fn frees(&self) -> bool {
        matches!(self.verb, "free" | "rmfiles")
    }
}

const STAGES: [Stage; 13] = [
    stage("fill 100 MiB", ("fill", "kept", 1), 2),
    stage("fill 1200 MiB", ("fill", "a", 12), 5),
    stage("check", ("check", "a", 12), 2),
    stage("free", ("free", "a", 12), 5),
    stage("files 400 MiB", ("files", "f", 4), 3),
    stage("fill 600 MiB", ("fill", "b", 6), 3),
    stage("check", ("check", "b", 6), 2),
    stage("free", ("free", "b", 6), 3),
    stage("check files", ("checkfiles", "f", 4), 2),
    stage("delete files", ("rmfiles", "f", 4), 3),
    stage("fill 900 MiB", ("fill", "c", 9), 4),
    stage("check", ("check", "c", 9), 2),
    stage("free", ("free", "c", 9), 4),
];
/// The last stage checks what was filled first, because that has been there during all stages.
const LAST: Stage = stage("check", ("check", "kept", 1), 1);

/// Returns how long the work takes if no piece is late.
pub fn lasts() -> Duration {
    STAGES.iter().chain([&LAST]).map(|stage| stage.lasts).sum()
}

/// What the guest has done so far. The thread that does the work writes it.
pub struct Progress {
    began: Instant,
    memory_bytes: u64,
    state: Mutex<State>,
}

/// State of a [`Progress`].
#[derive(Clone, Default)]
pub struct State {
    /// Start time and label of each stage.
    pub stages: Vec<(Duration, &'static str)>,
    /// Memory that is not free in the guest by its kernel's figures, in bytes, by time.
    pub used: Vec<(Duration, u64)>,
    /// Time that the guest has worked.
    pub busy: Duration,
    /// Bytes compared with what had been written.
    pub checked_bytes: u64,
    /// Bytes that differed from what had been written.
    pub wrong_bytes: u64,
}

impl Progress {
    /// Begins with nothing done, in a guest of `memory_bytes`.
    pub fn new(memory_bytes: u64) -> Progress {
        Progress { began: Instant::now(), memory_bytes, state: Mutex::default() }
    }

    /// Returns the time since the work began.
    pub fn time(&self) -> Duration {
        self.began.elapsed()
    }

    /// Locks and returns the state.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does all stages.
    ///
    /// # Errors
    /// The guest's answer has no known form, or the user interrupts.
    ///
    /// # Panics
    /// The guest does not answer, or fails.
    pub fn work(&self, vm: &Vm) -> anyhow::Result<()> {
        let mut end = Duration::ZERO;
        for stage in STAGES.iter().chain([&LAST]) {
            let start = self.enter(stage);
            self.ask_used(vm)?;
            for piece in 0..stage.pieces {
                interrupt::check()?;
                self.wait_until_due(start, stage, piece);
                self.one(vm, stage, piece)?;
                self.ask_used(vm)?;
            }
            end += stage.lasts;
            let due = if stage.frees() { self.time() + REST_AFTER_FREE } else { Duration::ZERO };
            self.rest(vm, end.max(due))?;
        }
        Ok(())
    }

    fn enter(&self, stage: &Stage) -> Duration {
        let start = self.time();
        self.state().stages.push((start, stage.label));
        start
    }

    /// Waits until a piece is due. Only stages that take memory wait; the others do all pieces at
    /// once.
    fn wait_until_due(&self, start: Duration, stage: &Stage, piece: u64) {
        if stage.takes() {
            let due = start + PIECE_EVERY * piece as u32;
            thread::sleep(due.saturating_sub(self.time()));
        }
    }

    fn one(&self, vm: &Vm, stage: &Stage, piece: u64) -> anyhow::Result<()> {
        let Stage { verb, name, .. } = stage;
        let size = if stage.takes() { PIECE } else { "" };
        let start = Instant::now();
        let answer = vm.guest(&format!("{verb} {name}{piece} {size}"));
        let took = start.elapsed();
        let mut state = self.state();
        state.busy += took;
        if stage.checks() {
            state.checked_bytes += PIECE_BYTES;
            state.wrong_bytes += wrong_bytes(&answer)?;
        }
        Ok(())
    }

    fn rest(&self, vm: &Vm, end: Duration) -> anyhow::Result<()> {
        while self.time() < end {
            interrupt::check()?;
            thread::sleep(ASK_EVERY.min(end.saturating_sub(self.time())));
            self.ask_used(vm)?;
        }
        Ok(())
    }

    fn ask_used(&self, vm: &Vm) -> anyhow::Result<()> {
        let free_bytes = free_bytes(&vm.guest("cat /proc/meminfo"))?;
        let used_bytes = self.memory_bytes.saturating_sub(free_bytes);
        let time = self.time();
        self.state().used.push((time, used_bytes));
        Ok(())
    }
}

/// Parses the guest's answer: `0`, or `17 first at ...`.
///
/// # Errors
/// It is none.
pub fn wrong_bytes(answer: &str) -> anyhow::Result<u64> {
    match answer.split_whitespace().next().map(str::parse) {
        Some(Ok(count)) => Ok(count),
        _ => bail!("the guest's check says {answer:?}"),
    }
}

fn free_bytes(meminfo: &str) -> anyhow::Result<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).context("no MemFree")?;
    Ok(kib.parse::<u64>()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_filled_is_checked_and_freed() {
        for (makes, checks, frees) in
            [("fill", "check", "free"), ("files", "checkfiles", "rmfiles")]
        {
            let count = |verb, name| {
                let all = STAGES.iter().chain([&LAST]);
                let stages = all.filter(|stage| stage.verb == verb && stage.name == name);
                stages.map(|stage| stage.pieces).sum::<u64>()
            };
            for name in ["a", "b", "c", "f"] {
                assert_eq!(count(makes, name), count(checks, name), "{name}");
                assert_eq!(count(makes, name), count(frees, name), "{name}");
            }
        }
    }

    #[test]
    fn the_guests_words_are_read() {
        assert_eq!(free_bytes("MemTotal: 9 kB\nMemFree:   1024 kB\n").unwrap(), 1 << 20);
        assert!(free_bytes("MemTotal: 9 kB\n").is_err());
        assert_eq!(wrong_bytes("0").unwrap(), 0);
        assert_eq!(wrong_bytes("17 first at page 1 byte 0: 1 instead of 2").unwrap(), 17);
        assert!(wrong_bytes("done").is_err());
    }
}
