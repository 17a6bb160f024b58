//! File systems whose files are memory.

use std::io;
use std::path::Path;

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of `include/uapi/linux/magic.h`.
const MAGICS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// File system of hugetlb files: `HUGETLBFS_MAGIC`.
pub(crate) const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Whether files of a file system of this type are in memory: tmpfs, ramfs or hugetlbfs. Memfds are
/// on one of them.
pub(crate) fn is_of_memory(kind: u64) -> bool {
    kind == HUGETLBFS_MAGIC || MAGICS.contains(&kind)
}

/// Whether the files of this directory are in memory, on tmpfs or ramfs.
///
/// # Errors
/// As statfs(2).
pub fn is_in_memory(directory: &Path) -> io::Result<bool> {
    Ok(MAGICS.contains(&(rustix::fs::statfs(directory)?.f_type as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dev_shm_is_memory_and_proc_is_not() {
        assert_eq!(is_in_memory(Path::new("/dev/shm")).ok(), Some(true));
        assert_eq!(is_in_memory(Path::new("/proc")).ok(), Some(false));
        assert!(is_in_memory(Path::new("/nowhere")).is_err());
    }
}
