//! What a child process is and may do, settled between fork and exec.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd, write};
use rustix::process::{Resource, Rlimit, setrlimit, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// Capabilities have numbers below this.
const CAPABILITIES_MAX: u32 = 64;
/// The number of user and group that means "leave it".
const NOBODY: u32 = u32::MAX;

/// Who a child is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// This user and group.
    Fixed {
        /// The user's number.
        uid: u32,
        /// The group's.
        gid: u32,
    },
    /// The user and the group whose number is this one plus the child's process number: no two
    /// processes that run have the same.
    PerProcess(u32),
}

impl User {
    /// The numbers of user and group for the process `pid`.
    pub fn of(self, pid: u32) -> (u32, u32) {
        match self {
            User::Fixed { uid, gid } => (uid, gid),
            User::PerProcess(base) => (base.saturating_add(pid), base.saturating_add(pid)),
        }
    }
}

/// A child without privilege.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Its user and group.
    pub user: User,
    /// Its other groups.
    pub groups: Vec<u32>,
}

/// What a child has of this process.
#[derive(Default)]
pub struct Child {
    /// Descriptors under the numbers that they have here; beside its standard streams it has
    /// no others.
    pub inherited: Vec<OwnedFd>,
    /// Files `cgroup.procs` of control groups that it is put into.
    pub cgroups: Vec<OwnedFd>,
    /// Who it is; none: who this process is, with all that it may.
    pub identity: Option<Identity>,
}

impl Child {
    /// Has it inherit this descriptor; the number that it has there.
    pub fn inherit(&mut self, descriptor: impl Into<OwnedFd>) -> RawFd {
        let descriptor = descriptor.into();
        let number = descriptor.as_raw_fd();
        self.inherited.push(descriptor);
        number
    }
}

/// Has `command` start such a child. One with an identity has no capability and can gain none,
/// makes files for its user alone, and leaves no core dump. It is killed for want of memory no
/// later than other processes, whatever protects this one.
pub fn settle(command: &mut Command, child: Child) {
    let groups: Vec<Gid> = { child.identity.iter() }
        .flat_map(|identity| &identity.groups)
        .filter(|&&group| group != NOBODY)
        .map(|&group| Gid::from_raw(group))
        .collect();
    let settle = move || Ok(be(&child, &groups)?);
    // SAFETY: between fork and exec `be` only makes system calls, directly: it allocates
    // nothing, takes no lock and does not panic.
    unsafe { command.pre_exec(settle) };
}

fn be(child: &Child, groups: &[Gid]) -> Result<(), Errno> {
    // "0" is whoever writes it.
    child.cgroups.iter().try_for_each(|cgroup| write(cgroup, b"0").map(drop))?;
    if let Ok(score) = open("/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        write(&score, b"0")?;
    }
    if let Some(identity) = &child.identity {
        become_user(identity, groups)?;
    }
    inherit_only(&child.inherited)
}

fn become_user(identity: &Identity, groups: &[Gid]) -> Result<(), Errno> {
    let pid = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let (uid, gid) = identity.user.of(pid);
    if uid == NOBODY || gid == NOBODY {
        return Err(Errno::INVAL);
    }
    umask(Mode::from_raw_mode(0o077));
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    limit_capabilities(CapabilitySet::empty())?;
    set_thread_groups(groups)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    // Root would keep them.
    drop_capabilities(CapabilitySet::empty())?;
    set_no_new_privs(true)
}

/// Takes all other capabilities out of what a program can ever gain that this thread executes.
fn limit_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    for number in 0..CAPABILITIES_MAX {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // This kernel knows no more.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Leaves this thread no other capability than these, of those that it has.
fn drop_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    let has = rustix::thread::capabilities(None)?;
    let left = has.permitted & kept;
    let sets =
        CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)
}

fn inherit_only(inherited: &[OwnedFd]) -> Result<(), Errno> {
    // SAFETY: it changes a flag of descriptors, which nobody uses between fork and exec.
    let closed = unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    if closed != 0 {
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::NOSYS));
    }
    inherited.iter().try_for_each(|descriptor| fcntl_setfd(descriptor, FdFlags::empty()))
}
