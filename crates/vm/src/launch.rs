//! Starting a stock QEMU whose RAM can be managed.

mod reconnect;

use std::env;
use std::ffi::{CString, OsString};
use std::io::{self, PipeWriter};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ebb_sys::confine::{self, Child as Settled, Identity};
use ebb_sys::ram_file::RamFile;
use ebb_sys::session;
use ebb_units::Gpa;

pub use self::reconnect::Reconnect;
use crate::handed::{Handed, by_number};

/// Option with the VM's name.
const NAME: &str = "-name";
/// Beginning of the option value for the control socket.
const CONTROL: &str = "socket,id=ebb-qmp,fd=";
/// Id of the balloon of a VM that Ebb starts.
const BALLOON: &str = "ebb-balloon";
/// Prefix of the ids of its virtio-mem devices, before the node's number.
const GROWTH: &str = "ebb-growth";
/// Prefix of the ids of the disks that Ebb serves, before the disk's number.
const DISK: &str = "ebb-disk";
/// Alignment of a memory device. QEMU places them at whole GiB, and Linux wants memory blocks of 2
/// GiB at most.
const REGION_ALIGN: u64 = 1 << 30;
/// Highest slot for devices that the guest is not to find; more devices use the slots below. A
/// guest does not look into a slot without a function 0, so QEMU maps the device's memory and the
/// guest never learns of it. Slot 31 is the chipset's.
const HIDDEN_SLOT: usize = 30;
/// Functions of each such slot, from 1 on.
const HIDDEN_FUNCTIONS: usize = 7;
/// PATH of a QEMU without privileges.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Everything that QEMU's own filter of system calls can deny.
pub const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Virtio device number of virtio-mem: VIRTIO 1.2, section 5.15.1.
const VIRTIO_MEM: u32 = 24;
/// Bytes of its configuration space: VIRTIO 1.2, section 5.15.4.
const VIRTIO_MEM_CONFIG_BYTES: u32 = 56;

/// What runs the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accelerator {
    /// The processor itself.
    Kvm,
    /// QEMU's translator of instructions.
    Tcg,
}

impl Accelerator {
    /// QEMU's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

/// A file of RAM, made before QEMU starts.
pub struct LaunchMemory {
    /// The file.
    pub file: RamFile,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A NUMA node of a VM to be started.
pub struct Node {
    /// RAM that it begins with.
    pub ram: LaunchMemory,
    /// Memory that can be plugged in addition, by virtio-mem.
    pub growth: Option<LaunchMemory>,
}

/// A virtio-mem device that another process serves, by vhost-user.
pub struct Served {
    /// Path of the socket at which it is served.
    pub socket: PathBuf,
    /// Where its region begins: [`growth_start`].
    pub address: Gpa,
}

/// Names of the character devices for `disks` served disks and `growths` served virtio-mem devices.
pub fn served_names(disks: usize, growths: usize) -> Vec<String> {
    let names = |name: &'static str, count| (0..count).map(move |index| format!("{name}{index}"));
    names(DISK, disks).chain(names(GROWTH, growths)).collect()
}

/// Where the memory that a node can plug begins, in a VM that begins with `initial_bytes` and can
/// plug `node_bytes` on each node. It lies behind all that a machine of QEMU maps.
pub fn growth_start(initial_bytes: u64, node_bytes: u64, node: u64) -> Gpa {
    let all = (4 << 30) + initial_bytes.next_multiple_of(REGION_ALIGN);
    Gpa(all + node * node_bytes.next_multiple_of(REGION_ALIGN))
}

/// A VM to be started.
pub struct Launch<'a> {
    /// The VM's name.
    pub name: &'a str,
    /// Directory of the VM's sockets and logs.
    pub directory: &'a Path,
    /// The QEMU to start: a name looked up in PATH, or a path.
    pub qemu: &'a Path,
    /// The VM's NUMA nodes, at least one.
    pub nodes: &'a [Node],
    /// What serves the pluggable memory of each node. If empty, QEMU does.
    pub served: &'a [Served],
    /// Whether memory that QEMU plugs is backed by the host at once.
    pub prealloc: bool,
    /// Whether the VM gets a balloon.
    pub balloon: bool,
    /// Number of processors.
    pub cpus: u32,
    /// What runs the guest's instructions.
    pub accelerator: Accelerator,
    /// A kernel for direct boot.
    pub kernel: Option<&'a Path>,
    /// The kernel's initial RAM disk.
    pub initrd: Option<&'a Path>,
    /// The kernel's command line.
    pub append: Option<&'a str>,
    /// Sockets of vhost-user-blk disks, each with [`Launch::disk_queues`] queues.
    pub disks: &'a [PathBuf],
    /// Number of queues of each disk.
    pub disk_queues: u16,
    /// How soon QEMU connects again to the process that serves the disks.
    pub reconnect: Reconnect,
    /// More arguments for QEMU, passed on unchanged.
    pub qemu_args: &'a [String],
    /// Where relative paths among QEMU's arguments begin.
    pub cwd: &'a Path,
    /// Whether QEMU filters its own system calls.
    pub sandbox: bool,
}

impl Launch<'_> {
    /// Path of the control socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    /// Starts QEMU, stopped before its guest's first instruction, in a session of its own: it
    /// outlives this process. Its messages go to `messages`, which somebody must read. Beside what
    /// is in `child`, it inherits its memory and its sockets. A QEMU with an identity has no
    /// environment but `PATH`.
    ///
    /// # Errors
    /// As fork(2) and execve(2): `NotFound` when there is no such QEMU. Also fails if something
    /// that QEMU inherits cannot be opened.
    pub fn start(&self, mut child: Settled, messages: PipeWriter) -> io::Result<Child> {
        let handed = Handed::open(self, &mut child)?;
        let mut command = Command::new(program(self.qemu)?);
        match child.identity.is_some() {
            true => {
                command.env_clear().env("PATH", PATH);
                child.directory = Some(CString::new(self.cwd.as_os_str().as_bytes())?);
            }
            false => drop(command.current_dir(self.cwd)),
        }
        command
            .args(self.arguments(&handed))
            .stdin(Stdio::null())
            .stdout(messages.try_clone()?)
            .stderr(messages);
        session::of_its_own(&mut command);
        confine::settle(&mut command, child);
        command.spawn()
    }

