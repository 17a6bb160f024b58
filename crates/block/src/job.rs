//! A request in flight, step by step. Each step is one transfer.

mod buffers;
mod disk;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ebb_sys::transfer::{AlignedBuffer, Operation, Transfer, TransferMemory};
use ebb_units::FRAME_BYTES;
use ebb_vhost::{Access, Guest, Pinned, Segment, bytes_of, slice};

use self::buffers::Lesson;
use crate::block_locks::Held;
use crate::counters::add;
use crate::image::outer;
use crate::observer::Direction;
use crate::request::{Data, Halted, ID_BYTES, Request, Sectors, Status, StatusByte};

pub(crate) use self::buffers::Buffers;
pub(crate) use self::disk::Disk;

/// Largest piece that goes through a buffer at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What a request does next.
pub(crate) enum Step {
    /// Run this transfer, then call [`Job::ended`].
    Run(Transfer),
    /// Call [`Job::again`] after a while: memory that the request needs is not available now.
    Later,
    /// The request has ended. The number is the bytes of data written into guest memory.
    Over(Status, u32),
}

/// A request that has begun.
pub(crate) struct Job {
    request: Request,
    guest: Guest,
    status: StatusByte,
    stage: Stage,
    /// How many of the request's bytes are done.
    done: u64,
    /// The memory that direct I/O uses at this moment.
    pinned: Option<Pinned>,
    held: Option<Arc<Held>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Moves data directly between disk and guest memory.
    Direct,
    /// Reads the blocks around a piece that is to be written.
    Fill,
    /// Moves a piece between disk and buffer.
    Move,
}

/// The next step, or why there is none.
type Stepped = Result<Step, Halted>;

fn failed(error: &io::Error) -> Halted {
    tracing::debug!("a request fails: {error}");
    Status::IoError.into()
}

impl Job {
    /// Begins a request whose blocks `held` locks.
    pub(crate) fn begin(
        disk: &Disk,
        buffers: &mut Buffers,
        guest: Guest,
        status: StatusByte,
        request: Request,
        held: Option<Held>,
    ) -> (Job, Step) {
        let (stage, held) = (Stage::Move, held.map(Arc::new));
        let mut job = Job { request, guest, status, stage, done: 0, pinned: None, held };
        let step = job.first(disk, buffers);
        (job, or_over(step))
    }

    /// Returns where its status goes, and unpins its other frames.
    pub(crate) fn into_status(self) -> StatusByte {
        self.status
    }

    /// Goes on after [`Step::Later`], with the piece at which it halted. What is done before a
    /// request's first transfer may be done twice.
    pub(crate) fn again(&mut self, disk: &Disk, buffers: &mut Buffers) -> Step {
        // Do not read the disk for memory that is still not available.
        let there = self.piece().map_or(Ok(()), |piece| {
            self.guest.pin(self.segments_of(&piece), self.access()).map(drop)
        });
        or_over(there.map_err(Halted::from).and_then(|()| self.first(disk, buffers)))
    }

    /// Goes on after a transfer has ended.
    pub(crate) fn ended(
        &mut self,
        disk: &Disk,
        buffers: &mut Buffers,
        result: io::Result<()>,
        memory: TransferMemory,
    ) -> Step {
        let step = match (result, memory) {
            (Err(error), memory) => {
                if let TransferMemory::Own(buffer) = memory {
                    buffers.give_back(buffer);
                }
                Err(failed(&error))
            }
            (Ok(()), TransferMemory::Own(buffer)) => self.piece_ended(disk, buffers, buffer),
            (Ok(()), _) => Ok(self.over(disk)),
        };
        or_over(step)
    }

