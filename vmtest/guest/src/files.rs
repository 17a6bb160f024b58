//! Files with a pattern in them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE, Wrong};

use crate::{Context, Result};

/// The default directory of files: a tmpfs.
pub const DIRECTORY: &str = "/tmp";
/// Size of a page.
pub const PAGE_BYTES: usize = WORDS_PER_PAGE * 8;

/// A file with a pattern.
pub struct Files {
    pattern: Pattern,
    path: PathBuf,
    bytes: u64,
}

impl Files {
    /// Writes `bytes`, whole pages, into a file called `name` in `directory`.
    pub fn write_in(directory: &Path, name: &str, generation: u64, bytes: u64) -> Result<Files> {
        let path = directory.join(format!("{name}.pattern"));
        let files = Files { pattern: Pattern::new(name, generation), path, bytes };
        files.fill().context(files.path.display())?;
        Ok(files)
    }

    fn fill(&self) -> io::Result<()> {
        write(File::create(&self.path)?, self.pattern, self.pages())
    }

    /// Reads the file back and compares every byte.
    pub fn check(&self) -> Result<Wrong> {
        let compared =
            File::open(&self.path).and_then(|file| compare(file, self.pattern, self.pages()));
        compared.context(self.path.display())
    }

    fn pages(&self) -> u64 {
        self.bytes / PAGE_BYTES as u64
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            eprintln!("{}: {error}", self.path.display());
        }
    }
}

/// Writes this many pages of a pattern.
pub fn write(mut to: impl Write, pattern: Pattern, pages: u64) -> io::Result<()> {
    let mut words = [0; WORDS_PER_PAGE];
    for page in 0..pages {
        pattern.write(page, &mut words);
        to.write_all(&bytes_of(&words))?;
    }
    Ok(())
}

/// Reads this many pages, and compares every byte with a pattern.
pub fn compare(mut from: impl Read, pattern: Pattern, pages: u64) -> io::Result<Wrong> {
    let (mut wrong, mut bytes) = (Wrong::default(), [0; PAGE_BYTES]);
    for page in 0..pages {
        from.read_exact(&mut bytes)?;
        pattern.check(page, &words_of(&bytes), &mut wrong);
    }
    Ok(wrong)
}

/// A page as bytes.
pub fn bytes_of(words: &[u64; WORDS_PER_PAGE]) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// A page as words.
pub fn words_of(bytes: &[u8; PAGE_BYTES]) -> [u64; WORDS_PER_PAGE] {
    let mut words = [0; WORDS_PER_PAGE];
    for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_ne_bytes(*from);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Seek;

    #[test]
    fn a_changed_byte_is_found() {
        let files = Files::write_in(&std::env::temp_dir(), "files-test", 3, 40 << 10).unwrap();
        assert_eq!(files.check().unwrap().bytes, 0);
        let mut file = File::options().read(true).write(true).open(&files.path).unwrap();
        let mut byte = [0];
        file.seek(std::io::SeekFrom::Start(5000)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(std::io::SeekFrom::Start(5000)).unwrap();
        file.write_all(&[!byte[0]]).unwrap();
        assert!(files.check().unwrap().to_string().starts_with("1 first at page 1 byte 904: "));
    }
}
