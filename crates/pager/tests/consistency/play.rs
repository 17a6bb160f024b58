//! A play of steps, and its reference.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ebb_pager::testing::{Machine, page_of};
use ebb_pager::{Grain, NothingKnown, Zeros};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use proptest::test_runner::TestCaseError;

use crate::daemon::{Broken, Daemon};
use crate::disk::{BLOCKS, FakeDisk};

/// Number of frames that the guest uses in its only huge frame.
pub const FRAMES: u64 = 12;
/// Longer than any action here takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// What happens to memory, disk, or both.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// The guest fills a frame with what `seed` stands for.
    Write { gfn: u64, seed: u64 },
    /// The guest touches a frame.
    Read { gfn: u64 },
    /// Blocks are read into frames.
    DiskRead { block: u64, gfn: u64, count: u64 },
    /// Frames are written to blocks.
    DiskWrite { gfn: u64, block: u64, count: u64 },
    /// Blocks become zeros.
    Discard { block: u64, count: u64 },
    /// Frames are evicted.
    Evict { gfn: u64, count: u64 },
    /// The VMM punches a frame, as for a balloon: it reads as zeros, or, if it was evicted, as what
    /// it was.
    Punch { gfn: u64 },
    /// The store is short of room: frames give up slots that they keep.
    GiveUp { most: u64 },
    /// All content comes back.
    GiveBack(Zeros),
}

impl Action {
    /// Whether the front end asks again, if it was not answered.
    fn is_request(self) -> bool {
        matches!(self, Action::DiskRead { .. } | Action::DiskWrite { .. } | Action::Discard { .. })
    }

    /// Whether the guest's processor does it, which outlives the daemon.
    fn is_guest(self) -> bool {
        matches!(self, Action::Write { .. } | Action::Read { .. })
    }
}

/// A death in the middle of a step, or after it if the step has fewer points than that.
#[derive(Clone, Copy, Debug)]
pub struct Crash {
    pub points: i64,
    /// Whether the VM dies too.
    pub vmm: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub action: Action,
    pub crash: Option<Crash>,
    /// Whether everything is evicted at the same time; not together with a crash.
    pub evict_beside: bool,
}

/// What memory and disk must hold, as seeds of [`page_of`].
struct Reference {
    memory: [u64; FRAMES as usize],
    disk: [u64; BLOCKS as usize],
}

impl Reference {
    fn apply(&mut self, action: Action) {
        match action {
            Action::Write { gfn, seed } => self.memory[gfn as usize] = seed,
            Action::DiskRead { block, gfn, count } => (0..count).for_each(|at| {
                self.memory[(gfn + at) as usize] = self.disk[(block + at) as usize];
            }),
            Action::DiskWrite { gfn, block, count } => (0..count).for_each(|at| {
                self.disk[(block + at) as usize] = self.memory[(gfn + at) as usize];
            }),
            Action::Discard { block, count } => {
                (0..count).for_each(|at| self.disk[(block + at) as usize] = 0);
            }
            Action::Read { .. }
            | Action::Evict { .. }
            | Action::Punch { .. }
            | Action::GiveUp { .. }
            | Action::GiveBack(_) => {}
        }
    }
}

struct Stage {
    machine: Machine,
    /// The daemon; `None` only between two daemons.
    daemon: Option<Daemon>,
    disk: Arc<FakeDisk>,
    reference: Reference,
    broken: Broken,
}

fn failed(why: impl Into<String>) -> TestCaseError {
    TestCaseError::fail(why.into())
}

/// Plays the steps. Returns the first thing that is wrong, if any.
pub fn play(steps: &[Step], grain: Grain, broken: Broken) -> Result<(), TestCaseError> {
    let (machine, disk) = (Machine::of(grain), Arc::new(FakeDisk::new()));
    let daemon = Daemon::over(&machine, &disk, broken, false);
    let reference = Reference { memory: [0; FRAMES as usize], disk: [0; BLOCKS as usize] };
    let mut stage = Stage { machine, daemon: Some(daemon), disk, reference, broken };
    let played = steps.iter().enumerate().try_for_each(|(index, step)| {
        let step = stage.step(*step).and_then(|()| stage.check());
        step.map_err(|error| failed(format!("step {index}: {error}")))
    });
    let played = played.and_then(|()| stage.end());
    if let Some(daemon) = stage.daemon.take() {
        daemon.killed(None);
    }
    played
}