    fn first(&mut self, disk: &Disk, buffers: &mut Buffers) -> Stepped {
        match &self.request {
            Request::Read(data) | Request::Write(data) if data.bytes == 0 => Ok(self.over(disk)),
            // Beyond the end of an image that was shrunk, a read fails by itself.
            Request::Read(_) => self.first_transfer(disk, buffers),
            Request::Write(data) => {
                let bytes = data.disk_offset()..data.disk_end();
                disk.image.check_end(bytes.end).map_err(|error| failed(&error))?;
                disk.before_overwrite(&bytes)?;
                self.first_transfer(disk, buffers)
            }
            Request::Flush => Ok(Step::Run(Transfer::sync(disk.image.file()))),
            Request::Discard(ranges) => {
                self.each_range(disk, ranges, |range| disk.image.discard(range.bytes()))
            }
            Request::WriteZeroes(ranges) => {
                self.each_range(disk, ranges, |range| disk.image.zero(range.bytes(), range.unmap))
            }
            Request::GetId(segments) => {
                let part = slice(segments, 0, ID_BYTES as u64);
                let bytes = bytes_of(&part);
                self.guest.write(part, &disk.id)?;
                Ok(Step::Over(Status::Ok, bytes as u32))
            }
        }
    }

    /// Acts on each range at once, while all else of this queue waits: such requests are rare.
    fn each_range(
        &self,
        disk: &Disk,
        ranges: &[Sectors],
        act: impl Fn(&Sectors) -> io::Result<()>,
    ) -> Stepped {
        let all = || -> Result<(), Halted> {
            for range in ranges.iter().filter(|range| !range.sectors.is_empty()) {
                disk.image.check_end(range.bytes().end).map_err(|error| failed(&error))?;
                disk.before_overwrite(&range.bytes())?;
                act(range).map_err(|error| failed(&error))?;
            }
            let synced = if disk.config.is_writeback() { Ok(()) } else { disk.image.sync() };
            synced.map_err(|error| failed(&error))
        };
        all()?;
        Ok(self.over(disk))
    }

    fn data(&self) -> Option<&Data> {
        match &self.request {
            Request::Read(data) | Request::Write(data) => Some(data),
            _ => None,
        }
    }

    fn is_write(&self) -> bool {
        matches!(self.request, Request::Write(_))
    }

    fn access(&self) -> Access {
        if self.is_write() { Access::Keep } else { Access::Replace }
    }

    fn operation(&self, disk: &Disk) -> Operation {
        match self.is_write() {
            true => Operation::Write { durable: !disk.config.is_writeback() },
            false => Operation::Read,
        }
    }

    fn first_transfer(&mut self, disk: &Disk, buffers: &mut Buffers) -> Stepped {
        let Some(data) = self.data() else { return Err(Status::IoError.into()) };
        let offset = data.disk_offset();
        let aligned = offset.is_multiple_of(FRAME_BYTES)
            && data.segments.iter().all(|segment| segment.is_aligned());
        if disk.wants_content || !aligned {
            return self.next_piece(disk, buffers);
        }
        let segments = data.segments.clone();
        let pieces = segments.iter().map(|segment| (segment.gpa.0, segment.bytes as usize));
        let transfer = Transfer::guest(
            disk.image.file(),
            self.operation(disk),
            offset,
            self.guest.memory(),
            pieces,
        );
        self.pinned = Some(self.guest.pin(segments.clone(), self.access())?);
        self.stage = Stage::Direct;
        transfer.map(Step::Run).map_err(|error| failed(&error))
    }

    /// Returns the bytes of the disk that the next piece covers.
    fn piece(&self) -> Option<Range<u64>> {
        let data = self.data()?;
        let start = data.disk_offset() + self.done;
        let border = (start / PIECE_BYTES + 1) * PIECE_BYTES;
        (self.done < data.bytes).then(|| start..border.min(data.disk_end()))
    }

    /// Returns the guest memory of a piece.
    fn segments_of(&self, piece: &Range<u64>) -> Vec<Segment> {
        let segments = self.data().map_or(&[][..], |data| &data.segments);
        slice(segments, self.done, piece.end - piece.start)
    }

