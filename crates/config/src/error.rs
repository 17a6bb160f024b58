//! Why a file is not used, in one line.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be opened or read.
    #[error("{path}: {1}", path = .0.display())]
    Io(PathBuf, io::Error),
    /// A directory, a pipe or the like has its name.
    #[error("{} is no file", .0.display())]
    NoFile(PathBuf),
    /// It belongs to this user.
    #[error(
        "{path} belongs to user {1}, who can change it: give it to root (`chown root {path}`)",
        path = .0.display()
    )]
    Owner(PathBuf, u32),
    /// Others can write it. These are its permissions.
    #[error(
        "{path} can be written by others (mode {1:04o}): take that from them (`chmod go-w {path}`)",
        path = .0.display()
    )]
    Mode(PathBuf, u32),
    /// It has more than this many bytes.
    #[error("{path} is longer than {1} bytes: name another file", path = .0.display())]
    TooLarge(PathBuf, u64),
    /// It is not UTF-8.
    #[error("{} is no text in UTF-8: name another file", .0.display())]
    NoText(PathBuf),
    /// Something in it is wrong.
    #[error("{}:{place}: {why}", .path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Where it is wrong.
        place: Place,
        /// What is wrong, and what to do.
        why: String,
    },
}

impl ConfigError {
    /// Whether there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self, ConfigError::Io(_, error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Something is wrong at this place. The reason stays one line, whatever the file has there.
    pub(crate) fn wrong(path: &Path, place: Place, why: &str) -> ConfigError {
        ConfigError::Wrong { path: path.into(), place, why: why.replace(char::is_control, " ") }
    }
}

/// A place in a file. Lines and columns count from 1, columns in characters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl Place {
    /// Where these bytes of a text begin; none: the end of the text.
    pub(crate) fn of(text: &str, span: Option<Range<usize>>) -> Place {
        let before = span.and_then(|span| text.get(..span.start)).unwrap_or(text);
        let line = before.rsplit('\n').next().unwrap_or_default();
        Place { line: before.matches('\n').count() + 1, column: line.chars().count() + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_from_one() {
        let text = "é = 1\n[a]\n";
        let place = |at: usize| Place::of(text, Some(at..at)).to_string();
        assert_eq!([place(0), place(3), place(7)], ["1:1", "1:3", "2:1"]);
        // Inside of a character, and behind the end: nothing is there to point at.
        assert_eq!([place(1), place(99)], ["3:1", "3:1"]);
        assert_eq!(Place::of(text, None).to_string(), "3:1");
    }

    #[test]
    fn a_reason_is_one_line() {
        let place = Place { line: 1, column: 2 };
        let error = ConfigError::wrong(Path::new("/a"), place, "no\nwhere\x1b[2J");
        assert_eq!(error.to_string(), "/a:1:2: no where [2J");
    }
}
