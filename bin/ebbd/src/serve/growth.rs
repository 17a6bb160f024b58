//! Memory by which a VM can grow, where QEMU lets Ebb itself serve the virtio-mem devices: one for
//! each NUMA node, behind a relay that outlives the daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::AcqRel;
use std::sync::{Arc, OnceLock};

use ebb_api::RunRequest;
use ebb_pager::{Pager, Sentry};
use ebb_served::PagerDma;
use ebb_sys::confine::Identity;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_virtio_mem::{BlockMemory, Device, Geometry, Guard, Options, StateFile, Touch};
use ebb_virtio_mem_user::{Backend, Setup};
use ebb_vm::handed;
use ebb_vm::launch::{self, Served, growth_start};

use crate::helpers::relay;
use crate::model::served::GrowthRecord;
use crate::system::last_words;

/// QEMU's generic vhost-user device. Before QEMU 11 it has none that a user may add.
const GENERIC_DEVICE: &str = "vhost-user-test-device-pci";

/// The devices of a VM that is to be started, by NUMA node; none: QEMU has to serve them.
pub fn plan(request: &RunRequest, qemu: &Path, identity: Option<Identity>) -> Vec<GrowthRecord> {
    let bytes = (request.max_bytes() - request.memory_bytes) / u64::from(request.nodes.max(1));
    // If something is wrong with this QEMU, starting it gives a better reason.
    if bytes == 0 || !has_generic_device(qemu, identity).unwrap_or(false) {
        return Vec::new();
    }
    (0..u64::from(request.nodes))
        .map(|node| GrowthRecord {
            address: growth_start(request.memory_bytes, bytes, node).0,
            bytes,
            prealloc: request.grow_prealloc,
        })
        .collect()
}

fn has_generic_device(qemu: &Path, identity: Option<Identity>) -> io::Result<bool> {
    let help = format!("{GENERIC_DEVICE},help");
    let asked = launch::ask(qemu, identity, &["-machine", "none", "-device", &help])?;
    // A QEMU without this device says so on standard error, and also ends with success.
    Ok(String::from_utf8_lossy(&asked.stdout).contains("options"))
}

fn front_socket(directory: &Path, node: usize) -> PathBuf {
    handed::socket_directory(directory).join(format!("memory{node}.front"))
}

fn device_socket(directory: &Path, node: usize) -> PathBuf {
    directory.join(format!("memory{node}.sock"))
}

/// What QEMU is to be told of the devices.
pub fn served(records: &[GrowthRecord], directory: &Path) -> Vec<Served> {
    let each = records.iter().enumerate().map(|(node, record)| Served {
        socket: front_socket(directory, node),
        address: Gpa(record.address),
    });
    each.collect()
}

/// Starts the relay before each device. A relay ends with the QEMU that connects to it.
///
/// # Errors
/// Those of bind(2) and fork(2).
pub fn start_relays(records: &[GrowthRecord], directory: &Path) -> io::Result<Vec<Child>> {
    (0..records.len()).map(|node| start_relay(directory, node)).collect()
}

fn start_relay(directory: &Path, node: usize) -> io::Result<Child> {
    let socket = front_socket(directory, node);
    let listener =
        ebb_vhost::socket::listen(&socket).map_err(|error| io::Error::other(error.to_string()))?;
    handed::admit(&socket)?;
    let path = directory.join(format!("memory{node}.log"));
    let log = std::fs::File::options().append(true).create(true).open(&path)?;
    // An upgrade may have replaced the program's file.
    Command::new("/proc/self/exe")
        .args([relay::COMMAND, "--once", "--device"])
        .arg(device_socket(directory, node))
        .arg("--log")
        .arg(path)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(log)
        // Signals to the daemon's group must not end the relay.
        .process_group(0)
        .spawn()
}

/// The devices of one VM. Dropping this stops them: the relays then wait for the next daemon.
pub struct Growth {
    backends: Vec<Backend>,
    link: Arc<Link>,
}

impl Growth {
    /// For a VM that has none.
    pub fn none() -> Growth {
        Growth { backends: Vec::new(), link: Arc::default() }
    }

