//! Ways in which a boot ends.

use std::convert::Infallible;
use std::fs::{self, File};

use rustix::system::{RebootCommand, reboot};

use crate::{Context, Result};

/// Resets the machine.
pub fn restart() -> Result<Infallible> {
    reboot(RebootCommand::Restart).context("reboot")?;
    Err("reboot(2) returned".into())
}

/// Starts another kernel in place of this one, without the firmware.
pub fn kexec(kernel: &str, initrd: &str) -> Result<Infallible> {
    let open = |path| File::open(path).context(path);
    let line = fs::read_to_string("/proc/cmdline").context("the command line")?;
    ebb_sys::kexec::load(&open(kernel)?, &open(initrd)?, line.trim_end()).context("kexec")?;
    reboot(RebootCommand::Kexec).context("reboot")?;
    Err("reboot(2) returned".into())
}

/// Turns the machine off.
pub fn off() -> Result<Infallible> {
    reboot(RebootCommand::PowerOff).context("power off")?;
    Err("reboot(2) returned".into())
}

/// Makes the kernel panic.
pub fn panic() -> Result<Infallible> {
    fs::write("/proc/sys/kernel/sysrq", "1").context("sysrq")?;
    fs::write("/proc/sysrq-trigger", "c").context("sysrq-trigger")?;
    Err("the kernel survived".into())
}

/// Stops for good, and leaves on the screen what was printed: init must not end.
pub fn halt() -> ! {
    loop {
        std::thread::park();
    }
}
