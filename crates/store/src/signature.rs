//! Finds what a block device contains already, by the magic bytes of known formats.

use crate::Medium;

/// Length of a device's head, which contains all magic bytes known here.
pub(crate) const HEAD_BYTES: usize = 1 << 20;

/// Offset, magic bytes, and what they mean.
const MARKS: [(usize, &[u8], &str); 20] = [
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (4086, b"SWAPSPACE2", "a swap space"),
    (4086, b"SWAP-SPACE", "a swap space"),
    (16374, b"SWAPSPACE2", "a swap space"),
    (65526, b"SWAPSPACE2", "a swap space"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (536, b"LVM2 001", "an LVM physical volume"),
    (24, b"LVM2 001", "an LVM physical volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "a part of a RAID"),
    (0, b"\xfc\x4e\x2b\xa9", "a part of a RAID"),
    (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "a bcache"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (0, b"hsqs", "a squashfs image"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (3, b"NTFS    ", "an NTFS file system"),
    (510, b"\x55\xaa", "a partition table or a FAT file system"),
];
/// Magic bytes of ZFS, which has a ring of these from 128 KiB on, each 1 KiB at least.
const UBERBLOCK: &[u8] = &0x00ba_b10c_u64.to_le_bytes();
const UBERBLOCKS: std::ops::Range<usize> = 128 << 10..256 << 10;

/// Returns what the device contains. `None`: nothing known.
pub(crate) fn find(head: &[u8]) -> Option<&'static str> {
    let is_at = |at: usize, mark: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(mark));
    let known = MARKS.iter().find(|(at, mark, _)| is_at(*at, mark)).map(|(.., what)| *what);
    let zfs =
        || { UBERBLOCKS.step_by(1024) }.any(|at| is_at(at, UBERBLOCK)).then_some("a ZFS pool");
    known.or_else(zfs)
}

/// Reads the head of a medium.
///
/// # Errors
/// As pread(2).
pub(crate) fn head(medium: &impl Medium) -> std::io::Result<crate::PageBuffer> {
    let mut head = crate::PageBuffer::new(HEAD_BYTES / 4096);
    let (_, error) = crate::medium::read(medium, 0, head.pages_mut());
    error.map_or(Ok(head), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mark_is_found_and_nothing_in_zeros() {
        let zeros = vec![0; HEAD_BYTES];
        assert_eq!(find(&zeros), None);
        assert_eq!(find(&[]), None);
        for (at, mark, what) in MARKS {
            let mut head = zeros.clone();
            head[at..at + mark.len()].copy_from_slice(mark);
            assert_eq!(find(&head), Some(what));
        }
        let mut head = zeros;
        head[(128 << 10) + 4096..][..8].copy_from_slice(UBERBLOCK);
        assert_eq!(find(&head), Some("a ZFS pool"));
    }
}
