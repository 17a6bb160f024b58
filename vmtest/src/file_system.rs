//! The programs that make and check file systems.

use std::path::Path;
use std::process::Command;

use crate::host::Ran;

/// Makes a file system in an image or on a device.
///
/// # Panics
/// The program fails.
pub fn make(kind: &str, at: &Path) {
    run(
        match kind {
            "ext4" => &["mkfs.ext4", "-q", "-F", "-b", "4096"],
            "xfs" => &["mkfs.xfs", "-q", "-s", "size=4096"],
            "btrfs" => &["mkfs.btrfs", "-q", "--sectorsize", "4096"],
            kind => panic!("no program makes {kind}"),
        },
        at,
    );
}

/// Checks a file system that nobody uses.
///
/// # Panics
/// The file system is damaged.
pub fn check(kind: &str, at: &Path) {
    run(
        match kind {
            "ext4" => &["e2fsck", "-fn"],
            "xfs" if at.is_file() => &["xfs_repair", "-n", "-f"],
            "xfs" => &["xfs_repair", "-n"],
            "btrfs" => &["btrfs", "check", "--readonly"],
            kind => panic!("no program checks {kind}"),
        },
        at,
    );
}

fn run(arguments: &[&str], at: &Path) {
    let [program, options @ ..] = arguments else { return };
    Ran::of(Command::new(program).args(options).arg(at)).ok();
}
