//! Transfers that run in the background: io_uring(7).

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use crate::transfer::{Operation, Transfer, TransferMemory, write_flags};

/// Retries of a submission for which the kernel has no memory at this moment, before that counts as
/// an error.
const SUBMIT_ROUNDS_MAX: u32 = 10_000;

/// A ring of transfers.
pub struct Ring {
    ring: IoUring,
    /// The transfers in flight, by the number that the kernel knows them by.
    running: Vec<Option<Running>>,
    free: Vec<usize>,
    /// Transfers begun, but not yet submitted to the kernel.
    queued: VecDeque<usize>,
}

struct Running {
    token: u64,
    transfer: Transfer,
}

/// A transfer that has ended.
pub struct Done {
    /// The token that it was begun with.
    pub token: u64,
    /// Success of all of it, or what went wrong.
    pub result: io::Result<()>,
    /// Its memory.
    pub memory: TransferMemory,
}

impl Ring {
    /// Makes a ring for about `entries` transfers at once; more wait for their turn. `wake`, an
    /// eventfd, becomes readable when any transfer has ended.
    ///
    /// # Errors
    /// As io_uring_setup(2): `PermissionDenied` where the host forbids it.
    pub fn new(entries: u32, wake: &impl AsFd) -> io::Result<Ring> {
        let ring = IoUring::new(entries)?;
        ring.submitter().register_eventfd(wake.as_fd().as_raw_fd())?;
        Ok(Ring { ring, running: Vec::new(), free: Vec::new(), queued: VecDeque::new() })
    }

