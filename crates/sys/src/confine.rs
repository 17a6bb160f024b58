//! What a child process is and may do, settled between fork and exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd, write};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, chdir, set_dumpable_behavior, setrlimit, umask,
};
pub use rustix::thread::CapabilitySet;
use rustix::thread::{
    CapabilitySets, Gid, Uid, remove_capability_from_bounding_set, set_capabilities,
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
    /// Where it begins, if it may go there; none: where this process is.
    pub directory: Option<CString>,
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
        // Who may not lower it leaves it: that is no reason to start nothing.
        let _ = write(&score, b"0");
    }
    if let Some(identity) = &child.identity {
        become_user(identity, groups)?;
    }
    if let Some(directory) = &child.directory {
        enter(directory)?;
    }
    inherit_only(&child.inherited)
}

/// Makes a directory the current one, or the root if this user cannot go there: whoever is in a
/// directory reaches what is below it, past closed ones above.
fn enter(directory: &CStr) -> Result<(), Errno> {
    match chdir(directory) {
        Err(Errno::ACCESS) => chdir(c"/"),
        entered => entered,
    }
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
            // Who may not take them out has none to pass on.
            Err(Errno::PERM) => break,
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

/// Nobody can have a core dump of this process, or look into it, but with the privilege for all.
/// No program that it starts can gain a privilege.
///
/// # Errors
/// As prctl(2) and setrlimit(2).
pub fn close_up() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(set_no_new_privs(true)?)
}

/// Leaves this thread, those that it makes and the programs that they start no other capability
/// than these: to be called before there are other threads.
///
/// # Errors
/// As prctl(2) and capset(2).
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    limit_capabilities(kept)?;
    Ok(drop_capabilities(kept)?)
}

/// Keeps what `value` itself holds out of swap, for as long as this process lives: other things
/// may lie on the same pages.
///
/// # Errors
/// As mlock(2).
pub fn lock_in_memory<T>(value: &T) -> io::Result<()> {
    // SAFETY: the bytes are borrowed, so they are mapped; locking changes none of them.
    let locked = unsafe { libc::mlock(std::ptr::from_ref(value).cast(), size_of::<T>()) };
    if locked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_of_its_own_goes_by_the_process() {
        assert_eq!(User::PerProcess(1000).of(7), (1007, 1007));
        assert_eq!(User::Fixed { uid: 1, gid: 2 }.of(7), (1, 2));
    }

    #[test]
    fn a_locked_value_is_counted() {
        let locked = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let before = locked();
        let value = Box::new([1_u8; 8192]);
        lock_in_memory(&*value).unwrap();
        assert!(locked() >= before + 8, "{before} kB, then {} kB", locked());
    }

    #[test]
    fn a_child_has_the_descriptors_meant_for_it_alone() {
        let directory = tempfile::tempdir().unwrap();
        let open = |name: &str| std::fs::File::create(directory.path().join(name)).unwrap();
        let (meant, other) = (open("meant"), open("other"));
        // Nobody has marked it as not to be inherited.
        fcntl_setfd(&other, FdFlags::empty()).unwrap();
        let mut child = Child::default();
        let number = child.inherit(meant);
        let mut command = Command::new("sh");
        command.args(["-c", "ls -l /proc/$$/fd"]);
        settle(&mut command, child);
        let told = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(told.contains(&format!(" {number} -> ")) && told.contains("/meant"), "{told}");
        assert!(!told.contains("/other"), "{told}");
    }
}
