//! Seeds of what is done in a random order.

use std::fs::File;
use std::io::Read;

/// Returns a random seed that is small enough for every reader of JSON.
///
/// # Errors
/// The kernel's random numbers cannot be read.
pub fn any() -> anyhow::Result<u64> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from(u32::from_ne_bytes(bytes)))
}
