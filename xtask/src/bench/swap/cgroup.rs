//! A control group for one VM: its memory, and the speed of its disks.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::mm::{MlockAllFlags, mlockall, munlockall};
use vmtest::Undo;

use super::bound::{Bound, used_bytes};
use super::pool::Pooled;
use super::warden::{Target, Waits, Warden, steps};
use crate::interrupt;

const ROOT: &str = "/sys/fs/cgroup";
/// The group of VMs that have one. Ebb looks at it in place of its own group.
const OF_OTHERS: &str = "ebb";
/// Controllers of version 1, which has a hierarchy for each.
const CONTROLLERS: [&str; 3] = ["memory", "blkio", "cpuacct"];
/// Most bytes by which a limit goes down between two looks at the VMMs' memory.
const LOOK_BYTES: u64 = 8 << 20;
const TRIES: u32 = 500;
/// Longest time for guests to reach their limit.
const BRING_DOWN: Duration = Duration::from_secs(120);

/// A control group. Processes that are started while it is entered are in it. When it is dropped,
/// they must have ended.
pub struct Cgroup {
    name: String,
    warden: Mutex<Option<Warden>>,
    bound: Mutex<Option<Bound>>,
    of_root: Mutex<Vec<Undo>>,
    _directories: Vec<Undo>,
}

/// See [`Cgroup::enter`].
pub struct Entered {
    _homes: Undo,
}

impl Cgroup {
    /// Makes an empty group.
    ///
    /// # Errors
    /// The host has no such controllers, or does not permit it.
    pub fn new(name: &str) -> anyhow::Result<Cgroup> {
        let name = format!("ebb-bench-{}-{name}", std::process::id());
        let mut directories = Vec::new();
        for controller in CONTROLLERS {
            let root = Path::new(ROOT).join(controller);
            ensure!(
                root.join("cgroup.procs").exists(),
                "{} is not there: this benchmark limits QEMU by version 1 of cgroups",
                root.display()
            );
            let path = root.join(&name);
            let (say, removed) = (|| path.display().to_string(), path.clone());
            let (_, undo) = Undo::of(
                || fs::create_dir(&path),
                |()| {
                    // The kernel removes a group only some time after its last process has ended.
                    move || {
                        if let Err(error) = retry(|| fs::remove_dir(&removed)) {
                            eprintln!("{}: {error}", removed.display());
                        }
                    }
                },
            )
            .with_context(say)?;
            directories.push(undo);
        }
        let (warden, of_root) = (Mutex::default(), Mutex::default());
        let bound = Mutex::default();
        let cgroup = Cgroup { name, warden, bound, of_root, _directories: directories };
        // Lock this process's memory: what it touches while it is in the group is charged to the
        // group, and would be swapped out. And the kernel kills a process whose pages it cannot
        // have back at once.
        mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
            .context("mlockall")?;
        Ok(cgroup)
    }

    fn directory(&self, controller: &str) -> PathBuf {
        Path::new(ROOT).join(controller).join(&self.name)
    }

    /// From now on limits the memory that all guests have together, with what is pooled for them.
    /// Guests' memory is the group's memory that is not locked. The excess is swapped out little by
    /// little: the kernel would kill a process whose pages are all in flight to a disk at once.
    ///
    /// # Errors
    /// The kernel cannot bring the memory down to that.
    pub fn limit_guests(&self, bytes: u64, pooled: Pooled) -> anyhow::Result<()> {
        let directory = self.directory("memory");
        let usage = fs::read_to_string(directory.join("memory.usage_in_bytes"))?;
        let mut limit = usage.trim().parse::<u64>()?.max(bytes);
        let path = directory.join("memory.limit_in_bytes");
        fs::write(directory.join("memory.oom_control"), "1")?;
        let target = Target { directory, bytes, pooled };
        let end = Instant::now() + BRING_DOWN;
        loop {
            interrupt::check()?;
            ensure!(Instant::now() < end, "the guests cannot be brought down to their limit");
            let wanted = target.limit()?;
            let next = limit.saturating_sub(LOOK_BYTES).max(wanted);
            // The file is busy while the kernel swaps.
            let set = |bytes: u64| retry(|| fs::write(&path, bytes.to_string()));
            steps(limit, next).try_for_each(set).with_context(|| path.display().to_string())?;
            limit = next;
            if limit == wanted {
                self.watch(Warden::start(target, Some(limit))?);
                return Ok(());
            }
        }
    }

