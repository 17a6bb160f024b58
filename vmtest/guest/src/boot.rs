//! What init does first: file systems and modules.

use std::fs::{self, File};
use std::path::Path;

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

/// Loads every module of the image, in the order that their dependencies ask
/// for.
pub fn load_modules() -> Result<()> {
    let order = fs::read_to_string(Path::new(MODULES).join("order")).context("module order")?;
    for name in order.lines() {
        let file = File::open(Path::new(MODULES).join(name)).context(name)?;
        rustix::system::finit_module(&file, c"", 0).context(name)?;
    }
    Ok(())
}

/// Tells one boot from the next.
pub fn id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().into()
}
