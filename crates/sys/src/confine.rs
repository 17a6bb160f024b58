//! What a child process is and may do, settled between fork and exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd, write};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, chdir, getrlimit, set_dumpable_behavior, setrlimit, umask,
};
pub use rustix::thread::CapabilitySet;
use rustix::thread::{
    CapabilitySets, Gid, Uid, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use crate::user_namespace::PIDS;

/// Capabilities have numbers below this.
const CAPABILITIES_MAX: u32 = 64;
/// The number of user and group that means "leave it as it is".
const NOBODY: u32 = u32::MAX;
/// The limit on core dumps, in bytes, that the kernel takes to mean none at all. With 0 the kernel
/// still gives one to a program that `core_pattern` names behind a `|`. A core dump in a file takes
/// a page at least.
const NO_CORE: u64 = 1;

/// The user and group of a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// This user and group.
    Fixed {
        /// The user's number.
        uid: u32,
        /// The group's number.
        gid: u32,
    },
    /// The user and the group whose number is this one plus the child's PID: no two running
    /// processes have the same.
    PerProcess(u32),
}

impl User {
    /// Returns the numbers of user and group for the process `pid`.
    pub fn of(self, pid: u32) -> (u32, u32) {
        match self {
            User::Fixed { uid, gid } => (uid, gid),
            User::PerProcess(base) => (base.saturating_add(pid), base.saturating_add(pid)),
        }
    }

    /// Whether a child, whatever its PID, can be the user with this number.
    pub fn may_be(self, number: u32) -> bool {
        match self {
            User::Fixed { uid, .. } => number == uid,
            User::PerProcess(base) => number.checked_sub(base).is_some_and(|pid| pid < PIDS),
        }
    }
}

/// The identity of a child without privilege.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Its user and group.
    pub user: User,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
}

/// What a child gets from this process.
#[derive(Default)]
pub struct Child {
    /// Descriptors under the numbers that they have here. Besides its standard streams the child
    /// gets no others.
    pub inherited: Vec<OwnedFd>,
    /// Files `cgroup.procs` of control groups to put the child into, if they accept it.
    pub cgroups: Vec<OwnedFd>,
    /// The directory that it starts in, or `/` if it may not enter that. `None`: this process's
    /// directory.
    pub directory: Option<CString>,
    /// Its user and groups. `None`: those of this process, with all its privileges.
    pub identity: Option<Identity>,
    /// Bytes of memory that it may lock, if this process's limit is lower and may be raised.
    pub lockable_bytes: u64,
}

impl Child {
    /// Adds a descriptor to inherit. Returns its number in the child.
    pub fn inherit(&mut self, descriptor: impl Into<OwnedFd>) -> RawFd {
        let descriptor = descriptor.into();
        let number = descriptor.as_raw_fd();
        self.inherited.push(descriptor);
        number
    }
}

/// Makes `command` start such a child. A child with an identity has no capability and can gain
/// none, creates files for its user alone, and leaves no core dump. No child is protected from the
/// OOM killer, even if this process is.
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
    // "0" means the process that writes it. Failure is ignored: the process that started the child
    // sees which control group it is in.
    for cgroup in &child.cgroups {
        let _ = write(cgroup, b"0");
    }
    if let Ok(score) = open("/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        // A process that may not lower its score keeps it: that is no reason not to start.
        let _ = write(&score, b"0");
    }
    let_lock(child.lockable_bytes);
    if let Some(identity) = &child.identity {
        become_user(identity, groups)?;
    }
    if let Some(directory) = &child.directory {
        enter(directory)?;
    }
    inherit_only(&child.inherited)
}

/// Raises the limit of memory that this process may lock, while it has the privilege for that. A
/// program that may not lock enough says so itself.
fn let_lock(bytes: u64) {
    let had = getrlimit(Resource::Memlock);
    if had.current.is_some_and(|current| current < bytes) {
        let maximum = had.maximum.map(|maximum| maximum.max(bytes));
        let _ = setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum });
    }
}

/// Makes a directory the current one, or the root if this user cannot enter it: a process that is
/// in a directory reaches what is below it, past closed directories above.
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
    forbid_core_dumps()?;
    limit_capabilities(CapabilitySet::empty())?;
    set_thread_groups(groups)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_res_gid(gid, gid, gid)?;
    // Until it executes another program, the child has this process's memory, keys among it. Where
    // `fs.suid_dumpable` is 1, a change of the user lets other processes of that user look into it,
    // but not while it has capabilities that they lack. So it keeps them until it is not dumpable.
    let _ = set_keep_capabilities(true);
    set_thread_res_uid(uid, uid, uid)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    drop_capabilities(CapabilitySet::empty())?;
    set_no_new_privs(true)
}

fn forbid_core_dumps() -> Result<(), Errno> {
    let limit =
        |bytes| setrlimit(Resource::Core, Rlimit { current: Some(bytes), maximum: Some(bytes) });
    match limit(NO_CORE) {
        // The limit is 0 already, and may not be raised.
        Err(Errno::PERM) => limit(0),
        limited => limited,
    }
}

