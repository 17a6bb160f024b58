//! Starts QEMU for a VM, stopped before its guest's first instruction.

use std::fs::DirBuilder;
use std::io::{self, PipeReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use ebb_api::{Backing, RunRequest};
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_vm::launch::{Launch, LaunchMemory, Node, Reconnect};
use ebb_vm::{Qmp, Ram, layout};

use crate::helpers::console;
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::model::served::GrowthRecord;
use crate::serve::disks::{self, Disks};
use crate::serve::growth;
use crate::system::confine::Plan;
use crate::system::host_facts;

const QEMU: &str = "qemu-system-x86_64";
/// A QEMU that does not open its control socket within this time is given up.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A process that Ebb started, QEMU or a relay; killed when dropped unless released.
pub struct Running(Option<Child>);

impl Running {
    /// Its process number.
    pub fn pid(&self) -> Option<i32> {
        self.0.as_ref().map(|child| child.id() as i32)
    }

    /// Leaves the process running. A thread waits for its end and calls `note`, if there is one to be
    /// had.
    pub fn release(
        mut self,
        note: impl FnOnce(ExitStatus) + Send + 'static,
    ) -> Option<std::thread::JoinHandle<()>> {
        let mut child = self.0.take()?;
        let wait = move || {
            // The end of a process that cannot be waited for is not noted.
            let _ = child.wait().map(note);
        };
        std::thread::Builder::new().spawn(wait).ok()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A VM whose QEMU is started and waits before its guest's first instruction.
pub struct Started {
    /// QEMU, the relays before its devices, and the console.
    pub children: Vec<Running>,
    /// The QEMU process.
    pub process: Process,
    /// The VM's RAM.
    pub ram: Ram,
    /// QEMU's control socket.
    pub qmp: Qmp,
}

/// Starts QEMU.
///
/// # Errors
/// QEMU does not start. Nothing of it is left then.
pub fn start(
    request: &RunRequest,
    backing: Backing,
    (directory, logs): (&Path, &Path),
    (disks, growth, plan): (&Disks, &[GrowthRecord], &Plan),
) -> Answer<Started> {
    let relays = growth::start_relays(growth, directory).map_err(failed("its memory devices"))?;
    let mut children: Vec<Running> = relays.into_iter().map(|relay| Running(Some(relay))).collect();
    let nodes = nodes(request, backing).map_err(failed("the VM's RAM"))?;
    let sockets: Vec<PathBuf> =
        (0..disks.count()).map(|index| disks::socket(directory, index)).collect();
    let launch = Launch {
        name: request.name.as_str(),
        directory,
        qemu: &qemu(),
        nodes: &nodes,
        served: &growth::served(growth, directory),
        prealloc: request.grow_prealloc,
        balloon: wants_balloon(request),
        cpus: request.cpus,
        accelerator: host_facts::accelerator().value,
        kernel: request.kernel.as_deref(),
        initrd: request.initrd.as_deref(),
        append: request.append.as_deref(),
        disks: &sockets,
        disk_queues: disks::queues(request.cpus),
        reconnect: match sockets.is_empty() {
            true => Reconnect::Second,
            false => Reconnect::of(&qemu(), plan.identity.clone()),
        },
        qemu_args: &request.qemu_args,
        cwd: request.cwd.as_deref().unwrap_or(Path::new("/")),
        sandbox: plan.sandbox,
    };
    let (mut messages, to_messages) = io::pipe().map_err(failed("a pipe"))?;
    let child = launch.start(plan.child(), to_messages).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let advice = match std::env::var_os("EBB_QEMU") {
                Some(_) => "EBB_QEMU names it to ebbd: name one that is there",
                None => "install it with apt-get install qemu-system-x86",
            };
            not_allowed(format!("there is no {}: {advice}", qemu().display()))
        }
        io::ErrorKind::PermissionDenied => {
            let advice = plan.advice(&error.to_string(), None);
            not_allowed(format!("{} does not start: {error}{advice}", qemu().display()))
        }
        _ => not_allowed(format!("QEMU does not start: {error}")),
    })?;
    let pid = child.id() as i32;
    let mut child = Running(Some(child));
    let mut qmp = control(&launch, &mut child, &mut messages, plan)?;
    // If the directory cannot be made, the VM has no logs.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(logs);
    let keeper = console::start(directory, logs, Some(messages));
    children.push(Running(Some(keeper.map_err(failed("its console"))?)));
    let process = Process::open(pid).map_err(failed("QEMU"))?;
    let ram = layout::discover(&process, &mut qmp).map_err(not_allowed)?;
    children.push(child);
    Ok(Started { children, process, ram, qmp })
}

/// Files for the VM's RAM and for pluggable memory, each of them one hole.
fn nodes(request: &RunRequest, backing: Backing) -> io::Result<Vec<Node>> {
    let count = u64::from(request.nodes);
    let memory = |name: &str, all_bytes: u64| {
        let bytes = all_bytes / count;
        let file = match backing {
            Backing::Hugetlb => RamFile::create_hugetlb(name, bytes),
            _ => RamFile::create(name, bytes),
        };
        file.map(|file| LaunchMemory { file, bytes })
    };
    let growth_bytes = request.max_bytes() - request.memory_bytes;
    let node = |_| {
        let name = format!("ebb-{}", request.name);
        let growth = (growth_bytes > 0).then(|| memory(&(name.clone() + "-growth"), growth_bytes));
        Ok(Node { ram: memory(&name, request.memory_bytes)?, growth: growth.transpose()? })
    };
    (0..request.nodes).map(node).collect()
}

/// Whether to add a balloon. QEMU has room for one only, and a device that cannot wait must not use
/// what a balloon takes.
fn wants_balloon(request: &RunRequest) -> bool {
    let has_one = request.qemu_args.iter().any(|word| word.contains("virtio-balloon"));
    !has_one && request.strict_disk().is_none()
}

/// The QEMU program; `EBB_QEMU` names another one.
pub fn qemu() -> PathBuf {
    std::env::var_os("EBB_QEMU").map_or_else(|| QEMU.into(), PathBuf::from)
}

/// Waits for QEMU's control socket, or for QEMU's end.
fn control(
    launch: &Launch<'_>,
    child: &mut Running,
    messages: &mut PipeReader,
    plan: &Plan,
) -> Answer<Qmp> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let ended = child.0.as_mut().map(Child::try_wait).transpose().map_err(failed("QEMU"))?;
        if let Some(Some(status)) = ended {
            let why = last_line(messages);
            let advice = plan.advice(&why, status.signal());
            return Err(not_allowed(format!("QEMU ended: {why}{advice}")));
        }
        match Qmp::connect(&launch.qmp_path()) {
            Ok(qmp) => return Ok(qmp),
            Err(error) if Instant::now() > deadline => return Err(not_allowed(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Last line that QEMU wrote. QEMU has ended; processes that it started may still run.
fn last_line(messages: &mut PipeReader) -> String {
    let mut text = vec![0; 64 << 10];
    let nothing = rustix::io::ioctl_fionread(&*messages).is_ok_and(|bytes| bytes == 0);
    let length = if nothing { 0 } else { messages.read(&mut text).unwrap_or(0) };
    let text = String::from_utf8_lossy(&text[..length]);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("it said nothing").trim().to_owned()
}
