//! VMCOREINFO: the note in which a Linux kernel describes itself for crash tools.
//!
//! It is an ELF note in a frame of its own, with lines of text behind the header:
//!
//! ```text
//! +0   namesz = 11 | descsz          (u32, u32)
//! +8   type = 0    | "VMCO"
//! +16  "REINFO\0\0"
//! +24  OSRELEASE=6.1.0-...\n  SYMBOL(x)=hex  SIZE(x)=n  OFFSET(x.y)=n
//!      LENGTH(x)=n  NUMBER(x)=signed decimal, or 0x and hex
//! ```

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use twox_hash::XxHash3_128;

use crate::memory::for_populated_frames;
use crate::{GuestMemory, Untrusted};

const HEADER_WORDS: usize = 3;
/// Bytes of the name "VMCOREINFO" with its terminating zero.
const NAME_BYTES: u32 = 11;
/// Most bytes of a note's text, as in the kernel (VMCOREINFO_BYTES).
const TEXT_BYTES_MAX: usize = 4096;
/// Most bytes of a release, as in `struct new_utsname`.
const RELEASE_BYTES_MAX: usize = 64;
/// Most notes to look at. Notes of earlier boots may remain in RAM, but not many, because a new
/// kernel takes most memory.
pub const NOTES_MAX: usize = 32;
/// Bound on offsets, sizes and lengths, which lie within structures and static arrays.
const EXTENT_MAX: u64 = 1 << 24;
/// Bits that are set in every kernel address: 63..47, or 63..56 with 5-level tables.
const KERNEL_HALF: u64 = 0xff00_0000_0000_0000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Symbol,
    Size,
    Offset,
    Length,
    Number,
}

/// One kernel's parsed note.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    gpa: Gpa,
    text: Vec<u8>,
    release: String,
    entries: Vec<(Kind, String, u64)>,
}

/// Returns every note in the populated RAM, at most [`NOTES_MAX`], in guest-physical order.
///
/// A note does not mean that its kernel runs: RAM keeps the notes of earlier boots.
pub fn find_notes(mem: &dyn GuestMemory) -> Vec<Note> {
    let mut notes = Vec::new();
    for_populated_frames(mem, |at, frame| {
        if notes.len() < NOTES_MAX && text_bytes(frame).is_some() {
            notes.extend(Note::read(mem, at));
        }
    });
    notes
}

/// Whether a note may begin in this frame. `false` if the frame is not resident.
pub fn may_hold_note(mem: &dyn GuestMemory, gfn: Gfn) -> bool {
    mem.words(gfn.gpa(), HEADER_WORDS).and_then(text_bytes).is_some()
}

/// Whether a frame that begins with these bytes may hold a note.
pub fn begins_note(header: &[u8; 8 * HEADER_WORDS]) -> bool {
    let (words, _) = header.as_chunks::<8>();
    let word = |index: usize| words.get(index).map_or(0, |word| u64::from_le_bytes(*word));
    announced_bytes([word(0), word(1), word(2)]).is_some()
}

/// The text's length if `words` begin with a note's header.
fn text_bytes(words: &[AtomicU64]) -> Option<usize> {
    let header: &[AtomicU64; HEADER_WORDS] = words.first_chunk()?;
    announced_bytes(header.each_ref().map(|word| word.load(Relaxed)))
}

/// The length of a note's text, by its header.
fn announced_bytes([sizes, kind, name]: [u64; HEADER_WORDS]) -> Option<usize> {
    let bytes = (sizes >> 32) as usize;
    let known = sizes as u32 == NAME_BYTES
        && kind == u64::from_le_bytes(*b"\0\0\0\0VMCO")
        && name == u64::from_le_bytes(*b"REINFO\0\0");
    (known && (1..=TEXT_BYTES_MAX).contains(&bytes)).then_some(bytes)
}

/// The text of the note whose header is at `gpa`.
fn text(mem: &dyn GuestMemory, gpa: Gpa) -> Option<Vec<u8>> {
    let bytes = text_bytes(mem.words(gpa, HEADER_WORDS)?)?;
    let words = mem.words(gpa, HEADER_WORDS + bytes.div_ceil(8))?;
    let load = |word: &AtomicU64| word.load(Relaxed).to_le_bytes();
    let mut text: Vec<u8> = words[HEADER_WORDS..].iter().flat_map(load).collect();
    text.truncate(bytes);
    Some(text)
}

