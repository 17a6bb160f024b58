//! Handlers of faults: Ebb's pager, and a bare handler that does the same to the memory and nothing
//! else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::Context;
use ebb_ledger::{Ledger, Tables};
use ebb_pager::{
    Committed, DigestKey, FaultThread, Grain, Latency, NoDevices, NoDisk, Pager, PagerParts,
    Restored,
};
use ebb_store::{Protection, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Events, Fault, HvaRange, Uffd, Watch, feature};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, HUGE_BYTES, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Puncher, Ram, Region};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vmtest::Scratch;

use super::bare::Bare;

/// A free block and the frame with its metadata.
#[derive(Clone, Copy)]
pub struct Block {
    pub metadata: Gfn,
    pub head: Gfn,
    pub order: u8,
}

impl Block {
    pub fn frames(self) -> FrameRange {
        FrameRange::block(self.head, self.order)
    }
}

/// Memory whose faults this process serves.
pub trait Handler {
    /// Returns the mapping that the victim touches. It begins with frame 0.
    fn victim(&self) -> &Mapping;

    /// Empties the blocks. With `watch`, also write-protects their metadata.
    ///
    /// # Errors
    /// Those of fallocate(2) and ioctl_userfaultfd(2).
    fn empty(&self, blocks: &[Block], watch: bool) -> anyhow::Result<()>;

    /// Returns the time, in ns, from the read of an event to the end of its resolution that
    /// `percent` of them did not exceed; `None` before the first.
    fn inside_ns(&self, percent: u64) -> Option<u64>;
}

/// Makes a userfaultfd for all of `victim`.
fn watched(victim: &Mapping) -> anyhow::Result<(Uffd, HvaRange)> {
    let uffd = Uffd::new().context("userfaultfd: run as root")?;
    uffd.handshake(feature::needed()).context("userfaultfd lacks a feature: see `ebb doctor`")?;
    Ok((uffd, HvaRange { start: victim.address(), bytes: victim.bytes() }))
}

/// The pager and its fault thread, as `ebbd` has them.
pub struct Ebb {
    // The fault thread must end before the mapping is dropped whose faults it serves.
    _faults: FaultThread,
    _restored: Receiver<Restored>,
    pager: Arc<Pager>,
    victim: Mapping,
    /// The file of the memory, for punches that the pager does not know of.
    file: RamFile,
    _directory: Scratch,
}

/// Most attempts to claim a block whose ledger word is locked.
const ATTEMPTS: usize = 10_000;

impl Ebb {
    /// Begins to manage the memory.
    ///
    /// # Errors
    /// The privilege is missing, or the run directory cannot be made.
    pub fn start(memory: Bare, huge: bool) -> anyhow::Result<Ebb> {
        let Bare { file, guest: victim, own: mapping } = memory;
        let of_pager = RamFile::from(file.as_fd().try_clone_to_owned()?);
        let directory = run_directory()?;
        let (gpa, bytes, hva) = (Gpa(0), victim.bytes(), victim.address());
        let region = Region { gpa, bytes, hva, file: 0, offset: 0 };
        let ram = Ram::new(vec![region], vec![Backing::new(of_pager, mapping)])?;
        let (uffd, _) = watched(&victim)?;
        let ledger =
            Ledger::create(&directory.path().join("ledger"), ram.end(), Tables::WhenSplit)?;
        let (run, slots) = (directory.path(), bytes / FRAME_BYTES);
        let store = SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted)?;
        let (pager, restored) = Pager::new(PagerParts {
            puncher: Puncher::new(ram),
            ledger,
            uffd,
            grain: if huge { Grain::Huge } else { Grain::Frame },
            devices: Box::new(NoDevices),
            store: Box::new(store),
            disk: Box::new(NoDisk),
            digest_key: Arc::new(DigestKey::random()?),
        })?;
        pager.frames().watch_all()?;
        let pager = Arc::new(pager);
        let me = Process::open(std::process::id() as i32)?.as_fd().try_clone_to_owned()?;
        let faults = FaultThread::start(pager.clone(), me, |why| {
            eprintln!("the fault thread ends: {why:?}");
        })?;
        let (_faults, _restored, _directory) = (faults, restored, directory);
        Ok(Ebb { _faults, _restored, pager, victim, file, _directory })
    }
}

impl Ebb {
    /// Returns the pager.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Claims and commits a block. The fault thread may still hold the lock of a fault that it has
    /// just served, so this retries.
    fn take(&self, block: &Block) -> Option<Committed<'_>> {
        (0..ATTEMPTS).find_map(|_| {
            let claim = self.pager.blocks().claim(block.metadata, block.head, block.order).ok()?;
            std::thread::yield_now();
            claim?.commit(true, 0)
        })
    }
}

impl Handler for Ebb {
    fn victim(&self) -> &Mapping {
        &self.victim
    }

