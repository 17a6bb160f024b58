//! Which users the QEMUs that Ebb starts run as, and what they may do.

mod sandbox;
mod vm_user;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Once;

use ebb_api::{Confinement, RunRequest, VmName};
use ebb_sys::confine::{CapabilitySet, Child, Identity, User};
use ebb_sys::user_namespace::{UserNamespace, missing_privilege};
use ebb_vm::launch::Accelerator;
use rustix::process::{Signal, geteuid};

use self::sandbox::{has_sandbox, own_sandbox};
use self::vm_user::GROUPS_MAX;
pub use self::vm_user::VmUser;
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::system::cgroup::{self, Group};
use crate::system::denied_args;
use crate::system::starting::Qemu;

const KVM: &str = "/dev/kvm";
/// Advice about a QEMU that its filter ended.
const FILTERED: &str = ". Its filter of system calls forbade something, as starting a program: leave \
                        that out, or pass a -sandbox of your own; --privileged runs QEMU as root";
const TUN: &str = "/dev/net/tun";
/// Directory of the nodes by which groups of passed-through devices are opened.
const VFIO: &str = "/dev/vfio/";
/// Part of the name of each of QEMU's PCI devices that are passed through.
const PASSED_THROUGH: &str = "vfio-pci";
/// What QEMU locks for such devices besides the guest's memory: firmware, and the memory of
/// emulated graphics. They are far smaller.
const LOCKED_BESIDE: u64 = 1 << 30;
/// File with the first port that a process without privileges may use. The next constant is its
/// default.
const LOWEST_PORT: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
const LOWEST_PORT_DEFAULT: u32 = 1024;
/// strerror(3) of `EACCES` and of `EPERM`.
const DENIED: [&str; 2] = ["Permission denied", "Operation not permitted"];

/// How a QEMU is to be confined.
pub struct Plan {
    /// Its user; none: root.
    pub identity: Option<Identity>,
    /// Whether it filters its own system calls.
    pub sandbox: bool,
    group: Group,
    lacks: Vec<String>,
    /// Bytes of memory that it must be able to lock.
    lockable_bytes: u64,
}

impl Plan {
    /// The plan for a requested VM. `default` is the daemon's user for requests that name none.
    ///
    /// # Errors
    /// There is no such user, or it could not use what the VM needs.
    pub fn new(
        request: &RunRequest,
        default: &VmUser,
        qemu: &Path,
        accelerator: Accelerator,
    ) -> Answer<Plan> {
        if request.privileged {
            tracing::warn!("QEMU runs as root, unconfined (--privileged)");
            let (group, lacks) = (Group::default(), Vec::new());
            // Root may lock all memory.
            return Ok(Plan { identity: None, sandbox: false, group, lacks, lockable_bytes: 0 });
        }
        let asked = request.user.as_deref().map(str::parse).transpose().map_err(not_allowed)?;
        let wanted = asked.unwrap_or_else(|| default.clone());
        let user = wanted.user().map_err(failed("a random number"))?;
        let mut groups = wanted.groups;
        can_be(user)?;
        if accelerator == Accelerator::Kvm {
            let more = kvm_groups(user).map_err(not_allowed)?;
            groups.retain(|group| !more.contains(group));
            groups.splice(..0, more);
            groups.truncate(GROUPS_MAX);
        }
        let identity = Identity { user, groups };
        let mut lacks = Vec::new();
        let sandbox = match own_sandbox(&request.qemu_args) {
            true => false,
            false => has_sandbox(qemu, &identity),
        };
        if let Some(why) = sandbox.then(|| denied_args::refusal(&request.qemu_args)).flatten() {
            return Err(not_allowed(why));
        }
        if own_sandbox(&request.qemu_args) {
            lacks.push("QEMU filters system calls as its own arguments say (-sandbox)".into());
        } else if !sandbox {
            lacks.push(
                "QEMU filters no system calls: it was built without seccomp (-sandbox)".into(),
            );
        }
        lacks.extend(shared_user(user));
        let limits_memory = !adds_memory(&request.qemu_args);
        if !limits_memory {
            lacks.push(
                "QEMU's memory has no limit: its own arguments give it memory that Ebb does not count"
                    .into(),
            );
        }
        cgroup::clear_left(false);
        let (group, without) = Group::make(request, user, limits_memory);
        warn_once(&without);
        lacks.extend(without);
        let lockable_bytes = lockable_bytes(&request.qemu_args, request.max_bytes());
        Ok(Plan { identity: Some(identity), sandbox, group, lacks, lockable_bytes })
    }

