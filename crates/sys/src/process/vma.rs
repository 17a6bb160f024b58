//! A mapping of a process, as `/proc/PID/maps` lists it.

use ebb_units::Hva;

use crate::uffd::HvaRange;

/// One line of `/proc/PID/maps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vma {
    /// First address.
    pub start: Hva,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it is writable.
    pub writable: bool,
    /// Whether it is writable and shared.
    pub shared_write: bool,
    /// Whether its bytes may be executed.
    pub executable: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file's inode number, 0 for none.
    pub inode: u64,
    /// The file's name, as the kernel prints it.
    pub name: String,
}

impl Vma {
    /// Whether this address lies in the mapping.
    pub fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.start.0).is_some_and(|into| into < self.bytes)
    }
}

/// Parses a text of `/proc/PID/maps`. Lines that make no sense are left out.
pub fn parse_mappings(text: &str) -> Vec<Vma> {
    text.lines().filter_map(parse_vma).collect()
}

fn parse_vma(line: &str) -> Option<Vma> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let flags = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    let has = |index: usize, flag: u8| flags.get(index) == Some(&flag);
    Some(Vma {
        start: Hva(start),
        bytes: end.checked_sub(start)?,
        writable: has(1, b'w'),
        shared_write: has(1, b'w') && has(3, b's'),
        executable: has(2, b'x'),
        offset,
        inode,
        name: words.next().unwrap_or("").trim_start().to_owned(),
    })
}

/// Whether all of a range is shared memory of a file.
pub(crate) fn is_shared(mappings: &[Vma], range: HvaRange) -> bool {
    let (mut at, end) = (range.start.0, range.start.0.saturating_add(range.bytes));
    for vma in mappings.iter().filter(|vma| vma.shared_write && vma.inode != 0) {
        if vma.contains(at) {
            at = vma.start.0 + vma.bytes;
        }
    }
    at >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_line_of_maps() {
        let line = "7f1c4be00000-7f1ccbe00000 rw-s 00200000 00:01 1029                       /memfd:memory-backend-memfd (deleted)";
        let vma = parse_vma(line).unwrap();
        assert_eq!(vma.start, Hva(0x7f1c_4be0_0000));
        assert_eq!((vma.bytes, vma.offset, vma.inode), (2 << 30, 2 << 20, 1029));
        assert!(vma.shared_write);
        assert_eq!(vma.name, "/memfd:memory-backend-memfd (deleted)");
        assert_eq!(parse_vma("00400000-00401000 r--p 00000000 00:00 0").unwrap().name, "");
        assert!(parse_vma("no such line").is_none());
    }
}