    fn empty(&self, blocks: &[Block], watch: bool) -> anyhow::Result<()> {
        if !watch {
            return blocks.iter().map(|block| block.frames()).try_for_each(|frames| {
                Ok(self.file.punch(frames.start.gpa().0, frames.bytes())?)
            });
        }
        self.pager.returner().end_watches()?;
        let mut claims = Vec::with_capacity(blocks.len());
        for block in blocks {
            claims.push(self.take(block).context("a block is not to be had")?);
        }
        self.pager.blocks().empty(&mut claims, true)?;
        Ok(())
    }

    fn inside_ns(&self, percent: u64) -> Option<u64> {
        self.pager.counters().fault_percentile_ns(percent)
    }
}

/// Makes a directory where `ebbd` would keep its ledgers: in memory, not on a disk.
pub(super) fn run_directory() -> anyhow::Result<Scratch> {
    let (prefix, run) = ("ebb-bench-", Path::new("/run"));
    let made = if run.is_dir() { Scratch::new_in(prefix, run) } else { Scratch::new(prefix) };
    made.context("a directory for the ledger")
}

/// How a bare handler resolves a fault.
#[derive(Clone, Copy)]
pub enum Resolve {
    /// Maps one zeroed page.
    Zero,
    /// Populates a huge frame, then wakes.
    Populate,
    /// Populates the block whose metadata was written, then unprotects.
    Restore { first: Gfn, order: u8 },
}

/// The bare handler: poll, read, resolve.
pub struct Plain {
    shared: Arc<Shared>,
    stop: OwnedFd,
    thread: Option<JoinHandle<io::Result<()>>>,
}

struct Shared {
    memory: Bare,
    uffd: Uffd,
    inside: Latency,
}

impl Plain {
    /// Starts to serve faults.
    ///
    /// # Errors
    /// The privilege is missing.
    pub fn start(memory: Bare, resolve: Resolve) -> anyhow::Result<Plain> {
        let (uffd, range) = watched(&memory.guest)?;
        uffd.register(range, Watch::MissingAndWrite)?;
        let shared = Arc::new(Shared { memory, uffd, inside: Latency::default() });
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (mine, stopped) = (shared.clone(), stop.try_clone()?);
        let thread = std::thread::spawn(move || mine.serve(resolve, &stopped));
        Ok(Plain { shared, stop, thread: Some(thread) })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let written = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (written, self.thread.take())
            && let Ok(Err(error)) = thread.join()
        {
            eprintln!("the bare handler ends: {error}");
        }
    }
}

impl Handler for Plain {
    fn victim(&self) -> &Mapping {
        &self.shared.memory.guest
    }

    fn empty(&self, blocks: &[Block], watch: bool) -> anyhow::Result<()> {
        let Shared { memory, uffd, .. } = &*self.shared;
        for block in blocks {
            let frames = block.frames();
            if watch {
                uffd.protect(self.shared.range(FrameRange::new(block.metadata, 1)))?;
            }
            memory.file.punch(frames.start.gpa().0, frames.bytes())?;
        }
        Ok(())
    }

    fn inside_ns(&self, percent: u64) -> Option<u64> {
        self.shared.inside.percentile_ns(percent)
    }
}

impl Shared {
    fn serve(&self, resolve: Resolve, stop: &OwnedFd) -> io::Result<()> {
        let mut events = Events::new();
        loop {
            let mut fds = [self.uffd.as_fd(), stop.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            poll(&mut fds, None)?;
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            for fault in self.uffd.read(&mut events)? {
                let began = Instant::now();
                self.resolve(resolve, fault)?;
                self.inside.record(began.elapsed());
            }
        }
    }

    fn resolve(&self, resolve: Resolve, fault: Fault) -> io::Result<()> {
        let offset = fault.address.0 - self.memory.guest.address().0;
        let frame = FrameRange::new(Gpa(offset).gfn(), 1);
        match resolve {
            // The victim's next store faults on the protection only.
            _ if fault.write_protected && !matches!(resolve, Resolve::Restore { .. }) => {
                self.uffd.unprotect(self.range(frame))
            }
            Resolve::Zero => self.uffd.zero(self.range(frame), true),
            Resolve::Populate => {
                let huge = FrameRange::huge(frame.start.huge());
                self.memory.own.populate(huge.start.gpa().0, HUGE_BYTES)?;
                self.uffd.wake(self.range(huge))
            }
            Resolve::Restore { first, order } => {
                let head = Gfn(first.0 + (frame.start.0 << order));
                let block = FrameRange::block(head, order);
                self.memory.own.populate(block.start.gpa().0, block.bytes())?;
                self.uffd.unprotect(self.range(frame))
            }
        }
    }

    fn range(&self, frames: FrameRange) -> HvaRange {
        let start = Hva(self.memory.guest.address().0 + frames.start.gpa().0);
        HvaRange { start, bytes: frames.bytes() }
    }
}
