//! The buffers of one queue, and the pieces in them that the observer has not heard of yet.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ebb_sys::transfer::AlignedBuffer;
use ebb_units::FRAME_BYTES;
use ebb_vhost::{Segment, whole_frames};

use super::disk::Disk;
use super::within;
use crate::block_locks::Held;
use crate::image::outer;
use crate::observer::Direction;

/// Bytes in use in buffers of one queue from which on no further request begins. It also bounds
/// the bytes in its free buffers.
const BUFFERS_BYTES_MAX: usize = 32 << 20;

/// Buffers of one queue, by size. Free ones are kept for later requests: the kernel would have to
/// clear new memory.
#[derive(Default)]
pub(crate) struct Buffers {
    kept: HashMap<usize, Vec<AlignedBuffer>>,
    kept_bytes: usize,
    used_bytes: usize,
    pub(super) lessons: Vec<Lesson>,
}

/// A piece that has moved between disk and memory through a buffer. The observer hears of it only
/// once the guest has, so the guest does not wait for that.
pub(super) struct Lesson {
    pub(super) piece: Range<u64>,
    pub(super) segments: Vec<Segment>,
    pub(super) direction: Direction,
    pub(super) buffer: AlignedBuffer,
    /// Keeps others from writing these blocks until then.
    pub(super) _held: Option<Arc<Held>>,
}

impl Buffers {
    pub(crate) fn is_exhausted(&self) -> bool {
        self.used_bytes >= BUFFERS_BYTES_MAX
    }

    /// Tells the observer of all pieces that have moved.
    pub(crate) fn teach(&mut self, disk: &Disk) {
        for lesson in std::mem::take(&mut self.lessons) {
            let Lesson { piece, segments, direction, buffer, _held } = lesson;
            let content = buffer.get(within(&piece, &outer(&piece))).unwrap_or_default();
            for (block, gfn, position) in whole_frames(&segments, piece.start) {
                if let Some(content) = content.get(position..).and_then(<[u8]>::first_chunk) {
                    disk.observer.moved(block, gfn, content, direction);
                }
            }
            self.give_back(buffer);
        }
    }

    pub(super) fn take(&mut self, bytes: u64) -> AlignedBuffer {
        let size = (bytes as usize).next_power_of_two().max(FRAME_BYTES as usize);
        self.used_bytes += size;
        match self.kept.get_mut(&size).and_then(Vec::pop) {
            Some(buffer) => {
                self.kept_bytes -= size;
                buffer
            }
            None => AlignedBuffer::new(size),
        }
    }

    pub(super) fn give_back(&mut self, buffer: AlignedBuffer) {
        let size = buffer.len();
        self.used_bytes = self.used_bytes.saturating_sub(size);
        if self.kept_bytes + size <= BUFFERS_BYTES_MAX {
            self.kept_bytes += size;
            self.kept.entry(size).or_default().push(buffer);
        }
    }
}
