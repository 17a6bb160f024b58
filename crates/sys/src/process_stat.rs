//! What `/proc/PID/stat` says about a process (proc_pid_stat(5)).

use std::fs;
use std::io;

/// Some fields of `/proc/PID/stat`.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Stat {
    /// The name that the process gave itself: any bytes.
    pub name: Vec<u8>,
    /// Its state. `S`: it sleeps, and a signal can wake it.
    pub state: char,
    /// The PID of its parent.
    pub parent: i32,
    /// Its start time, in clock ticks since boot.
    pub start_ticks: u64,
}

impl Stat {
    /// Reads the fields of the process or thread that has this number now.
    ///
    /// # Errors
    /// As reading that file. [`crate::process::is_no_process`] tells if there is no such process.
    pub fn of(pid: i32) -> io::Result<Stat> {
        let text = fs::read(format!("/proc/{pid}/stat"))?;
        Stat::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses a line such as `63 (khugepaged) S 2 0 0 ...`. A name may contain parentheses, so the
    /// name ends at the last one.
    pub fn parse(text: &[u8]) -> Option<Stat> {
        let start = text.iter().position(|&byte| byte == b'(')? + 1;
        let end = text.iter().rposition(|&byte| byte == b')')?;
        let after = str::from_utf8(text.get(end + 1..)?).ok()?;
        // The first of these words is field 3.
        let mut words = after.split_ascii_whitespace();
        let state = words.next()?.chars().next()?;
        let parent = words.next()?.parse().ok()?;
        // This is field 22.
        let start_ticks = words.nth(17)?.parse().ok()?;
        Some(Stat { name: text.get(start..end)?.to_owned(), state, parent, start_ticks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &[u8]) -> Option<Stat> {
        let fields: String = (5..=52).map(|field| format!(" {field}")).collect();
        Stat::parse(&[&b"7 ("[..], name, b") D 4", fields.as_bytes(), b"\n"].concat())
    }

    #[test]
    fn a_name_of_any_bytes_does_not_shift_the_fields() {
        for name in [&b"sh"[..], b"", b"a) S 1 2 (b", b"(", b")", b"\xff) (\n"] {
            let expected = Stat { name: name.to_owned(), state: 'D', parent: 4, start_ticks: 22 };
            assert_eq!(parse(name), Some(expected));
        }
    }

    #[test]
    fn truncated_text_is_no_stat() {
        for text in ["7 (sh) S", "7 (sh) S 2 5 6", "7 sh S 2", ")(", ""] {
            assert_eq!(Stat::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn this_process_has_one() {
        let own = Stat::of(std::process::id() as i32).unwrap();
        assert!(own.start_ticks > 0 && own.parent >= 0 && !own.name.is_empty());
        assert!(crate::process::is_no_process(&Stat::of(0).unwrap_err()));
    }
}
