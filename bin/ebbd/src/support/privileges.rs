//! Privileges that the daemon and its helpers give up when they start.

use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, ScopedJoinHandle};

use ebb_api::advice;
use ebb_sys::call_filter::{Role, forbid_calls};
use ebb_sys::confine::{self, CapabilitySet};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Score of this process for the OOM killer: other processes are killed before the one that has
/// their memory.
const OOM_SCORE: &str = "-900";
/// Fewest descriptors without a warning: with fewer, a daemon soon has none left.
const DESCRIPTORS_LEAST: u64 = 1024;
/// Approximate number of descriptors that a VM takes in its own process.
const DESCRIPTORS_EACH: u32 = 30;
/// Whether this is the process of a VM, in which QEMU runs already.
static SERVES_VM: AtomicBool = AtomicBool::new(false);
/// Capabilities that the daemon needs, or a QEMU that is started with `--privileged`.
const DAEMON: [CapabilitySet; 20] = [
    // Images, devices and directories of other users.
    CapabilitySet::CHOWN,
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::DAC_READ_SEARCH,
    CapabilitySet::FOWNER,
    // QEMUs that are users of their own.
    CapabilitySet::KILL,
    CapabilitySet::SETGID,
    CapabilitySet::SETUID,
    CapabilitySet::SETPCAP,
    // A userfaultfd in a VMM, and the device node by which it is made.
    CapabilitySet::SYS_PTRACE,
    CapabilitySet::MKNOD,
    // Where pages are, moving them between nodes, and keys that are locked in memory.
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_NICE,
    CapabilitySet::SYS_RESOURCE,
    CapabilitySet::IPC_LOCK,
    // Privileged QEMUs: commands to the host's SCSI devices, -chroot, and set-group-ID bits of what
    // their guests write to shared directories.
    CapabilitySet::SYS_RAWIO,
    CapabilitySet::SYS_CHROOT,
    CapabilitySet::FSETID,
    // Privileged QEMUs: networks.
    CapabilitySet::NET_ADMIN,
    CapabilitySet::NET_RAW,
    CapabilitySet::NET_BIND_SERVICE,
];

/// Capabilities of [`DAEMON`] that the process of a VM needs once QEMU runs and has a userfaultfd.
const OF_VM: [CapabilitySet; 7] = [
    // Swap files, and directories that QEMUs of other users have their sockets in.
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::DAC_READ_SEARCH,
    // To end a QEMU of another user.
    CapabilitySet::KILL,
    // QEMU's descriptors and page tables, and helpers that trace it.
    CapabilitySet::SYS_PTRACE,
    // Where pages are, and moving them between nodes.
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_NICE,
    // Keys that are locked in memory.
    CapabilitySet::IPC_LOCK,
];

/// Forbids core dumps and gaining privileges, in every process of this program.
///
/// # Errors
/// Those of prctl(2) and setrlimit(2).
pub fn close_up() -> io::Result<()> {
    confine::close_up()
}

/// Gives up capabilities that the daemon and the processes that it starts never need, and has the
/// OOM killer choose the daemon late.
///
/// # Errors
/// Those of prctl(2) and capset(2).
pub fn of_daemon() -> io::Result<()> {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::warn!("the OOM killer does not spare this process: {error}");
    }
    if let Some(most) = raise_descriptors().filter(|&most| most < DESCRIPTORS_LEAST) {
        tracing::warn!("{}", scarce(most, false));
    }
    confine::keep_capabilities(DAEMON.into_iter().collect())
}

/// Raises the limit of open files to the most that is allowed. A shell allows 1024 at first, which
/// some dozens of VMs use up. Returns the new limit; none: no limit.
fn raise_descriptors() -> Option<u64> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("the limit of open files cannot be raised: {error}");
    }
    getrlimit(Resource::Nofile).current
}

/// Advice about a request that failed for want of descriptors; none: that is not why it failed.
pub fn want_of_descriptors(why: &str) -> Option<String> {
    let error = std::io::Error::from(rustix::io::Errno::MFILE).to_string();
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    why.contains(&error).then(|| scarce(most, SERVES_VM.load(Relaxed)))
}

/// Advice about a limit of `most` open files: in `ebbd`, from which the processes of VMs have it,
/// or in such a process (`serves_vm`).
fn scarce(most: u64, serves_vm: bool) -> String {
    let pid = std::process::id();
    let more = "more (`ulimit -Hn`, LimitNOFILE= of systemd)";
    match serves_vm {
        true => format!(
            "the VM's process {pid} may open {most} files: end ebbd, start it with {more}, and end \
             that process (`kill {pid}`): the next one recovers the VM"
        ),
        false => format!(
            "ebbd, and each process that it starts for a VM, may open {most} files, and a VM needs \
             some {DESCRIPTORS_EACH}: {} and start it with {more}",
            advice::end(pid)
        ),
    }
}

