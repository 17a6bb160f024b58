//! Starts VMs, and attaches those that somebody else started.

use ebb_api::{
    Accelerator as ApiAccelerator, AttachRequest, Backing, MIN_ORDER_DEFAULT, Mode, OnViolation,
    RunRequest, VmName,
};
use ebb_reclaim::vprobe::MIN_ORDER_LOWEST;
use ebb_sys::process::Process;
use ebb_vm::launch::{self, Accelerator};
use ebb_vm::{Qmp, handed, layout, takeover};
use serde_json::json;
use std::path::{Path, PathBuf};

use super::recovery::serve;
use super::registry::Daemon;
use super::start_qemu::{Started, qemu, start};
use super::tiers::{self, Claimed};
use crate::model::api_error::{Answer, failed, not_allowed, unsaved};
use crate::model::record::{Auto, Record, Totals};
use crate::serve::disks::{self, Disks, Shared};
use crate::serve::growth::{self, Growth};
use crate::support::life;
use crate::system::confine::Plan;
use crate::system::host_facts::{self, Chosen};
use crate::system::{origin, starting};
use crate::vm::attach::attach as attach_vm;
use crate::vm::devices;

/// Starts a VM and manages it.
///
/// # Errors
/// [`ApiError`]; nothing is left behind then.
pub fn run(daemon: &Daemon, request: &RunRequest) -> Answer<()> {
    let mut request = request.clone();
    let tiers = tiers::resolve(&mut request)?;
    let request = &request;
    request.check()?;
    let min_order = min_order(request.min_order)?;
    let reserved = daemon.reserve(&request.name, false)?;
    let claimed = Claimed::file_of(tiers.as_ref())?;
    let backing = host_facts::backing(request.backing, request.memory_bytes)?;
    let plan = confine(daemon, request, &reserved.directory, &claimed)?;
    let images = disks::open(&request.disks).map_err(not_allowed)?;
    disks::check(&images).map_err(not_allowed)?;
    let shared = Shared::new(&images, &request.disks, request.max_bytes())
        .map_err(failed("a random key"))?;
    let served = Disks::start(images, &shared, &reserved.directory, request.cpus);
    let served = served.map_err(failed("its disks"))?;
    let records = growth::plan(request, &qemu(), plan.identity.clone());
    let devices = Growth::start(&records, &reserved.directory, None);
    let devices = devices.map_err(failed("its memory devices"))?;
    let logs = daemon.logs(&request.name);
    let logs = logs.as_deref().unwrap_or(&reserved.directory);
    let directories = (reserved.directory.as_path(), logs);
    let with = (&served, records.as_slice(), &plan);
    let mut started = start(request, backing.value, directories, with)?;
    let own = launch::served_names(request.disks.len(), records.len());
    let found = devices::of_new(&started.process, &mut started.qmp, &own)?;
    if let Some(tiers) = &tiers {
        tiers::check(tiers, backing.value, &found)?;
    }
    let accelerator = host_facts::accelerator();
    let mode =
        host_facts::mode(request.mode, request.strict_disk().map(|disk| disk.path.as_path()));
    let made =
        (Chosen { value: api(accelerator.value), reason: accelerator.reason }, backing, mode);
    let qmp = reserved.directory.join("qmp.sock");
    let known = record_of(daemon, &request.name, &started.process, qmp, made, min_order)?;
    let record = Record {
        started: true,
        logs: daemon.logs(&request.name),
        confinement: Some(plan.of(started.process.pid())),
        begin: !request.qemu_args.iter().any(|word| word == "-S"),
        evicts: tiers.as_ref().is_some_and(|tiers| tiers.file.is_some()),
        limit_bytes: tiers.as_ref().and_then(|tiers| tiers.limit_bytes),
        disks: request.disks.clone(),
        images: shared.images(),
        growth: records,
        cpus: request.cpus,
        swap: tiers.as_ref().and_then(|tiers| tiers.file.clone()).unwrap_or(known.swap),
        tiers,
        ..known
    };
    let Started { children, process, ram, qmp } = started;
    let pid = process.pid();
    let with = (served, devices);
    let managed = attach_vm(process, ram, qmp, with, record, &reserved.directory)?;
    serve(daemon, request.name.clone(), managed)?;
    // A mark that stays does no harm: the record counts before it.
    let _ = starting::unmark(&reserved.directory);
    for child in children {
        let (daemon, name) = (daemon.clone(), request.name.clone());
        let filters = plan.sandbox && child.pid() == Some(pid);
        child.release(move |ended| {
            if filters {
                daemon.note_end(&name, pid, ended);
            }
        });
    }
    plan.keep();
    claimed.keep();
    reserved.keep();
    Ok(())
}

