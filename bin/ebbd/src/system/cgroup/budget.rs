//! What is left of the memory that control groups allow all VMs together.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::slice;

use ebb_policy::pressure::Budget;

use super::hierarchy::{Hierarchy, MOUNTS, PARENT, find};

const OWN: &str = "/proc/self/cgroup";
const CONTROLLER: &str = "memory";

/// Files of the limits, of which the least holds, and of the memory in use. Lines of `memory.stat`
/// with what the kernel can take back of that, as it counts in `MemAvailable`.
struct Files {
    limits: &'static [&'static str],
    used: &'static str,
    caches: &'static [&'static str],
}

const VERSION_1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    caches: &["total_inactive_file", "total_active_file"],
};
const VERSION_2: Files = Files {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    caches: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// The control groups that contain all VMs, as far as they are mounted: each limits what the groups
/// in it take together. VMs have groups in `ebb`. Where no VM has one, their processes are in the
/// group of this process.
pub struct VmGroups {
    files: &'static Files,
    /// The group of this process and those around it. The last one is the mounted one.
    own: Vec<PathBuf>,
}

impl VmGroups {
    /// Finds them.
    pub fn find() -> VmGroups {
        let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
        let own = fs::read_to_string(OWN).unwrap_or_default();
        let at = find(&mounts, CONTROLLER);
        let files = match &at {
            Some(Hierarchy { version: 2, .. }) => &VERSION_2,
            _ => &VERSION_1,
        };
        let own = at.map(|at| directories(&at, &mounts, &own)).unwrap_or_default();
        VmGroups { files, own }
    }

    /// What is left in each of them that has a limit below the host's memory.
    pub fn budgets(&self, host_bytes: u64) -> Vec<Budget> {
        let Some((root, own)) = self.own.split_last() else { return Vec::new() };
        let parent = root.join(PARENT);
        let inner = if has_groups(&parent) { slice::from_ref(&parent) } else { own };
        let all = inner.iter().chain([root]);
        all.filter_map(|directory| budget(directory, self.files, host_bytes)).collect()
    }
}

fn has_groups(directory: &Path) -> bool {
    let mut entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
}

/// The directories of this process's group and of those around it, by `/proc/self/mountinfo` and
/// `/proc/self/cgroup`.
fn directories(at: &Hierarchy, mounts: &str, own: &str) -> Vec<PathBuf> {
    let group = own.lines().find_map(|line| group_of(line, at.version));
    let top = mounts.lines().find_map(|line| top_of(line, &at.root)).unwrap_or("/");
    // A group that lies outside of the mounted ones has a path with `..` or another beginning.
    let is_inside =
        |below: &&Path| below.components().all(|part| matches!(part, Component::Normal(_)));
    let below = group.and_then(|group| Path::new(group).strip_prefix(top).ok()).filter(is_inside);
    let parts = below.unwrap_or(Path::new("")).components();
    let own: PathBuf = at.root.components().chain(parts).collect();
    let around = own.ancestors().take_while(|directory| directory.starts_with(&at.root));
    around.map(Path::to_owned).collect()
}

/// Parses lines like `4:cpu,memory:/a/b` of version 1 and `0::/a/b` of version 2.
fn group_of(line: &str, version: u8) -> Option<&str> {
    let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
    let is_it = match version {
        2 => controllers.is_empty(),
        _ => controllers.split(',').any(|word| word == CONTROLLER),
    };
    is_it.then_some(group)
}

/// The group that is mounted at `root`. In a container, this may be the container's own.
fn top_of<'a>(line: &'a str, root: &Path) -> Option<&'a str> {
    let mut fields = line.split(' ').skip(3);
    let top = fields.next()?;
    (Path::new(fields.next()?) == root).then_some(top)
}

fn budget(directory: &Path, files: &Files, host_bytes: u64) -> Option<Budget> {
    let read = |file: &str| fs::read_to_string(directory.join(file)).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    // Without a limit, the file has the word `max`, or more bytes than any host.
    let limits = files.limits.iter().filter_map(|file| number(file));
    let total_bytes = limits.min().filter(|&bytes| bytes < host_bytes)?;
    let used_bytes = number(files.used)?;
    let stat = read("memory.stat")?;
    let caches = files.caches.iter().filter_map(|key| line_of(&stat, key));
    let cache_bytes = caches.fold(0, u64::saturating_add);
    let left_bytes = total_bytes.saturating_sub(used_bytes.saturating_sub(cache_bytes));
    let name = format!("control group {}", directory.display());
    Some(Budget { name, total_bytes, available_bytes: left_bytes })
}

