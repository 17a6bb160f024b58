//! The processes in a control group: who they are, and how they are ended.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ebb_sys::process::{Process, is_no_process};

pub(super) const MEMBERS: &str = "cgroup.procs";
/// Writing 1 there kills all processes in the group. Version 1 does not have it.
const KILL: &str = "cgroup.kill";

/// The processes in a group. A process without a number here is 0.
pub(super) fn members(directory: &Path) -> io::Result<Vec<i32>> {
    let text = fs::read_to_string(directory.join(MEMBERS))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Ends all processes in those of these groups that contain only such users.
pub(super) fn end_members_if(directories: &[PathBuf], is_one: impl Fn(u32) -> bool) {
    let ours = |directory: &&PathBuf| has_only(directory, &is_one).unwrap_or(false);
    directories.iter().filter(ours).for_each(|directory| end_members(directory));
}

/// Whether all processes in a group belong to such users. A process of another container, which may
/// have a group with the same name, has no number here. Looks twice: a process that has ended since
/// it was listed tells nothing, and may have made another one.
pub(super) fn has_only(directory: &Path, is_one: impl Fn(u32) -> bool) -> io::Result<bool> {
    for _ in 0..2 {
        for pid in members(directory)? {
            if !is_ended_or(pid, &is_one)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn is_ended_or(pid: i32, is_one: impl Fn(u32) -> bool) -> io::Result<bool> {
    match Process::open(pid).and_then(|process| process.user()) {
        Ok(user) => Ok(is_one(user)),
        Err(error) if is_no_process(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Kills all in the group. If the kernel cannot do that, they stay, and so does the group.
pub(super) fn end_members(directory: &Path) {
    let kill = directory.join(KILL);
    if kill.exists()
        && let Err(error) = fs::write(&kill, "1")
    {
        tracing::warn!("{}: {error}", kill.display());
    }
}
