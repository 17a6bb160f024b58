//! A control group for each VM, `ebb/NAME.PID`. It limits what the VM's processes take together, and
//! only a QEMU that misbehaves reaches that. Two groups are in it: `qemu` for QEMU and what it
//! starts, and `ebb` for the VM's process.

mod budget;
mod hierarchy;
mod processes;
mod removal;
mod service;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ebb_api::{RunRequest, VmName};
use ebb_sys::confine::User;

pub use self::budget::VmGroups;
use self::hierarchy::{Hierarchy, MOUNTS, PARENT, QEMU, SWAP, find};
use self::processes::{MEMBERS, end_members_if, members};
use self::removal::{clear_below, remove_above, remove_all};
pub use self::removal::{remove, remove_of};
pub use self::service::enter;

/// Memory beside the VM's RAM and an eighth of it: what QEMU itself needs, for example for TCG's
/// translations.
const OVERHEAD_BYTES: u64 = 2 << 30;
/// Threads beside one for each processor.
const TASKS: u64 = 1024;
const MEMORY: &str = "memory.max";
/// Kernels without swap do not have it.
const SWAPS: &str = "/proc/swaps";

/// What is limited, by which controller, and the files that take the limit in hierarchies of
/// version 1 and version 2.
const CONTROLLERS: [Controller; 2] = [
    Controller { of: "memory", name: "memory", files: ["memory.limit_in_bytes", MEMORY] },
    Controller { of: "threads", name: "pids", files: ["pids.max", "pids.max"] },
];

struct Controller {
    of: &'static str,
    name: &'static str,
    files: [&'static str; 2],
}

/// The control group of a QEMU, in each hierarchy that can limit that of its VM. Removed when dropped
/// unless kept.
#[derive(Default)]
pub struct Group {
    directories: Vec<PathBuf>,
    /// User of the QEMU in it; none: no QEMU is to be in it.
    user: Option<User>,
    kept: bool,
}

impl Group {
    /// Makes a group for the QEMU of the requested VM, with this user. QEMU's memory may be
    /// unknown. Also returns what has no limit, and why.
    pub fn make(request: &RunRequest, user: User, limits_memory: bool) -> (Group, Vec<String>) {
        let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
        let most = request.max_bytes();
        let limits = [most + most / 8 + OVERHEAD_BYTES, u64::from(request.cpus) + TASKS];
        let mut group = Group { directories: Vec::new(), user: Some(user), kept: false };
        let (mut without, mut warning) = (Vec::new(), None);
        for (controller, limit) in CONTROLLERS.iter().zip(limits) {
            let limit = (controller.name != "memory" || limits_memory).then_some(limit);
            match group.limit(&mounts, controller, limit, &request.name) {
                Ok(lack) => warning = warning.or(lack),
                Err(why) => without.push((controller.of, why)),
            }
        }
        (group, lacks(&without).into_iter().chain(warning).collect())
    }

    /// Sets one limit, and returns why it is not effective, if so. Without a limit of memory, this
    /// memory still stays out of the host's swap where one group has both settings.
    fn limit(
        &mut self,
        mounts: &str,
        controller: &Controller,
        limit: Option<u64>,
        name: &VmName,
    ) -> Result<Option<String>, String> {
        let at = find(mounts, controller.name)
            .ok_or_else(|| format!("no hierarchy with {} is mounted", controller.name))?;
        if limit.is_none() && at.version == 1 {
            return Ok(None);
        }
        let [one, two] = controller.files;
        let file = if at.version == 2 { two } else { one };
        let of_vm = self.add(&at, controller.name, name)?;
        set(&of_vm, file, limit).map_err(in_words(&of_vm))?;
        Ok((file == MEMORY).then(|| unlimited_swap(&of_vm, Path::new(SWAPS))).flatten())
    }

    /// Makes its directory in one hierarchy, in that of the VM's group. Returns the latter.
    fn add(&mut self, at: &Hierarchy, controller: &str, name: &VmName) -> Result<PathBuf, String> {
        let parent = at.root.join(PARENT);
        fs::create_dir_all(&parent).map_err(in_words(&parent))?;
        if at.version == 2 {
            enable(&at.root, controller)?;
            enable(&parent, controller)?;
        }
        // Another daemon's VM may have this name, so the number is that of this VM's process.
        let of_vm = parent.join(format!("{name}.{}", std::process::id()));
        let directory = of_vm.join(QEMU);
        if !self.directories.contains(&directory) {
            make_anew(&of_vm).map_err(in_words(&of_vm))?;
            if let Err(error) = fs::create_dir(&directory) {
                let _ = remove_all(&of_vm);
                return Err(in_words(&directory)(error));
            }
            self.directories.push(directory);
        }
        Ok(of_vm)
    }

