//! May this process take over another's paging?

use std::fs;

use ebb_sys::confine::CapabilitySet;
use rustix::process::geteuid;

use super::finding::Finding;

const CHECK: &str = "privilege";
const COST: &str = "no VM can be managed";

/// Bits of `CapEff`, from `include/uapi/linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_MKNOD: u32 = 27;
/// Yama's ptrace scope in which nobody may trace until the next boot.
const PTRACE_FORBIDDEN: &str = "3";

/// Whether this user cannot take over another process's paging.
pub fn is_unprivileged() -> bool {
    let has = rustix::thread::capabilities(None).map(|has| has.effective);
    !geteuid().is_root() && !has.is_ok_and(|has| has.contains(CapabilitySet::SYS_PTRACE))
}

/// Returns the finding that a user without privilege sees first.
pub fn unprivileged() -> Finding {
    Finding::missing(
        CHECK,
        format!("this is user {}: what only root can see is UNKNOWN below", geteuid().as_raw()),
        "ebb run, and every command that speaks to ebbd, needs root",
        "run ebb, and ebb doctor, as root",
    )
}

pub fn check() -> Finding {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    judge(effective_capabilities(&status), yama.trim())
}

fn judge(capabilities: Option<u64>, ptrace_scope: &str) -> Finding {
    let Some(capabilities) = capabilities else {
        return Finding::missing(CHECK, "/proc does not tell", COST, "mount /proc");
    };
    let has = |bit: u32| capabilities >> bit & 1 == 1;
    if !has(CAP_SYS_PTRACE) {
        return Finding::missing(CHECK, "no CAP_SYS_PTRACE", COST, "run as root, in no container");
    }
    if ptrace_scope == PTRACE_FORBIDDEN {
        let mend = "take kernel.yama.ptrace_scope = 3 out of sysctl's settings and reboot";
        return Finding::missing(CHECK, "kernel.yama.ptrace_scope is 3", COST, mend);
    }
    if !has(CAP_MKNOD) {
        let cost = "a QEMU that runs as another user or in a sandbox cannot be managed";
        return Finding::degraded(CHECK, "no CAP_MKNOD", cost, "run as root, in no container");
    }
    Finding::ok(CHECK, "may trace and make device nodes")
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn reads_the_effective_set() {
        let status = "Name:\tebb\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
        assert_eq!(effective_capabilities(status), Some(0x1ff_ffff_ffff));
        assert_eq!(effective_capabilities("CapEff:\tzz"), None);
        assert_eq!(effective_capabilities(""), None);
    }

    #[test]
    fn tracing_is_needed_and_nodes_are_useful() {
        let both = 1 << CAP_SYS_PTRACE | 1 << CAP_MKNOD;
        assert_eq!(judge(Some(both), "1").verdict, Verdict::Ok);
        assert_eq!(judge(Some(both), "").verdict, Verdict::Ok);
        assert_eq!(judge(Some(both), "3").verdict, Verdict::Missing);
        assert_eq!(judge(Some(1 << CAP_SYS_PTRACE), "0").verdict, Verdict::Degraded);
        assert_eq!(judge(Some(1 << CAP_MKNOD), "0").verdict, Verdict::Missing);
        assert_eq!(judge(None, "0").verdict, Verdict::Missing);
    }
}