    /// What QEMU inherits from this process.
    pub fn child(&self) -> Child {
        let (cgroups, lockable_bytes) = (self.group.doors(), self.lockable_bytes);
        Child { identity: self.identity.clone(), cgroups, lockable_bytes, ..Child::default() }
    }

    /// The directories of its control group.
    pub fn cgroups(&self) -> &[PathBuf] {
        self.group.directories()
    }

    /// Keeps the control group: QEMU runs on.
    pub fn keep(self) {
        self.group.keep();
    }

    /// What tells the QEMU that is about to run from other processes.
    pub fn qemu(&self, name: &VmName) -> Qemu {
        match self.identity.as_ref().map(|identity| identity.user) {
            Some(User::Fixed { uid, .. }) => Qemu::User(uid),
            Some(User::PerProcess(base)) => Qemu::UserFrom(base),
            None => Qemu::Named(name.clone()),
        }
    }

    /// The confinement of the QEMU that runs, for the record.
    pub fn of(&self, pid: i32) -> Confinement {
        let user = self.identity.as_ref().map(|identity| identity.user.of(pid as u32));
        let (uid, gid) = user.unwrap_or_default();
        let (cgroups, outside) = self.group.around(pid);
        let outside =
            outside.iter().map(|group| format!("QEMU could not enter {}", group.display()));
        let outside: Vec<String> = outside.collect();
        warn_once(&outside);
        Confinement {
            privileged: self.identity.is_none(),
            uid,
            gid,
            sandbox: self.sandbox,
            cgroups,
            lacks: [self.lacks.clone(), outside].concat(),
        }
    }

    /// Advice about a QEMU that ended in this way after these words; empty: this confinement is not
    /// the reason.
    pub fn advice(&self, why: &str, signal: Option<i32>) -> String {
        if self.identity.is_none() {
            return String::new();
        }
        if self.sandbox && signal == Some(Signal::SYS.as_raw()) {
            return FILTERED.into();
        }
        let lowest = fs::read_to_string(LOWEST_PORT).ok();
        let lowest =
            lowest.and_then(|text| text.trim().parse().ok()).unwrap_or(LOWEST_PORT_DEFAULT);
        if let Some(advice) = port_advice(why, lowest) {
            return advice;
        }
        let is_denied = DENIED.iter().any(|denied| why.contains(denied));
        if is_denied && why.contains(VFIO) {
            return ". QEMU has a user of its own: give the device's group to a user (chown USER \
                    /dev/vfio/GROUP), and name that user by --user; --privileged runs QEMU as root"
                .into();
        }
        let advice = match (is_denied, why.contains(TUN)) {
            (false, _) => "",
            (true, true) if why.contains("configure") => {
                ". The tap must exist, and be of QEMU's user: ip tuntap add NAME mode tap user \
                 UID, and --user UID; --privileged runs QEMU as root"
            }
            (true, true) => {
                ". QEMU's user may not open /dev/net/tun: give it mode 0666, as udev does (a \
                 user gets only their own taps there), and make a tap for QEMU's user: ip tuntap \
                 add NAME mode tap user UID, and --user UID; --privileged runs QEMU as root"
            }
            (true, false) => {
                ". QEMU has a user of its own: give drives by --disk, or give the files to a \
                 user and name that user by --user; --privileged runs QEMU as root"
            }
        };
        advice.into()
    }
}

/// Advice about a host port that QEMU does not get, if users may have ports from `lowest` on; none:
/// its words tell of no such port.
fn port_advice(why: &str, lowest: u32) -> Option<String> {
    // For example `Could not set up host forwarding rule 'tcp::80-:80'`.
    let (_, rule) = why.split_once("forwarding rule '")?;
    let (from, _) = rule.split_once('\'')?.0.rsplit_once('-')?;
    let port: u32 = from.rsplit(':').next()?.parse().ok()?;
    Some(match port < lowest {
        true => format!(
            ". Port {port} is for root: forward one from {lowest} on (or lower \
             net.ipv4.ip_unprivileged_port_start); --privileged runs QEMU as root"
        ),
        false => format!(". Port {port} of the host may be in use"),
    })
}

/// Warns once: a host that has no control group for one QEMU has none for the others. `ebb status`
/// says it of each.
fn warn_once(lacks: &[String]) {
    static WARNED: Once = Once::new();
    if !lacks.is_empty() {
        WARNED.call_once(|| tracing::warn!("QEMUs run without limits: {}", lacks.join("; ")));
    }
}

