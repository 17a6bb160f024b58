//! Begins to manage a VM: starts it, attaches one that somebody else started, or recovers one.

use ebb_api::{
    Accelerator as ApiAccelerator, AttachRequest, Backing, MIN_ORDER_DEFAULT, Mode, OnViolation,
    RunRequest, VmName,
};
use ebb_reclaim::vprobe::MIN_ORDER_LOWEST;
use ebb_served::SharedDisks;
use ebb_sys::process::Process;
use ebb_vm::launch::{self, Accelerator};
use ebb_vm::{Monitor, Qmp, Ram, handed, layout, reach, takeover};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};

use super::start_qemu::{Running, Started, qemu, start};
use super::tiers::{self, Claimed};
use crate::helpers::console;
use crate::model::api_error::{Answer, ApiError, failed, not_allowed, unsaved};
use crate::model::auto::Auto;
use crate::model::record::{Record, Totals};
use crate::model::served::GrowthRecord;
use crate::model::site::Site;
use crate::model::task::{Task, Work};
use crate::serve::disks::{self, Disks};
use crate::serve::growth::{self, Growth};
use crate::serve::swap_room;
use crate::support::life;
use crate::support::privileges::{self, as_vm_thread};
use crate::system::confine::{self, Plan};
use crate::system::host_facts::{self, Chosen};
use crate::system::{cgroup, last_words, origin, starting};
use crate::vm::attach::attach as attach_vm;
use crate::vm::context::VmContext;
use crate::vm::context::mailbox::Command;
use crate::vm::ready::Ready;
use crate::vm::recover::{NotRecovered, recover};
use crate::vm::{detach, devices, passed_through};

/// What processes beside QEMU are for.
const BESIDE: &str = "which has its console or connects one of its memory devices";

/// A VM whose faults are served.
pub struct Begun {
    /// What its worker begins with.
    pub ready: Ready,
    /// Its QEMU, if this process started it.
    pub qemu: Option<OwnQemu>,
}

/// A QEMU that this process started.
pub struct OwnQemu {
    /// The QEMU process.
    pub process: Process,
    /// The thread that notes how QEMU ends.
    pub noting: JoinHandle<()>,
}

/// Carries out the task. None: there is nothing left to recover.
///
/// # Errors
/// The refusal. Then nothing is left behind, or what was to be recovered is unchanged.
pub fn begin(task: &Task) -> Answer<Option<Begun>> {
    let Task { site, name, slot, work, .. } = task;
    swap_room::begin(site.settings.swap_quota, &site.run_dir, *slot);
    let directory = site.directory(name);
    match work {
        Work::Run(request) => {
            let begun = run(site, request, &directory);
            if begun.is_err() {
                // Its QEMU has ended, so there is nothing to look for.
                let _ = starting::unmark(&directory);
            }
            begun.map(Some)
        }
        Work::Attach(request) => {
            let ready = attach(site, request, &directory)?;
            Ok(Some(Begun { ready, qemu: None }))
        }
        Work::Recover => {
            let ready = recover_vm(site, &directory)?;
            Ok(ready.map(|ready| Begun { ready, qemu: None }))
        }
    }
}

/// Recovers a VM. None: it has ended, or was detached.
fn recover_vm(site: &Site, directory: &Path) -> Answer<Option<Ready>> {
    let managed = match recover(directory, site.settings) {
        Ok(managed) => managed,
        Err(NotRecovered::Over) => return Ok(None),
        Err(NotRecovered::Failed(error)) => return Err(ApiError::Failed(error.to_string())),
    };
    let cgroups = cgroups_of(&managed.0.record);
    let console = managed.0.record.has_console().then(|| managed.0.logs());
    if let Err(error) = privileges::of_vm() {
        // A guest that waits for its memory is worse than a process that could do more.
        tracing::error!("it keeps its privileges: {error}");
    }
    let ready = Ready::new(managed).map_err(|(error, _)| ApiError::Failed(error.to_string()))?;
    // Last, since this takes some milliseconds.
    cgroup::enter(&cgroups);
    console.into_iter().for_each(|logs| keep_console(directory.to_owned(), logs));
    tracing::info!("recovered");
    Ok(Some(ready))
}

