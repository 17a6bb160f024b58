//! Undoes on the host what a killed benchmark could not undo; the next benchmark does that. Names
//! of directories and control groups contain the process number, which tells that their process has
//! ended.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Scratch, setting, undo};

const PREFIX: &str = "ebb-bench-";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const BOOT_COPY: &str = "boot";
const SETTINGS: &str = "settings";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Time between two attempts: the kernel removes a process's memory first, and its group later.
const TO_END: Duration = Duration::from_millis(100);
const TRIES: u32 = 100;

/// Makes a directory with this process's number in its name. If this process is killed, the next
/// benchmark removes it.
///
/// # Errors
/// Those of mkdir(2).
pub fn scratch() -> anyhow::Result<Scratch> {
    Ok(Scratch::new(&format!("{PREFIX}{}-", std::process::id()))?)
}

/// Undoes what killed benchmarks left. From then on, records all settings of the host until the
/// result is dropped.
///
/// # Errors
/// A file operation fails. What cannot be undone is only reported.
pub fn begin() -> anyhow::Result<Scratch> {
    for directory in left_in(&std::env::temp_dir())? {
        println!("{} was left by a benchmark that was killed: swept", directory.display());
        sweep(&directory);
    }
    for group in left_groups() {
        end(&group);
    }
    let record = scratch()?;
    fs::write(record.path().join(BOOT_COPY), fs::read(BOOT)?)?;
    let settings = record.path().join(SETTINGS);
    fs::create_dir(&settings)?;
    setting::record_in(settings);
    Ok(record)
}

/// Whether a name has the number of a process that has ended.
fn is_left(name: &str) -> bool {
    let number = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    let pid = number.and_then(|(number, _)| number.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

fn left_in(place: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(place).with_context(|| place.display().to_string())?.flatten();
    let is_one =
        |path: &PathBuf| path.file_name().is_some_and(|name| is_left(&name.to_string_lossy()));
    Ok(entries.map(|entry| entry.path()).filter(is_one).collect())
}

/// Returns the groups left by ended processes, of all controllers.
fn left_groups() -> Vec<PathBuf> {
    let controllers = fs::read_dir(CGROUPS).into_iter().flatten().flatten();
    controllers.flat_map(|controller| left_in(&controller.path()).unwrap_or_default()).collect()
}

fn sweep(directory: &Path) {
    let number = directory.file_name().map(|name| name.to_string_lossy().into_owned());
    let number = number.as_deref().and_then(|name| name.split('-').nth(2)).unwrap_or_default();
    // QEMU and the daemon use what is below them, so they end first.
    let of = format!("{PREFIX}{number}-");
    let is_of = |group: &PathBuf| {
        group.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&of))
    };
    left_groups().iter().filter(|group| is_of(group)).for_each(|group| end(group));
    let now = fs::read(BOOT).ok();
    // Records of an earlier boot are ignored, because this boot began with its own settings.
    let is_of_now = now.is_some() && fs::read(directory.join(BOOT_COPY)).ok() == now;
    let records = if is_of_now { setting::records(&directory.join(SETTINGS)) } else { Vec::new() };
    let loops = loops(directory);
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let area = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let is_ours = |device: &String| {
        let block = device.replacen("/dev", "/sys/block", 1);
        loops.contains(device) || records.iter().any(|(path, _)| path.starts_with(&block))
    };
    for device in swaps.lines().filter_map(area).filter(is_ours) {
        run("swapoff", &[&device]);
    }
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let place = |line: &str| line.split(' ').nth(1).map(str::to_owned);
    for place in mounts.lines().filter_map(place).filter(|at| Path::new(at).starts_with(directory))
    {
        run("umount", &[&place]);
    }
    for device in loops.iter().rev() {
        run("losetup", &["--detach", device]);
    }
    for (path, value) in records {
        if let Err(error) = fs::write(&path, value) {
            eprintln!("{}: {error}", path.display());
        }
    }
    if let Err(error) = fs::remove_dir_all(directory) {
        eprintln!("{}: {error}", directory.display());
    }
}

