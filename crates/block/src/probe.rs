//! Whether an image can be used on a disk with sectors of 4 KiB. It only looks for what is known
//! to fail: file systems on the whole disk, and in the partitions of a table that it understands.

use std::io;

use ebb_units::FRAME_BYTES;
use thiserror::Error;

/// Most partitions to look at.
const PARTITIONS_MAX: u64 = 128;
const SMALL_SECTOR: u64 = 512;

/// What cannot be used, and why.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SmallSectors {
    /// A partition table that counts in sectors of 512 bytes.
    #[error(
        "its {0} partition table counts in sectors of 512 bytes, and this disk has sectors of \
         4 KiB: make the table anew on a 4 KiB disk (`losetup --sector-size 4096`), or use the \
         file system without one"
    )]
    Table(&'static str),
    /// A file system that reads less than 4 KiB at a time.
    #[error(
        "{place} holds {kind} with {unit} of {bytes} bytes, and this disk has sectors of 4 KiB: \
         make it anew with `{remedy}`"
    )]
    FileSystem {
        /// Where it is: `it`, or `its partition 1`.
        place: String,
        /// Its name.
        kind: &'static str,
        /// What is too small: `blocks` or `sectors`.
        unit: &'static str,
        /// The bytes of one block or sector.
        bytes: u64,
        /// The command that makes one that works.
        remedy: &'static str,
    },
}

/// Reads an image at an offset. It fills the whole slice, or fails.
pub(crate) type ReadAt<'a> = &'a dyn Fn(u64, &mut [u8]) -> io::Result<()>;

/// Fails if an image needs smaller sectors. Parts that cannot be read are ignored.
pub(crate) fn probe(read_at: ReadAt, image_bytes: u64) -> Result<(), SmallSectors> {
    file_system(read_at, 0, "it")?;
    if array(read_at, SMALL_SECTOR) == Some(*b"EFI PART") {
        return Err(SmallSectors::Table("GPT"));
    }
    if array(read_at, FRAME_BYTES) == Some(*b"EFI PART") {
        return gpt(read_at);
    }
    match array(read_at, 510) {
        Some([0x55, 0xaa]) => mbr(read_at, image_bytes),
        _ => Ok(()),
    }
}

/// UEFI 2.10, section 5.3: the header is in the second sector and says how large the entries are.
fn gpt(read_at: ReadAt) -> Result<(), SmallSectors> {
    let field = |at| array(read_at, FRAME_BYTES + at).map(u32::from_le_bytes).unwrap_or(0);
    let table = array(read_at, FRAME_BYTES + 72).map(u64::from_le_bytes).unwrap_or(0);
    let (count, entry_bytes) = (u64::from(field(80)), u64::from(field(84)));
    for index in 0..count.min(PARTITIONS_MAX) {
        let entry = table.saturating_mul(FRAME_BYTES).saturating_add(index * entry_bytes);
        let first = array(read_at, entry.saturating_add(32)).map(u64::from_le_bytes).unwrap_or(0);
        if first != 0 {
            let place = format!("its partition {}", index + 1);
            file_system(read_at, first.saturating_mul(FRAME_BYTES), &place)?;
        }
    }
    Ok(())
}

/// Four entries of 16 bytes from byte 446 on: type at 4, first sector at 8, number of sectors at
/// 12. The table does not say how large a sector is. It is 512 bytes if sectors of 4 KiB would
/// not fit, or if only then there is a file system.
fn mbr(read_at: ReadAt, image_bytes: u64) -> Result<(), SmallSectors> {
    let field = |at| u64::from(array(read_at, at).map(u32::from_le_bytes).unwrap_or(0));
    for index in 0..4 {
        let entry = 446 + index * 16;
        let (first, count) = (field(entry + 8), field(entry + 12));
        let kind = array::<1>(read_at, entry + 4);
        if first == 0 || count == 0 || kind == Some([0]) {
            continue;
        }
        let here = |sector| known_file_system(read_at, first * sector);
        if (first + count) * FRAME_BYTES > image_bytes || here(SMALL_SECTOR) && !here(FRAME_BYTES) {
            return Err(SmallSectors::Table("MBR"));
        }
        file_system(read_at, first * FRAME_BYTES, &format!("its partition {}", index + 1))?;
    }
    Ok(())
}

