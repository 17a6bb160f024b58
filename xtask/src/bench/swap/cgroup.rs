//! A control group for one VM: how much memory, and how fast its disks.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, ensure};

const ROOT: &str = "/sys/fs/cgroup";
/// Version 1: a hierarchy for each controller.
const CONTROLLERS: [&str; 2] = ["memory", "blkio"];
const LIMIT_STEP_BYTES: u64 = 8 << 20;
const TRIES: u32 = 500;
const REVIVE_BYTES: u64 = 1 << 20;
const REVIVE_EVERY: Duration = Duration::from_millis(2);

/// Processes started while it is entered are in it. When it goes, they must have ended.
pub struct Cgroup {
    name: String,
    reviver: Mutex<Option<Reviver>>,
}

/// Wakes processes that wait for memory. While all that could go is on its way to the
/// disk, version 1 gives up and kills, or, told not to, has them wait for somebody to make
/// room; nobody does once the disk is done.
struct Reviver {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// See [`Cgroup::enter`].
pub struct Entered {
    homes: Vec<PathBuf>,
}

impl Cgroup {
    /// An empty group.
    ///
    /// # Errors
    /// The host has no such controllers, or does not let us.
    pub fn new(name: &str) -> anyhow::Result<Cgroup> {
        let name = format!("ebb-bench-{}-{name}", std::process::id());
        for controller in CONTROLLERS {
            let root = Path::new(ROOT).join(controller);
            ensure!(
                root.join("cgroup.procs").exists(),
                "{} is not there: this benchmark limits QEMU by version 1 of cgroups",
                root.display()
            );
            let path = root.join(&name);
            fs::create_dir(&path).with_context(|| path.display().to_string())?;
        }
        Ok(Cgroup { name, reviver: Mutex::default() })
    }

    fn directory(&self, controller: &str) -> PathBuf {
        Path::new(ROOT).join(controller).join(&self.name)
    }

    /// Limits the memory of all its processes. What is too much is swapped out, little by
    /// little: whose pages are all on their way to a disk at once would be killed.
    ///
    /// # Errors
    /// The kernel cannot bring it down to that.
    pub fn limit_memory(&self, bytes: u64) -> anyhow::Result<()> {
        let directory = self.directory("memory");
        let usage = fs::read_to_string(directory.join("memory.usage_in_bytes"))?;
        let mut limit = usage.trim().parse::<u64>()?.max(bytes);
        let path = directory.join("memory.limit_in_bytes");
        fs::write(directory.join("memory.oom_control"), "1")?;
        loop {
            limit = limit.saturating_sub(LIMIT_STEP_BYTES).max(bytes);
            // Busy while it swaps.
            retry(|| fs::write(&path, limit.to_string()))
                .with_context(|| path.display().to_string())?;
            if limit == bytes {
                let reviver = Reviver::start(directory, bytes)?;
                *self.reviver.lock().unwrap_or_else(PoisonError::into_inner) = Some(reviver);
                return Ok(());
            }
        }
    }

    /// The most memory that was charged to it since this was asked last.
    ///
    /// # Errors
    /// As the file system's.
    pub fn peak_bytes(&self) -> anyhow::Result<u64> {
        let path = self.directory("memory").join("memory.max_usage_in_bytes");
        let peak = fs::read_to_string(&path)?.trim().parse()?;
        fs::write(&path, "0")?;
        Ok(peak)
    }

    /// No more than this of the device `number` (as in `7:3`), for reads and for writes.
    ///
    /// # Errors
    /// As the file system's.
    pub fn throttle(&self, number: &str, requests: u64, bytes: u64) -> anyhow::Result<()> {
        for (file, most) in [
            ("read_iops", requests),
            ("write_iops", requests),
            ("read_bps", bytes),
            ("write_bps", bytes),
        ] {
            let path = self.directory("blkio").join(format!("blkio.throttle.{file}_device"));
            fs::write(&path, format!("{number} {most}"))
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// From now on what this process starts is in the group, until the answer goes.
    ///
    /// # Errors
    /// As the file system's.
    pub fn enter(&self) -> anyhow::Result<Entered> {
        let text = fs::read_to_string("/proc/self/cgroup")?;
        let home = |controller: &str| {
            let line = text.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (names, path) = rest.split_once(':')?;
                names.split(',').any(|name| name == controller).then_some(path)
            });
            let path = line.unwrap_or("/").trim_start_matches('/');
            Path::new(ROOT).join(controller).join(path)
        };
        let entered = Entered { homes: CONTROLLERS.map(home).into() };
        CONTROLLERS.iter().try_for_each(|controller| move_into(&self.directory(controller)))?;
        Ok(entered)
    }
}

impl Reviver {
    fn start(directory: PathBuf, limit_bytes: u64) -> io::Result<Reviver> {
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let revive = move || {
            let limit = directory.join("memory.limit_in_bytes");
            while !stopped.load(Ordering::Relaxed) {
                let state = fs::read_to_string(directory.join("memory.oom_control"));
                if state.is_ok_and(|state| state.contains("under_oom 1")) {
                    // Less has the kernel make room, more has it wake. It may be busy.
                    for bytes in [limit_bytes - REVIVE_BYTES, limit_bytes] {
                        let _ = fs::write(&limit, bytes.to_string());
                    }
                }
                thread::sleep(REVIVE_EVERY);
            }
        };
        Ok(Reviver { stop, thread: Some(thread::Builder::new().spawn(revive)?) })
    }
}

impl Drop for Reviver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}

fn move_into(directory: &Path) -> anyhow::Result<()> {
    let path = directory.join("cgroup.procs");
    fs::write(&path, std::process::id().to_string()).with_context(|| path.display().to_string())
}

impl Drop for Entered {
    fn drop(&mut self) {
        for home in &self.homes {
            if let Err(error) = move_into(home) {
                eprintln!("{error:#}");
            }
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.reviver.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        for controller in CONTROLLERS {
            let path = self.directory(controller);
            // The kernel takes a group away only some time after its last process.
            if let Err(error) = retry(|| fs::remove_dir(&path)) {
                eprintln!("{}: {error}", path.display());
            }
        }
    }
}

/// Until it is not busy any more.
fn retry(mut action: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..TRIES {
        match action() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
    action()
}
