//! Every QEMU on a host, and whether it can be managed. Nothing is asked of it.

use std::path::Path;
use std::{fmt, fs, io};

use ebb_sys::process::{Process, Vma};
use ebb_vm::command_line::CommandLine;
use ebb_vm::takeover::{self, AttachRefusal};

use crate::ram::{COMMAND_LINE_MAX, MAPS_MAX, place_of};

/// Names of QEMU's program, up to the architecture.
const PROGRAMS: [&str; 3] = ["qemu-system-", "qemu-kvm", "kvm"];
/// Users whose QEMUs are those of the host's managers of VMs, beside root.
const MANAGERS: [&str; 2] = ["libvirt-qemu", "qemu"];
const USERS: &str = "/etc/passwd";
/// The most bytes of a command line that are read of every process.
const PROGRAM_MAX: u64 = 4 << 10;
/// Longest reason, in characters: a process chooses parts of it.
const REASON_MAX: usize = 500;
/// Memory that is mapped as a memfd, as the kernel names it.
const MEMFD: &str = "/memfd:";

/// Who started a QEMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Manager {
    /// A person, a script, or a program that is not known.
    Unknown,
    /// libvirt.
    Libvirt,
    /// KubeVirt, by a libvirt in a pod.
    KubeVirt,
    /// Proxmox VE.
    Proxmox,
    /// Incus or LXD.
    Incus,
    /// Kata Containers.
    Kata,
}

/// A QEMU that runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its process.
    pub pid: i32,
    /// The VM's name, as its command line gives it.
    pub name: Option<String>,
    /// The VM's UUID, as its command line gives it.
    pub uuid: Option<String>,
    /// Who started it.
    pub manager: Manager,
    /// The VM's RAM without what is plugged, in bytes.
    pub memory_bytes: u64,
    /// Why it cannot be managed as it is, and what to do; none: it can, as far as can be seen.
    pub obstacle: Option<String>,
}

/// Finds every QEMU on this host, in the order of their processes.
///
/// # Errors
/// As reading `/proc`.
pub fn discover() -> io::Result<Vec<Found>> {
    discover_among(&managers_of_host(), |_| true)
}

/// Finds the QEMUs of root and of libvirt's users, as [`discover`] does. Processes of other users are
/// not read: whoever owns a process can make a read of its command line wait for ever.
///
/// # Errors
/// As reading `/proc`.
pub fn discover_of_managers() -> io::Result<Vec<Found>> {
    let managers = managers_of_host();
    discover_among(&managers, |process| process.user().is_ok_and(|user| managers.contains(&user)))
}

/// Finds the wanted QEMUs, as [`discover`] does. A process that is not wanted is not read.
///
/// # Errors
/// As reading `/proc`.
pub fn discover_wanted(is_wanted: impl Fn(&Process) -> bool) -> io::Result<Vec<Found>> {
    discover_among(&managers_of_host(), is_wanted)
}

fn discover_among(
    managers: &[u32],
    is_wanted: impl Fn(&Process) -> bool,
) -> io::Result<Vec<Found>> {
    Ok(qemus(is_wanted)?.filter_map(|(process, line)| found(&process, &line, managers)).collect())
}

/// Finds process and name of each wanted QEMU on this host, in the order of their processes. Does not
/// look for what stands in the way of managing it. A process that is not wanted is not read.
///
/// # Errors
/// As reading `/proc`.
pub fn running(is_wanted: impl Fn(&Process) -> bool) -> io::Result<Vec<(i32, Option<String>)>> {
    Ok(qemus(is_wanted)?.map(|(process, line)| (process.pid(), line.name())).collect())
}

/// The users whose QEMUs Ebb attaches: root, and those of libvirt.
pub fn managers_of_host() -> Vec<u32> {
    managers(&fs::read_to_string(USERS).unwrap_or_default())
}