/// Restarts the console in a thread of its own: QEMU may be slow to answer, and its faults must not
/// wait for that.
fn keep_console(directory: PathBuf, logs: PathBuf) {
    let keep = move || {
        if let Err(error) = console::restart_if_gone(&directory, &logs) {
            tracing::warn!("its console: {error}");
        }
    };
    if let Err(error) = thread::Builder::new().name("console".into()).spawn(keep) {
        tracing::warn!("its console: {error}");
    }
}

/// Serves the faults of a VM that was just attached, without privileges that were needed only until
/// now. If this fails, the VM is as it was.
fn serve(managed: (VmContext, Receiver<Command>)) -> Answer<Ready> {
    let cgroups = cgroups_of(&managed.0.record);
    let ready = match privileges::of_vm() {
        Ok(()) => Ready::new(managed),
        Err(error) => Err((error, Box::new(managed.0))),
    };
    let ready = ready.map_err(|(error, context)| {
        detach::undo(*context);
        failed("the VM's threads")(error)
    })?;
    cgroup::enter(&cgroups);
    Ok(ready)
}

/// The control group of the VM's QEMU, if it has one.
fn cgroups_of(record: &Record) -> Vec<PathBuf> {
    let groups = record.confinement.iter().flat_map(|confinement| &confinement.cgroups);
    groups.cloned().collect()
}

fn run(site: &Site, request: &RunRequest, directory: &Path) -> Answer<Begun> {
    let mut request = request.clone();
    let tiers = tiers::resolve(&mut request)?;
    let request = &request;
    request.check()?;
    let min_order = min_order(request.min_order)?;
    let claimed = Claimed::file_of(tiers.as_ref())?;
    let backing = host_facts::backing(request.backing, request.memory_bytes)?;
    let plan = confine(site, request, directory, &claimed)?;
    let records = growth::plan(request, &qemu(), plan.identity.clone());
    let served = serve_devices(request, &records, directory)?;
    let logs = site.logs(&request.name);
    let directories = (directory, logs.as_deref().unwrap_or(directory));
    let with = (&served.0, records.as_slice(), &plan);
    let mut started = start(request, backing.value, directories, with)?;
    let served_names = launch::served_names(request.disks.len(), records.len());
    let passed = passed_through::take_new(&started.process, request)?;
    let found =
        devices::of_new(&started.process, &mut started.qmp, (&served_names, passed.is_some()))?;
    check_place(&started.ram, backing.value)?;
    if let Some(tiers) = &tiers {
        tiers::check(tiers, backing.value, &found)?;
    }
    let accelerator = host_facts::accelerator();
    let mode = match passed {
        Some(_) => Chosen::new(Mode::Strict, passed_through::WHY_STRICT),
        None => {
            host_facts::mode(request.mode, request.strict_disk().map(|disk| disk.path.as_path()))
        }
    };
    let made =
        (Chosen { value: api(accelerator.value), reason: accelerator.reason }, backing, mode);
    let qmp = directory.join("qmp.sock");
    let known =
        record_of(site, &request.name, &started.process, Monitor::Socket(qmp), made, min_order)?;
    let record = Record {
        started: true,
        logs: site.logs(&request.name),
        confinement: Some(plan.of(started.process.pid())),
        begin: !request.qemu_args.iter().any(|word| word == "-S"),
        evicts: tiers.as_ref().is_some_and(|tiers| tiers.file.is_some()),
        limit_bytes: tiers.as_ref().and_then(|tiers| tiers.limit_bytes),
        is_piloted: false,
        piloted_compressed_bytes: None,
        piloted_devices: Vec::new(),
        disks: request.disks.clone(),
        images: disks::on_record(&served.0.shared),
        growth: records,
        cpus: request.cpus,
        swap: tiers.as_ref().and_then(|tiers| tiers.file.clone()).unwrap_or(known.swap),
        tiers,
        min_order: match passed {
            Some(_) => known.min_order.max(passed_through::MIN_ORDER),
            None => known.min_order,
        },
        passed_through: passed
            .as_ref()
            .map(|held| passed_through::on_record(held.numbers(), false)),
        ..known
    };
    let Started { children, process, ram, qmp } = started;
    let (pid, qemu_process) = (process.pid(), process.try_clone());
    let ready = serve(attach_vm(process, ram, qmp, (served, passed), record, directory)?)?;
    // A mark that stays does no harm: the record has precedence.
    let _ = starting::unmark(directory);
    let qemu_process = qemu_process.map_err(failed("QEMU"))?;
    let noting = release(children, pid, plan.sandbox, (&request.name, directory));
    let qemu = noting.map(|noting| OwnQemu { process: qemu_process, noting });
    plan.keep();
    claimed.keep();
    Ok(Begun { ready, qemu })
}

