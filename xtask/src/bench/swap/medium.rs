//! Disks to swap to and to serve guests from: fast ones, and slow ones made of fast ones.

use std::fs::{self, File};
use std::ops::Sub;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, ensure};
use vmtest::{Undo, undo};

use super::cgroup::Cgroup;
use crate::bench::blocks::HostFails;

const PAGE_SECTORS: u64 = 8;

/// Kind of a disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// This machine's own disk, at its own speed.
    Ssd,
    /// A disk with as many requests and bytes a second as a hard disk.
    Hdd,
}

impl Medium {
    /// Returns the medium's name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Medium::Ssd => "SSD",
            Medium::Hdd => "HDD-like",
        }
    }

    /// Whether the kernel should believe that the disk has a moving head. With one, it reads ahead
    /// of swap by place on the disk, otherwise by address.
    fn is_rotational(self) -> bool {
        self == Medium::Hdd
    }

    /// Returns requests and bytes a second, or `None` for no limit.
    fn speed(self) -> Option<(u64, u64)> {
        match self {
            Medium::Ssd => None,
            Medium::Hdd => Some((500, 120_000_000)),
        }
    }
}

/// A block device whose requests are counted. A slow one is two loop devices, one on the other: the
/// upper one merges requests, and the lower one is throttled like a disk.
pub struct Drive {
    // The fields are dropped in this order.
    upper: Loop,
    lower: Option<Loop>,
    _file: Undo,
}

struct Loop {
    device: PathBuf,
    _undo: Undo,
}

/// What was read from a disk and written to it.
#[derive(Clone, Copy, Default, Debug)]
pub struct Traffic {
    pub read_requests: u64,
    pub read_pages: u64,
    pub write_requests: u64,
    pub write_pages: u64,
}

impl Drive {
    /// Makes a drive on a new file: empty and of `bytes`, or a copy.
    ///
    /// # Errors
    /// There are no loop devices, or there is no room.
    pub fn new(file: &Path, content: Content<'_>, medium: Medium) -> anyhow::Result<Drive> {
        let made = file.to_owned();
        // The loop device keeps the file until it is removed itself.
        let undo = Undo::new(move || {
            if let Err(error) = fs::remove_file(&made) {
                eprintln!("{}: {error}", made.display());
            }
        });
        match content {
            Content::Empty(bytes) => {
                let made = File::create(file)?;
                rustix::fs::fallocate(&made, rustix::fs::FallocateFlags::empty(), 0, bytes)
                    .with_context(|| file.display().to_string())?;
            }
            Content::Copy(from) => {
                output(Command::new("cp").arg("--sparse=never").args([from, file]))?;
            }
        }
        // Otherwise pending writeback would slow down the first measurement.
        File::open(file)?.sync_all()?;
        let (upper, lower) = match medium.speed() {
            None => (Loop::on(file, medium)?, None),
            Some(_) => {
                let lower = Loop::on(file, medium)?;
                (Loop::on(&lower.device, medium)?, Some(lower))
            }
        };
        Ok(Drive { upper, lower, _file: undo })
    }

    /// Returns the path of the device.
    pub fn device(&self) -> &Path {
        &self.upper.device
    }

    /// Limits the group's processes to the medium's speed.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn throttle(&self, cgroup: &Cgroup, medium: Medium) -> anyhow::Result<()> {
        match (&self.lower, medium.speed()) {
            (Some(lower), Some((requests, bytes))) => {
                cgroup.throttle(&lower.number()?, requests, bytes)
            }
            _ => Ok(()),
        }
    }

    /// Returns the traffic so far.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn traffic(&self) -> anyhow::Result<Traffic> {
        let text = fs::read_to_string(self.upper.sysfs("stat")?)?;
        let fields: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let field = |index: usize| fields.get(index).copied().context("a short stat");
        Ok(Traffic {
            read_requests: field(0)?,
            read_pages: field(2)? / PAGE_SECTORS,
            write_requests: field(4)?,
            write_pages: field(6)? / PAGE_SECTORS,
        })
    }
}

/// Content of a new drive.
#[derive(Clone, Copy)]
pub enum Content<'a> {
    Empty(u64),
    Copy(&'a Path),
}

impl Loop {
    fn on(file: &Path, medium: Medium) -> anyhow::Result<Loop> {
        let file = path(file)?;
        let add = || run("losetup", &["--find", "--show", "--direct-io=on", file]);
        let (device, undo) = Undo::of(add, |device| undo("losetup", ["--detach", device.trim()]))?;
        let device = device.trim();
        let made = Loop { device: device.into(), _undo: undo };
        // A loop device copies this setting from the disk beneath, which means nothing for a
        // virtual disk.
        set_rotational(&made.sysfs("queue/rotational")?, medium.is_rotational())?;
        Ok(made)
    }

