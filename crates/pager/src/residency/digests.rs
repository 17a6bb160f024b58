//! Digests of what disk-backed frames held: if another program changes the disk, it is noticed, and
//! no guest gets what was written there. They are in a mapped file that outlives the daemon:
//! `docs/run-directory.md`.

use ebb_store::Page;
use ebb_sys::mapping::Mapping;
use ebb_units::Gfn;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use twox_hash::XxHash3_128;

const MAGIC: u64 = u64::from_le_bytes(*b"EBBREST1");
const HEADER_BYTES: u64 = 4096;
/// The header's words: magic, count of frames, and the number of the record that the file belongs
/// to. The key follows at [`KEY_AT`].
const HEADER_WORDS: usize = 3;
const KEY_AT: u64 = 64;
const KEY_WORDS: usize = 24;
/// The words of a row: a block's number plus one, or 0 if nothing is known; then the digest.
const ROW_WORDS: usize = 2;
const ROW_BYTES: u64 = ROW_WORDS as u64 * 8;
/// Number of rows in a page. A page of rows gets its memory as a whole.
const ROWS: u64 = 4096 / ROW_BYTES;

/// For each disk-backed frame, its block and the keyed digest of its content.
pub struct Digests {
    file: File,
    mapping: Mapping,
    frames: u64,
    owner: u64,
    key: [u8; KEY_WORDS * 8],
    /// Which pages of rows have memory, as far as this process knows.
    prepared: Vec<AtomicBool>,
}