/// Gives up, for this thread and those that it starts later, the capabilities that the process of a
/// VM needs only to start QEMU and to make a userfaultfd in it.
///
/// # Errors
/// Those of prctl(2) and capset(2).
fn of_vm_thread() -> io::Result<()> {
    confine::keep_capabilities(OF_VM.into_iter().collect())
}

/// Does work in a thread of its own after [`of_vm_thread`], and waits for it: for threads that must
/// begin before QEMU does.
///
/// # Errors
/// Those of [`of_vm_thread`], or there is no thread to be had.
///
/// # Panics
/// The work panicked.
pub fn as_vm_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let done = thread::scope(|scope| {
        let work = || of_vm_thread().map(|()| work());
        thread::Builder::new().spawn_scoped(scope, work).map(ScopedJoinHandle::join)
    })?;
    done.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Does [`of_vm_thread`], and filters the system calls of all threads, and of the helpers that they
/// start.
///
/// # Errors
/// Those of prctl(2), capset(2) and seccomp(2).
pub fn of_vm() -> io::Result<()> {
    SERVES_VM.store(true, Relaxed);
    of_vm_thread()?;
    filter(Role::Vm)
}

/// Gives up all capabilities, for a relay: it only forwards messages between two sockets of its own
/// user.
///
/// # Errors
/// Those of prctl(2), capset(2) and seccomp(2).
pub fn of_relay() -> io::Result<()> {
    confine::keep_capabilities(CapabilitySet::empty())?;
    filter(Role::Device { uses_uring: false })
}

/// Gives up what a process that serves one device does not need. Its files may belong to another
/// user, and it makes some beside its socket.
///
/// # Errors
/// Those of prctl(2), capset(2) and seccomp(2).
pub fn of_device(uses_uring: bool) -> io::Result<()> {
    confine::keep_capabilities(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH)?;
    filter(Role::Device { uses_uring })
}

/// Filters system calls if the kernel can: a kernel without such filters serves VMs all the same.
fn filter(role: Role) -> io::Result<()> {
    match forbid_calls(role) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            tracing::warn!("system calls are not filtered: {error}");
            Ok(())
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_lack_of_descriptors_is_reported_with_the_limit() {
        let why = format!("QEMU: {}", io::Error::from(rustix::io::Errno::MFILE));
        let message = want_of_descriptors(&why).unwrap();
        for word in ["ulimit -Hn", "LimitNOFILE", &format!("`kill {}`", std::process::id())] {
            assert!(message.contains(word) && !message.contains('\n'), "{message}");
        }
        let in_vm = scarce(1024, true);
        for word in ["the VM's process", "end ebbd", &format!("`kill {}`", std::process::id())] {
            assert!(in_vm.contains(word) && !in_vm.contains('\n'), "{in_vm}");
        }
        assert_eq!(want_of_descriptors("QEMU: No such file or directory (os error 2)"), None);
    }

    #[test]
    fn all_descriptors_that_are_allowed_are_had() {
        let before = getrlimit(Resource::Nofile);
        let less = before.maximum.map(|most| most / 2);
        setrlimit(Resource::Nofile, Rlimit { current: less, ..before }).unwrap();
        assert_eq!(raise_descriptors(), before.maximum);
        setrlimit(Resource::Nofile, before).unwrap();
    }

    /// A daemon that systemd starts must have all of them, and need not have more.
    #[test]
    fn the_unit_of_systemd_leaves_the_daemon_what_it_needs() {
        let unit = include_str!("../../../../deploy/systemd/ebbd.service");
        let sets = unit.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
        let left: BTreeSet<String> = sets.flat_map(str::split_whitespace).map(Into::into).collect();
        let kept: CapabilitySet = DAEMON.into_iter().collect();
        let kept = kept.iter_names().map(|(name, _)| format!("CAP_{name}"));
        assert_eq!(left, kept.collect::<BTreeSet<_>>());
    }

    #[test]
    fn a_privileged_qemu_can_do_what_it_needs_and_nobody_loads_modules() {
        let kept: CapabilitySet = DAEMON.into_iter().collect();
        for needed in [
            CapabilitySet::SYS_RAWIO,
            CapabilitySet::SYS_CHROOT,
            CapabilitySet::FSETID,
            CapabilitySet::NET_ADMIN,
        ] {
            assert!(kept.contains(needed), "{needed:?}");
        }
        assert!(kept.contains(OF_VM.into_iter().collect()), "a VM's process has some of them");
        for never in [CapabilitySet::SYS_MODULE, CapabilitySet::SYS_BOOT, CapabilitySet::SYS_TIME] {
            assert!(!kept.contains(never), "{never:?}");
        }
    }
}
