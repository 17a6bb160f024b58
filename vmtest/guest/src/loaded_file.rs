//! A file under load: written and read in random places, with every byte checked.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, OFlags, fadvise};
use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE, Wrong};

use crate::files::{PAGE_BYTES, bytes_of, words_of};
use crate::{Context, Result};

/// Longest piece that is read or written at once.
const RUN_PAGES: usize = 32;
/// Cycles between two writebacks, after which the page cache is dropped.
const SYNC_EVERY: u64 = 8;

/// How the file is accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Past the page cache.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// Memory with the alignment of direct I/O.
#[repr(align(4096))]
struct Run([u8; RUN_PAGES * PAGE_BYTES]);

/// A file, and its expected content.
pub struct LoadedFile {
    file: File,
    name: String,
    /// Generation of each page; 0 is a page of zeros, as in a file that was only extended.
    generations: Vec<u64>,
    random: u64,
    cycles: u64,
    run: Box<Run>,
    wrong: Wrong,
}

impl LoadedFile {
    /// Creates a file of `bytes`.
    pub fn create(path: &Path, kind: Kind, bytes: u64) -> Result<LoadedFile> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        if kind == Kind::Direct {
            options.custom_flags(OFlags::DIRECT.bits() as i32);
        }
        let file = options.open(path).context(path.display())?;
        file.set_len(bytes).context(path.display())?;
        Ok(LoadedFile {
            file,
            name: path.display().to_string(),
            generations: vec![0; bytes as usize / PAGE_BYTES],
            random: 1 + kind as u64,
            cycles: 0,
            run: Box::new(Run([0; RUN_PAGES * PAGE_BYTES])),
            wrong: Wrong::default(),
        })
    }

    /// Writes one place, and checks another.
    pub fn cycle(&mut self) -> io::Result<()> {
        self.cycles += 1;
        let (page, count) = self.place();
        self.write(page, count)?;
        if self.cycles.is_multiple_of(SYNC_EVERY) {
            self.file.sync_all()?;
            fadvise(&self.file, 0, None, Advice::DontNeed)?;
        }
        let (page, count) = self.place();
        self.check(page, count)
    }

    /// Checks all of the file as it is on the disk. Returns what was wrong since it was created.
    pub fn finish(mut self) -> io::Result<Wrong> {
        self.file.sync_all()?;
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        for page in (0..self.generations.len()).step_by(RUN_PAGES) {
            self.check(page, RUN_PAGES.min(self.generations.len() - page))?;
        }
        Ok(self.wrong)
    }

    fn write(&mut self, page: usize, count: usize) -> io::Result<()> {
        let pattern = Pattern::new(&self.name, self.cycles);
        let mut words = [0; WORDS_PER_PAGE];
        for (page, bytes) in (page..).zip(self.run.0.chunks_mut(PAGE_BYTES)).take(count) {
            pattern.write(page as u64, &mut words);
            bytes.copy_from_slice(&bytes_of(&words));
        }
        self.file.write_all_at(&self.run.0[..count * PAGE_BYTES], (page * PAGE_BYTES) as u64)?;
        self.generations[page..page + count].fill(self.cycles);
        Ok(())
    }

    fn check(&mut self, page: usize, count: usize) -> io::Result<()> {
        let part = &mut self.run.0[..count * PAGE_BYTES];
        self.file.read_exact_at(part, (page * PAGE_BYTES) as u64)?;
        for (page, bytes) in (page..).zip(part.as_chunks::<PAGE_BYTES>().0) {
            match self.generations[page] {
                0 => self.wrong.bytes += bytes.iter().filter(|&&byte| byte != 0).count() as u64,
                generation => Pattern::new(&self.name, generation).check(
                    page as u64,
                    &words_of(bytes),
                    &mut self.wrong,
                ),
            }
        }
        Ok(())
    }

    /// A random piece of the file: xorshift64.
    fn place(&mut self) -> (usize, usize) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = self.generations.len();
        let page = (self.random >> 16) as usize % pages;
        let count = 1 + self.random as usize % RUN_PAGES;
        (page, count.min(pages - page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_is_found() {
        for (kind, wrong) in [(Kind::Buffered, 0), (Kind::Direct, 1)] {
            let path = std::env::temp_dir().join(format!("loaded-file-{wrong}"));
            let mut file = LoadedFile::create(&path, kind, 1 << 20).unwrap();
            (0..50).for_each(|_| file.cycle().unwrap());
            if wrong == 1 {
                let other = File::options().read(true).write(true).open(&path).unwrap();
                let mut byte = [0];
                other.read_exact_at(&mut byte, 70_000).unwrap();
                other.write_all_at(&[!byte[0]], 70_000).unwrap();
            }
            assert_eq!(file.finish().unwrap().bytes, wrong);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