/// Message about a QEMU that ended by itself and not well: by a signal of its own fault, or with a
/// code. None: it was told to end, or was killed.
/// `filters`: it has set its own filter of system calls, so SIGSYS comes from that.
pub fn ended_badly(pid: i32, ended: ExitStatus, filters: bool) -> Option<String> {
    if filters && ended.signal() == Some(Signal::SYS.as_raw()) {
        return Some(format!("QEMU {pid} was ended by SIGSYS{FILTERED}"));
    }
    let told = [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP].map(Signal::as_raw);
    let was_told = ended.signal().is_some_and(|signal| told.contains(&signal));
    let is_bad = !ended.success() && !was_told;
    is_bad.then(|| format!("QEMU {pid} ended by itself: {ended}"))
}

/// Checks that QEMU can be this user where the daemon runs.
fn can_be(user: User) -> Answer<()> {
    let namespace = UserNamespace::own().map_err(failed("the daemon's user namespace"))?;
    let has =
        rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |has| has.effective);
    let unprivileged = missing_privilege(geteuid().as_raw(), has);
    let unprivileged = unprivileged.map(|(why, advice)| format!("{why}: {advice}"));
    let why = unprivileged.or_else(|| namespace.user_restriction(user));
    why.map_or(Ok(()), |why| Err(not_allowed(format!("ebbd cannot start QEMU as a user: {why}"))))
}

/// Warning about what others can do to QEMUs of a user that is not theirs alone.
fn shared_user(user: User) -> Option<String> {
    match user {
        User::PerProcess(_) => None,
        User::Fixed { uid: 0, .. } => {
            Some("QEMU is user 0, which owns the run directory with its keys".into())
        }
        User::Fixed { uid, .. } => {
            Some(format!("QEMU shares user {uid} with all other processes of that user"))
        }
    }
}

/// Whether these arguments give the VM memory that its size does not include.
fn adds_memory(qemu_args: &[String]) -> bool {
    let kinds = ["memory-backend", "nvdimm", "ivshmem"];
    qemu_args.iter().any(|word| kinds.iter().any(|kind| word.contains(kind)))
}

/// Bytes of memory that a QEMU with these arguments must be able to lock: for passed-through
/// devices all memory of its guest, `memory_bytes`, and more. 0: none.
fn lockable_bytes(qemu_args: &[String], memory_bytes: u64) -> u64 {
    match qemu_args.iter().any(|word| word.contains(PASSED_THROUGH)) {
        true => memory_bytes.saturating_add(LOCKED_BESIDE),
        false => 0,
    }
}

