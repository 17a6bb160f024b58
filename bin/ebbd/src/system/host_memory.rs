//! How much memory the host has left, and how long its tasks wait for some: what host pressure is
//! judged by.

use std::future::pending;
use std::io::PipeWriter;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, iter};

use ebb_policy::pressure::{Budget, HostMemory};
use ebb_sys::meminfo::MemInfo;
use ebb_sys::psi::{self, Access, Trigger};
use tokio::sync::Notify;

use super::cgroup::VmGroups;
use super::host_facts;

/// Shortest time over which the share of waiting tasks is taken.
const SAMPLE_LEAST: Duration = Duration::from_millis(500);
/// Longest time over which it is taken. After more than that, the past does not count.
const SAMPLE_MOST: Duration = Duration::from_secs(5);
/// Stack of a thread that only waits.
const STACK_BYTES: usize = 64 << 10;

/// All memory of the host, and of each control group around the VMs, by name. Empty: the host's is
/// not known.
pub fn totals() -> Vec<(String, u64)> {
    let Some(host_bytes) = host_facts::memory_bytes() else { return Vec::new() };
    let groups = VmGroups::find().budgets(host_bytes).into_iter();
    let groups = groups.map(|group| (group.name, group.total_bytes));
    iter::once(("the host".to_owned(), host_bytes)).chain(groups).collect()
}

/// What the host has now, for people: the time in which tasks wait is the kernel's average of 10 s.
///
/// # Errors
/// Those of reading `/proc/meminfo`.
pub fn glance() -> io::Result<HostMemory> {
    let MemInfo { total_bytes, available_bytes } = MemInfo::read()?;
    let host = Budget { name: "host".into(), total_bytes, available_bytes };
    let groups = VmGroups::find().budgets(total_bytes);
    Ok(HostMemory { host, groups, stall_permille: psi::some_permille().ok() })
}

/// Reads the host's memory.
pub struct HostReader {
    groups: VmGroups,
    stalls: Option<Stalls>,
    /// None: the kernel gave no trigger.
    follower: Option<Arc<Follower>>,
    /// The thread that waits for the trigger ends once this is closed.
    _ending: Option<PipeWriter>,
    /// How the kernel lets PSI be seen, in words.
    psi: String,
}

/// What the thread tells that waits for the kernel's trigger.
#[derive(Default)]
struct Follower {
    fired: Notify,
    /// Why no thread waits for it any more; none: one does.
    ended: OnceLock<String>,
}

impl HostReader {
    /// A reader with the best that the kernel offers. `stall_percent`: the share of the time from
    /// which waiting tasks are pressure; none: they are not looked at.
    pub fn open(stall_percent: Option<u32>) -> HostReader {
        let access = stall_percent.map(|percent| (percent, Access::open(percent)));
        let psi = match &access {
            Some((_, access)) => access.to_string(),
            None => "PSI is not looked at (--pressure-stall 0)".into(),
        };
        let (stalls, follower, ending) = match access {
            None | Some((_, Access::None(_))) => (None, None, None),
            Some((percent, Access::Reading(_))) => (Some(Stalls::new(percent)), None, None),
            Some((percent, Access::Trigger(trigger))) => {
                let (follower, ending) = follow(trigger);
                (Some(Stalls::new(percent)), Some(follower), ending)
            }
        };
        HostReader { groups: VmGroups::find(), stalls, follower, _ending: ending, psi }
    }

    /// By what it sees pressure now, in words.
    pub fn seen_by(&self) -> String {
        let ended = self.follower.as_ref().and_then(|follower| follower.ended.get());
        let psi = match ended {
            Some(why) => format!("PSI by reading it ({why})"),
            None => self.psi.clone(),
        };
        format!("available memory each second; {psi}")
    }

    /// Waits until the kernel tells that tasks wait for memory.
    pub async fn stall(&self) {
        match &self.follower {
            Some(follower) => follower.fired.notified().await,
            None => pending().await,
        }
    }

    /// Reads what the host has. `stalled`: [`HostReader::stall`] has just returned.
    ///
    /// # Errors
    /// Those of reading `/proc/meminfo`.
    pub fn read(&mut self, stalled: bool) -> io::Result<HostMemory> {
        let MemInfo { total_bytes, available_bytes } = MemInfo::read()?;
        let host = Budget { name: "host".into(), total_bytes, available_bytes };
        let groups = self.groups.budgets(total_bytes);
        let look = |stalls: &mut Stalls| stalls.look(Instant::now(), psi::some_stall(), stalled);
        Ok(HostMemory { host, groups, stall_permille: self.stalls.as_mut().map(look) })
    }
}

/// Waits for the trigger in a thread of its own: the runtime would wait for such a file only by
/// unsafe calls. Without the thread, nobody wakes the reader, and it reads all the same. The thread
/// ends once what is returned beside the follower is dropped.
fn follow(trigger: Trigger) -> (Arc<Follower>, Option<PipeWriter>) {
    let follower = Arc::new(Follower::default());
    let followed = Arc::clone(&follower);
    let started = io::pipe().and_then(|(end, ending)| {
        let wait = move || {
            let error = loop {
                match trigger.wait(end.as_fd()) {
                    Ok(true) => followed.fired.notify_one(),
                    Ok(false) => return,
                    Err(error) => break error,
                }
            };
            followed.end(format!("the kernel has ended its trigger: {error}"));
        };
        let thread = thread::Builder::new().name("host pressure".into()).stack_size(STACK_BYTES);
        thread.spawn(wait).map(|_| ending)
    });
    if let Err(error) = &started {
        follower.end(format!("no thread waits for its trigger: {error}"));
    }
    (follower, started.ok())
}