/// The number of a line such as `inactive_file 8081408`.
fn line_of(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    rest.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(version: u8) -> Hierarchy {
        Hierarchy { root: "/c/memory".into(), version }
    }

    /// The directories of a group, with `top` as the mounted one.
    fn found(version: u8, top: &str, own: &str) -> Vec<String> {
        let mounts = format!(
            "30 24 0:26 / / rw - ext4 /dev/vda rw\n\
             36 35 0:30 {top} /c/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        );
        let found = directories(&at(version), &mounts, own);
        found.iter().map(|directory| directory.display().to_string()).collect()
    }

    #[test]
    fn the_own_group_and_those_around_it_are_found() {
        let one = "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/y\n";
        assert_eq!(found(1, "/", one), ["/c/memory/a/b", "/c/memory/a", "/c/memory"]);
        assert_eq!(found(2, "/", one), ["/c/memory/y", "/c/memory"]);
        assert_eq!(found(1, "/a", one), ["/c/memory/b", "/c/memory"]);
        assert_eq!(found(1, "/a/b", one), ["/c/memory"]);
    }

    #[test]
    fn a_group_elsewhere_leaves_the_mounted_one() {
        for own in ["4:memory:/other", "4:memory:/a/../../etc", "4:memory:/..", "memory", ""] {
            assert_eq!(found(1, "/a", own), ["/c/memory"], "{own}");
        }
    }

    #[test]
    fn what_is_left_of_a_limit_includes_caches() {
        let group = tempfile::tempdir().unwrap();
        let budget = |files| budget(group.path(), files, 1 << 30);
        let write = |file: &str, text: &str| fs::write(group.path().join(file), text).unwrap();
        let stat = "inactive_file_x 1\ninactive_file 100\ntotal_inactive_file 200\n\
                    active_file 20\ntotal_active_file 30\nslab_reclaimable 4\n";
        write("memory.stat", stat);
        for (files, available_bytes) in [(&VERSION_1, 730), (&VERSION_2, 624)] {
            let limit = files.limits[0];
            assert_eq!(budget(files), None);
            write(limit, "1000\n");
            write(files.used, "500\n");
            let found = budget(files).unwrap();
            assert_eq!((found.total_bytes, found.available_bytes), (1000, available_bytes));
            assert!(found.name.starts_with("control group /"), "{}", found.name);
            for no_limit in ["max\n", "9223372036854771712\n", "1073741824\n", "-1\n", ""] {
                write(limit, no_limit);
                assert_eq!(budget(files), None, "{no_limit}");
            }
            write(limit, "1000\n");
            write(files.used, "18446744073709551615\n");
            assert_eq!(budget(files).map(|budget| budget.available_bytes), Some(0));
        }
        write("memory.stat", "nothing\n");
        assert_eq!(budget(&VERSION_2).map(|budget| budget.available_bytes), Some(0));
        write("memory.high", "900\n");
        assert_eq!(budget(&VERSION_2).map(|budget| budget.total_bytes), Some(900));
        write("memory.high", "max\n");
        assert_eq!(budget(&VERSION_2).map(|budget| budget.total_bytes), Some(1000));
    }

    #[test]
    fn a_limit_counts_if_it_is_one_of_the_vms() {
        let root = tempfile::tempdir().unwrap();
        let limit = |below: &str, bytes: &str| {
            let group = root.path().join(below);
            fs::create_dir_all(&group).unwrap();
            fs::write(group.join(VERSION_2.limits[0]), bytes).unwrap();
            fs::write(group.join(VERSION_2.used), "0").unwrap();
            fs::write(group.join("memory.stat"), "").unwrap();
        };
        let own = ["system/ebbd", "system", ""].map(|below| root.path().join(below));
        let groups = VmGroups { files: &VERSION_2, own: own.into() };
        let totals = || -> Vec<u64> {
            groups.budgets(1 << 30).iter().map(|budget| budget.total_bytes).collect()
        };
        limit("", "9");
        limit("system", "8");
        limit("system/ebbd", "7");
        limit("ebb", "6");
        assert_eq!(totals(), [7, 8, 9], "no VM has a group of its own");
        limit("ebb/web.1", "5");
        assert_eq!(totals(), [6, 9]);
    }
}
