//! A medium that fails as told, and remembers.
#![allow(dead_code, reason = "each test uses its part")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use ebb_store::{Medium, Page};

/// What happens to one write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// All of it is written.
    None,
    /// Nothing is, and an error says so.
    Error,
    /// So many bytes are, and the medium says so.
    Short(usize),
    /// So many bytes are, then an error.
    Torn(usize),
}

/// Bytes in memory with faults to come, shared with the test that looks at it.
#[derive(Clone, Default)]
pub struct Faulty(Arc<Mutex<State>>);

#[derive(Default)]
pub struct State {
    pub bytes: Vec<u8>,
    /// The next writes meet these, then none.
    pub faults: Vec<Fault>,
    /// Reads fail.
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

    /// The same bytes apart from it.
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
        // Whoever reads it again is to notice.
        state.bytes[offset as usize..(offset + bytes) as usize].fill(0xdd);
        Ok(())
    }

    fn is_direct(&self) -> bool {
        true
    }
}

/// A page that no other number has, and that does not compress.
pub fn noise(number: u64) -> Page {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
}

/// A page that only this number has: by the number filled with one byte, or
/// with more or less noise. (Filled ones are shared by numbers.)
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

/// A run directory on tmpfs, where there is one.
pub fn run_directory() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir_in("/dev/shm").ok()?;
    ebb_store::is_in_memory(dir.path()).ok()?.then_some(dir)
}