    /// The command line, for callers that start a QEMU that differs from this one in a few words,
    /// or compare such command lines. What QEMU would inherit has no number yet.
    pub fn outline(&self) -> Vec<String> {
        let words = self.arguments(&Handed::outline(self));
        words.into_iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn arguments(&self, handed: &Handed) -> Vec<OsString> {
        let Launch { name, .. } = self;
        let mut words: Vec<OsString> = Vec::new();
        let mut option = |key: &str, value: String| words.extend([key.into(), value.into()]);
        option(NAME, escape(Path::new(name)));
        option("-accel", self.accelerator.name().into());
        if self.accelerator == Accelerator::Kvm {
            // KVM writes some pages of a guest that runs guests past the page table, so past any
            // protection. Whoever wants such a guest names another CPU behind this one.
            option("-cpu", "host,vmx=off,svm=off".into());
        }
        if self.sandbox {
            option("-sandbox", SANDBOX.into());
        }
        self.memory(handed, &mut option);
        let Handed { qmp, console, .. } = handed;
        option("-chardev", format!("{CONTROL}{qmp},server=on,wait=off"));
        option("-mon", "chardev=ebb-qmp,mode=control".into());
        option("-chardev", format!("socket,id=ebb-console,fd={console},server=on,wait=off"));
        option("-serial", "chardev:ebb-console".into());
        option("-display", "none".into());
        if self.balloon {
            // No free page reporting, unless the user asks for it: Ebb reclaims free memory itself.
            option("-device", format!("virtio-balloon-pci,id={BALLOON},deflate-on-oom=on"));
        }
        for (index, socket) in self.disks.iter().enumerate() {
            let (id, queues) = (format!("{DISK}{index}"), self.disk_queues);
            let socket = escape(&handed.socket(socket));
            // The process that serves the disk may die and return.
            let reconnect = self.reconnect.option();
            option("-chardev", format!("socket,id={id},path={socket},{reconnect}"));
            option("-device", format!("vhost-user-blk-pci,chardev={id},num-queues={queues}"));
        }
        words.extend(["-nodefaults".into(), "-no-user-config".into(), "-S".into()]);
        for (key, file) in [("-kernel", &handed.kernel), ("-initrd", &handed.initrd)] {
            if let Some(file) = file {
                words.extend([key.into(), file.into()]);
            }
        }
        if let Some(append) = self.append {
            words.extend(["-append".into(), append.into()]);
        }
        words.extend(self.qemu_args.iter().map(OsString::from));
        words
    }

    /// Adds the options for the machine, the processors, RAM and memory that can be plugged.
    fn memory(&self, handed: &Handed, option: &mut impl FnMut(&str, String)) {
        let initial: u64 = self.nodes.iter().map(|node| node.ram.bytes).sum();
        let growths = self.nodes.iter().filter_map(|node| node.growth.as_ref());
        let growth: u64 = match self.served.is_empty() {
            true => growths.map(|growth| growth.bytes).sum(),
            // Room up to the highest address of [`growth_start`].
            false => {
                let each = growths.map(|growth| growth.bytes.next_multiple_of(REGION_ALIGN));
                initial.next_multiple_of(REGION_ALIGN) + each.sum::<u64>()
            }
        };
        let memory = format!("{}M", initial >> 20);
        option(
            "-m",
            match growth {
                0 => memory,
                growth => format!("{memory},slots=0,maxmem={}M", (initial + growth) >> 20),
            },
        );
        match self.nodes.len() {
            1 => {
                option("-machine", "q35,memory-backend=ram0".into());
                option("-smp", self.cpus.to_string());
            }
            // Each node gets a socket, so that processors that share a cache are on one node.
            count => {
                let each = self.cpus / count as u32;
                option("-machine", "q35".into());
                option("-smp", format!("{},sockets={count},cores={each},threads=1", self.cpus));
                for node in 0..count as u32 {
                    let cpus = format!("{}-{}", node * each, (node + 1) * each - 1);
                    option("-numa", format!("node,nodeid={node},cpus={cpus},memdev=ram{node}"));
                }
            }
        }
        for (index, (node, (ram, plugged))) in self.nodes.iter().zip(&handed.nodes).enumerate() {
            option("-object", backend(&format!("ram{index}"), node.ram.bytes, *ram));
            if let (Some(growth), Some(plugged)) = (&node.growth, plugged) {
                let name = format!("growth{index}");
                option("-object", backend(&name, growth.bytes, *plugged) + ",reserve=off");
                match self.served.get(index) {
                    Some(served) => served.options(index, &name, handed, option),
                    None => option(
                        "-device",
                        format!(
                            "virtio-mem-pci,id={GROWTH}{index},memdev={name},node={index},\
                             requested-size=0,prealloc={}",
                            if self.prealloc { "on" } else { "off" }
                        ),
                    ),
                }
            }
        }
    }
}

impl Served {
    /// Adds the options of the device. QEMU's generic device knows nothing of memory, so another
    /// device maps the region, and the guest is not to find that one.
    fn options(
        &self,
        index: usize,
        memory: &str,
        handed: &Handed,
        option: &mut impl FnMut(&str, String),
    ) {
        let slot = HIDDEN_SLOT - index / HIDDEN_FUNCTIONS;
        let place = format!("{slot:#x}.{}", 1 + index % HIDDEN_FUNCTIONS);
        let Gpa(address) = self.address;
        option(
            "-device",
            format!("virtio-pmem-pci,memdev={memory},memaddr={address:#x},addr={place}"),
        );
        let id = format!("{GROWTH}{index}");
        let socket = escape(&handed.socket(&self.socket));
        option("-chardev", format!("socket,id={id},path={socket}"));
        option(
            "-device",
            format!(
                "vhost-user-test-device-pci,id={id},chardev={id},virtio-id={VIRTIO_MEM},num_vqs=1,\
                 config_size={VIRTIO_MEM_CONFIG_BYTES}"
            ),
        );
    }
}

/// The options of a memory backend in an inherited memfd, opened by its path in /proc. QEMU's own
/// memfd backend cannot align its mapping to 2 MiB, and without that no huge page is ever mapped. A
/// core dump of QEMU does not contain this memory.
fn backend(name: &str, bytes: u64, number: RawFd) -> String {
    let path = by_number(number);
    format!(
        "memory-backend-file,id={name},size={bytes},mem-path={},share=on,align=2M,dump=off",
        path.display()
    )
}

/// Runs QEMU to tell something about itself, confined as one that runs a VM.
///
/// # Errors
/// As fork(2) and execve(2).
pub fn ask(qemu: &Path, identity: Option<Identity>, words: &[&str]) -> io::Result<Output> {
    let mut command = Command::new(program(qemu)?);
    if identity.is_some() {
        command.env_clear().env("PATH", PATH);
    }
    command.args(words).stdin(Stdio::null());
    confine::settle(&mut command, Settled { identity, ..Settled::default() });
    command.output()
}

/// Whether this is the command line of a QEMU, or of a script in its place, that was started for
/// the VM of this name.
pub fn is_of(words: &[String], name: &str) -> bool {
    let name = escape(Path::new(name));
    words.windows(2).any(|pair| pair[0] == NAME && pair[1] == name)
        && words.iter().any(|word| word.starts_with(CONTROL))
}

/// The program as this process finds it. The child process would look in other places.
fn program(name: &Path) -> io::Result<PathBuf> {
    if name.components().count() > 1 || name.is_absolute() {
        return Ok(name.to_owned());
    }
    let path = env::var_os("PATH").unwrap_or_else(|| PATH.into());
    let found = env::split_paths(&path).map(|place| place.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Escapes a path for QEMU's option strings, where a comma ends a value and two stand for one.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests;
