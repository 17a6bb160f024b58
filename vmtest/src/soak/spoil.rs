//! Damages a guest's memory on purpose, to show that a soak finds it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

/// What neighbouring words of a pattern differ by (`vmtest/guest/src/pattern.rs`).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const PAGE_BYTES: usize = 4096;
/// Words that are looked at: the first words of a page may be of another one.
const FIRST: usize = 64;
const COUNT: usize = 32;
/// Smallest file that is a guest's memory.
const RAM_BYTES_MIN: u64 = 32 << 20;

/// Flips one byte of each resident page that has a pattern.
pub fn flip_bytes(qemu: i32) {
    let entries = fs::read_dir(format!("/proc/{qemu}/fd")).into_iter().flatten().flatten();
    for entry in entries {
        let is_ram =
            fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
        let file = File::options().read(true).write(true).open(entry.path());
        if let (true, Ok(file)) = (is_ram, file) {
            flip(&file);
        }
    }
}

fn flip(file: &File) {
    let bytes = file.metadata().map_or(0, |found| found.size());
    if bytes < RAM_BYTES_MIN {
        return;
    }
    let mut page = [0; PAGE_BYTES];
    for at in (0..bytes).step_by(PAGE_BYTES) {
        if file.read_exact_at(&mut page, at).is_ok() && has_pattern(&page) {
            let place = (FIRST + 1) * 8;
            // The guest may have freed the page: then it is not missed.
            let _ = file.write_all_at(&[!page[place]], at + place as u64);
        }
    }
}

fn has_pattern(page: &[u8; PAGE_BYTES]) -> bool {
    let words = page.as_chunks::<8>().0;
    let words = words.iter().skip(FIRST).take(COUNT).map(|word| u64::from_ne_bytes(*word));
    let words: Vec<u64> = words.collect();
    words.windows(2).all(|two| two[1].wrapping_sub(two[0]) == STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_recognized() {
        let mut page = [0; PAGE_BYTES];
        assert!(!has_pattern(&page));
        let words = page.as_chunks_mut::<8>().0.iter_mut();
        words.zip(0..).for_each(|(word, at): (_, u64)| {
            *word = at.wrapping_mul(STEP).wrapping_add(99).to_ne_bytes();
        });
        assert!(has_pattern(&page));
    }
}