/// Groups that let a user run guests on the processor.
fn kvm_groups(user: User) -> Result<Vec<u32>, String> {
    let found = fs::metadata(KVM).map_err(|error| format!("{KVM}: {error}"))?;
    let (mode, owner, group) = (found.mode(), found.uid(), found.gid());
    let is_owner = matches!(user, User::Fixed { uid, .. } if uid == owner);
    match is_owner || mode & 0o006 == 0o006 {
        true => Ok(Vec::new()),
        false if mode & 0o060 == 0o060 && group != 0 => Ok(vec![group]),
        false => Err(format!(
            "QEMU does not run as root, and only root may use {KVM}: give {KVM} to a group (chgrp \
             kvm {KVM} && chmod 660 {KVM}), or run the VM with --user root"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::vm_user::USERS;
    use super::*;
    use rustix::thread::CapabilitySets;
    use std::thread;

    #[test]
    fn a_daemon_that_may_not_change_users_says_so_beforehand() {
        let message = thread::spawn(|| {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            // This holds for this thread alone; a thread without capabilities has none to give up.
            rustix::thread::set_capabilities(None, sets).unwrap();
            can_be(User::PerProcess(USERS.start)).unwrap_err().to_string()
        });
        let message = message.join().unwrap();
        assert!(message.contains("start QEMU as another user"), "{message}");
    }

    #[test]
    fn memory_of_the_arguments_is_not_limited() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(Into::into).collect() };
        assert!(adds_memory(&words("-object memory-backend-memfd,id=a,size=8G,share=on")));
        assert!(!adds_memory(&words("-drive file=disk.img,if=virtio")));
    }

    #[test]
    fn a_qemu_may_lock_what_passed_through_devices_reach() {
        let bytes = |text: &str| {
            let words: Vec<String> = text.split(' ').map(Into::into).collect();
            lockable_bytes(&words, 8 << 30)
        };
        assert_eq!(bytes("-device vfio-pci,host=0000:01:00.0,id=a"), 9 << 30);
        assert_eq!(bytes(r#"-device {"driver":"vfio-pci","id":"a"}"#), 9 << 30);
        assert_eq!(bytes("-device virtio-net-pci,netdev=vfio"), 0);
    }

    #[test]
    fn a_user_of_others_is_reported() {
        assert_eq!(shared_user(User::PerProcess(USERS.start)), None);
        let message = |uid| shared_user(User::Fixed { uid, gid: 1 }).unwrap_or_default();
        assert!(message(0).contains("keys") && message(33).contains("user 33"));
    }

    #[test]
    fn advice_is_for_who_was_denied_something() {
        let identity = Some(Identity { user: User::PerProcess(USERS.start), groups: Vec::new() });
        let (group, lacks) = (Group::default(), Vec::new());
        let plan = Plan { identity, sandbox: true, group, lacks, lockable_bytes: 0 };
        let denied = plan.advice("a.img: Permission denied", None);
        for remedy in ["--disk", "--user", "--privileged"] {
            assert!(denied.contains(remedy), "{denied}");
        }
        let device = plan.advice("failed to open /dev/vfio/3: Permission denied", None);
        assert!(device.contains("chown USER /dev/vfio/GROUP"), "{device}");
        assert!(plan.advice("it said nothing", Some(Signal::SYS.as_raw())).contains("-sandbox"));
        assert_eq!(plan.advice("it said nothing", Some(Signal::KILL.as_raw())), "");
        assert_eq!(plan.advice("no such device", None), "");
        let filtered = |raw| ended_badly(7, ExitStatus::from_raw(raw), true);
        let message = filtered(Signal::SYS.as_raw()).unwrap();
        assert!(message.contains("QEMU 7") && message.contains("-sandbox"), "{message}");
        assert_eq!(filtered(Signal::KILL.as_raw()), None);
        assert_eq!(filtered(0), None);
        let privileged = Plan { identity: None, ..plan };
        assert_eq!(privileged.advice("a.img: Permission denied", None), "");
    }

    #[test]
    fn only_a_qemu_that_nobody_told_to_end_has_ended_badly() {
        // As wait(2) gives them: a signal in the low bits, a code above them.
        for (raw, is_bad) in
            [(0, false), (9, false), (15, false), (6, true), (11, true), (256, true)]
        {
            let message = ended_badly(7, ExitStatus::from_raw(raw), false);
            assert_eq!(message.is_some(), is_bad, "{message:?}");
        }
    }

    #[test]
    fn a_port_that_is_not_available_is_reported() {
        let words =
            |rule| format!("qemu: -nic user: Could not set up host forwarding rule '{rule}'");
        for rule in ["tcp::80-:80", "tcp:127.0.0.1:80-10.0.2.15:8080", "udp:my-host:80-:80"] {
            let message = port_advice(&words(rule), 1024).unwrap();
            for word in ["Port 80 ", "1024", "ip_unprivileged_port_start", "--privileged"] {
                assert!(message.contains(word), "{rule}: {message}");
            }
        }
        let message = port_advice(&words("tcp::8080-:80"), 1024).unwrap();
        assert!(message.contains("in use") && !message.contains("--privileged"), "{message}");
        assert!(port_advice(&words("tcp::80-:80"), 80).unwrap().contains("in use"));
        for other in ["it said nothing", "forwarding rule '", "forwarding rule 'a-b'"] {
            assert_eq!(port_advice(other, 1024), None, "{other}");
        }
    }

    #[test]
    fn a_tap_is_of_the_user_that_qemu_is() {
        let identity = Some(Identity { user: User::PerProcess(USERS.start), groups: Vec::new() });
        let (group, lacks) = (Group::default(), Vec::new());
        let plan = Plan { identity, sandbox: false, group, lacks, lockable_bytes: 0 };
        for (words, remedy) in [
            ("could not open /dev/net/tun: Permission denied", "0666"),
            ("Could not open '/dev/net/tun': Permission denied", "0666"),
            ("could not configure /dev/net/tun (t0): Operation not permitted", "must exist"),
        ] {
            let message = plan.advice(words, None);
            assert!(message.contains(remedy) && !message.contains("--disk"), "{words}: {message}");
            assert!(message.contains("tap user UID, and --user UID"), "{words}: {message}");
        }
    }
}