    /// Begins a transfer. [`Ring::submit`] submits it to the kernel.
    pub fn begin(&mut self, token: u64, transfer: Transfer) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        if let Some(slot) = self.running.get_mut(place) {
            *slot = Some(Running { token, transfer });
            self.queued.push_back(place);
        }
    }

    /// The number of transfers begun that [`Ring::reap`] has not handed out.
    pub fn in_flight(&self) -> usize {
        self.running.len() - self.free.len()
    }

    /// Whether any transfer has ended that was not handed out.
    pub fn has_ended(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Submits to the kernel all transfers that were begun. Without any, it makes no system call.
    ///
    /// # Errors
    /// As io_uring_enter(2). The next call submits them.
    pub fn submit(&mut self) -> io::Result<()> {
        loop {
            let all = self.push_queued();
            if self.needs_kernel() {
                self.enter(0)?;
            }
            if all {
                return Ok(());
            }
        }
    }

    /// Whether the kernel has entries to take, or ends to hand out that the ring had no room for.
    fn needs_kernel(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.cq_overflow()
    }

    /// Queues entries for submission. `false`: there is no room for all before some are submitted.
    fn push_queued(&mut self) -> bool {
        let mut queue = self.ring.submission();
        while let Some(&place) = self.queued.front() {
            let running = self.running.get(place).and_then(Option::as_ref);
            if let Some(running) = running {
                let entry = entry(&running.transfer).user_data(place as u64);
                // SAFETY: what the entry points to, `parts` and what they point to, is in `running`
                // until the kernel says that the transfer has ended: `reap` takes it out then, and
                // `drop` waits for it.
                if unsafe { queue.push(&entry) }.is_err() {
                    return false;
                }
            }
            self.queued.pop_front();
        }
        true
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        let mut rounds = 0;
        loop {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Too many completions wait to be reaped. The next call submits the rest.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && wanted == 0 => {
                    return Ok(());
                }
                Err(error) => {
                    rounds += 1;
                    let again = [Some(libc::EAGAIN), Some(libc::EBUSY)];
                    if !again.contains(&error.raw_os_error()) || rounds > SUBMIT_ROUNDS_MAX {
                        return Err(error);
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Hands out the transfers that have ended. Waits for nothing. A transfer that moved only a
    /// part is queued again for the rest.
    pub fn reap(&mut self, mut each: impl FnMut(Done)) {
        let ends: Vec<(u64, i32)> =
            self.ring.completion().map(|end| (end.user_data(), end.result())).collect();
        for (place, result) in ends {
            let place = place as usize;
            let Some(slot) = self.running.get_mut(place) else { continue };
            let Some(running) = slot.as_mut() else { continue };
            match running.transfer.settle(result as isize) {
                None => self.queued.push_back(place),
                Some(result) => {
                    let Some(Running { token, transfer }) = slot.take() else { continue };
                    self.free.push(place);
                    each(Done { token, result, memory: transfer.into_memory() });
                }
            }
        }
    }

    /// Waits until no transfer is in flight.
    ///
    /// # Errors
    /// As io_uring_enter(2).
    pub fn drain(&mut self, mut each: impl FnMut(Done)) -> io::Result<()> {
        while self.in_flight() > 0 {
            self.push_queued();
            self.enter(1)?;
            self.reap(&mut each);
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.drain(drop).is_err() {
            // The kernel may still write to this memory. A leak harms nobody.
            mem::forget(mem::take(&mut self.running));
        }
    }
}

fn entry(transfer: &Transfer) -> Entry {
    let fd = types::Fd(transfer.file.as_raw_fd());
    let (parts, count) = (transfer.parts.as_ptr(), transfer.parts.len() as u32);
    match transfer.operation {
        Operation::Read => opcode::Readv::new(fd, parts, count).offset(transfer.offset).build(),
        Operation::Write { durable } => opcode::Writev::new(fd, parts, count)
            .offset(transfer.offset)
            .rw_flags(write_flags(durable))
            .build(),
        Operation::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::AlignedBuffer;
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::Arc;

    fn ring(entries: u32) -> Option<Ring> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        match Ring::new(entries, &wake) {
            Ok(ring) => Some(ring),
            Err(error) => {
                println!("SKIPPED: io_uring: {error}");
                None
            }
        }
    }

    #[test]
    fn more_transfers_than_the_ring_has_room_for_all_end() {
        let Some(mut ring) = ring(2) else { return };
        let file = Arc::new(tempfile::tempfile().unwrap());
        for n in 0..50u8 {
            let mut buffer = AlignedBuffer::new(4096);
            buffer.fill(n);
            let (operation, offset) = (Operation::Write { durable: n == 7 }, u64::from(n) * 4096);
            let write = Transfer::own(file.clone(), operation, offset, buffer, 4096).unwrap();
            ring.begin(n.into(), write);
        }
        ring.begin(50, Transfer::sync(file.clone()));
        ring.submit().unwrap();
        let mut ended = Vec::new();
        ring.drain(|done| {
            done.result.unwrap();
            ended.push(done.token);
        })
        .unwrap();
        ended.sort_unstable();
        assert_eq!(ended, (0..=50).collect::<Vec<u64>>());
        let mut read = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&*file, &mut read, 49 * 4096).unwrap();
        assert_eq!(read, [49; 4096]);
    }

    #[test]
    fn the_kernel_is_called_only_if_there_is_something_for_it() {
        let Some(mut ring) = ring(4) else { return };
        assert!(!ring.needs_kernel());
        ring.submit().unwrap();
        ring.begin(0, Transfer::sync(Arc::new(tempfile::tempfile().unwrap())));
        assert!(ring.push_queued());
        assert!(ring.needs_kernel());
        ring.submit().unwrap();
        assert!(!ring.needs_kernel());
        let mut ended = 0;
        ring.drain(|done| ended += u32::from(done.result.is_ok())).unwrap();
        assert_eq!(ended, 1);
    }

    #[test]
    fn a_dropped_ring_waits_for_what_it_began() {
        let Some(mut ring) = ring(4) else { return };
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(1 << 20).unwrap();
        let buffer = AlignedBuffer::new(1 << 20);
        let read = Transfer::own(file.clone(), Operation::Read, 0, buffer, 1 << 20).unwrap();
        ring.begin(0, read);
        ring.submit().unwrap();
        drop(ring);
        assert_eq!(Arc::strong_count(&file), 1);
    }

    #[test]
    fn an_error_comes_back_with_its_memory() {
        let Some(mut ring) = ring(4) else { return };
        let file = Arc::new(tempfile::tempfile().unwrap());
        let read = Transfer::own(file, Operation::Read, 0, AlignedBuffer::new(4096), 4096).unwrap();
        ring.begin(9, read);
        let mut ends = Vec::new();
        ring.drain(|done| ends.push(done)).unwrap();
        let Done { token, result, memory } = ends.pop().unwrap();
        assert_eq!((token, result.unwrap_err().kind()), (9, io::ErrorKind::UnexpectedEof));
        assert!(matches!(memory, TransferMemory::Own(_)));
    }
}
