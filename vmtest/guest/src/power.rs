//! Ends of a boot.

use std::convert::Infallible;
use std::fs;

use rustix::system::{RebootCommand, reboot};

use crate::{Context, Result};

/// Starts the machine anew.
pub fn restart() -> Result<Infallible> {
    reboot(RebootCommand::Restart).context("reboot")?;
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

/// Stops for good, leaving what was printed on the screen: init must not end.
pub fn halt() -> ! {
    loop {
        std::thread::park();
    }
}
