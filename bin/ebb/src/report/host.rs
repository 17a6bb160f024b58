//! What the host is, as far as it matters to Ebb.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::bundle::Bundle;

/// Most of a file of the kernel's.
const FILE_MOST_BYTES: u64 = 16 << 10;
/// Most entries of the run directory's list.
const ENTRIES_MOST: usize = 2000;
/// How deep that list goes: the run directory, its VMs' directory, each VM's.
const DEPTH_MOST: usize = 3;
const FILES: [&str; 29] = [
    "/etc/os-release",
    "/proc/version",
    "/proc/cmdline",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/swaps",
    "/proc/pressure/cpu",
    "/proc/pressure/io",
    "/proc/pressure/memory",
    "/proc/misc",
    "/proc/self/cgroup",
    "/proc/self/uid_map",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/nr_hugepages",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/overcommit_ratio",
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/unprivileged_userfaultfd",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/kernel/mm/ksm/run",
    "/sys/devices/system/node/online",
    "/sys/module/kvm_intel/parameters/nested",
    "/sys/module/kvm_amd/parameters/nested",
    "/sys/module/zswap/parameters/enabled",
    "/sys/fs/cgroup/cgroup.controllers",
];

/// Adds the host, the settings of this command, and the names in the run directory.
pub fn add(bundle: &mut Bundle, run_dir: &Path) {
    bundle.text("host.txt", "the host's kernel, memory and settings", &host());
    bundle.text("settings.txt", "variables EBB_* of this command", &settings());
    bundle.text(
        "run-directory.txt",
        "names, sizes and owners of the run directory",
        &list(run_dir),
    );
}

fn host() -> String {
    let mut text = processor();
    for path in FILES {
        let content = read(path).unwrap_or_else(|error| format!("({error})"));
        text += &format!("== {path}\n{}\n", content.trim_end());
    }
    text
}

/// The processor's name and the number of its threads. All of the file would be long.
fn processor() -> String {
    let all = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let names = all.lines().filter_map(|line| line.strip_prefix("model name"));
    let mut counts = BTreeMap::<&str, u32>::new();
    for name in names {
        *counts.entry(name.trim_start_matches(['\t', ' ', ':'])).or_default() += 1;
    }
    let lines = counts.iter().map(|(name, count)| format!("{count} x {name}\n"));
    format!("== processors\n{}", lines.collect::<String>())
}

fn read(path: &str) -> std::io::Result<String> {
    let mut content = Vec::new();
    File::open(path)?.take(FILE_MOST_BYTES).read_to_end(&mut content)?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

/// Variables that are settings. All of them are sizes, switches and names of files.
pub fn is_setting(name: &str) -> bool {
    name.starts_with("EBB_")
}

fn settings() -> String {
    let all = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| is_setting(name))?;
        Some((name, value.to_string_lossy().into_owned()))
    });
    let sorted: BTreeMap<String, String> = all.collect();
    sorted.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

fn list(run_dir: &Path) -> String {
    let mut lines = Vec::new();
    list_below(run_dir, 0, &mut lines);
    if lines.len() >= ENTRIES_MOST {
        lines.push("(and more)\n".into());
    }
    lines.concat()
}

fn list_below(path: &Path, depth: usize, lines: &mut Vec<String>) {
    if lines.len() >= ENTRIES_MOST {
        return;
    }
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) => return lines.push(format!("{}: {error}\n", path.display())),
    };
    let kind = match found.file_type() {
        kind if kind.is_dir() => 'd',
        kind if kind.is_socket() => 's',
        kind if kind.is_symlink() => 'l',
        kind if kind.is_file() => '-',
        _ => '?',
    };
    let (mode, owner, bytes) = (found.mode() & 0o7777, found.uid(), found.len());
    lines.push(format!("{kind} {mode:04o} {owner:>10} {bytes:>14} {}\n", path.display()));
    if kind == 'd' && depth < DEPTH_MOST {
        let mut below: Vec<_> =
            fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        below.sort();
        below.iter().for_each(|path| list_below(path, depth + 1, lines));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_told_and_what_is_not_there_is_named() {
        let text = host();
        assert!(text.contains("== /proc/meminfo\nMemTotal:"), "{text}");
        for path in FILES {
            assert!(text.contains(&format!("== {path}\n")), "{path}");
        }
    }

    #[test]
    fn a_list_has_names_and_no_content() {
        let home = tempfile::tempdir().unwrap();
        let vm = home.path().join("vms/web");
        fs::create_dir_all(&vm).unwrap();
        fs::write(vm.join("swap.key"), "secret").unwrap();
        let text = list(home.path());
        assert!(
            text.contains("              6 ") && text.contains("/vms/web/swap.key\n"),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
        assert!(list(Path::new("/nowhere")).contains("/nowhere: No such file"));
    }
}