    fn next_piece(&mut self, disk: &Disk, buffers: &mut Buffers) -> Stepped {
        let Some(piece) = self.piece() else { return Ok(self.over(disk)) };
        let blocks = outer(&piece);
        let buffer = buffers.take(blocks.end - blocks.start);
        if !self.is_write() {
            self.stage = Stage::Move;
            return self.transfer(disk, Operation::Read, &blocks, buffer);
        }
        if blocks != piece {
            self.stage = Stage::Fill;
            return self.transfer(disk, Operation::Read, &blocks, buffer);
        }
        self.write_piece(disk, buffers, &piece, buffer)
    }

    fn write_piece(
        &mut self,
        disk: &Disk,
        buffers: &mut Buffers,
        piece: &Range<u64>,
        mut buffer: AlignedBuffer,
    ) -> Stepped {
        let blocks = outer(piece);
        let part = buffer.get_mut(within(piece, &blocks)).ok_or(Status::IoError)?;
        if let Err(fault) = self.guest.read(self.segments_of(piece), part) {
            buffers.give_back(buffer);
            return Err(fault.into());
        }
        self.stage = Stage::Move;
        self.transfer(disk, self.operation(disk), &blocks, buffer)
    }

    fn transfer(
        &self,
        disk: &Disk,
        operation: Operation,
        blocks: &Range<u64>,
        buffer: AlignedBuffer,
    ) -> Stepped {
        let bytes = (blocks.end - blocks.start) as usize;
        Transfer::own(disk.image.file(), operation, blocks.start, buffer, bytes)
            .map(Step::Run)
            .map_err(|error| failed(&error))
    }

    fn piece_ended(
        &mut self,
        disk: &Disk,
        buffers: &mut Buffers,
        buffer: AlignedBuffer,
    ) -> Stepped {
        let Some(piece) = self.piece() else { return Err(Status::IoError.into()) };
        if self.stage == Stage::Fill {
            return self.write_piece(disk, buffers, &piece, buffer);
        }
        self.moved(disk, buffers, &piece, buffer)?;
        self.done += piece.end - piece.start;
        self.next_piece(disk, buffers)
    }

    /// Writes what was read to the guest, once a piece has moved between disk and `buffer`, and
    /// notes for the observer what moved.
    fn moved(
        &self,
        disk: &Disk,
        buffers: &mut Buffers,
        piece: &Range<u64>,
        buffer: AlignedBuffer,
    ) -> Result<(), Halted> {
        let segments = self.segments_of(piece);
        let content = buffer.get(within(piece, &outer(piece))).ok_or(Status::IoError.into());
        let copied = match self.is_write() {
            true => Ok(()),
            false => content.and_then(|read| Ok(self.guest.write(segments.clone(), read)?)),
        };
        if !disk.wants_content || copied.is_err() {
            buffers.give_back(buffer);
            return copied;
        }
        let direction = if self.is_write() { Direction::Write } else { Direction::Read };
        let (piece, _held) = (piece.clone(), self.held.clone());
        buffers.lessons.push(Lesson { piece, segments, direction, buffer, _held });
        copied
    }

    /// Counts a request that succeeded.
    fn over(&self, disk: &Disk) -> Step {
        let counters = &disk.counters;
        let mut written = 0;
        match &self.request {
            Request::Read(data) => {
                add(&counters.reads, 1);
                add(&counters.read_bytes, data.bytes);
                written = data.bytes;
            }
            Request::Write(data) => {
                add(&counters.writes, 1);
                add(&counters.written_bytes, data.bytes);
            }
            Request::Flush => add(&counters.flushes, 1),
            Request::Discard(_) => add(&counters.discards, 1),
            Request::WriteZeroes(_) => add(&counters.write_zeroes, 1),
            Request::GetId(_) => {}
        }
        Step::Over(Status::Ok, written as u32)
    }
}

fn or_over(step: Stepped) -> Step {
    step.unwrap_or_else(|halted| match halted {
        Halted::Ended(status) => Step::Over(status, 0),
        Halted::NotNow => Step::Later,
    })
}

/// Returns where `piece` is in a buffer that contains `blocks`.
fn within(piece: &Range<u64>, blocks: &Range<u64>) -> Range<usize> {
    (piece.start - blocks.start) as usize..(piece.end - blocks.start) as usize
}
