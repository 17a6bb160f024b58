//! A disk whose requests take long: a loop device for which the kernel throttles a process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_units::Bytes;

use crate::file_system;
use crate::host::{Host, Ran};
use crate::wait::patiently;

const CGROUP: &str = "/sys/fs/cgroup/blkio";
const READS: &str = "blkio.throttle.read_iops_device";
/// Number of slow disks in this process: concurrent tests may give theirs the same name.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// An image behind a loop device, and the group of processes for which it is slow.
pub struct SlowDisk {
    image: PathBuf,
    device: PathBuf,
    group: PathBuf,
}

/// Checks that there can be a slow disk.
///
/// # Errors
/// Says why there cannot.
pub fn slow_disks() -> Result<(), String> {
    let (file, control) = (Path::new(CGROUP).join(READS), "/dev/loop-control");
    match (file.exists(), Path::new(control).exists()) {
        (true, true) => Ok(()),
        (false, _) => Err(format!("{} is not there: no version 1 of cgroups", file.display())),
        (_, false) => Err(format!("{control} is not there")),
    }
}

impl SlowDisk {
    /// An empty disk in the host's directory. It is slow from [`SlowDisk::slow_down`] on.
    ///
    /// # Panics
    /// There can be none: `require!` [`slow_disks`] first.
    pub fn new(host: &Host, name: &str, size: &str) -> SlowDisk {
        let image = host.directory().join(format!("{name}.img"));
        let bytes: Bytes = size.parse().expect("a size");
        let made = File::create(&image).expect("an image");
        // Writing to a hole would first have to allocate it.
        rustix::fs::fallocate(&made, rustix::fs::FallocateFlags::empty(), 0, bytes.0)
            .expect("room for an image");
        let (pid, number) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let group = Path::new(CGROUP).join(format!("ebb-test-{pid}-{number}-{name}"));
        fs::create_dir(&group).expect("a cgroup");
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--direct-io=on"]).arg(&image);
        let device = PathBuf::from(Ran::of(&mut command).ok().trim());
        SlowDisk { image, device, group }
    }

    /// Makes a file system on it.
    pub fn formatted(self, kind: &str) -> SlowDisk {
        file_system::make(kind, &self.device);
        self
    }

    /// The device to give to QEMU.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Limits this process to this many reads a second.
    pub fn slow_down(&self, pid: i32, requests: u32) {
        let name = self.device.file_name().expect("a device");
        let number = Path::new("/sys/block").join(name).join("dev");
        let number = fs::read_to_string(number).expect("a block device");
        let limit = format!("{} {requests}", number.trim());
        fs::write(self.group.join(READS), limit).expect("a limit");
        fs::write(self.group.join("cgroup.procs"), pid.to_string()).expect("QEMU is moved");
    }

    /// Checks the file system, with no guest using it.
    ///
    /// # Panics
    /// The file system is damaged.
    pub fn check(&self, kind: &str) {
        file_system::check(kind, &self.device);
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // The group is busy until its last process has ended.
        if !patiently(|| fs::remove_dir(&self.group).is_ok()) {
            eprintln!("{} cannot be removed", self.group.display());
        }
        Ran::of(Command::new("losetup").arg("--detach").arg(&self.device));
        if let Err(error) = fs::remove_file(&self.image) {
            eprintln!("{}: {error}", self.image.display());
        }
    }
}
