//! Keeps what guests have of a control group's memory at a limit, whatever their VMMs take for
//! themselves. A limit on both together would give guests what the VMMs lose to swapping.
//!
//! Beside guests that somebody else limits, it looks as often and does nothing, so that its cost is
//! the same.

mod vmm_memory;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;

pub use self::vmm_memory::{Guest, parts};
use super::pool::Pooled;

const REVIVE_BYTES: u64 = 1 << 20;
const REVIVE_EVERY: Duration = Duration::from_millis(2);
/// Number of turns after which the warden looks at the VMMs' own memory and at what is pooled.
/// QEMU's translation cache grows by up to 30 MiB a second, which must not reduce the guests'
/// memory.
const FOLLOW_EVERY: u32 = 25;
/// Least change of a limit that is followed, and greatest change at a time.
const STEP_BYTES: std::ops::RangeInclusive<u64> = (1 << 20)..=(4 << 20);
/// Most bytes by which one write lowers a limit. The kernel answers only once that much is free at
/// once, while processes at their limit take pages back as fast as it frees them: with 8 MiB and
/// compressed memory it never answers.
const WRITE_STEP_BYTES: u64 = 128 << 10;

/// Divisor: at least a quarter of the guests' memory stays resident.
const LEAST_RESIDENT: u64 = 4;

/// Adjusts the group's limit to the VMMs' own memory, and wakes processes that wait for memory.
///
/// While all pages that could be evicted are in flight to the disk, version 1 gives up and kills
/// processes. If told not to, it makes them wait until somebody makes room, and nobody does once
/// the disk is done.
pub struct Warden {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    waits: AtomicU64,
    waited_ns: AtomicU64,
}

/// How often and how long processes of the group waited for memory that only the warden gives.
/// Version 2 of control groups has no such waits.
#[derive(Clone, Copy, Default, Debug)]
pub struct Waits {
    pub times: u64,
    pub time: Duration,
}

/// The limit of a control group.
pub struct Target {
    /// The group's directory of the memory controller.
    pub directory: PathBuf,
    /// What all guests should have together, with what is pooled for them.
    pub bytes: u64,
    pub pooled: Pooled,
}

impl Target {
    /// Returns the group's limit for the current memory of its VMMs and of the pool. The pool is
    /// charged to nobody, so the guests have that much less.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn limit(&self) -> anyhow::Result<u64> {
        Ok(resident_bytes(self.bytes, self.pooled.bytes()?) + own_bytes(&self.directory)?)
    }
}

/// Returns what guests may have beside their pool. Memory that does not compress would fill a pool
/// without end, so a part always stays for resident memory.
fn resident_bytes(bytes: u64, pooled: u64) -> u64 {
    bytes.saturating_sub(pooled).max(bytes / LEAST_RESIDENT)
}

impl Warden {
    /// Starts the warden. `limit` is the group's current limit, or `None` if somebody else limits
    /// the guests.
    ///
    /// # Errors
    /// Those of pthread_create(3).
    pub fn start(target: Target, limit: Option<u64>) -> io::Result<Warden> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let guard = thread::Builder::new().spawn(move || target.hold(limit, &own))?;
        Ok(Warden { shared, thread: Some(guard) })
    }

    /// Returns all waits so far.
    pub fn waits(&self) -> Waits {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let time = Duration::from_nanos(of(&self.shared.waited_ns));
        Waits { times: of(&self.shared.waits), time }
    }
}

impl Target {
    fn hold(&self, mut limit: Option<u64>, shared: &Shared) {
        let file = self.directory.join("memory.limit_in_bytes");
        // The file may be busy.
        let set = |bytes: u64| fs::write(&file, bytes.to_string()).is_ok();
        let mut waits_since = None::<Instant>;
        for time in 1u32.. {
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            if time.is_multiple_of(FOLLOW_EVERY)
                && let Ok(wanted) = self.limit()
                && let Some(limit) = limit.as_mut().filter(|limit| is_step(wanted, **limit))
            {
                let next = wanted.max(limit.saturating_sub(*STEP_BYTES.end()));
                // If the kernel refuses a limit, the one before it stays.
                *limit =
                    steps(*limit, next).take_while(|bytes| set(*bytes)).last().unwrap_or(*limit);
            }
            let state = fs::read_to_string(self.directory.join("memory.oom_control"));
            if state.is_ok_and(|state| state.contains("under_oom 1")) {
                if waits_since.is_none() {
                    shared.waits.fetch_add(1, Ordering::Relaxed);
                }
                waits_since.get_or_insert_with(Instant::now);
                // A lower limit makes the kernel make room, a higher one makes it wake processes.
                let turns = limit.map(|limit| [limit - REVIVE_BYTES, limit]);
                for bytes in turns.into_iter().flatten() {
                    set(bytes);
                }
            } else if let Some(since) = waits_since.take() {
                let waited = since.elapsed().as_nanos() as u64;
                shared.waited_ns.fetch_add(waited, Ordering::Relaxed);
            }
            thread::sleep(REVIVE_EVERY);
        }
    }
}

/// Returns the values to set a limit to, one after the other: up at once, down in steps.
pub fn steps(from: u64, to: u64) -> impl Iterator<Item = u64> {
    let between = (1..from.saturating_sub(to).div_ceil(WRITE_STEP_BYTES))
        .map(move |step| from - step * WRITE_STEP_BYTES);
    between.chain([to])
}

fn is_step(wanted: u64, limit: u64) -> bool {
    wanted.abs_diff(limit) >= *STEP_BYTES.start()
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}

