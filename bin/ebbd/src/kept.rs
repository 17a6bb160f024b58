//! What a daemon keeps for the one after it: JSON, in files that are whole or not there.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes the file anew.
///
/// # Errors
/// As write(2) and rename(2); the file is what it was then.
pub fn save(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let next = path.with_extension("json.next");
    fs::write(&next, serde_json::to_vec_pretty(what)?)?;
    fs::rename(next, path)
}

/// Reads it; `None`: there is none.
///
/// # Errors
/// As read(2); `InvalidData`: it makes no sense.
pub fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