/// Returns the loop devices on files of a directory, each after those that it stands on.
fn loops(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut left: Vec<(String, String)> = entries
        .filter_map(|entry| {
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
            Some((format!("/dev/{}", entry.file_name().to_str()?), file.trim().to_owned()))
        })
        .collect();
    let mut found: Vec<String> = Vec::new();
    loop {
        let before = found.len();
        left.retain(|(device, file)| {
            let is_one = Path::new(file).starts_with(directory) || found.contains(file);
            if is_one {
                found.push(device.clone());
            }
            !is_one
        });
        if found.len() == before {
            return found;
        }
    }
}

/// Ends all processes in a control group that has lost its owner.
fn end(group: &Path) {
    for _ in 0..TRIES {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        let pids = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
        for pid in pids {
            // The process may have ended.
            let _ = kill_process(pid, Signal::KILL);
        }
        match fs::remove_dir(group) {
            Err(error) if error.kind() != ErrorKind::NotFound => std::thread::sleep(TO_END),
            _ => return,
        }
    }
    eprintln!("{} stays", group.display());
}

fn run(program: &str, arguments: &[&str]) {
    let mut command: Command = undo::helper(program);
    match command.args(arguments).status() {
        Ok(status) if status.success() => {}
        failed => eprintln!("{program} {}: {failed:?}", arguments.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use vmtest::HostSetting;

    use super::*;
    use crate::bench::swap::medium::{Content, Drive, Medium, Mounted, SwapArea, format};

    const VICTIM: &str = "EBB_SWEEP_VICTIM";

    /// Is not a test by itself, but a benchmark that is killed.
    #[test]
    fn victim() {
        let Some(setting) = env::var_os(VICTIM) else { return };
        let _record = begin().unwrap();
        let scratch = scratch().unwrap();
        let _setting = HostSetting::of(Path::new(&setting), "changed").unwrap();
        let drive = |name: &str, medium| {
            Drive::new(&scratch.path().join(name), Content::Empty(16 << 20), medium)
        };
        let made =
            drive("swap", Medium::Hdd).and_then(|swap| Ok((swap, drive("disk", Medium::Ssd)?)));
        let Ok((swap, disk)) = made else { return println!("\nno loop device") };
        format(&disk).unwrap();
        let _mounted = Mounted::on(&disk, &scratch.path().join("mounted")).unwrap();
        let Ok(_area) = SwapArea::at(&[swap.device()]) else { return println!("\nswaps already") };
        println!("\nready");
        std::thread::park();
    }

    #[test]
    fn what_a_killed_benchmark_left_is_swept() {
        let _turn = crate::bench::swap::linux::one_at_a_time();
        let place = vmtest::Scratch::new("ebb-test-").unwrap();
        let setting = place.path().join("setting");
        fs::write(&setting, "before").unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["bench::sweep::tests::victim", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(VICTIM, &setting).stdout(Stdio::piped());
        let mut victim = command.spawn().unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
        let is_ready = lines.any(|line| line == "ready");
        victim.kill().unwrap();
        victim.wait().unwrap();
        if !is_ready {
            return eprintln!("SKIPPED: no loop device, or this host swaps already");
        }
        let name = format!("{PREFIX}{}-", victim.id());
        let left = || -> Vec<PathBuf> {
            let of = |path: &PathBuf| path.to_string_lossy().contains(&name);
            left_in(&env::temp_dir()).unwrap().into_iter().filter(of).collect()
        };
        let directories = left();
        assert_eq!(directories.len(), 2, "{directories:?}");
        let devices: Vec<String> = directories.iter().flat_map(|place| loops(place)).collect();
        assert_eq!(devices.len(), 3, "{devices:?}");
        directories.iter().for_each(|directory| sweep(directory));
        assert!(left().is_empty());
        assert_eq!(fs::read_to_string(&setting).unwrap(), "before");
        let swaps = fs::read_to_string("/proc/swaps").unwrap();
        assert!(devices.iter().all(|device| !swaps.contains(device)), "{swaps}");
        assert!(directories.iter().all(|place| loops(place).is_empty()));
    }

    #[test]
    fn a_running_process_has_left_nothing() {
        assert!(!is_left(&format!("{PREFIX}{}-vm", std::process::id())));
        assert!(is_left(&format!("{PREFIX}4194305-vm")));
        assert!(!is_left("ebb-bench-vm") && !is_left("ebb-4194305-vm"));
        assert!(!is_left("ebb-bench-4194305"));
    }
}
