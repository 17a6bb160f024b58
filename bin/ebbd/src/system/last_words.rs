//! Why a VM's process or its QEMU ended. The process leaves this in the VM's directory for `ebbd`,
//! which reads it once after that process has ended.

use std::fs;
use std::io;
use std::path::Path;
use std::process;

use crate::support::log;

const FILE: &str = "last-words";
const MOST_BYTES: usize = 4096;

/// Leaves the last words. What finds no room is left out.
pub fn leave(directory: &Path, words: &str) {
    let most = words.len().min(MOST_BYTES);
    let end = (0..=most).rev().find(|&end| words.is_char_boundary(end)).unwrap_or(0);
    if let Err(error) = fs::write(directory.join(FILE), &words[..end]) {
        tracing::warn!("{}: its last words: {error}", directory.display());
    }
}

/// Leaves the last words of a VM's process whose service failed, and ends it as if it were killed:
/// nothing that is half done goes on. The next process recovers the VM.
pub fn end_process(directory: &Path, why: &str) -> ! {
    leave(directory, &format!("its service failed: {why}"));
    log::end();
    process::exit(1);
}

/// Reads and removes the last words; none: there are none.
pub fn take(directory: &Path) -> Option<String> {
    let path = directory.join(FILE);
    let words = fs::read_to_string(&path);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("{}: {error}", path.display());
        }
        _ => {}
    }
    words.ok().filter(|words| !words.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_read_once() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(take(directory.path()), None);
        leave(directory.path(), &"ä".repeat(MOST_BYTES));
        assert_eq!(take(directory.path()).map(|words| words.len()), Some(MOST_BYTES));
        assert_eq!(take(directory.path()), None);
    }
}