/// The result of an action on a thread of its own.
type Done = Receiver<Result<(), String>>;

impl Stage {
    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("one daemon follows the other")
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let Step { action, crash, evict_beside } = step;
        if let Some(crash) = crash {
            return self.crash(action, crash);
        }
        let all = Action::Evict { gfn: 0, count: FRAMES };
        let beside = evict_beside.then(|| self.begin(all));
        let done = self.begin(action);
        wait(&done)?;
        beside.iter().try_for_each(wait)?;
        self.note(action)
    }

    /// Has the reference follow an action that is done.
    fn note(&mut self, action: Action) -> Result<(), TestCaseError> {
        self.reference.apply(action);
        if let Action::Punch { gfn } = action
            && self.page(Gfn(gfn))? == page_of(0)
        {
            self.reference.memory[gfn as usize] = 0;
        }
        Ok(())
    }

    /// Begins an action on a thread of its own.
    fn begin(&self, action: Action) -> Done {
        let (tell, done) = channel();
        let (pager, device) = (Arc::clone(&self.daemon().pager), self.daemon().device());
        let guest = self.machine.guest();
        let seed = match action {
            Action::Read { gfn } => self.reference.memory[gfn as usize],
            _ => 0,
        };
        let act = move || match action {
            Action::Write { gfn, seed } => {
                guest.write(Gfn(gfn), &page_of(seed));
                Ok(())
            }
            Action::Read { gfn } => match guest.read(Gfn(gfn)) == page_of(seed) {
                true => Ok(()),
                false => Err(format!("the guest reads something else in frame {gfn}")),
            },
            Action::DiskRead { block, gfn, count } => text(device.read(block, Gfn(gfn), count)),
            Action::DiskWrite { gfn, block, count } => text(device.write(Gfn(gfn), block, count)),
            Action::Discard { block, count } => text(device.discard(block..block + count)),
            Action::Evict { gfn, count } => {
                let frames = match pager.folios().grain() {
                    Grain::Frame => FrameRange::new(Gfn(gfn), count),
                    Grain::Huge => FrameRange::huge(Gfn(gfn).huge()),
                };
                let frames: Vec<Gfn> = frames.frames().collect();
                text(pager.evictor().evict(&frames, &NothingKnown).map(drop))
            }
            Action::Punch { gfn } => text(guest.punch(FrameRange::new(Gfn(gfn), 1))),
            Action::GiveUp { most } => match pager.residency().give_up_kept(most as usize) {
                given if given as u64 <= most => Ok(()),
                given => Err(format!("{given} slots are given up")),
            },
            Action::GiveBack(zeros) => text(pager.returner().give_back_all(zeros).map(drop)),
        };
        // Nobody listens any more to a killed daemon's action.
        std::thread::spawn(move || drop(tell.send(act())));
        done
    }

    fn crash(&mut self, action: Action, crash: Crash) -> Result<(), TestCaseError> {
        let (tell, blown) = channel();
        self.daemon().fuse.light(crash.points, tell);
        let done = self.begin(action);
        let (mut is_over, mut at_work) = (false, None);
        while !is_over && at_work.is_none() {
            match done.recv_timeout(Duration::from_millis(1)) {
                Ok(result) => {
                    result.map_err(failed)?;
                    is_over = true;
                }
                Err(RecvTimeoutError::Timeout) => at_work = blown.try_recv().ok(),
                Err(RecvTimeoutError::Disconnected) => return Err(failed("it panicked")),
            }
        }
        // The guest may have gone on before a thread of the daemon came to its point.
        if !self.daemon().fuse.put_out() && at_work.is_none() {
            at_work = blown.recv_timeout(DEADLINE).ok();
        }
        match crash.vmm {
            true => self.start_anew(action, at_work.as_deref()),
            false => self.restart(action, at_work.as_deref(), is_over, &done),
        }
    }

    /// Has another daemon recover the VM. The front end asks again for what was not answered, and
    /// the guest touches again what it waited for.
    fn restart(
        &mut self,
        action: Action,
        at_work: Option<&str>,
        is_over: bool,
        done: &Done,
    ) -> Result<(), TestCaseError> {
        // The old daemon's threads end first: they would answer too.
        if let Some(daemon) = self.daemon.take() {
            daemon.killed(at_work);
        }
        self.daemon = Some(Daemon::over(&self.machine, &self.disk, self.broken, true));
        if !is_over && action.is_guest() {
            wait(done)?;
        } else if !is_over && action.is_request() {
            wait(&self.begin(action))?;
        }
        self.note(action)
    }

    /// Starts a new VM: nothing is left of the old one. Its last request has reached the disk,
    /// partly, or not at all.
    fn start_anew(&mut self, action: Action, at_work: Option<&str>) -> Result<(), TestCaseError> {
        let before = self.reference.disk;
        self.reference.apply(action);
        for (block, page) in self.disk.blocks().iter().enumerate() {
            let seed = &mut self.reference.disk[block];
            if *page == page_of(before[block]) {
                *seed = before[block];
            }
        }
        self.reference.memory = [0; FRAMES as usize];
        self.machine = Machine::of(self.machine.grain);
        let next = Daemon::over(&self.machine, &self.disk, self.broken, false);
        if let Some(daemon) = self.daemon.replace(next) {
            daemon.killed(at_work);
        }
        Ok(())
    }

    /// Checks that everything is where it should be, without touching any of it.
    fn check(&self) -> Result<(), TestCaseError> {
        for (block, page) in self.disk.blocks().iter().enumerate() {
            if *page != page_of(self.reference.disk[block]) {
                return Err(failed(format!("block {block} is wrong")));
            }
        }
        for (gfn, seed) in (0..).map(Gfn).zip(self.reference.memory) {
            if self.page(gfn)? != page_of(seed) {
                let content = self.daemon().pager.ledger().content(gfn);
                return Err(failed(format!("{gfn:?} is wrong: {content:?}")));
            }
        }
        self.check_slots()
    }

    /// Checks that each slot in use has one word that names it, or one frame that keeps it. A
    /// thread that serves a fault unlocks the frame a little later than the guest goes on.
    fn check_slots(&self) -> Result<(), TestCaseError> {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.daemon().slots() {
                (used, known) if used == known => return Ok(()),
                (used, known) if Instant::now() > end => {
                    return Err(failed(format!("{used} slots are in use, and {known} known")));
                }
                _ => std::thread::yield_now(),
            }
        }
    }

    /// Returns what a frame holds, wherever that is.
    fn page(&self, gfn: Gfn) -> Result<Page, TestCaseError> {
        let content = self.daemon().pager.ledger().content(gfn);
        let hole = || self.daemon().non_resident_page(content, &self.disk);
        match self.machine.in_file(gfn) {
            Some(page) => Ok(page),
            None => hole().map_err(|error| failed(format!("{gfn:?}, {content:?}: {error}"))),
        }
    }

    /// Checks that the guest finds all content, and that the VM can be detached.
    fn end(&self) -> Result<(), TestCaseError> {
        (0..FRAMES).try_for_each(|gfn| wait(&self.begin(Action::Read { gfn })))?;
        wait(&self.begin(Action::GiveBack(Zeros::Leave)))?;
        self.check()?;
        wait(&self.begin(Action::GiveBack(Zeros::Fill)))?;
        self.check()
    }
}

fn text(result: std::io::Result<()>) -> Result<(), String> {
    result.map_err(|error| error.to_string())
}

fn wait(done: &Done) -> Result<(), TestCaseError> {
    match done.recv_timeout(DEADLINE) {
        Ok(result) => result.map_err(failed),
        Err(error) => Err(failed(format!("an action does not end: {error}"))),
    }
}