    /// Open files through which a process can join the group, as far as they can be opened.
    pub fn doors(&self) -> Vec<OwnedFd> {
        let open = |directory: &PathBuf| {
            File::options().write(true).open(directory.join(MEMBERS)).ok().map(OwnedFd::from)
        };
        self.directories.iter().filter_map(open).collect()
    }

    /// Its directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// The directories that the process is in, and those that it is not in.
    pub fn around(&self, pid: i32) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let is_in = |directory: &PathBuf| members(directory).is_ok_and(|all| all.contains(&pid));
        self.directories.iter().cloned().partition(is_in)
    }

    /// Keeps the group: a QEMU is in it.
    pub fn keep(mut self) {
        self.kept = true;
        for directory in &self.directories {
            // This removes only a directory that QEMU could not join.
            if fs::remove_dir(directory).is_ok() {
                remove_above(directory);
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.kept {
            // The group was made for one QEMU, whose start has failed. Where another container sees
            // this hierarchy, others have a group with the same name.
            let is_one = |uid| self.user.is_some_and(|user| user.may_be(uid));
            end_members_if(&self.directories, is_one);
            remove(&self.directories);
        }
    }
}

/// Warnings about missing limits.
fn lacks(without: &[(&str, String)]) -> Vec<String> {
    match without {
        [(one, why), (other, same)] if why == same => {
            vec![format!("no control group limits QEMU's {one} and {other}: {why}")]
        }
        all => { all.iter() }
            .map(|(of, why)| format!("no control group limits QEMU's {of}: {why}"))
            .collect(),
    }
}

fn in_words(at: &Path) -> impl FnOnce(io::Error) -> String {
    move |error| format!("{}: {error}", at.display())
}

/// Sets a limit. If it limits memory, none of that may go to the host's swap: guests' bytes would
/// be on a disk in the clear, and would count as returned while Ebb takes them for resident.
fn set(directory: &Path, file: &str, limit: Option<u64>) -> io::Result<()> {
    let swap = directory.join(SWAP);
    if file.starts_with("memory") && swap.exists() {
        fs::write(swap, "0")?;
    }
    limit.map_or(Ok(()), |limit| fs::write(directory.join(file), limit.to_string()))
}

/// Warning about a group of version 2 whose memory the host may swap out.
fn unlimited_swap(directory: &Path, swaps: &Path) -> Option<String> {
    let may = swaps.exists() && !directory.join(SWAP).exists();
    may.then(|| {
        format!(
            "QEMU's memory may go to the host's swap, as the guest wrote it: {} has no {SWAP}: boot the \
             host with swapaccount=1, or encrypt its swap",
            directory.display()
        )
    })
}

/// Removes empty groups of VMs' processes that have ended. At the `start` of a daemon, this
/// includes groups with its own number: another process had it then.
pub fn clear_left(start: bool) {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    for controller in CONTROLLERS {
        if let Some(hierarchy) = find(&mounts, controller.name) {
            clear_below(&hierarchy.root.join(PARENT), start);
        }
    }
}

/// Makes the directory, in place of an empty one of a VM with this name that was detached before it
/// ended.
fn make_anew(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            remove_all(directory)?;
            fs::create_dir(directory)
        }
        made => made,
    }
}

/// Enables the controller for groups in this one.
fn enable(directory: &Path, controller: &str) -> Result<(), String> {
    let path = directory.join("cgroup.subtree_control");
    let has = |text: String| text.split_ascii_whitespace().any(|word| word == controller);
    let enabled = fs::read_to_string(&path).and_then(|text| match has(text) {
        true => Ok(()),
        false => fs::write(&path, format!("+{controller}")),
    });
    enabled.map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => {
            let at = directory.display();
            format!(
                "{at} has processes in it, so that groups below it cannot be limited; in a \
                 container, before it starts ebbd: mkdir {at}/init && xargs -rn1 <{at}/{MEMBERS} \
                 >{at}/init/{MEMBERS}"
            )
        }
        _ => in_words(&path)(error),
    })
}
