//! A medium that fails as told, and remembers what was written.
#![allow(dead_code, reason = "each test uses its part")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use ebb_store::{Medium, Page};

/// What happens to one write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// All of it is written.
    None,
    /// Nothing is written, and the write fails.
    Error,
    /// This many bytes are written, and the write reports them.
    Short(usize),
    /// This many bytes are written, then the write fails.
    Torn(usize),
}

/// Bytes in memory with faults to come, shared with the test that looks at them.
#[derive(Clone, Default)]
pub struct Faulty(Arc<Mutex<State>>);

#[derive(Default)]
pub struct State {
    pub bytes: Vec<u8>,
    /// Faults of the next writes. Later writes have none.
    pub faults: Vec<Fault>,
    /// Whether reads fail.
    pub blind: bool,
}

impl Faulty {
    pub fn new(bytes: usize) -> Faulty {
        let faulty = Faulty::default();
        faulty.state().bytes = vec![0; bytes];
        faulty
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns a medium of its own with the same bytes.
    pub fn copy(&self) -> Faulty {
        let copy = Faulty::default();
        copy.state().bytes = self.state().bytes.clone();
        copy
    }
}

impl State {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

fn eio() -> io::Error {
    rustix::io::Errno::IO.into()
}

impl Medium for Faulty {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let state = self.state();
        if state.blind {
            return Err(eio());
        }
        let there = state.bytes.get(offset as usize..).unwrap_or_default();
        let count = there.len().min(bytes.len());
        bytes[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.state();
        let fault = if state.faults.is_empty() { Fault::None } else { state.faults.remove(0) };
        let count = match fault {
            Fault::None => bytes.len(),
            Fault::Error => 0,
            Fault::Short(count) | Fault::Torn(count) => count.min(bytes.len()),
        };
        state.write(offset as usize, &bytes[..count]);
        match fault {
            Fault::Error | Fault::Torn(_) => Err(eio()),
            _ => Ok(count),
        }
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let mut state = self.state();
        // A later read must notice the discard.
        state.bytes[offset as usize..(offset + bytes) as usize].fill(0xdd);
        Ok(())
    }

    fn is_direct(&self) -> bool {
        true
    }
}

/// Returns a page that no other number has, and that does not compress.
pub fn noise(number: u64) -> Page {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
}

/// Returns a page for this number: filled with one byte, which other numbers have too, or with
/// more or less noise, which no other number has.
pub fn mixed(number: u64) -> Page {
    let noise_bytes = match number % 5 {
        0 => return [(number >> 32) as u8; 4096],
        1 => 40,
        2 => 1000,
        3 => 1900,
        _ => 4096,
    };
    let noise = noise(number);
    std::array::from_fn(|at| if at < noise_bytes { noise[at] } else { 7 })
}

/// Makes a run directory on tmpfs. `None`: there is no tmpfs.
pub fn run_directory() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir_in("/dev/shm").ok()?;
    ebb_store::is_in_memory(dir.path()).ok()?.then_some(dir)
}