/// Begins to serve the disks and the virtio-mem devices of a VM that is to be started.
fn serve_devices(
    request: &RunRequest,
    records: &[GrowthRecord],
    directory: &Path,
) -> Answer<(Disks, Growth)> {
    let images = disks::open(&request.disks).map_err(not_allowed)?;
    SharedDisks::check(&images).map_err(not_allowed)?;
    let shared = disks::share(&images, &request.disks, request.max_bytes());
    let shared = shared.map_err(failed("a random key"))?;
    let serving = as_vm_thread(|| {
        let disks = Disks::start(images, &shared, (&request.name, directory), request.cpus);
        let disks = disks.map_err(failed("its disks"))?;
        let devices = Growth::start(records, directory, None);
        Answer::Ok((disks, devices.map_err(failed("its memory devices"))?))
    });
    serving.map_err(failed("its devices"))?
}

/// Lets the started processes go on without this one. Returns the thread that notes how QEMU, which
/// has the number `pid`, ends. `filters`: QEMU has set its own filter of system calls.
fn release(
    children: Vec<Running>,
    pid: i32,
    filters: bool,
    (name, directory): (&VmName, &Path),
) -> Option<JoinHandle<()>> {
    let mut qemu = None;
    for child in children {
        let (its_pid, is_qemu) = (child.pid().unwrap_or_default(), child.pid() == Some(pid));
        let (name, at) = (name.clone(), directory.to_owned());
        let noting = child.release(move |ended| {
            // They end by themselves once QEMU has ended.
            if !is_qemu && !ended.success() {
                tracing::warn!("process {its_pid} beside QEMU, {BESIDE}, has ended: {ended}");
            }
            let why = confine::ended_badly(pid, ended, filters).filter(|_| is_qemu);
            if let Some(why) = why {
                tracing::error!("{why}");
                last_words::leave(&at, &format!("{name}: {why}"));
            }
        });
        qemu = qemu.or(noting.filter(|_| is_qemu));
    }
    qemu
}

/// Checks that memory in huge pages lies where each huge frame of the guest is one huge page.
fn check_place(ram: &Ram, backing: Backing) -> Answer<()> {
    match backing == Backing::Thp && !host_facts::huge_pages_fit(ram) {
        true => Err(not_allowed(
            "QEMU's arguments place its RAM where huge pages do not fit (max-ram-below-4g, or the \
             sizes of NUMA nodes): give --backing small, or sizes that are multiples of 2 MiB",
        )),
        false => Ok(()),
    }
}

/// Decides what the VM's QEMU may do, makes the directory that it may use, and marks the start.
fn confine(site: &Site, request: &RunRequest, directory: &Path, claimed: &Claimed) -> Answer<Plan> {
    handed::make_socket_directory(directory).map_err(failed("the VM's directory"))?;
    let user = site.vm_user.parse().map_err(not_allowed)?;
    let plan = Plan::new(request, &user, &qemu(), host_facts::accelerator().value)?;
    let marked =
        starting::mark(directory, plan.qemu(&request.name), plan.cgroups(), claimed.path());
    marked.map_err(unsaved("the VM's directory"))?;
    Ok(plan)
}