/// Settles what the VM's QEMU may do, makes the directory that it may go to, and notes that it
/// is being started.
fn confine(
    daemon: &Daemon,
    request: &RunRequest,
    directory: &Path,
    claimed: &Claimed,
) -> Answer<Plan> {
    handed::make_socket_directory(directory).map_err(failed("the VM's directory"))?;
    let plan = Plan::new(request, daemon.vm_user(), &qemu(), host_facts::accelerator().value)?;
    let marked =
        starting::mark(directory, plan.qemu(&request.name), plan.cgroups(), claimed.path());
    marked.map_err(unsaved("the VM's directory"))?;
    Ok(plan)
}

/// Manages a VM that somebody else started.
///
/// # Errors
/// [`ApiError`]; nothing is changed then.
pub fn attach(daemon: &Daemon, request: &AttachRequest) -> Answer<()> {
    request.check()?;
    let min_order = min_order(request.min_order)?;
    let reserved = daemon.reserve(&request.name, true)?;
    let process = takeover::open(request.pid).map_err(not_allowed)?;
    let (path, mut qmp) =
        takeover::connect(&process, request.qmp.as_deref()).map_err(not_allowed)?;
    devices::of_new(&process, &mut qmp, &[])?;
    let ram = layout::discover(&process, &mut qmp).map_err(not_allowed)?;
    let hugetlb = ram.files().iter().any(|file| file.file.is_hugetlb().unwrap_or(false));
    let backing = host_facts::backing_of(&ram, hugetlb);
    let accelerator = accelerator_of(&mut qmp)?;
    let mode = host_facts::mode(request.mode, None);
    let made = (accelerator, backing, mode);
    let mut record = record_of(daemon, &request.name, &process, path, made, min_order)?;
    origin::restore(&mut record, &reserved.directory);
    let disks = Disks::none().map_err(failed("a random key"))?;
    let with = (disks, Growth::none());
    let managed = attach_vm(process, ram, qmp, with, record, &reserved.directory)?;
    serve(daemon, request.name.clone(), managed)?;
    reserved.keep();
    Ok(())
}

/// The record of a VM of which nothing has been asked yet.
fn record_of(
    daemon: &Daemon,
    name: &VmName,
    process: &Process,
    qmp: PathBuf,
    (accelerator, backing, mode): (Chosen<ApiAccelerator>, Chosen<Backing>, Chosen<Mode>),
    min_order: u8,
) -> Answer<Record> {
    Ok(Record {
        name: name.clone(),
        pid: process.pid(),
        start_ticks: process.start_ticks().map_err(failed("QEMU"))?,
        boot: life::boot().map_err(failed("the host's boot"))?,
        userfaultfd: None,
        leaving: None,
        started: false,
        console: false,
        logs: None,
        confinement: None,
        qmp,
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
        low_bytes: None,
        high_bytes: None,
        share: None,
        disks: Vec::new(),
        images: Vec::new(),
        growth: Vec::new(),
        cpus: 0,
        disks_used: false,
        swap: daemon.swap_path(name, process.pid()),
        tiers: None,
        settings: daemon.settings(),
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
    Ok(Chosen::new(value, "it was started so"))
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
