//! What init does first: file systems and modules.

use std::convert::Infallible;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, mount as mount_at};

use crate::{Context, Result};

const MODULES: &str = "/modules";

/// Mounts what programs expect, and a tmpfs that may grow to nearly all RAM.
pub fn mount() -> Result<()> {
    for (kind, at, options) in [
        (c"proc", "/proc", c""),
        (c"sysfs", "/sys", c""),
        (c"devtmpfs", "/dev", c""),
        (c"tmpfs", "/tmp", c"size=95%"),
    ] {
        fs::create_dir_all(at).context(at)?;
        mount_at(kind, at, kind, MountFlags::empty(), options).context(at)?;
    }
    Ok(())
}

/// Loads every module of the image, in the order of their dependencies.
pub fn load_modules() -> Result<()> {
    load_in_order("order")
}

/// Loads what a file system, a device or another request of the host needs, if the image has
/// anything for it.
pub fn load_for(kind: &str) -> Result<()> {
    let order = format!("order.{kind}");
    match Path::new(MODULES).join(&order).exists() {
        true => load_in_order(&order),
        false => Ok(()),
    }
}

fn load_in_order(order: &str) -> Result<()> {
    let order = fs::read_to_string(Path::new(MODULES).join(order)).context("module order")?;
    for name in order.lines() {
        let file = File::open(Path::new(MODULES).join(name)).context(name)?;
        match rustix::system::finit_module(&file, c"", 0) {
            // Another file system needed it as well.
            Err(rustix::io::Errno::EXIST) => {}
            result => result.context(name)?,
        }
    }
    Ok(())
}

/// Mounts a disk.
pub fn mount_disk(kind: &str, device: &str, at: &str) -> Result<()> {
    load_for(kind)?;
    fs::create_dir_all(at).context(at)?;
    let flags = MountFlags::empty();
    match mount_at(device, at, kind, flags, None) {
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS) => {
            mount_at(device, at, kind, MountFlags::RDONLY, None).context(device)
        }
        result => result.context(device),
    }
}

/// Unmounts it, with all that was written to it.
pub fn unmount(at: &str) -> Result<()> {
    rustix::mount::unmount(at, rustix::mount::UnmountFlags::empty()).context(at)
}

/// Hands this process over to the init program of the system on a disk.
pub fn system(kind: &str, device: &str) -> Result<Infallible> {
    mount_disk(kind, device, "/root")?;
    for at in ["proc", "sys", "dev"] {
        let (from, to) = (format!("/{at}"), format!("/root/{at}"));
        rustix::mount::mount_move(&from, &to).context(to)?;
    }
    std::env::set_current_dir("/root").context("/root")?;
    rustix::mount::mount_move(".", "/").context("the root")?;
    rustix::process::chroot(".").context("the root")?;
    let error = Command::new("/sbin/init").env_clear().env("TERM", "dumb").exec();
    Err(error).context("/sbin/init")
}

/// An identifier of this boot.
pub fn id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().into()
}
