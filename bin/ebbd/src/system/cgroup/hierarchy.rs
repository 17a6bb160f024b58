//! The trees of control groups that are mounted, and where Ebb's groups are in them.

use std::fs;
use std::path::{Path, PathBuf};

pub(super) const MOUNTS: &str = "/proc/self/mountinfo";
/// The group that contains the groups of all VMs.
pub(super) const PARENT: &str = "ebb";
/// The group of QEMU in that of its VM.
pub(super) const QEMU: &str = "qemu";
/// How much of a group's memory may go to the host's swap. Version 1 does not have it.
pub(super) const SWAP: &str = "memory.swap.max";

/// A tree of control groups.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Hierarchy {
    pub(super) root: PathBuf,
    pub(super) version: u8,
}

/// The hierarchy that has this controller.
pub(super) fn find(mounts: &str, controller: &str) -> Option<Hierarchy> {
    let has = |root: &Path| {
        let all = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        all.split_ascii_whitespace().any(|word| word == controller)
    };
    mounts.lines().filter_map(parse).find_map(|(root, kind, options)| match kind {
        "cgroup2" if has(&root) => Some(Hierarchy { root, version: 2 }),
        "cgroup" if options.split(',').any(|word| word == controller) => {
            Some(Hierarchy { root, version: 1 })
        }
        _ => None,
    })
}

/// Parses lines like
/// `36 35 0:30 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory`.
pub(super) fn parse(line: &str) -> Option<(PathBuf, &str, &str)> {
    let (mount, kind) = line.split_once(" - ")?;
    let root = mount.split(' ').nth(4)?;
    let mut kind = kind.split(' ');
    Some((root.into(), kind.next()?, kind.nth(1)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hierarchy_with_the_controller_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let unified = directory.path().display();
        let mounts = format!(
            "30 24 0:26 / {unified} rw,relatime - cgroup2 cgroup2 rw\n\
             31 24 0:27 / /c/cpu,memory rw,relatime shared:9 - cgroup cgroup rw,cpu,memory\n\
             32 24 0:28 / /home rw - ext4 /dev/memory rw,memory\n"
        );
        let one = Hierarchy { root: "/c/cpu,memory".into(), version: 1 };
        assert_eq!(find(&mounts, "memory"), Some(one));
        assert_eq!(find(&mounts, "pids"), None);
        fs::write(directory.path().join("cgroup.controllers"), "cpu io memory pids\n").unwrap();
        let two = Hierarchy { root: directory.path().into(), version: 2 };
        assert_eq!(find(&mounts, "memory"), Some(two));
        assert!(find(&mounts, "pids").is_some());
    }
}