fn qemus(
    is_wanted: impl Fn(&Process) -> bool,
) -> io::Result<impl Iterator<Item = (Process, CommandLine)>> {
    let mut pids = Process::numbers()?;
    pids.sort_unstable();
    let processes = pids.into_iter().filter_map(|pid| Process::open(pid).ok());
    Ok(processes.filter(move |process| is_wanted(process)).filter_map(qemu))
}

/// The numbers of root and of the users of [`MANAGERS`].
fn managers(users: &str) -> Vec<u32> {
    let number = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        MANAGERS.contains(&name).then(|| fields.nth(1)?.parse().ok())?
    };
    users.lines().filter_map(number).chain([0]).collect()
}

/// The process and its command line, if it is a QEMU.
fn qemu(process: Process) -> Option<(Process, CommandLine)> {
    let program = CommandLine::new(process.command_line_within(PROGRAM_MAX).ok()?).program();
    if !is_qemu(&process.program().unwrap_or_default()) && !is_qemu(Path::new(&program)) {
        return None;
    }
    let line = CommandLine::new(process.command_line_within(COMMAND_LINE_MAX).ok()?);
    Some((process, line))
}

fn found(process: &Process, line: &CommandLine, managers: &[u32]) -> Option<Found> {
    let (pid, manager) = (process.pid(), Manager::of(line, process));
    let user = process.user().ok()?;
    let why = obstacle(process, line, manager)
        .or_else(|| (!managers.contains(&user)).then_some(Obstacle::User { pid, user }));
    let shown = |why: Obstacle| {
        let sign = |sign: char| if sign.is_control() { '?' } else { sign };
        why.to_string().chars().take(REASON_MAX).map(sign).collect()
    };
    Some(Found {
        pid,
        name: line.name(),
        uuid: line.uuid(),
        manager,
        memory_bytes: line.ram_bytes(),
        obstacle: why.map(shown),
    })
}

fn is_qemu(program: &Path) -> bool {
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    PROGRAMS.iter().any(|program| match program.ends_with('-') {
        true => name.starts_with(program),
        false => name == *program,
    })
}

/// Why a VM cannot be managed as it is.
enum Obstacle {
    Attach(AttachRefusal),
    /// A backend is no shared memfd.
    Backing(Manager, Option<String>),
    /// It is not a manager of VMs who runs it.
    User {
        pid: i32,
        user: u32,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Attach(refusal) => refusal.fmt(f),
            Obstacle::User { pid, user } => write!(
                f,
                "user {user} runs it, who is neither root nor libvirt: if you trust that user with \
                 it, `ebb attach --name NAME --pid {pid}`"
            ),
            Obstacle::Backing(manager, name) => {
                let name = name.as_deref().unwrap_or("NAME");
                write!(f, "its RAM is no shared memfd: {}", manager.with_memfd(name))
            }
        }
    }
}

/// The first thing that stands in the way of an attach.
fn obstacle(process: &Process, line: &CommandLine, manager: Manager) -> Option<Obstacle> {
    let pid = process.pid();
    let looked = takeover::open(pid).and_then(|_| takeover::free_monitor(pid, line));
    if let Err(refusal) = looked {
        return Some(Obstacle::Attach(refusal));
    }
    let mappings = process.mappings_within(MAPS_MAX).unwrap_or_default();
    let is_memfd = |vma: &Vma| vma.shared_write && vma.name.starts_with(MEMFD);
    let mut found = Vec::new();
    let all = line.ram().iter().all(|block| {
        let place = place_of(&mappings, block.bytes, &found);
        found.extend(place.map(|vma| vma.start));
        place.is_some_and(is_memfd)
    });
    (!all).then(|| Obstacle::Backing(manager, line.name()))
}

impl Manager {
    fn of(line: &CommandLine, process: &Process) -> Manager {
        let has = |part: &str| line.words().iter().any(|word| word.contains(part));
        let in_pod = || process.cgroup().is_ok_and(|path| path.contains("kubepods"));
        match () {
            () if has("/libvirt/qemu/") && in_pod() => Manager::KubeVirt,
            () if has("/libvirt/qemu/") => Manager::Libvirt,
            () if has("/run/qemu-server/") => Manager::Proxmox,
            () if has("/run/incus/") || has("/log/incus/") || has("/log/lxd/") => Manager::Incus,
            () if has("/run/vc/") => Manager::Kata,
            () => Manager::Unknown,
        }
    }

