//! khugepaged, the kernel's thread that makes large folios of small pages (Linux
//! `Documentation/admin-guide/mm/transhuge.rst`, "Khugepaged controls").

use std::fs;
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use crate::process::is_no_process;
use crate::process_stat::Stat;

/// The PID of kthreadd, the parent of all kernel threads.
const KTHREADD: i32 = 2;

/// The PID that khugepaged had when it was last found. 0: it was not found.
static LAST: AtomicI32 = AtomicI32::new(0);

/// Whether every collapse that began before this call has ended.
///
/// khugepaged sleeps interruptibly only between collapses. Within one it runs, or waits for locks
/// and disks uninterruptibly. There is one such thread on the host, so seeing it asleep once is
/// enough. Where huge pages are forbidden for all there is no such thread.
///
/// # Errors
/// `Unsupported`: kernel threads are invisible, as in a container. Otherwise as reading `/proc`.
pub fn is_asleep() -> io::Result<bool> {
    let last = stat(LAST.load(Relaxed))?.filter(is_khugepaged);
    let found = match last {
        Some(stat) => Some(stat),
        None => find()?,
    };
    Ok(found.is_none_or(|stat| stat.state == 'S'))
}

fn find() -> io::Result<Option<Stat>> {
    let sees_kernel_threads = stat(KTHREADD)?.is_some_and(|stat| stat.name == b"kthreadd");
    if !sees_kernel_threads {
        return Err(io::ErrorKind::Unsupported.into());
    }
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(stat) = stat(pid)?.filter(is_khugepaged) {
            LAST.store(pid, Relaxed);
            return Ok(Some(stat));
        }
    }
    Ok(None)
}

/// Returns `None` if there is no such process.
fn stat(pid: i32) -> io::Result<Option<Stat>> {
    match Stat::of(pid) {
        Err(error) if is_no_process(&error) => Ok(None),
        stat => stat.map(Some),
    }
}

/// Whether this is the kernel's thread. A process that takes its name has another parent.
fn is_khugepaged(stat: &Stat) -> bool {
    stat.parent == KTHREADD && stat.name == b"khugepaged"
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_name_alone_makes_no_khugepaged() {
        for (name, parent, expected) in [
            ("khugepaged", KTHREADD, true),
            ("khugepaged", 1, false),
            ("khugepaged) S 2 (", 1, false),
            ("kthreadd", KTHREADD, false),
        ] {
            let stat = Stat { name: name.into(), state: 'S', parent, start_ticks: 1 };
            assert_eq!(is_khugepaged(&stat), expected, "{stat:?}");
        }
    }

    /// khugepaged sleeps for ten seconds, and then works for some milliseconds.
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
