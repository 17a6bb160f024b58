//! A filter of system calls, for processes that serve a device or a VM.

use std::io;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Calls that start programs, look into other processes, make devices, or change what a process may
/// do. A process that serves one device needs none of them; the helpers of a VM's process do.
const OF_HELPERS: [c_long; 19] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_userfaultfd,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_capset,
];
/// Calls of no use to any process of Ebb's that serves a guest, and of much use to an attacker in
/// control of it.
const OF_NOBODY: [c_long; 60] = [
    // They run programs of the kernel, or old ones.
    libc::SYS_uselib,
    libc::SYS_perf_event_open,
    libc::SYS_bpf,
    UPROBE,
    URETPROBE,
    // They reach files past directories, or watch whole file systems.
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    // They mount, or change what is seen as the root.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    OPEN_TREE_ATTR,
    libc::SYS_mount_setattr,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    // They change users and what those may do.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_personality,
    libc::SYS_modify_ldt,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    // They change the host.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS__sysctl,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_settimeofday,
    libc::SYS_adjtimex,
];
/// The calls of io_uring.
const URING: [c_long; 3] =
    [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
/// uprobe(2), newer than the `libc` crate, which names the other calls.
const UPROBE: c_long = 336;
/// uretprobe(2), newer than the `libc` crate, which names the other calls.
const URETPROBE: c_long = 335;
/// open_tree_attr(2), newer than the `libc` crate, which names the other calls.
const OPEN_TREE_ATTR: c_long = 467;
/// Numbers from here on are calls of the x32 ABI, which has numbers of its own.
const X32: u32 = 0x4000_0000;

/// What a process does, as far as it decides which calls it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It serves one device. With `uses_uring` it may make the calls of io_uring.
    Device {
        /// Whether its I/O goes through io_uring.
        uses_uring: bool,
    },
    /// It serves one VM: it looks into the VMM, and starts helpers that trace the VMM.
    Vm,
}

/// Makes system calls that a process with this role does not need fail with `EPERM` from now on, in
/// all threads and in all programs that they start: those that mount, change users or change the
/// host, and for a [`Role::Device`] also those that start programs or look into other processes.
///
/// # Errors
/// `Unsupported`: the kernel was built without such filters. Otherwise as seccomp(2), in words.
pub fn forbid_calls(role: Role) -> io::Result<()> {
    let program = program(role).map_err(io::Error::other)?;
    seccompiler::apply_filter_all_threads(&program).map_err(in_kind)
}

fn in_kind(error: seccompiler::Error) -> io::Error {
    match &error {
        seccompiler::Error::Seccomp(why) if why.raw_os_error() == Some(libc::ENOSYS) => {
            io::Error::new(io::ErrorKind::Unsupported, error)
        }
        _ => io::Error::other(error),
    }
}

fn program(role: Role) -> Result<BpfProgram, seccompiler::BackendError> {
    let forbidden: Vec<c_long> = match role {
        Role::Device { uses_uring } => {
            let uring = URING.iter().filter(|_| !uses_uring);
            OF_NOBODY.iter().chain(&OF_HELPERS).chain(uring).copied().collect()
        }
        Role::Vm => OF_NOBODY.to_vec(),
    };
    let clone = (libc::SYS_clone, vec![SeccompRule::new(vec![forbidden_flags(role)?])?]);
    let rules = forbidden.into_iter().map(|call| (call, Vec::new())).chain([clone]).collect();
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, TargetArch::x86_64)?;
    let rest: BpfProgram = filter.try_into()?;
    Ok(by_number().into_iter().chain(rest).collect())
}

/// Flags with which clone(2) fails: it makes no user namespace, in which its child would have all
/// capabilities. For a device it makes threads only.
fn forbidden_flags(role: Role) -> Result<SeccompCondition, seccompiler::BackendError> {
    let (mask, value) = match role {
        Role::Device { .. } => (libc::CLONE_THREAD, 0),
        Role::Vm => (libc::CLONE_NEWUSER, libc::CLONE_NEWUSER as u64),
    };
    SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask as u64), value)
}

