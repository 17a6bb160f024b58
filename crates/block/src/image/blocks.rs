//! Whole blocks of an image: which ones bytes touch, and I/O on them through memory of our own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use ebb_sys::transfer::{AlignedBuffer, Operation, Transfer, TransferMemory};
use ebb_units::FRAME_BYTES;
use rustix::io::Errno;

/// Returns the range of whole blocks in `bytes`, in bytes.
pub(super) fn inner(bytes: &Range<u64>) -> Range<u64> {
    let start = bytes.start.next_multiple_of(FRAME_BYTES);
    start..(bytes.end / FRAME_BYTES * FRAME_BYTES).max(start)
}

/// Returns the range of blocks that `bytes` touch, in bytes.
pub(crate) fn outer(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / FRAME_BYTES * FRAME_BYTES..bytes.end.next_multiple_of(FRAME_BYTES)
}

pub(super) fn move_own(
    file: &Arc<File>,
    operation: Operation,
    offset: u64,
    buffer: AlignedBuffer,
    bytes: u64,
) -> io::Result<AlignedBuffer> {
    let transfer = Transfer::own(file.clone(), operation, offset, buffer, bytes as usize)?;
    match transfer.run() {
        (Ok(()), TransferMemory::Own(buffer)) => Ok(buffer),
        (Err(error), _) => Err(error),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

pub(super) fn reads_first_block(file: &File) -> bool {
    let Ok(file) = file.try_clone().map(Arc::new) else { return false };
    let buffer = AlignedBuffer::new(FRAME_BYTES as usize);
    match move_own(&file, Operation::Read, 0, buffer, FRAME_BYTES) {
        Err(error) => error.raw_os_error() != Some(Errno::INVAL.raw_os_error()),
        Ok(_) => true,
    }
}

/// Reads any bytes by reading whole blocks.
pub(super) fn read_at(file: &Arc<File>, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let end = offset.checked_add(into.len() as u64).filter(|&end| end < i64::MAX as u64 / 2);
    let blocks = outer(&(offset..end.ok_or(io::ErrorKind::UnexpectedEof)?));
    let count = blocks.end - blocks.start;
    let buffer = AlignedBuffer::new(count as usize);
    let buffer = move_own(file, Operation::Read, blocks.start, buffer, count)?;
    let from = (offset - blocks.start) as usize;
    let part = buffer.get(from..from + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
    into.copy_from_slice(part);
    Ok(())
}
