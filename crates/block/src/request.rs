//! The requests of a driver: virtio 1.2, section 5.2.6.

use std::ops::Range;

use ebb_units::Gpa;
use ebb_vhost::{Access, Chain, DmaFault, Guest, Pinned, Segment, bytes_of, slice};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::{Bytes, GuestAddress};

use crate::block_locks::Span;
use crate::config::{
    DISCARD_SECTORS_MAX, RANGES_MAX, SECTOR_BYTES, SECTORS_PER_BLOCK, SEGMENTS_MAX,
    ZERO_SECTORS_MAX,
};

const HEADER_BYTES: u64 = 16;
const RANGE_BYTES: u64 = 16;
/// Bytes of a disk's ID.
pub(crate) const ID_BYTES: usize = 20;

/// How a request ends: the byte that the device writes after the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = VIRTIO_BLK_S_OK as u8,
    IoError = VIRTIO_BLK_S_IOERR as u8,
    Unsupported = VIRTIO_BLK_S_UNSUPP as u8,
}

/// Why a request does not go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Halted {
    /// It ends with this status.
    Ended(Status),
    /// It is valid, but memory that it needs is not available now.
    NotNow,
}

impl From<Status> for Halted {
    fn from(status: Status) -> Halted {
        Halted::Ended(status)
    }
}

impl From<DmaFault> for Halted {
    fn from(fault: DmaFault) -> Halted {
        if fault.passes() { Halted::NotNow } else { Halted::Ended(Status::IoError) }
    }
}

/// A read or a write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Data {
    pub(crate) sector: u64,
    pub(crate) segments: Vec<Segment>,
    pub(crate) bytes: u64,
}

/// Sectors to discard or to zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Sectors {
    pub(crate) sectors: Range<u64>,
    pub(crate) unmap: bool,
}

/// What a request asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    Read(Data),
    Write(Data),
    Flush,
    Discard(Vec<Sectors>),
    WriteZeroes(Vec<Sectors>),
    GetId(Vec<Segment>),
}

/// The disk's size, and whether it may be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) sectors: u64,
    pub(crate) readonly: bool,
}

/// Where the status goes. It is pinned before the request begins, so that it can be written
/// whatever happens: a driver takes whatever byte is there for the status.
pub(crate) struct StatusByte {
    guest: Guest,
    at: Gpa,
    _pinned: Pinned,
}

impl StatusByte {
    /// Pins the last byte that the device may write. `None`: there is none.
    pub(crate) fn pin(guest: &Guest, chain: &Chain) -> Option<Result<StatusByte, DmaFault>> {
        let last = chain.writable.last()?;
        let at = last.gpa.checked_add(u64::from(last.bytes).checked_sub(1)?)?;
        let pinned = guest.pin(vec![Segment { gpa: at, bytes: 1 }], Access::Keep);
        Some(pinned.map(|_pinned| StatusByte { guest: guest.clone(), at, _pinned }))
    }

    /// Writes the status. Whether that succeeded: it fails only for memory that was not pinned.
    pub(crate) fn tell(self, status: Status) -> bool {
        self.guest.memory().write_slice(&[status as u8], GuestAddress(self.at.0)).is_ok()
    }
}

/// Reads the request in `chain`, once.
pub(crate) fn parse(guest: &Guest, chain: &Chain, limits: Limits) -> Result<Request, Halted> {
    if bytes_of(&chain.readable) < HEADER_BYTES {
        return Err(Status::IoError.into());
    }
    let mut header = [0; HEADER_BYTES as usize];
    guest.read(slice(&chain.readable, 0, HEADER_BYTES), &mut header)?;
    let header = u128::from_le_bytes(header);
    let (kind, sector) = (header as u32, (header >> 64) as u64);
    let sent = slice(&chain.readable, HEADER_BYTES, u64::MAX);
    let wanted = slice(&chain.writable, 0, bytes_of(&chain.writable).saturating_sub(1));
    let empty = |segments: &[Segment]| segments.is_empty().then_some(()).ok_or(Status::IoError);
    let request = match kind {
        VIRTIO_BLK_T_IN => empty(&sent).and(data(sector, wanted, limits)).map(Request::Read),
        VIRTIO_BLK_T_OUT => {
            writable(limits)?;
            empty(&wanted).and(data(sector, sent, limits)).map(Request::Write)
        }
        VIRTIO_BLK_T_FLUSH => empty(&sent).and(empty(&wanted)).map(|()| Request::Flush),
        VIRTIO_BLK_T_GET_ID => empty(&sent).map(|()| Request::GetId(wanted)),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            writable(limits)?;
            empty(&wanted)?;
            return match kind {
                VIRTIO_BLK_T_DISCARD => discard(guest, sent, limits),
                _ => write_zeroes(guest, sent, limits),
            };
        }
        _ => Err(Status::Unsupported),
    };
    Ok(request?)
}

