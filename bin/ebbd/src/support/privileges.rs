//! What the daemon and its helpers give up as they start.

use std::fs;
use std::io;

use ebb_api::advice;
use ebb_sys::call_filter::forbid_calls;
use ebb_sys::confine::{self, CapabilitySet};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Other processes are killed for want of memory before the one that holds their memory.
const OOM_SCORE: &str = "-900";
/// With fewer descriptors a daemon soon has none left.
const DESCRIPTORS_LEAST: u64 = 1024;
/// What a VM takes, by and large.
const DESCRIPTORS_EACH: u32 = 30;
/// What the daemon does with each, or a QEMU that is started with `--privileged`:
const DAEMON: [CapabilitySet; 20] = [
    // images, devices and directories of others;
    CapabilitySet::CHOWN,
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::DAC_READ_SEARCH,
    CapabilitySet::FOWNER,
    // QEMUs that are users of their own;
    CapabilitySet::KILL,
    CapabilitySet::SETGID,
    CapabilitySet::SETUID,
    CapabilitySet::SETPCAP,
    // a userfaultfd in a VMM, and the node by which it is made;
    CapabilitySet::SYS_PTRACE,
    CapabilitySet::MKNOD,
    // where pages are, and moving them between nodes; keys that are locked in memory;
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_NICE,
    CapabilitySet::SYS_RESOURCE,
    CapabilitySet::IPC_LOCK,
    // of privileged QEMUs: commands to the host's SCSI devices, -chroot, set-group-ID bits of what
    // their guests write to shared directories,
    CapabilitySet::SYS_RAWIO,
    CapabilitySet::SYS_CHROOT,
    CapabilitySet::FSETID,
    // and networks.
    CapabilitySet::NET_ADMIN,
    CapabilitySet::NET_RAW,
    CapabilitySet::NET_BIND_SERVICE,
];

/// For all of them: no core dump, and no privilege to be gained.
///
/// # Errors
/// As prctl(2) and setrlimit(2).
pub fn close_up() -> io::Result<()> {
    confine::close_up()
}

/// For the daemon: what it, and what it starts, can never do is given up, and it is killed late.
///
/// # Errors
/// As prctl(2) and capset(2).
pub fn of_daemon() -> io::Result<()> {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::warn!("as likely to be killed for want of memory as others: {error}");
    }
    if let Some(most) = raise_descriptors().filter(|&most| most < DESCRIPTORS_LEAST) {
        tracing::warn!("{}", scarce(most));
    }
    confine::keep_capabilities(DAEMON.into_iter().collect())
}

/// Lets the daemon open as many files as it is allowed to: a shell allows 1024 at first, which some
/// dozens of VMs fill. How many that is; none: any number.
fn raise_descriptors() -> Option<u64> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("no more files can be opened than before: {error}");
    }
    getrlimit(Resource::Nofile).current
}

/// What is said where a request failed for want of descriptors; none: that is not why.
pub fn want_of_descriptors(why: &str) -> Option<String> {
    let error = std::io::Error::from(rustix::io::Errno::MFILE).to_string();
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    why.contains(&error).then(|| scarce(most))
}

fn scarce(most: u64) -> String {
    format!(
        "ebbd may open {most} files, and needs some {DESCRIPTORS_EACH} for each VM: {} and start it with \
         more (`ulimit -Hn`, LimitNOFILE= of systemd)",
        advice::end(std::process::id())
    )
}

/// For a relay, which only passes messages on between two sockets of its own user.
///
/// # Errors
/// As prctl(2), capset(2) and seccomp(2).
pub fn of_relay() -> io::Result<()> {
    confine::keep_capabilities(CapabilitySet::empty())?;
    filter(false)
}

/// For who serves one device: its files may be another user's, and it makes some beside its socket.
///
/// # Errors
/// As prctl(2), capset(2) and seccomp(2).
pub fn of_device(uses_uring: bool) -> io::Result<()> {
    confine::keep_capabilities(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH)?;
    filter(uses_uring)
}

/// As far as the kernel can: one without such filters serves VMs all the same.
fn filter(uses_uring: bool) -> io::Result<()> {
    match forbid_calls(uses_uring) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            tracing::warn!("system calls are not filtered: {error}");
            Ok(())
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_descriptors_is_told_with_the_limit() {
        let why = format!("QEMU: {}", io::Error::from(rustix::io::Errno::MFILE));
        let told = want_of_descriptors(&why).unwrap();
        for word in ["ulimit -Hn", "LimitNOFILE", &format!("`kill {}`", std::process::id())] {
            assert!(told.contains(word) && !told.contains('\n'), "{told}");
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
        for never in [CapabilitySet::SYS_MODULE, CapabilitySet::SYS_BOOT, CapabilitySet::SYS_TIME] {
            assert!(!kept.contains(never), "{never:?}");
        }
    }
}