fn known_file_system(read_at: ReadAt, base: u64) -> bool {
    is_ext(read_at, base)
        || array(read_at, base) == Some(*b"XFSB")
        || array(read_at, base.saturating_add(0x1_0040)) == Some(*b"_BHRfS_M")
        || fat_sector_bytes(read_at, base).is_some()
}

fn file_system(read_at: ReadAt, base: u64, place: &str) -> Result<(), SmallSectors> {
    let small = ext(read_at, base)
        .or_else(|| xfs(read_at, base))
        .or_else(|| fat(read_at, base))
        .or_else(|| iso9660(read_at, base));
    match small {
        Some((kind, unit, bytes, remedy)) if bytes < FRAME_BYTES => {
            Err(SmallSectors::FileSystem { place: place.into(), kind, unit, bytes, remedy })
        }
        _ => Ok(()),
    }
}

/// Name of the file system, `blocks` or `sectors`, bytes of one, remedy.
type Found = (&'static str, &'static str, u64, &'static str);

/// Linux documentation: filesystems/ext4/super: magic at 0x38, block size at 0x18.
fn is_ext(read_at: ReadAt, base: u64) -> bool {
    array(read_at, base.saturating_add(1024 + 0x38)) == Some(0xef53u16.to_le_bytes())
}

fn ext(read_at: ReadAt, base: u64) -> Option<Found> {
    let log = array(read_at, base.saturating_add(1024 + 0x18)).map(u32::from_le_bytes)?;
    let found = is_ext(read_at, base) && log <= 6;
    found.then(|| ("ext2, ext3 or ext4", "blocks", 1024 << log, "mkfs.ext4 -b 4096"))
}

/// XFS Algorithms & Data Structures, "Superblocks": sb_blocksize at 4, sb_sectsize at 102.
fn xfs(read_at: ReadAt, base: u64) -> Option<Found> {
    if array(read_at, base) != Some(*b"XFSB") {
        return None;
    }
    let sector = u64::from(array(read_at, base.saturating_add(102)).map(u16::from_be_bytes)?);
    Some(("xfs", "sectors", sector, "mkfs.xfs -s size=4096"))
}

fn fat(read_at: ReadAt, base: u64) -> Option<Found> {
    let sector = fat_sector_bytes(read_at, base)?;
    Some(("vfat", "sectors", sector, "mkfs.vfat -S 4096"))
}

/// A jump, bytes per sector at 11, and the name of the type, which tells it from other boot
/// sectors.
fn fat_sector_bytes(read_at: ReadAt, base: u64) -> Option<u64> {
    let at = |offset: u64| base.saturating_add(offset);
    let jump = array::<1>(read_at, base)?;
    let named = array(read_at, at(54)) == Some(*b"FAT") || array(read_at, at(82)) == Some(*b"FAT");
    let sector = u64::from(array(read_at, at(11)).map(u16::from_le_bytes)?);
    let plausible = matches!(jump, [0xeb | 0xe9]) && named && sector.is_power_of_two();
    (plausible && sector >= SMALL_SECTOR).then_some(sector)
}

/// ECMA-119: the descriptors begin at sector 16 of 2 KiB.
fn iso9660(read_at: ReadAt, base: u64) -> Option<Found> {
    let found = array(read_at, base.saturating_add(0x8001)) == Some(*b"CD001");
    found.then_some(("ISO 9660", "sectors", 2048, "mkfs.ext4 -b 4096"))
}

fn array<const N: usize>(read_at: ReadAt, offset: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    read_at(offset, &mut bytes).ok().map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probes an image of 64 MiB with these bytes in it.
    fn look(pieces: &[(u64, &[u8])]) -> Result<(), SmallSectors> {
        const BYTES: u64 = 64 << 20;
        let read_at = |offset: u64, into: &mut [u8]| {
            let end = offset.checked_add(into.len() as u64).filter(|&end| end <= BYTES);
            end.ok_or(io::ErrorKind::UnexpectedEof)?;
            for (place, byte) in (offset..).zip(into) {
                let has =
                    |(at, bytes): &&(u64, &[u8])| (*at..at + bytes.len() as u64).contains(&place);
                *byte = pieces.iter().find(has).map_or(0, |(at, b)| b[(place - at) as usize]);
            }
            Ok(())
        };
        probe(&read_at, BYTES)
    }

    fn why(pieces: &[(u64, &[u8])]) -> String {
        look(pieces).unwrap_err().to_string()
    }

    const BOOT: (u64, &[u8]) = (510, &[0x55, 0xaa]);

    #[test]
    fn an_empty_disk_is_fine() {
        assert_eq!(look(&[]), Ok(()));
        assert_eq!(look(&[BOOT]), Ok(()));
    }

    #[test]
    fn small_ext_blocks_are_refused() {
        let ext = |log: &'static [u8]| [(1024 + 0x38, &[0x53, 0xef][..]), (1024 + 0x18, log)];
        assert_eq!(look(&ext(&[2])), Ok(()));
        assert!(why(&ext(&[0])).contains("blocks of 1024 bytes"));
        assert!(why(&ext(&[1])).contains("mkfs.ext4 -b 4096"));
    }

    #[test]
    fn small_sectors_are_refused() {
        let xfs = |size: &'static [u8]| [(0, &b"XFSB"[..]), (102, size)];
        assert_eq!(look(&xfs(&[0x10, 0])), Ok(()));
        assert!(why(&xfs(&[2, 0])).contains("xfs with sectors of 512 bytes"));
        let fat = |size: &'static [u8]| [(0, &[0xeb][..]), (11, size), (82, b"FAT32"), BOOT];
        assert_eq!(look(&fat(&[0, 0x10])), Ok(()));
        assert!(why(&fat(&[0, 2])).contains("mkfs.vfat -S 4096"));
        assert!(why(&[(0x8001, b"CD001")]).contains("ISO 9660 with sectors of 2048"));
    }

    #[test]
    fn tables_of_small_sectors_are_refused() {
        assert!(why(&[(512, b"EFI PART"), BOOT]).contains("GPT"));
        // One partition from sector 2048 on, with all the sectors that there are.
        let large: &[u8] = &[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0xf8, 1, 0];
        assert!(why(&[(446, large), BOOT]).contains("MBR"));
        let small: &[u8] = &[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
        assert_eq!(look(&[(446, small), BOOT]), Ok(()));
        assert!(why(&[(446, small), BOOT, (1 << 20, b"XFSB")]).contains("MBR"));
        let inside = 2048 * 4096;
        let why = why(&[(446, small), BOOT, (inside, b"XFSB"), (inside + 102, &[2, 0])]);
        assert!(why.contains("its partition 1 holds xfs"), "{why}");
    }

    #[test]
    fn a_table_of_large_sectors_is_read() {
        let header =
            [(4096, &b"EFI PART"[..]), (4096 + 72, &[2]), (4096 + 80, &[4]), (4096 + 84, &[128])];
        let entry = (2 * 4096 + 128 + 32, &[16][..]);
        let mut pieces = header.to_vec();
        pieces.push(entry);
        assert_eq!(look(&pieces), Ok(()));
        pieces.extend([(16 * 4096, &b"XFSB"[..]), (16 * 4096 + 102, &[4, 0])]);
        assert!(why(&pieces).contains("its partition 2 holds xfs with sectors of 1024"));
    }

    #[test]
    fn wild_numbers_lead_nowhere() {
        let wild: &[u8] = &[0xff; 16];
        assert_eq!(look(&[(4096, b"EFI PART"), (4096 + 72, &[0xff; 16]), (512 * 9, wild)]), Ok(()));
        assert!(look(&[(446, wild), BOOT]).is_err());
    }
}
