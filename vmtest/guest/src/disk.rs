//! A disk whose device writes into memory that no processor has touched since it was freed.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::OFlags;
use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE};

use crate::files::{PAGE_BYTES, bytes_of, compare};
use crate::{Context, Result};

/// Memory with the alignment of direct I/O.
#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Writes the first `bytes` of the disk past the page cache and reads them back through it: the
/// kernel does not clear the pages into which the device reads. Returns how many bytes came back
/// wrong.
pub fn round_trip(path: &str, bytes: u64, generation: u64) -> Result<String> {
    let pattern = Pattern::new(path, generation);
    let pages = bytes / PAGE_BYTES as u64;
    write(path, pattern, pages).context(path)?;
    let wrong = File::open(path).and_then(|disk| compare(disk, pattern, pages));
    Ok(wrong.context(path)?.to_string())
}

/// Writes directly, which drops cached pages of the same place.
fn write(path: &str, pattern: Pattern, pages: u64) -> io::Result<()> {
    let flags = OFlags::DIRECT.bits() as i32;
    let disk = File::options().write(true).custom_flags(flags).open(path)?;
    let mut words = [0; WORDS_PER_PAGE];
    for page in 0..pages {
        pattern.write(page, &mut words);
        disk.write_all_at(&Page(bytes_of(&words)).0, page * PAGE_BYTES as u64)?;
    }
    Ok(())
}