/// Returns what a group has beside its guests' memory: locked memory, and the kernel's.
fn own_bytes(directory: &Path) -> anyhow::Result<u64> {
    let kernel = number(&directory.join("memory.kmem.usage_in_bytes"))?;
    let stat = fs::read_to_string(directory.join("memory.stat"))?;
    Ok(kernel + locked_bytes(&stat).context("the group does not tell what is locked")?)
}

fn locked_bytes(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("unevictable ")?.parse().ok())
}

fn number(path: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(text.trim().parse().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    use ebb_sys::mapping::Mapping;
    use ebb_sys::ram_file::RamFile;

    use super::*;
    use crate::bench::swap::cgroup::Cgroup;
    use crate::bench::swap::linux::{Linux, Memory, Swap, Swapping, one_at_a_time, swaps};
    use crate::bench::swap::medium::{Content, Drive, Medium};

    /// Environment variable that tells the program below how much memory to have.
    const FILL: &str = "EBB_WARDEN_FILL";

    /// Is not a test by itself, but a program whose memory compresses to a part, and which writes
    /// to it again and again.
    #[test]
    fn filler() {
        let Some(bytes) = env::var(FILL).ok().and_then(|text| text.parse().ok()) else { return };
        io::stdin().read_line(&mut String::new()).unwrap();
        let file = RamFile::create("ebb-test", bytes).unwrap();
        let memory = Mapping::new(&file, 0, bytes).unwrap();
        for round in 1u64.. {
            for at in (0..bytes).step_by(4096) {
                for (place, word) in memory.words(at, 128).unwrap().iter().enumerate() {
                    word.store(round * at * 31 * place as u64, Ordering::Relaxed);
                }
            }
            if round == 1 {
                println!("\nfilled");
            }
        }
    }

    /// Version 1 of control groups charges compressed memory to nobody, so the limit is on the sum.
    #[test]
    fn memory_and_pool_share_one_limit() {
        let _turn = one_at_a_time();
        let (all, limit) = (64 << 20, 24 << 20);
        let scratch = vmtest::Scratch::new("ebb-test-").unwrap();
        let content = Content::Empty(2 * all);
        let drive = Drive::new(&scratch.path().join("swap"), content, Medium::Ssd);
        let (Ok(drive), Ok(cgroup)) = (drive, Cgroup::new("test")) else {
            return eprintln!("SKIPPED: no loop device or no version 1 of control groups");
        };
        if swaps() {
            return eprintln!("SKIPPED: this host swaps already");
        }
        for swap in [Swap::Zswap("lzo"), Swap::Zram("lzo-rle"), Swap::ZramDisk("lzo")] {
            let way = Linux { memory: Memory::Memfd, swap };
            let offered = Linux::offered(true, Medium::Ssd);
            if !offered.iter().any(|offered| offered.swap == swap) {
                eprintln!("SKIPPED: no {}", way.name());
                continue;
            }
            let swapping = Swapping::new(way, &drive, [all, limit]).unwrap();
            let program = Filler::start(&cgroup, all);
            let guest = Guest { pid: program.0.id() as i32, memory_bytes: all };
            cgroup.limit_guests(limit, swapping.pooled()).unwrap();
            // Swapped memory is pooled, and pooled memory makes the warden swap more.
            let held = vmtest::until_or(|| {
                let (own, pooled) = (parts(guest).ok()?.guest, swapping.pooled().bytes().ok()?);
                let is_held = pooled > limit / 8 && own + pooled <= limit * 108 / 100;
                is_held.then_some(())
            });
            drop(program);
            assert!(held.is_some(), "{}", way.name());
        }
    }

    /// The program above. Dropping this ends it, even if the test fails: otherwise it would keep
    /// the swap device and the test's output open for ever.
    struct Filler(Child);

    impl Filler {
        /// Starts the program, and returns once it has filled its memory.
        fn start(cgroup: &Cgroup, bytes: u64) -> Filler {
            let mut command = Command::new(env::current_exe().unwrap());
            command.args(["warden::tests::filler", "--nocapture", "--test-threads=1"]);
            command.env(FILL, bytes.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut filler = Filler(command.spawn().unwrap());
            let program = &mut filler.0;
            // Other tests of this process must not be in the group.
            cgroup.add(program.id()).unwrap();
            program.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
            let output = program.stdout.as_mut().unwrap();
            let is_ready = |line: io::Result<String>| line.unwrap() == "filled";
            assert!(BufReader::new(output).lines().any(is_ready));
            filler
        }
    }

    impl Drop for Filler {
        fn drop(&mut self) {
            let ended = self.0.kill().and_then(|()| self.0.wait());
            if let Err(error) = ended {
                eprintln!("{error}");
            }
        }
    }

    #[test]
    fn locked_memory_is_the_groups_own_line() {
        let stat = "inactive_anon 1\nunevictable 4096\ntotal_unevictable 8192\n";
        assert_eq!(locked_bytes(stat), Some(4096));
        assert_eq!(locked_bytes("cache 1\n"), None);
    }

    #[test]
    fn a_limit_goes_down_in_steps() {
        let step = WRITE_STEP_BYTES;
        assert_eq!(steps(3 * step + 5, 5).collect::<Vec<_>>(), [2 * step + 5, step + 5, 5]);
        assert_eq!(steps(step + 1, 0).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(steps(7, 7).collect::<Vec<_>>(), [7]);
        assert_eq!(steps(7, 4 * step).collect::<Vec<_>>(), [4 * step]);
    }

    #[test]
    fn pooled_memory_counts_as_the_guests() {
        assert_eq!(resident_bytes(200, 0), 200);
        assert_eq!(resident_bytes(200, 60), 140);
        assert_eq!(resident_bytes(200, 500), 50);
    }
}