impl Digests {
    /// Opens the file of a VM whose memory ends at `end`, as an earlier daemon left it, or makes it
    /// anew. Nothing is known of frames that were disk-backed before it was made.
    ///
    /// The file is made anew for another `owner`, the number on record with the VM. A daemon that
    /// knows no digests drops that number, and the frames that it leaves disk-backed are not those
    /// noted here.
    ///
    /// # Errors
    /// As open(2), mmap(2) and getrandom(2). `StorageFull`: there is no room for the header.
    pub fn open(path: &Path, end: Gfn, owner: u64) -> io::Result<Digests> {
        let bytes = HEADER_BYTES + end.0.next_multiple_of(ROWS) * ROW_BYTES;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path)?;
        if file.metadata()?.len() != bytes {
            file.set_len(0)?;
            file.set_len(bytes)?;
        }
        let mapping = Mapping::new(&file, 0, bytes)?;
        mapping.reserve(0, HEADER_BYTES)?;
        let prepared = (0..end.0.div_ceil(ROWS)).map(|_| AtomicBool::new(false)).collect();
        let mut digests = Digests { file, mapping, frames: end.0, owner, key: [0; _], prepared };
        match digests.is_made() {
            true => digests.read_key(),
            false => digests.make(bytes)?,
        }
        Ok(digests)
    }

    fn is_made(&self) -> bool {
        let header = self.mapping.words(0, HEADER_WORDS).unwrap_or_default();
        header.iter().map(|word| word.load(Acquire)).eq(self.header())
    }

    fn header(&self) -> [u64; HEADER_WORDS] {
        [MAGIC, self.frames, self.owner]
    }

    fn make(&mut self, bytes: u64) -> io::Result<()> {
        // What another format left belongs to nobody.
        self.file.set_len(0)?;
        self.file.set_len(bytes)?;
        self.mapping.reserve(0, HEADER_BYTES)?;
        if getrandom(&mut self.key, GetRandomFlags::empty())? != self.key.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let words = self.mapping.words(KEY_AT, KEY_WORDS).unwrap_or_default();
        for (word, bytes) in words.iter().zip(self.key.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        // The magic is written last: a file without it was never finished.
        let header = self.mapping.words(0, HEADER_WORDS).unwrap_or_default();
        for (word, value) in header.iter().zip(self.header()).rev() {
            word.store(value, Release);
        }
        Ok(())
    }

    fn read_key(&mut self) {
        let words = self.mapping.words(KEY_AT, KEY_WORDS).unwrap_or_default();
        for (bytes, word) in self.key.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
    }

    /// Notes the content of a frame that the block will back. The caller has locked the frame's
    /// word.
    pub(super) fn note(&self, gfn: Gfn, block: u64, page: &Page) -> io::Result<()> {
        self.prepare(gfn)?;
        let [known, digest] = self.row(gfn).ok_or(io::ErrorKind::InvalidInput)?;
        known.store(0, Release);
        digest.store(self.digest(page), Release);
        known.store(block + 1, Release);
        Ok(())
    }

    /// Whether the page differs from what the frame held. `false` if nothing is known, as of frames
    /// of a daemon without digests.
    ///
    /// If a row that this process made cannot be read, the process ends (SIGBUS), as if it could not
    /// be written. The next process reads it by pread(2).
    ///
    /// # Errors
    /// As pread(2): nobody can tell then.
    pub(super) fn is_changed(&self, gfn: Gfn, block: u64, page: &Page) -> io::Result<bool> {
        let [known, digest] = match self.row(gfn).filter(|_| self.is_prepared(gfn)) {
            Some(row) => row.each_ref().map(|word| word.load(Acquire)),
            None => self.read_row(gfn)?,
        };
        Ok(known == block + 1 && digest != self.digest(page))
    }

    /// Reads a row that may have no memory: such a row reads as zeros, and needs none.
    fn read_row(&self, gfn: Gfn) -> io::Result<[u64; ROW_WORDS]> {
        let mut row = [0; ROW_BYTES as usize];
        self.file.read_exact_at(&mut row, HEADER_BYTES + gfn.0 * ROW_BYTES)?;
        let mut words = row.as_chunks().0.iter().copied().map(u64::from_ne_bytes);
        Ok([0; ROW_WORDS].map(|zero| words.next().unwrap_or(zero)))
    }

    /// Whether this process has given memory to the row.
    fn is_prepared(&self, gfn: Gfn) -> bool {
        self.prepared.get((gfn.0 / ROWS) as usize).is_some_and(|prepared| prepared.load(Acquire))
    }

    fn digest(&self, page: &Page) -> u64 {
        // A secret of this length is never refused.
        XxHash3_128::oneshot_with_secret(&self.key, page).map_or(0, |hash| hash as u64)
    }

    fn prepare(&self, gfn: Gfn) -> io::Result<()> {
        let page = gfn.0 / ROWS;
        let prepared = self.prepared.get(page as usize).ok_or(io::ErrorKind::InvalidInput)?;
        if !prepared.load(Acquire) {
            self.mapping.reserve(HEADER_BYTES + page * ROWS * ROW_BYTES, ROWS * ROW_BYTES)?;
            prepared.store(true, Release);
        }
        Ok(())
    }

    fn row(&self, gfn: Gfn) -> Option<&[std::sync::atomic::AtomicU64; ROW_WORDS]> {
        let inside = (gfn.0 < self.frames).then_some(HEADER_BYTES + gfn.0 * ROW_BYTES)?;
        self.mapping.words(inside, ROW_WORDS)?.first_chunk()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This holds even if there is no room for a row that has no memory.
    #[test]
    fn what_nobody_can_compare_does_not_count_as_equal() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("digests");
        let open = || Digests::open(&path, Gfn(2 * ROWS), 1).unwrap();
        let (page, other) = ([1; 4096], [2; 4096]);
        let first = open();
        first.note(Gfn(3), 7, &page).unwrap();
        assert!(!first.is_changed(Gfn(3), 7, &page).unwrap());
        assert!(first.is_changed(Gfn(3), 7, &other).unwrap());
        assert!(!first.is_changed(Gfn(3), 8, &other).unwrap());
        let next = open();
        let is_changed = |page| next.is_changed(Gfn(3), 7, page);
        assert!(!is_changed(&page).unwrap() && is_changed(&other).unwrap());
        // Nothing is known of another block, or of another frame.
        assert!(!next.is_changed(Gfn(3), 8, &other).unwrap());
        assert!(!next.is_changed(Gfn(ROWS), 7, &other).unwrap());
        let last = open();
        last.file.set_len(HEADER_BYTES).unwrap();
        assert!(last.is_changed(Gfn(3), 7, &other).is_err());
    }
}