fn writable(limits: Limits) -> Result<(), Status> {
    if limits.readonly { Err(Status::IoError) } else { Ok(()) }
}

fn data(sector: u64, segments: Vec<Segment>, limits: Limits) -> Result<Data, Status> {
    let bytes = bytes_of(&segments);
    let whole = bytes.is_multiple_of(SECTOR_BYTES) && segments.len() <= SEGMENTS_MAX as usize;
    let range = inside(sector, bytes / SECTOR_BYTES, limits);
    range.filter(|_| whole).ok_or(Status::IoError)?;
    Ok(Data { sector, segments, bytes })
}

fn inside(sector: u64, count: u64, limits: Limits) -> Option<Range<u64>> {
    let end = sector.checked_add(count).filter(|&end| end <= limits.sectors)?;
    Some(sector..end)
}

fn discard(guest: &Guest, sent: Vec<Segment>, limits: Limits) -> Result<Request, Halted> {
    let all = ranges(guest, sent, limits, DISCARD_SECTORS_MAX)?;
    // Section 5.2.6.2: a discard has nothing to unmap.
    match all.iter().any(|range| range.unmap) {
        true => Err(Status::Unsupported.into()),
        false => Ok(Request::Discard(all)),
    }
}

fn write_zeroes(guest: &Guest, sent: Vec<Segment>, limits: Limits) -> Result<Request, Halted> {
    Ok(Request::WriteZeroes(ranges(guest, sent, limits, ZERO_SECTORS_MAX)?))
}

fn ranges(
    guest: &Guest,
    sent: Vec<Segment>,
    limits: Limits,
    sectors_max: u32,
) -> Result<Vec<Sectors>, Halted> {
    let bytes = bytes_of(&sent);
    let allowed = RANGE_BYTES..=u64::from(RANGES_MAX) * RANGE_BYTES;
    if !bytes.is_multiple_of(RANGE_BYTES) || !allowed.contains(&bytes) {
        return Err(Status::IoError.into());
    }
    let mut table = vec![0; bytes as usize];
    guest.read(sent, &mut table)?;
    let (entries, _) = table.as_chunks::<{ RANGE_BYTES as usize }>();
    Ok(entries.iter().map(|entry| range(*entry, limits, sectors_max)).collect::<Result<_, _>>()?)
}

fn range(entry: [u8; 16], limits: Limits, sectors_max: u32) -> Result<Sectors, Status> {
    let entry = u128::from_le_bytes(entry);
    let (sector, count, flags) = (entry as u64, (entry >> 64) as u32, (entry >> 96) as u32);
    if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
        return Err(Status::Unsupported);
    }
    let allowed = count <= sectors_max;
    let sectors = inside(sector, count.into(), limits).filter(|_| allowed);
    Ok(Sectors { sectors: sectors.ok_or(Status::IoError)?, unmap: flags != 0 })
}

impl Data {
    /// Returns the byte of the disk where it begins.
    pub(crate) fn disk_offset(&self) -> u64 {
        self.sector * SECTOR_BYTES
    }

    /// Returns the byte of the disk where it ends.
    pub(crate) fn disk_end(&self) -> u64 {
        self.disk_offset() + self.bytes
    }

    fn sectors(&self) -> Range<u64> {
        self.sector..self.sector + self.bytes / SECTOR_BYTES
    }
}

impl Sectors {
    /// Returns its bytes on the disk.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.sectors.start * SECTOR_BYTES..self.sectors.end * SECTOR_BYTES
    }
}

impl Request {
    /// Returns the blocks that it reads or writes.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let of = |sectors: Range<u64>, writes| Span { blocks: blocks(&sectors), writes };
        match self {
            Request::Read(data) => vec![of(data.sectors(), false)],
            Request::Write(data) => vec![of(data.sectors(), true)],
            Request::Discard(ranges) | Request::WriteZeroes(ranges) => {
                ranges.iter().map(|range| of(range.sectors.clone(), true)).collect()
            }
            Request::Flush | Request::GetId(_) => Vec::new(),
        }
    }
}

/// Returns the blocks that contain these sectors.
fn blocks(sectors: &Range<u64>) -> Range<u64> {
    sectors.start / SECTORS_PER_BLOCK..sectors.end.div_ceil(SECTORS_PER_BLOCK)
}