impl Note {
    /// Reads and parses the note whose header is at `gpa`. `None` if there is none.
    pub fn read(mem: &dyn GuestMemory, gpa: Gpa) -> Option<Note> {
        Note::parse(gpa, text(mem, gpa)?)
    }

    /// Parses a note's text. `None` if the text does not begin with the kernel's release.
    pub fn parse(gpa: Gpa, text: Vec<u8>) -> Option<Note> {
        let mut lines = text.split(|&byte| byte == b'\n' || byte == 0);
        let release = lines.next()?.strip_prefix(b"OSRELEASE=")?;
        let release = release.iter().take(RELEASE_BYTES_MAX).map(|&byte| printable(byte)).collect();
        let entries = lines.filter_map(|line| entry(std::str::from_utf8(line).ok()?)).collect();
        Some(Note { gpa, release, entries, text })
    }

    /// Digest that tells this boot's kernel from others, as far as the note does. It covers the
    /// note's place and all of its text, which includes the kernel's random base.
    pub fn digest(&self) -> u64 {
        XxHash3_128::oneshot_with_seed(self.gpa.0, &self.text) as u64
    }

    /// Whether the note is still in memory as it was read.
    pub fn is_there(&self, mem: &dyn GuestMemory) -> bool {
        text(mem, self.gpa).as_ref() == Some(&self.text)
    }

    /// Where the note is.
    pub fn gpa(&self) -> Gpa {
        self.gpa
    }

    /// The frames that it lies in.
    pub(crate) fn frames(&self) -> FrameRange {
        let end = self.gpa.0 + (8 * HEADER_WORDS + self.text.len()) as u64;
        let first = self.gpa.gfn();
        FrameRange::new(first, end.div_ceil(FRAME_BYTES) - first.0)
    }

    /// The kernel's release, as `uname -r` tells it; printable ASCII.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Major and minor version. `(0, 0)` if the release does not begin with them.
    pub fn version(&self) -> (u32, u32) {
        let mut parts = self.release.split(|c: char| !c.is_ascii_digit());
        let mut next = || parts.next().and_then(|part| part.parse().ok());
        next().zip(next()).unwrap_or((0, 0))
    }

    /// The lines that are valid UTF-8.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        let lines = self.text.split(|&byte| byte == b'\n' || byte == 0);
        lines.filter_map(|line| std::str::from_utf8(line).ok())
    }

    pub(crate) fn symbol(&self, name: &'static str) -> Result<u64, Untrusted> {
        let value = self.get(Kind::Symbol, name).ok_or(Untrusted::Lacks(name))?;
        match value & KERNEL_HALF == KERNEL_HALF {
            true => Ok(value),
            false => Err(Untrusted::Absurd { what: name, value }),
        }
    }

    /// The size of a structure in bytes, at least 1.
    pub(crate) fn size(&self, name: &'static str) -> Result<u64, Untrusted> {
        self.extent(Kind::Size, name, 1)
    }

    /// A field's offset in bytes.
    pub(crate) fn offset(&self, name: &'static str) -> Result<u64, Untrusted> {
        self.extent(Kind::Offset, name, 0)
    }

    /// An array's length, at least 1.
    pub(crate) fn length(&self, name: &'static str) -> Result<u64, Untrusted> {
        self.extent(Kind::Length, name, 1)
    }

    /// A number; a negative one is in two's complement.
    pub(crate) fn number(&self, name: &'static str) -> Result<u64, Untrusted> {
        self.get(Kind::Number, name).ok_or(Untrusted::Lacks(name))
    }

    fn extent(&self, kind: Kind, name: &'static str, least: u64) -> Result<u64, Untrusted> {
        let value = self.get(kind, name).ok_or(Untrusted::Lacks(name))?;
        match (least..=EXTENT_MAX).contains(&value) {
            true => Ok(value),
            false => Err(Untrusted::Absurd { what: name, value }),
        }
    }

    fn get(&self, kind: Kind, name: &str) -> Option<u64> {
        self.entries.iter().find(|entry| entry.0 == kind && entry.1 == name).map(|entry| entry.2)
    }
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() { byte as char } else { '?' }
}