/// Attaches a VM that somebody else started.
fn attach(site: &Site, request: &AttachRequest, directory: &Path) -> Answer<Ready> {
    request.check()?;
    let min_order = min_order(request.min_order)?;
    let process = takeover::open(request.pid).map_err(not_allowed)?;
    let (monitor, mut qmp) =
        takeover::connect(&process, request.qmp.as_deref()).map_err(not_allowed)?;
    // By postcopy, QEMU must watch all of its memory itself. If it cannot, it ends when the guest
    // has left its source already.
    let awaits = reach::awaits_guest(&mut qmp).map_err(|why| {
        ApiError::Unavailable(format!("process {} does not tell its state: {why}", request.pid))
    })?;
    if awaits {
        return Err(ApiError::Unavailable(format!(
            "process {} waits for a guest that migrates to it: attach it once the guest runs there",
            request.pid
        )));
    }
    devices::of_new(&process, &mut qmp, (&[], false))?;
    let ram = layout::discover(&process, &mut qmp).map_err(not_allowed)?;
    let hugetlb = ram.files().iter().any(|file| file.is_hugetlb().unwrap_or(false));
    let backing = host_facts::backing_of(&ram, hugetlb);
    let accelerator = accelerator_of(&mut qmp)?;
    let mode = host_facts::mode(request.mode, None);
    let made = (accelerator, backing, mode);
    let mut record = record_of(site, &request.name, &process, monitor, made, min_order)?;
    origin::restore(&mut record, directory);
    let disks = Disks::none().map_err(failed("a random key"))?;
    let with = ((disks, Growth::none()), None);
    serve(attach_vm(process, ram, qmp, with, record, directory)?)
}

/// The record of a VM for which nothing has been requested yet.
fn record_of(
    site: &Site,
    name: &VmName,
    process: &Process,
    monitor: Monitor,
    (accelerator, backing, mode): (Chosen<ApiAccelerator>, Chosen<Backing>, Chosen<Mode>),
    min_order: u8,
) -> Answer<Record> {
    let (qmp, domain) = match monitor {
        Monitor::Socket(path) => (path, None),
        Monitor::Libvirt(domain) => (domain.socket, Some(domain.uuid)),
    };
    Ok(Record {
        name: name.clone(),
        pid: process.pid(),
        start_ticks: process.start_ticks().map_err(failed("QEMU"))?,
        boot: life::boot().map_err(failed("the host's boot"))?,
        userfaultfd: None,
        making: None,
        leaving: None,
        started: false,
        console: false,
        logs: None,
        confinement: None,
        qmp,
        domain,
        accelerator: accelerator.value,
        accelerator_reason: accelerator.reason,
        backing: backing.value,
        backing_reason: backing.reason,
        mode: mode.value,
        mode_reason: mode.reason,
        min_order,
        begin: false,
        small_pages: false,
        evicts: false,
        shares: false,
        size: None,
        size_bytes: None,
        on_violation: OnViolation::default(),
        auto: Auto::default(),
        limit_bytes: None,
        is_piloted: false,
        piloted_compressed_bytes: None,
        piloted_devices: Vec::new(),
        low_bytes: None,
        high_bytes: None,
        share: None,
        disks: Vec::new(),
        images: Vec::new(),
        growth: Vec::new(),
        cpus: 0,
        swap: site.swap_path(name, process.pid()),
        tiers: None,
        passed_through: None,
        settings: site.settings,
        regions: Vec::new(),
        totals: Totals::default(),
        kernel: None,
        digests: 0,
    })
}

fn accelerator_of(qmp: &mut Qmp) -> Answer<Chosen<ApiAccelerator>> {
    let answer = qmp.execute("query-kvm", json!({})).map_err(not_allowed)?;
    let kvm = answer.get("enabled").and_then(serde_json::Value::as_bool).unwrap_or(false);
    let value = if kvm { ApiAccelerator::Kvm } else { ApiAccelerator::Tcg };
    Ok(Chosen::new(value, "QEMU was started with it"))
}

fn api(accelerator: Accelerator) -> ApiAccelerator {
    match accelerator {
        Accelerator::Kvm => ApiAccelerator::Kvm,
        Accelerator::Tcg => ApiAccelerator::Tcg,
    }
}

fn min_order(asked: Option<u8>) -> Answer<u8> {
    match asked.unwrap_or(MIN_ORDER_DEFAULT) {
        order if order < MIN_ORDER_LOWEST => Err(not_allowed(format!(
            "blocks of order {order} share their metadata's frame with others: the smallest order \
             is {MIN_ORDER_LOWEST}"
        ))),
        order => Ok(order),
    }
}