/// Returns the rules before the list: for x32's calls, which the list does not name, and for
/// clone3(2), whose flags a filter cannot see. A caller that finds clone3(2) missing calls
/// clone(2).
fn by_number() -> [sock_filter; 5] {
    let statement = |code: u32, k: u32| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let unless = |compare: u32, k: u32| {
        let code = (libc::BPF_JMP | compare | libc::BPF_K) as u16;
        sock_filter { code, jt: 0, jf: 1, k }
    };
    let fail =
        |errno: i32| statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32);
    [
        // `seccomp_data` begins with the call's number.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        unless(libc::BPF_JGE, X32),
        fail(libc::EPERM),
        unless(libc::BPF_JEQ, libc::SYS_clone3 as u32),
        fail(libc::ENOSYS),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Makes a call that does nothing if it is allowed: none of its arguments means anything.
    fn errno_of(call: c_long) -> Option<i32> {
        // SAFETY: no address is mapped at -1, no descriptor has that number, and the calls that
        // this is used for change nothing then.
        let result = unsafe { libc::syscall(call, -1, -1, -1, -1, -1, -1) };
        (result < 0).then(|| io::Error::last_os_error().raw_os_error()).flatten()
    }

    fn run_alone(test: &str) {
        let me = std::env::current_exe().unwrap();
        let test = format!("call_filter::tests::{test}");
        let ran = Command::new(me).args([&test, "--exact", "--ignored"]).output().unwrap();
        let output = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && output.contains("1 passed"), "{output}");
    }

    #[test]
    fn a_kernel_without_filters_differs_from_one_that_refuses() {
        let kind = |errno| {
            in_kind(seccompiler::Error::Seccomp(io::Error::from_raw_os_error(errno))).kind()
        };
        assert_eq!(kind(libc::ENOSYS), io::ErrorKind::Unsupported);
        assert_eq!(kind(libc::EACCES), io::ErrorKind::Other);
    }

    #[test]
    fn a_server_of_a_device_starts_threads_and_nothing_else() {
        run_alone("with_the_filter");
        run_alone("with_io_uring");
    }

    #[test]
    fn a_server_of_a_vm_starts_helpers_that_may_look_into_processes() {
        run_alone("with_helpers");
    }

    #[test]
    #[ignore = "a_server_of_a_device_starts_threads_and_nothing_else runs it in a process of its \
                own: a filter stays"]
    fn with_the_filter() {
        let x32 = c_long::from(X32);
        assert_ne!(errno_of(x32 | libc::SYS_getpid), Some(libc::EPERM));
        forbid_calls(Role::Device { uses_uring: false }).unwrap();
        // 520 is execve(2) in x32.
        for call in [libc::SYS_getpid, libc::SYS_ptrace, 520] {
            assert_eq!(errno_of(x32 | call), Some(libc::EPERM), "x32: {call}");
        }
        for call in [
            libc::SYS_fsopen,
            libc::SYS_fsconfig,
            libc::SYS_fsmount,
            libc::SYS_fspick,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            OPEN_TREE_ATTR,
            libc::SYS_mount_setattr,
            libc::SYS_kexec_file_load,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_process_mrelease,
            libc::SYS_userfaultfd,
            libc::SYS_fanotify_init,
            libc::SYS_quotactl_fd,
            libc::SYS_clock_adjtime,
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_enter,
        ] {
            assert_eq!(errno_of(call), Some(libc::EPERM), "{call}");
        }
        assert_eq!(errno_of(libc::SYS_clone3), Some(libc::ENOSYS));
        // SAFETY: a process that these made would have a copy of all of this one, and end at once.
        let made = unsafe {
            [0, libc::CLONE_NEWUSER].map(|flags| {
                let made = libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0);
                if made == 0 {
                    libc::_exit(0);
                }
                (made, io::Error::last_os_error().raw_os_error())
            })
        };
        assert_eq!(made, [(-1, Some(libc::EPERM)); 2]);
        let thread = std::thread::spawn(|| 7);
        assert_eq!(thread.join().unwrap(), 7);
        assert!(std::fs::read("/proc/self/status").is_ok());
    }

    #[test]
    #[ignore = "a_server_of_a_device_starts_threads_and_nothing_else runs it in a process of its \
                own: a filter stays"]
    fn with_io_uring() {
        let without = errno_of(libc::SYS_io_uring_setup);
        forbid_calls(Role::Device { uses_uring: true }).unwrap();
        assert_eq!(errno_of(libc::SYS_io_uring_setup), without);
        assert_eq!(errno_of(libc::SYS_bpf), Some(libc::EPERM));
    }

    #[test]
    #[ignore = "a_server_of_a_vm_starts_helpers_that_may_look_into_processes runs it in a process \
                of its own: a filter stays"]
    fn with_helpers() {
        let before = [libc::SYS_ptrace, libc::SYS_pidfd_getfd, libc::SYS_capset].map(errno_of);
        forbid_calls(Role::Vm).unwrap();
        let after = [libc::SYS_ptrace, libc::SYS_pidfd_getfd, libc::SYS_capset].map(errno_of);
        assert_eq!(before, after);
        for call in [
            libc::SYS_bpf,
            libc::SYS_mount,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_setuid,
            libc::SYS_init_module,
            libc::SYS_kexec_load,
            libc::SYS_open_by_handle_at,
        ] {
            assert_eq!(errno_of(call), Some(libc::EPERM), "{call}");
        }
        assert!(Command::new("true").status().unwrap().success());
        // What it starts is filtered, too.
        let output = Command::new("unshare").args(["--mount", "true"]).output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    }
}
