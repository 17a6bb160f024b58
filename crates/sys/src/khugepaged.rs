//! khugepaged, the kernel's thread that makes large folios of small pages (Linux
//! `Documentation/admin-guide/mm/transhuge.rst`, "Khugepaged controls").

use std::fs;
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

/// The parent of all kernel threads.
const KTHREADD: i32 = 2;

/// The number that it had when it was last found; 0: it was not.
static LAST: AtomicI32 = AtomicI32::new(0);

/// Whether every collapse that began before this call has ended.
///
/// khugepaged sleeps interruptibly between collapses only: within one it runs, or waits for locks and
/// disks uninterruptibly. It is one thread for the host, so to see it asleep once is enough. Where
/// huge pages are forbidden for all there is no such thread.
///
/// # Errors
/// `Unsupported`: kernel threads are not to be seen, in a container for example; as reading `/proc`.
pub fn is_asleep() -> io::Result<bool> {
    let last = Stat::of(LAST.load(Relaxed))?.filter(Stat::is_khugepaged);
    let found = match last {
        Some(stat) => Some(stat),
        None => find()?,
    };
    Ok(found.is_none_or(|stat| stat.state == 'S'))
}

fn find() -> io::Result<Option<Stat>> {
    let sees_kernel_threads = Stat::of(KTHREADD)?.is_some_and(|stat| stat.is_named("kthreadd"));
    if !sees_kernel_threads {
        return Err(io::ErrorKind::Unsupported.into());
    }
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(stat) = Stat::of(pid)?.filter(Stat::is_khugepaged) {
            LAST.store(pid, Relaxed);
            return Ok(Some(stat));
        }
    }
    Ok(None)
}

/// What `/proc/PID/stat` tells, as far as it matters here.
#[derive(PartialEq, Eq, Debug)]
struct Stat {
    name: Vec<u8>,
    state: char,
    parent: i32,
}

impl Stat {
    /// `None`: there is no such process.
    fn of(pid: i32) -> io::Result<Option<Stat>> {
        match fs::read(format!("/proc/{pid}/stat")) {
            Ok(text) => Ok(Stat::parse(&text)),
            // `ESRCH`: it ended between open(2) and read(2).
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// `63 (khugepaged) S 2 0 0 ...`; a process may have parentheses in its name.
    fn parse(text: &[u8]) -> Option<Stat> {
        let start = text.iter().position(|&byte| byte == b'(')? + 1;
        let end = text.iter().rposition(|&byte| byte == b')')?;
        let after = str::from_utf8(text.get(end + 1..)?).ok()?;
        let mut words = after.split_ascii_whitespace();
        let state = words.next()?.chars().next()?;
        let parent = words.next()?.parse().ok()?;
        Some(Stat { name: text.get(start..end)?.to_owned(), state, parent })
    }

    fn is_named(&self, name: &str) -> bool {
        self.name == name.as_bytes()
    }

    /// Whoever is named like it has another parent.
    fn is_khugepaged(&self) -> bool {
        self.parent == KTHREADD && self.is_named("khugepaged")
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_a_process_calls_itself_makes_it_no_khugepaged() {
        for (text, expected) in [
            ("63 (khugepaged) S 2 0 0 0", Some(true)),
            ("63 (khugepaged) R 2 0", Some(true)),
            ("63 (khugepaged) S 1 0", Some(false)),
            ("63 (khugepaged) S 2 () S 1 0", Some(false)),
            ("63 (kthreadd) S 2 0", Some(false)),
            ("63 (khugepaged) S", None),
            ("63 khugepaged S 2", None),
            (")(", None),
            ("", None),
        ] {
            let found = Stat::parse(text.as_bytes());
            assert_eq!(found.map(|stat| stat.is_khugepaged()), expected, "{text}");
        }
        assert_eq!(Stat::parse(b"9 (\xff) (x) D 7 0").map(|stat| stat.state), Some('D'));
    }

    /// It sleeps ten seconds, and is at work for some milliseconds.
    #[test]
    fn it_is_seen_asleep_soon() {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match is_asleep() {
                Ok(true) => break,
                Ok(false) => assert!(Instant::now() < deadline, "it is always at work"),
                Err(error) => return assert_eq!(error.kind(), io::ErrorKind::Unsupported),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let last = LAST.load(Relaxed);
        let name = fs::read_to_string(format!("/proc/{last}/comm"));
        assert!(last == 0 || name.unwrap().trim() == "khugepaged");
    }
}