    /// The manager's name; none: not known.
    pub fn word(self) -> Option<&'static str> {
        match self {
            Manager::Unknown => None,
            Manager::Libvirt => Some("libvirt"),
            Manager::KubeVirt => Some("KubeVirt"),
            Manager::Proxmox => Some("Proxmox VE"),
            Manager::Incus => Some("Incus"),
            Manager::Kata => Some("Kata Containers"),
        }
    }

    /// How its users give a VM RAM in a shared memfd.
    fn with_memfd(self, name: &str) -> String {
        match self {
            Manager::Libvirt => format!(
                "in `virsh edit {name}`, give <memoryBacking> a <source type='memfd'/> and an \
                 <access mode='shared'/>, then shut the domain down and start it"
            ),
            Manager::KubeVirt => {
                "KubeVirt gives RAM in a memfd to VMs that share a file system by \
                                  virtiofs; other VMs of it cannot be managed yet"
                    .into()
            }
            Manager::Proxmox => "in `qm set VMID --args`, add -object \
                 memory-backend-memfd,id=ebb,size=SIZEM,share=on -numa node,memdev=ebb with the \
                 VM's own size, then stop and start it"
                .into(),
            Manager::Incus => "the memory of Incus's VMs is a memfd unless raw.qemu or hugepages \
                               say otherwise: remove what says so, then restart the instance"
                .into(),
            Manager::Kata => {
                "Kata's VMs cannot be managed yet: their RAM is a file in /dev/shm".into()
            }
            Manager::Unknown => "start QEMU with -object \
                 memory-backend-memfd,id=ram,size=SIZE,share=on and -machine ...,memory-backend=ram"
                .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_known_by_its_program() {
        for program in ["/usr/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm", "/usr/bin/kvm"] {
            assert!(is_qemu(Path::new(program)), "{program}");
        }
        for program in ["/usr/bin/qemu-img", "/usr/bin/kvmtool", "/", ""] {
            assert!(!is_qemu(Path::new(program)), "{program}");
        }
    }

    #[test]
    fn managers_of_vms_have_users_of_their_own() {
        let users = "root:x:0:0::/root:/bin/sh\nlibvirt-qemu:x:64055:107::/:/bin/false\n\
                     me:x:1000:1000::/home/me:/bin/sh\nqemu:x:?:1::/:\nqemu\n";
        assert_eq!(managers(users), [64055, 0]);
        let why = Obstacle::User { pid: 7, user: 1000 }.to_string();
        assert!(why.contains("ebb attach --name NAME --pid 7"), "{why}");
    }

    #[test]
    fn managers_are_known_by_their_paths() {
        let own = Process::own().unwrap();
        let of = |word: &str| {
            let words = ["qemu", "-chardev", word].map(str::to_owned).into();
            Manager::of(&CommandLine::new(words), &own)
        };
        let libvirts = "socket,id=m,path=/var/lib/libvirt/qemu/domain-1-web/monitor.sock";
        assert_eq!(of(libvirts), Manager::Libvirt);
        assert_eq!(of("socket,id=qmp,path=/var/run/qemu-server/100.qmp"), Manager::Proxmox);
        assert_eq!(of("socket,id=m,path=/run/incus/web/qemu.monitor"), Manager::Incus);
        assert_eq!(of("socket,id=m,path=/run/q.sock"), Manager::Unknown);
    }

    #[test]
    fn each_manager_says_what_to_change_in_one_line() {
        use Manager::{Incus, Kata, KubeVirt, Libvirt, Proxmox, Unknown};
        for manager in [Unknown, Libvirt, KubeVirt, Proxmox, Incus, Kata] {
            let text = Obstacle::Backing(manager, Some("web".into())).to_string();
            assert!(text.starts_with("its RAM is no shared memfd: "), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}