    /// Serves the devices: of a VM that is about to be started, whose memory is all a hole, or of a
    /// VM that is being recovered, with its pager. This process ends if a thread that serves one
    /// panics: the guest would wait for its device.
    ///
    /// # Errors
    /// A socket, or the state file of a device, cannot be used.
    pub fn start(
        records: &[GrowthRecord],
        directory: &Path,
        pager: Option<&Arc<Pager>>,
    ) -> anyhow::Result<Growth> {
        let link = Arc::new(Link::default());
        if let Some(pager) = pager {
            link.dma.serve_with(pager);
        }
        let start = |(node, record): (u16, &GrowthRecord)| {
            let state = directory.join(format!("memory{node}.state"));
            let (state, saved) = StateFile::open_or_create(&state, record.geometry(node))?;
            let setup = Setup {
                saved,
                options: Options { prealloc: record.prealloc, ..Options::default() },
                memory: Box::new(Blocks(Arc::clone(&link.dma))),
                record: Box::new(state),
                dma: link.dma.clone(),
            };
            let backend = Backend::start(&device_socket(directory, usize::from(node)), setup)?;
            let directory = directory.to_owned();
            backend.on_panic(move |why| {
                let why = format!("its memory device of node {node}: {why}");
                last_words::end_process(&directory, &why)
            });
            anyhow::Ok(backend)
        };
        let backends = (0..).zip(records).map(start).collect::<Result<Vec<_>, _>>()?;
        let guards = backends.iter().map(|backend| Arc::clone(backend.device().guard()));
        // Nobody has touched anything yet.
        let _ = link.guards.set(guards.collect());
        Ok(Growth { backends, link })
    }

    /// The devices by node; `true`: the guest drives it.
    pub fn devices(&self) -> impl Iterator<Item = (&Arc<Device>, bool)> {
        self.backends.iter().map(|backend| (backend.device(), backend.is_driven()))
    }

    /// Sets the `pager` that gives and takes their memory, and that tells of touches of unplugged
    /// memory. `fresh`: the pager does not know what is plugged, and its guest has not begun.
    ///
    /// # Errors
    /// Their memory cannot be watched or emptied.
    pub fn attach(&self, pager: &Arc<Pager>, fresh: bool) -> io::Result<()> {
        if self.backends.is_empty() {
            return Ok(());
        }
        self.link.dma.serve_with(pager);
        let regions: Vec<FrameRange> = self.devices().map(|(device, _)| region(device)).collect();
        pager
            .pluggable()
            .watch_pluggable(regions.clone(), Arc::clone(&self.link) as Arc<dyn Sentry>)?;
        if fresh {
            regions.into_iter().try_for_each(|region| pager.pluggable().unplug(region))
        } else {
            Ok(())
        }
    }

    /// Returns a function that removes frames from this process's page table where devices have
    /// them mapped.
    pub fn forgetting(&self) -> impl Fn(FrameRange) + Send + Sync + 'static {
        let dma = Arc::clone(&self.link.dma);
        move |frames| dma.forget(frames)
    }

    /// Sets what to call at a violation: once, until the next [`Growth::look`].
    pub fn on_violation(&self, report: impl Fn() + Send + Sync + 'static) {
        let _ = self.link.on_violation.set(Box::new(report));
    }

    /// Whether there was a violation since the last look.
    pub fn look(&self) -> bool {
        self.link.violation_reported.swap(false, AcqRel)
    }
}

fn region(device: &Device) -> FrameRange {
    let Geometry { start, region_bytes, .. } = device.geometry();
    FrameRange::new(start.gfn(), region_bytes / FRAME_BYTES)
}

/// What the devices and the pager of a VM know of each other.
#[derive(Default)]
struct Link {
    dma: Arc<PagerDma>,
    guards: OnceLock<Vec<Arc<Guard>>>,
    on_violation: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Whether a violation was told, and nobody has looked since.
    violation_reported: AtomicBool,
}

impl Sentry for Link {
    fn touched(&self, gfn: Gfn, write: bool) {
        let guards = self.guards.get().into_iter().flatten();
        let mut touches = guards.map(|guard| (guard, guard.judge(gfn.gpa(), write)));
        let touched = touches.find(|(_, touch)| *touch != Touch::Outside);
        if touched.is_some_and(|(guard, touch)| touch == Touch::Forbidden && !guard.may_read())
            && !self.violation_reported.swap(true, AcqRel)
            && let Some(report) = self.on_violation.get()
        {
            report();
        }
    }
}

/// Memory of the blocks, given and taken by the pager. Before there is a pager, nothing was
/// plugged.
struct Blocks(Arc<PagerDma>);

impl BlockMemory for Blocks {
    fn plug(&mut self, frames: FrameRange, prealloc: bool) -> io::Result<()> {
        let pager = self.0.pager().ok_or(io::ErrorKind::NotConnected)?;
        pager.pluggable().plug(frames, prealloc)
    }

    fn unplug(&mut self, frames: FrameRange) -> io::Result<()> {
        self.0.pager().map_or(Ok(()), |pager| pager.pluggable().unplug(frames))
    }
}