/// Parses one line. `None` if it is not an entry: kernels write such lines as well.
fn entry(line: &str) -> Option<(Kind, String, u64)> {
    let (kind, rest) = line.split_once('(')?;
    let (name, value) = rest.split_once(")=")?;
    let kind = match kind {
        "SYMBOL" => Kind::Symbol,
        "SIZE" => Kind::Size,
        "OFFSET" => Kind::Offset,
        "LENGTH" => Kind::Length,
        "NUMBER" => Kind::Number,
        _ => return None,
    };
    let value = match (kind, value.strip_prefix("0x")) {
        (_, Some(hex)) => u64::from_str_radix(hex, 16).ok()?,
        (Kind::Symbol, None) => u64::from_str_radix(value, 16).ok()?,
        (Kind::Number, None) => value.parse::<i64>().ok()? as u64,
        (_, None) => value.parse().ok()?,
    };
    Some((kind, name.into(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(lines: &str) -> Note {
        Note::parse(Gpa(0), format!("OSRELEASE=6.12.107+deb13\n{lines}").into()).expect("a note")
    }

    #[test]
    fn another_boot_has_another_digest() {
        let at = |gpa, base: &str| {
            let text = format!("OSRELEASE=6.12.107+deb13\nKERNELOFFSET={base}\n");
            Note::parse(Gpa(gpa), text.into()).expect("a note").digest()
        };
        let first = at(4096, "28c00000");
        assert_eq!(first, at(4096, "28c00000"));
        assert_ne!(first, at(8192, "28c00000"));
        assert_ne!(first, at(4096, "28e00000"));
    }

    #[test]
    fn reads_each_kind_of_entry() {
        let note = note(
            "PAGESIZE=4096\nSYMBOL(_stext)=ffffffffa9c00000\nSIZE(page)=64\n\
             OFFSET(page.lru)=8\nLENGTH(zone.free_area)=11\nNUMBER(phys_base)=-73400320\n\
             NUMBER(VMALLOC_START)=0xff58e9c440000000\nKERNELOFFSET=28c00000\n",
        );
        assert_eq!(note.release(), "6.12.107+deb13");
        assert_eq!(note.version(), (6, 12));
        assert_eq!(note.symbol("_stext"), Ok(0xffff_ffff_a9c0_0000));
        assert_eq!(note.size("page"), Ok(64));
        assert_eq!(note.offset("page.lru"), Ok(8));
        assert_eq!(note.length("zone.free_area"), Ok(11));
        assert_eq!(note.number("phys_base"), Ok(-73_400_320i64 as u64));
        assert_eq!(note.number("VMALLOC_START"), Ok(0xff58_e9c4_4000_0000));
        assert_eq!(note.number("page.lru"), Err(Untrusted::Lacks("page.lru")));
    }

    #[test]
    fn malformed_numbers_count_as_missing() {
        for value in ["", "x", "0x", "-", "99999999999999999999", "1 ", " 1", "1.0"] {
            let note = note(&format!("NUMBER(a)={value}\nSIZE(a)={value}\nSYMBOL(a)={value}z\n"));
            assert_eq!(note.number("a"), Err(Untrusted::Lacks("a")), "{value:?}");
            assert_eq!(note.size("a"), Err(Untrusted::Lacks("a")), "{value:?}");
            assert_eq!(note.symbol("a"), Err(Untrusted::Lacks("a")), "{value:?}");
        }
    }

    #[test]
    fn the_first_of_two_entries_counts() {
        assert_eq!(note("SIZE(a)=1\nSIZE(a)=2\n").size("a"), Ok(1));
    }

    #[test]
    fn a_release_cannot_forge_output() {
        let note = Note::parse(Gpa(0), b"OSRELEASE=6.1\x1b[2Jz\xff\nSIZE(a)=1\n".to_vec());
        assert_eq!(note.expect("a note").release(), "6.1?[2Jz?");
        let long = Note::parse(Gpa(0), [b"OSRELEASE=".to_vec(), vec![b'a'; 4000]].concat());
        assert_eq!(long.expect("a note").release().len(), RELEASE_BYTES_MAX);
    }

    #[test]
    fn a_release_without_a_version_is_zero() {
        for release in ["", "x", "6", "99999999999.1", "-6.1"] {
            let note = Note::parse(Gpa(0), format!("OSRELEASE={release}\n").into());
            assert_eq!(note.expect("a note").version(), (0, 0), "{release}");
        }
    }
}