    /// Bounds the group's memory: guests, which have `guests_bytes` now, are to have `bytes`, beside
    /// what processes of the group take for themselves now. Who needs more gets it all the same, and
    /// sees that hardly anything is available.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn bound(&self, bytes: u64, guests_bytes: u64) -> anyhow::Result<()> {
        let others = fs::read_dir(Path::new(ROOT).join("memory").join(OF_OTHERS));
        let is_group = |entry: io::Result<fs::DirEntry>| entry.is_ok_and(|at| at.path().is_dir());
        ensure!(
            !others.into_iter().flatten().any(is_group),
            "other VMs run here: Ebb would look at their control group"
        );
        let directory = self.directory("memory");
        let bytes = bytes + used_bytes(&directory)?.saturating_sub(guests_bytes);
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.get_or_insert_with(|| Bound::start(directory, bytes)).set(bytes);
        Ok(())
    }

    /// Looks at guests as often as at those that it limits, but does nothing: somebody else limits
    /// them, or nobody.
    ///
    /// # Errors
    /// Those of pthread_create(3).
    pub fn look_at_guests(&self) -> anyhow::Result<()> {
        let directory = self.directory("memory");
        let target = Target { directory, bytes: 0, pooled: Pooled::Nothing };
        self.watch(Warden::start(target, None)?);
        Ok(())
    }

    fn watch(&self, warden: Warden) {
        *self.warden.lock().unwrap_or_else(PoisonError::into_inner) = Some(warden);
    }

    /// Returns the waits of the guests that are limited now.
    pub fn waits(&self) -> Waits {
        let warden = self.warden.lock().unwrap_or_else(PoisonError::into_inner);
        warden.as_ref().map(Warden::waits).unwrap_or_default()
    }

    /// Returns the most memory that was charged to the group since the last call.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn peak_bytes(&self) -> anyhow::Result<u64> {
        let path = self.directory("memory").join("memory.max_usage_in_bytes");
        let peak = fs::read_to_string(&path)?.trim().parse()?;
        fs::write(&path, "0")?;
        Ok(peak)
    }

    /// Returns how long all threads that are or were in the group have run so far.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn ran(&self) -> anyhow::Result<Duration> {
        let path = self.directory("cpuacct").join("cpuacct.usage");
        Ok(Duration::from_nanos(fs::read_to_string(&path)?.trim().parse()?))
    }

    /// Limits reads and writes of the device `number` (as in `7:3`). Version 1 charges swap-out
    /// writes to the root group, so the root group's writes get the same limit.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn throttle(&self, number: &str, requests: u64, bytes: u64) -> anyhow::Result<()> {
        for direction in ["read", "write"] {
            for (unit, most) in [("iops", requests), ("bps", bytes)] {
                let file = format!("blkio.throttle.{direction}_{unit}_device");
                let (own, line) = (self.directory("blkio").join(&file), format!("{number} {most}"));
                fs::write(&own, &line).with_context(|| own.display().to_string())?;
                if direction == "write" {
                    let roots = Path::new(ROOT).join("blkio").join(&file);
                    self.hold_root(&roots, &line, format!("{number} 0"))?;
                }
            }
        }
        Ok(())
    }

    fn hold_root(&self, file: &Path, line: &str, after: String) -> anyhow::Result<()> {
        let undone = file.to_owned();
        let deed = || fs::write(file, line).with_context(|| file.display().to_string());
        let (_, undo) = Undo::of(deed, |()| {
            move || {
                if let Err(error) = fs::write(&undone, &after) {
                    eprintln!("{}: {error}", undone.display());
                }
            }
        })?;
        self.of_root.lock().unwrap_or_else(PoisonError::into_inner).push(undo);
        Ok(())
    }

    /// Puts processes that this one starts into the group, until the result is dropped.
    ///
    /// # Errors
    /// A file operation fails.
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
        let (homes, me) = (CONTROLLERS.map(home), std::process::id());
        let entered = Entered {
            _homes: Undo::new(move || {
                for error in homes.iter().filter_map(|home| move_into(home, me).err()) {
                    eprintln!("{error:#}");
                }
            }),
        };
        self.add(std::process::id())?;
        Ok(entered)
    }

    /// Moves a process into the group.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn add(&self, pid: u32) -> anyhow::Result<()> {
        CONTROLLERS.iter().try_for_each(|controller| move_into(&self.directory(controller), pid))
    }
}

fn move_into(directory: &Path, pid: u32) -> anyhow::Result<()> {
    let path = directory.join("cgroup.procs");
    fs::write(&path, pid.to_string()).with_context(|| path.display().to_string())
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = munlockall() {
            eprintln!("munlockall: {error}");
        }
        self.warden.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.bound.get_mut().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Repeats the action until it is not busy any more.
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
