//! Serving one fault: journey 2 of ARCHITECTURE.md.

pub mod failure;
pub mod jobs;
pub mod later;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use ebb_ledger::{Content, Want};
use ebb_sys::uffd::Fault;
use ebb_units::{FrameRange, Gfn};

use crate::fault::hand::Hand;
use crate::fault::installer::Installer;
use crate::fault::refiller::Refiller;
use crate::fault::room::LimitRoom;
use crate::fault::server::failure::Failure;
use crate::fault::server::jobs::Jobs;
use crate::frames::Frames;
use crate::frames::words::Served;
use crate::support::counters::{FaultKind, add};

/// Most attempts to serve a fault while other threads change the frame's word. After them the fault
/// is left to come again.
const ATTEMPTS: usize = 64;

/// A reclaimed block that was restored because its metadata was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Its first frame.
    pub head: Gfn,
    /// Its order: it has `1 << order` frames.
    pub order: u8,
}

/// Most restored blocks that wait to be checked; blocks beyond that are not checked.
const RESTORED_CAPACITY: usize = 1024;

/// Serves the faults of one VM.
pub struct FaultServer {
    frames: Arc<Frames>,
    installer: Arc<Installer>,
    refiller: Refiller,
    room: Arc<LimitRoom>,
    jobs: Jobs,
    failure: Failure,
    restored: SyncSender<Restored>,
}

impl FaultServer {
    /// Returns the server, and a receiver of the blocks that it restores. The receiver is for a
    /// check whether the guest then used them.
    pub(crate) fn new(
        frames: &Arc<Frames>,
        installer: &Arc<Installer>,
        refiller: Refiller,
        room: &Arc<LimitRoom>,
    ) -> (FaultServer, Receiver<Restored>) {
        let (restored, receiver) = sync_channel(RESTORED_CAPACITY);
        let server = FaultServer {
            frames: Arc::clone(frames),
            installer: Arc::clone(installer),
            refiller,
            room: Arc::clone(room),
            jobs: Jobs::new(),
            failure: Failure::default(),
            restored,
        };
        (server, receiver)
    }

    /// The part that brings back content that has to be read.
    #[cfg(test)]
    pub(crate) fn refiller(&self) -> &Refiller {
        &self.refiller
    }

    /// Faults that wait for a refill thread.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Serves a fault that was read at `began`, leaves it to the refill threads, or leaves a mark
    /// for the holder of the frame's lock. Returns what it was if it is done.
    pub(crate) fn serve(&self, fault: Fault, began: Instant, hand: &mut Hand) -> Option<FaultKind> {
        if !fault.write_protected && self.needs_time(fault) {
            if self.refiller.refill_at_once(fault, &mut hand.in_memory) {
                return Some(FaultKind::Evicted);
            }
            if self.refill_later(fault, began) {
                return None;
            }
        }
        Some(self.serve_on(fault, hand))
    }

    /// Whether the frame's content is evicted, or the fault may have to wait for room.
    fn needs_time(&self, fault: Fault) -> bool {
        let gfn = self.frames.ram().gpa(fault.address).map(|gpa| gpa.gfn());
        let content = gfn.map(|gfn| self.frames.ledger().content(gfn));
        matches!(content, Some(Content::Saved { .. } | Content::OnDisk { .. }))
            || self.room.is_over_limit()
    }

    /// Serves a fault on this thread. Reads ahead if the thread has room for pages. Returns what
    /// the fault was.
    pub(crate) fn serve_on(&self, fault: Fault, hand: &mut Hand) -> FaultKind {
        let (counter, mut kind) = match fault.write_protected {
            true => (&self.frames.counters().metadata, FaultKind::Metadata),
            false => (&self.frames.counters().missing, FaultKind::Missing),
        };
        // The kernel reports faults in registered ranges only.
        let Some(gfn) = self.frames.ram().gpa(fault.address).map(|gpa| gpa.gfn()) else {
            return kind;
        };
        add(counter, 1);
        for _ in 0..ATTEMPTS {
            match self.attempt(gfn, fault, hand, &mut kind) {
                Ok(Served::Done) => return kind,
                Ok(Served::Busy) => std::thread::yield_now(),
                Err(error) => {
                    if self.fault_failed(gfn, error, hand.pages.is_some()) {
                        add(&self.frames.counters().retried, 1);
                        return kind;
                    }
                    break;
                }
            }
        }
        // No memory, or too many attempts: woken, the guest touches the frame again.
        add(&self.frames.counters().retried, 1);
        self.frames.report("wake", self.frames.wake(FrameRange::new(gfn, 1)));
        kind
    }

    /// Makes one attempt. Notes in `kind` whether the frame is evicted.
    fn attempt(
        &self,
        gfn: Gfn,
        fault: Fault,
        hand: &mut Hand,
        kind: &mut FaultKind,
    ) -> io::Result<Served> {
        match (fault.write_protected, self.frames.ledger().want(gfn)) {
            (_, Want::Marked(_)) => Ok(Served::Done),
            (true, Want::Free(Content::Watch { head, order })) => {
                let served = self.installer.restore(gfn, head, order)?;
                if let Served::Done = served {
                    // If the queue is full, this block is not checked.
                    let _ = self.restored.try_send(Restored { head, order });
                }
                Ok(served)
            }
            // The protection ended before its event was read.
            (true, Want::Free(_)) => self.let_through(gfn),
            (false, Want::Free(content)) => match (content, &mut hand.pages) {
                (Content::Saved { .. } | Content::OnDisk { .. }, pages) => {
                    *kind = FaultKind::Evicted;
                    match pages {
                        Some(buffer) => self.refiller.refill_ahead(gfn, buffer),
                        None => self.installer.install_ahead(gfn, content, &mut hand.zeros),
                    }
                }
                (Content::Unplugged, _) => self.installer.serve_unplugged(gfn, fault.write),
                (Content::Empty { .. }, _) => {
                    add(&self.frames.counters().early, 1);
                    self.installer.install_ahead(gfn, content, &mut hand.zeros)
                }
                _ => self.installer.install_ahead(gfn, content, &mut hand.zeros),
            },
        }
    }

    /// Ends a protection that belongs to no watch. This happens under the lock of the frame's word:
    /// the worker may be about to protect the frame for a block, and that protection must not be
    /// the one that ends.
    fn let_through(&self, gfn: Gfn) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Some(held) = self.frames.lock_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        let watched = held.contents().any(|(_, content)| matches!(content, Content::Watch { .. }));
        let done =
            if watched { Ok(Served::Busy) } else { self.frames.unprotect(frame).map(Served::done) };
        let wanted = held.abandon();
        self.frames.after(wanted, words);
        done
    }
}
