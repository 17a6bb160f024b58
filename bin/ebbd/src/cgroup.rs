//! A control group for each QEMU. Its limits are such as only a QEMU that went astray meets.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use ebb_api::{RunRequest, VmName};

use crate::record::Record;

const MOUNTS: &str = "/proc/self/mountinfo";
/// The group that all of them are in.
const PARENT: &str = "ebb";
/// Beside its RAM, and an eighth as much: for what QEMU itself needs, TCG's translations among it.
const OVERHEAD_BYTES: u64 = 2 << 30;
/// How often, and for how long in all, a group is tried to be removed.
const TRIES: u32 = 10;
const TRY_EVERY: Duration = Duration::from_millis(10);
/// Beside its processors.
const TASKS: u64 = 1024;

/// What limits a process, and the files that take a limit, in a hierarchy of version 1 and in
/// one of version 2.
const CONTROLLERS: [(&str, &str, &str); 2] =
    [("memory", "memory.limit_in_bytes", "memory.max"), ("pids", "pids.max", "pids.max")];

/// A control group, in each hierarchy that can limit it. Removed unless kept.
#[derive(Default)]
pub struct Group {
    directories: Vec<PathBuf>,
    kept: bool,
}

impl Group {
    /// Makes one for the QEMU of such a VM, whose memory may be unknown.
    ///
    /// # Errors
    /// No hierarchy is mounted here, or none can be written, in words.
    pub fn make(request: &RunRequest, limits_memory: bool) -> Result<Group, String> {
        let mounts = fs::read_to_string(MOUNTS).map_err(|error| format!("{MOUNTS}: {error}"))?;
        let most = request.max_bytes();
        let limits = [most + most / 8 + OVERHEAD_BYTES, u64::from(request.cpus) + TASKS];
        let mut group = Group::default();
        for ((controller, one, two), limit) in CONTROLLERS.into_iter().zip(limits) {
            let hierarchy = find(&mounts, controller)
                .ok_or_else(|| format!("no hierarchy with {controller} is mounted"))?;
            let file = if hierarchy.version == 2 { two } else { one };
            if controller == "memory" && !limits_memory {
                continue;
            }
            let made = group.add(&hierarchy, controller, &request.name);
            made.and_then(|directory| fs::write(directory.join(file), limit.to_string()))
                .map_err(|error| format!("{}: {error}", hierarchy.root.display()))?;
        }
        Ok(group)
    }

    /// Its directory in one hierarchy.
    fn add(&mut self, at: &Hierarchy, controller: &str, name: &VmName) -> io::Result<PathBuf> {
        let parent = at.root.join(PARENT);
        fs::create_dir_all(&parent)?;
        if at.version == 2 {
            for above in [&at.root, &parent] {
                enable(above, controller)?;
            }
        }
        // Another daemon may have a VM of this name.
        let directory = parent.join(format!("{name}.{}", std::process::id()));
        if !self.directories.contains(&directory) {
            make_anew(&directory)?;
            self.directories.push(directory.clone());
        }
        Ok(directory)
    }

    /// Where who is to be in it writes itself into.
    ///
    /// # Errors
    /// As open(2).
    pub fn doors(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |directory: &PathBuf| {
            File::options().write(true).open(directory.join("cgroup.procs")).map(OwnedFd::from)
        };
        self.directories.iter().map(open).collect()
    }

    /// Its directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Somebody is in it.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.kept {
            remove(&self.directories);
        }
    }
}

/// Removes the control group of a QEMU that has ended.
pub fn remove_of(record: &Record) {
    record.confinement.iter().for_each(|confinement| remove(&confinement.cgroups));
}

/// Removes a control group that nobody is in any more.
fn remove(directories: &[PathBuf]) {
    for directory in directories {
        match remove_soon(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("control group {}: {error}", directory.display());
            }
            _ => {}
        }
    }
}

/// A process counts as in its group for a moment after its end was told.
fn remove_soon(directory: &Path) -> io::Result<()> {
    for _ in 0..TRIES {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => sleep(TRY_EVERY),
            removed => return removed,
        }
    }
    fs::remove_dir(directory)
}

/// In place of the empty one of a VM of this name that was let go before it ended.
fn make_anew(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_dir(directory)?;
            fs::create_dir(directory)
        }
        made => made,
    }
}

/// Lets groups in this one have the controller.
fn enable(directory: &Path, controller: &str) -> io::Result<()> {
    let path = directory.join("cgroup.subtree_control");
    match fs::read_to_string(&path)?.split_ascii_whitespace().any(|word| word == controller) {
        true => Ok(()),
        false => fs::write(&path, format!("+{controller}")),
    }
}

/// A tree of control groups.
#[derive(PartialEq, Eq, Debug)]
struct Hierarchy {
    root: PathBuf,
    version: u8,
}

/// The hierarchy that has this controller.
fn find(mounts: &str, controller: &str) -> Option<Hierarchy> {
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

/// `36 35 0:30 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory`
fn parse(line: &str) -> Option<(PathBuf, &str, &str)> {
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