/// Removes all capabilities but `kept` from those that a program executed by this thread can ever
/// gain.
fn limit_capabilities(kept: CapabilitySet) -> Result<(), Errno> {
    for number in 0..CAPABILITIES_MAX {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // This kernel knows no more capabilities.
            Err(Errno::INVAL) => break,
            // A process that may not remove them has none to pass on.
            Err(Errno::PERM) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Drops all capabilities that this thread has, except those in `kept`.
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

/// Closes this process to others. Without the privilege for all processes nobody can get a core
/// dump of it, or look into it. No program that it starts can gain a privilege.
///
/// # Errors
/// As prctl(2) and setrlimit(2).
pub fn close_up() -> io::Result<()> {
    forbid_core_dumps()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(set_no_new_privs(true)?)
}

/// Drops all capabilities but `kept` for this thread, those that it creates and the programs that
/// they start. Call it before there are other threads.
///
/// # Errors
/// As prctl(2) and capset(2).
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    limit_capabilities(kept)?;
    Ok(drop_capabilities(kept)?)
}

/// Keeps what `value` itself holds out of swap, as long as this process lives. Nothing unlocks it,
/// because other data may lie on the same pages.
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
        let may_be = |number| User::PerProcess(1000).may_be(number);
        assert!(may_be(1007) && may_be(1000 + PIDS - 1) && !may_be(999) && !may_be(1000 + PIDS));
        assert!(!User::Fixed { uid: 1, gid: 2 }.may_be(2));
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
        // Nothing marks it as not to be inherited.
        fcntl_setfd(&other, FdFlags::empty()).unwrap();
        let mut child = Child::default();
        let number = child.inherit(meant);
        let mut command = Command::new("sh");
        command.args(["-c", "ls -l /proc/$$/fd"]);
        settle(&mut command, child);
        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(
            output.contains(&format!(" {number} -> ")) && output.contains("/meant"),
            "{output}"
        );
        assert!(!output.contains("/other"), "{output}");
    }

    fn output_of(child: Child, script: &str) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        settle(&mut command, child);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn a_child_starts_even_if_it_cannot_join_a_control_group() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let child = Child { cgroups: vec![full.into()], ..Child::default() };
        assert_eq!(output_of(child, "echo started"), "started\n");
    }

    /// Whether this process may: root may, with these capabilities.
    fn may_become_another_user() -> bool {
        let has = rustix::thread::capabilities(None).unwrap().effective;
        let may = has.contains(CapabilitySet::SETUID | CapabilitySet::SETGID);
        if !may {
            eprintln!("SKIPPED: this process may not become another user");
        }
        may
    }

    #[test]
    fn a_child_leaves_no_core_dump_to_a_program_either() {
        if !may_become_another_user() {
            return;
        }
        let user = User::Fixed { uid: 65534, gid: 65534 };
        let identity = Identity { user, groups: Vec::new() };
        let child = Child { identity: Some(identity), ..Child::default() };
        let output = output_of(child, "grep '^Max core file size' /proc/self/limits");
        let limits: Vec<&str> = output.split_whitespace().skip(4).take(2).collect();
        assert_eq!(limits, ["1", "1"], "{output}");
    }

    #[test]
    fn a_child_may_lock_more_memory_than_this_process() {
        let has = rustix::thread::capabilities(None).unwrap().effective;
        if !has.contains(CapabilitySet::SYS_RESOURCE) {
            eprintln!("SKIPPED: this process may not raise limits");
            return;
        }
        let limit_of = |lockable_bytes| {
            let child = Child { lockable_bytes, ..Child::default() };
            let output = output_of(child, "grep '^Max locked memory' /proc/self/limits");
            output.split_whitespace().nth(3).map(str::to_owned)
        };
        // Where there is no limit, none is set.
        let text = |limit: Option<u64>| Some(limit.map_or("unlimited".into(), |l| l.to_string()));
        let had = getrlimit(Resource::Memlock).current;
        let more = had.map(|bytes| bytes + (1 << 20));
        assert_eq!(limit_of(more.unwrap_or(1 << 20)), text(more));
        assert_eq!(limit_of(0), text(had));
    }

    const SUID_DUMPABLE: &str = "/proc/sys/fs/suid_dumpable";

    /// The host's setting, which is restored on drop.
    struct SuidDumpable(String);

    impl Drop for SuidDumpable {
        fn drop(&mut self) {
            let _ = std::fs::write(SUID_DUMPABLE, &self.0);
        }
    }

    #[test]
    fn a_child_is_closed_to_its_user_before_it_is_another_program() {
        if !may_become_another_user() {
            return;
        }
        let _put_back = SuidDumpable(std::fs::read_to_string(SUID_DUMPABLE).unwrap());
        // Where it cannot be set, the test makes do with the host's own setting.
        let _ = std::fs::write(SUID_DUMPABLE, "1");
        let me = std::env::current_exe().unwrap();
        let test = "confine::tests::one_that_became_a_user_is_closed";
        let ran = Command::new(me).args([test, "--exact", "--ignored"]).output().unwrap();
        let output = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && output.contains("1 passed"), "{output}");
    }

    #[test]
    #[ignore = "a_child_is_closed_to_its_user_before_it_is_another_program runs it in a process \
                of its own"]
    fn one_that_became_a_user_is_closed() {
        let user = User::Fixed { uid: 65534, gid: 65534 };
        become_user(&Identity { user, groups: Vec::new() }, &[]).unwrap();
        let dumpable = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(dumpable, DumpableBehavior::NotDumpable);
        assert!(rustix::thread::capabilities(None).unwrap().permitted.is_empty());
    }
}