    fn sysfs(&self, attribute: &str) -> anyhow::Result<PathBuf> {
        let name = self.device.file_name().context("a device without a name")?;
        Ok(Path::new("/sys/block").join(name).join(attribute))
    }

    /// Returns the device's number, as in `7:3`.
    fn number(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.sysfs("dev")?)?.trim().into())
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, before: Traffic) -> Traffic {
        Traffic {
            read_requests: self.read_requests - before.read_requests,
            read_pages: self.read_pages - before.read_pages,
            write_requests: self.write_requests - before.write_requests,
            write_pages: self.write_pages - before.write_pages,
        }
    }
}

/// The kernel's own swap areas, as long as this exists.
pub struct SwapArea {
    _undo: Vec<Undo>,
}

impl SwapArea {
    /// Makes the kernel swap to devices: to the first until it is full, then to the next, and so
    /// on.
    ///
    /// # Errors
    /// It is not permitted, or the host already swaps to something else, which would be measured
    /// too.
    pub fn at(devices: &[&Path]) -> anyhow::Result<SwapArea> {
        let others = fs::read_to_string("/proc/swaps")?;
        if others.lines().count() > 1 {
            return Err(anyhow!("it swaps already: `swapoff -a` first").context(HostFails));
        }
        let mut areas = Vec::new();
        for (device, priority) in devices.iter().zip((1..100).rev()) {
            let device = path(device)?;
            run("mkswap", &["--quiet", device])?;
            let on = || run("swapon", &["--priority", &priority.to_string(), device]);
            let (_, undo) = Undo::of(on, |_| undo("swapoff", [device]))?;
            areas.push(undo);
        }
        Ok(SwapArea { _undo: areas })
    }
}

/// Tells the kernel whether the disk has a moving head, and checks that it accepts this.
fn set_rotational(path: &Path, is_rotational: bool) -> anyhow::Result<()> {
    let (say, value) = (|| path.display().to_string(), u8::from(is_rotational).to_string());
    fs::write(path, &value).with_context(say)?;
    let is = fs::read_to_string(path).with_context(say)?;
    ensure!(is.trim() == value, "{} stays {}", say(), is.trim());
    Ok(())
}

/// A file system on a drive, mounted as long as this exists.
pub struct Mounted {
    at: PathBuf,
    _undo: Undo,
}

impl Mounted {
    /// Mounts the drive at a directory, which is made.
    ///
    /// # Errors
    /// The drive has no file system that the kernel knows.
    pub fn on(drive: &Drive, at: &Path) -> anyhow::Result<Mounted> {
        fs::create_dir_all(at)?;
        let (device, place) = (path(drive.device())?, path(at)?);
        let mount = || run("mount", &[device, place]);
        let (_, undo) = Undo::of(mount, |_| undo("umount", [place]))?;
        Ok(Mounted { at: at.into(), _undo: undo })
    }

    /// Returns where the file system is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

/// Makes a file system on a drive.
///
/// # Errors
/// The program fails.
pub fn format(drive: &Drive) -> anyhow::Result<()> {
    let mut mkfs = Command::new("mkfs.ext4");
    // Initialized later, the tables would be counted as swapped out.
    mkfs.args(["-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
    output(mkfs.arg(drive.device())).map(drop)
}

fn path(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Returns an action that runs a program, and runs it once more if it fails.
fn undo<const COUNT: usize>(
    program: &'static str,
    arguments: [&str; COUNT],
) -> impl Fn() + Send + use<COUNT> {
    let arguments = arguments.map(str::to_owned);
    move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let done = run(program, &arguments).or_else(|_| run(program, &arguments));
        if let Err(error) = done {
            eprintln!("{error:#}");
        }
    }
}

/// Runs a program that changes the host. Returns its output.
fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    output(undo::helper(program).args(arguments))
}

/// Runs a command. Returns its output.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("{command:?} does not start"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine's own disk may report either.
    #[test]
    fn only_a_hard_disk_has_a_head_that_moves() {
        let scratch = vmtest::Scratch::new("ebb-test-").unwrap();
        for (medium, expected) in [(Medium::Ssd, "0"), (Medium::Hdd, "1")] {
            let file = scratch.path().join(expected);
            let Ok(drive) = Drive::new(&file, Content::Empty(1 << 20), medium) else {
                return eprintln!("SKIPPED: no loop device");
            };
            for part in [Some(&drive.upper), drive.lower.as_ref()].into_iter().flatten() {
                let is = fs::read_to_string(part.sysfs("queue/rotational").unwrap()).unwrap();
                assert_eq!(is.trim(), expected, "{}", part.device.display());
            }
        }
    }
}