impl Follower {
    fn end(&self, why: String) {
        tracing::warn!("the host's stalls are read each second only: {why}");
        let _ = self.ended.set(why);
    }
}

/// The share of the time in which tasks of the host wait for memory.
struct Stalls {
    most_permille: u32,
    /// When the total was read last, and what it was; none: it was not read yet.
    last: Option<(Instant, Duration)>,
    permille: u32,
}

impl Stalls {
    fn new(most_percent: u32) -> Stalls {
        Stalls { most_permille: most_percent * 10, last: None, permille: 0 }
    }

    /// Takes the share since the last look, unless that was just now.
    fn look(&mut self, now: Instant, total: io::Result<Duration>, stalled: bool) -> u32 {
        let Ok(total) = total else {
            (self.last, self.permille) = (None, 0);
            return 0;
        };
        let (at, before) = *self.last.get_or_insert((now, total));
        let elapsed = now.saturating_duration_since(at);
        if elapsed > SAMPLE_MOST {
            (self.last, self.permille) = (Some((now, total)), 0);
        } else if elapsed >= SAMPLE_LEAST {
            self.permille = permille(total.saturating_sub(before), elapsed);
            self.last = Some((now, total));
        }
        if stalled {
            self.permille = self.permille.max(self.most_permille);
        }
        self.permille
    }
}

fn permille(part: Duration, whole: Duration) -> u32 {
    let permille = part.as_micros() * 1000 / whole.as_micros().max(1);
    u32::try_from(permille).unwrap_or(u32::MAX).min(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_share_is_that_since_the_last_look() {
        let (mut stalls, at) = (Stalls::new(15), Instant::now());
        let mut look = |after_ms: u32, total_ms: u32, stalled| {
            stalls.look(at + after_ms * MS, Ok(total_ms * MS), stalled)
        };
        assert_eq!(look(0, 70_000, false), 0);
        assert_eq!(look(1000, 70_041, false), 41);
        // Just now: the share stays.
        assert_eq!(look(1100, 70_141, false), 41);
        assert_eq!(look(2000, 70_141, false), 100);
        // The kernel's trigger has fired.
        assert_eq!(look(2100, 70_200, true), 150);
        assert_eq!(look(2200, 70_200, false), 150);
        assert_eq!(look(3000, 70_200, false), 59);
        assert_eq!(look(4000, 80_000, false), 1000);
        // Nobody asked for a while.
        assert_eq!(look(9001, 85_000, false), 0);
        assert_eq!(look(10_001, 85_010, false), 10);
    }

    #[test]
    fn a_trigger_that_has_ended_is_not_claimed() {
        let follower = Arc::new(Follower::default());
        let reader = HostReader {
            groups: VmGroups::find(),
            stalls: None,
            follower: Some(Arc::clone(&follower)),
            _ending: None,
            psi: "PSI by a trigger".into(),
        };
        assert_eq!(reader.seen_by(), "available memory each second; PSI by a trigger");
        follower.end("gone".into());
        assert_eq!(reader.seen_by(), "available memory each second; PSI by reading it (gone)");
    }

    /// The pilot opens a reader each time that it is turned on.
    #[test]
    fn a_reader_that_is_dropped_leaves_no_thread() {
        let reader = HostReader::open(Some(50));
        let Some(follower) = reader.follower.as_ref().map(Arc::downgrade) else {
            eprintln!("SKIPPED a_reader_that_is_dropped_leaves_no_thread: {}", reader.seen_by());
            return;
        };
        drop(reader);
        testkit::until("the thread to end", || (follower.strong_count() == 0).then_some(()));
    }

    #[test]
    fn a_total_that_cannot_be_read_or_runs_back_is_no_stall() {
        let (mut stalls, at) = (Stalls::new(15), Instant::now());
        assert_eq!(stalls.look(at, Ok(700 * MS), true), 150);
        assert_eq!(stalls.look(at + 1000 * MS, Ok(600 * MS), false), 0);
        assert_eq!(stalls.look(at + 2000 * MS, Err(io::ErrorKind::NotFound.into()), true), 0);
        assert_eq!(stalls.look(at + 3000 * MS, Ok(900 * MS), false), 0);
        assert_eq!(stalls.look(at + 4000 * MS, Ok(901 * MS), false), 1);
        // A clock that runs back.
        assert_eq!(stalls.look(at, Ok(9000 * MS), false), 1);
        assert_eq!(permille(Duration::MAX, Duration::ZERO), 1000);
    }

    #[test]
    fn this_host_is_read() {
        let mut reader = HostReader::open(None);
        assert!(reader.seen_by().starts_with("available memory each second; "));
        assert!(reader.seen_by().contains("--pressure-stall 0"), "{}", reader.seen_by());
        let memory = reader.read(false).unwrap();
        assert!(memory.host.total_bytes > 1 << 20);
        assert_eq!(memory.stall_permille, None);
    }
}
