//! How long plugging and unplugging takes, and whether touches of unplugged memory are seen.

use std::time::Instant;

use serde_json::json;
use vmtest::{Guest, Host, MemoryDevice, Vm, assets, until};

use super::mechanism::Mechanism;
use super::{KERNEL, MIB, MOVABLE, mib, one, reach};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;

/// Memory that a VM begins with.
const BEGAN_MIB: u64 = 1024;
/// Goal: most time, as a ratio to that of QEMU's device.
const GOAL: f64 = 1.0;
const TOUCHES: u64 = 100;
/// Address of the first device of a VM that began with a GiB.
const REGION: u64 = 5 << 30;

/// Seconds to grow and to shrink, and what the host still gives afterwards, for managed VMs.
#[derive(Default)]
struct Figures {
    more: Rounds,
    less: Rounds,
    left_mib: Rounds,
}

/// Runs the benchmark.
///
/// # Errors
/// A size is not reached.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("virtio-mem-plug");
    let (gib, rounds) = if quick { (1, 3) } else { (4, 5) };
    report.note(format!(
        "{gib} GiB come and go, {rounds} rounds, in turn. Plugged memory is filled and freed \
         before it goes. Devices alone: VMs that nobody holds, both under QEMU 11; from the \
         request to when the device has the size, looked at every 5 ms. By `ebb resize`: as it \
         tells, looked at every 0.2 s; smaller includes waiting for the guest's figures, which \
         come every second."
    ));
    if assets::qemu11().is_ok() {
        alone(&mut report, gib, rounds)?;
    }
    resized(&mut report, gib, rounds)?;
    Ok(report)
}

/// Measures the two devices, without anybody else.
fn alone(report: &mut Report, gib: u64, rounds: usize) -> anyhow::Result<()> {
    let qemu = assets::qemu11().map_err(anyhow::Error::msg)?;
    let guest = || Guest::debian(KERNEL).append(MOVABLE).memory("1G").qemu_in(&qemu);
    let host = Host::in_memory().map_err(anyhow::Error::msg)?;
    let mut device = MemoryDevice::new(&host, "8G", "");
    let own = host.qemu(guest().served_memory(&device));
    let qemus = Host::new().qemu(guest().qemu_args(&virtio_mem_args(gib)));
    let [mut ours, mut theirs] = [Figures::default(), Figures::default()];
    let size = format!("{gib}G");
    for _ in 0..rounds {
        ours.more.push(seconds(|| device.resize(&size)));
        use_all(&own, gib);
        ours.less.push(seconds(|| device.resize("0")));
        theirs.more.push(seconds(|| plug(&qemus, gib << 30)));
        use_all(&qemus, gib);
        theirs.less.push(seconds(|| plug(&qemus, 0)));
    }
    rows(report, gib, "device alone", &ours, ("QEMU's device", &theirs), Some(GOAL));
    Ok(())
}

/// Measures the command, on VMs that Ebb manages.
fn resized(report: &mut Report, gib: u64, rounds: usize) -> anyhow::Result<()> {
    let mechanisms = Mechanism::here(report);
    let most_mib = BEGAN_MIB + gib * 1024;
    let start = |&mechanism: &Mechanism| {
        mechanism.start(Guest::debian(KERNEL).append(MOVABLE), BEGAN_MIB, most_mib)
    };
    let vms: Vec<Vm> = mechanisms.iter().map(start).collect();
    let mut all: Vec<Figures> = mechanisms.iter().map(|_| Figures::default()).collect();
    let (small, large) = (format!("{BEGAN_MIB}M"), format!("{most_mib}M"));
    for vm in &vms {
        reach(vm, &small)?;
    }
    for _ in 0..rounds {
        for (vm, figures) in vms.iter().zip(&mut all) {
            figures.more.push(reach(vm, &large)?.duration_ns as f64 / 1e9);
            use_all(vm, gib);
            figures.less.push(reach(vm, &small)?.duration_ns as f64 / 1e9);
            figures.left_mib.push(mib(vm.host_bytes()));
        }
    }
    if let Some((balloon, devices)) = all.split_last() {
        for (mechanism, device) in mechanisms.iter().zip(devices) {
            rows(report, gib, mechanism.name(), device, ("balloon", balloon), None);
        }
    }
    if mechanisms.contains(&Mechanism::Own) {
        touch_unplugged(report, &vms[0]);
    }
    Ok(())
}

fn rows(
    report: &mut Report,
    gib: u64,
    what: &str,
    ours: &Figures,
    (name, theirs): (&str, &Figures),
    goal: Option<f64>,
) {
    let with_goal = |row: Row| if let Some(goal) = goal { row.at_most(goal) } else { row };
    let more = Row::new(format!("{what}, {gib} GiB more"), "s", &ours.more);
    report.row(with_goal(more.against(name, &theirs.more)));
    let less = Row::new(format!("{what}, {gib} GiB less"), "s", &ours.less);
    report.row(with_goal(less.against(name, &theirs.less)));
    if ours.left_mib.mean().is_some() {
        let left = Row::new(format!("{what}, left of the host's"), "MiB", &ours.left_mib);
        report.row(left.against(name, &theirs.left_mib));
    }
}

/// Touches unplugged memory. Nothing must be plugged when this begins.
fn touch_unplugged(report: &mut Report, vm: &Vm) {
    for index in 0..TOUCHES {
        let line = format!("xp /1xg {:#x}", REGION + index * 4 * MIB);
        vm.qmp("human-monitor-command", json!({ "command-line": line }));
    }
    let devices = vm.status().size.devices;
    let seen = devices.first().and_then(|device| device.violations).unwrap_or(0);
    let row = Row::new("touches of what is not plugged: counted", "", &one(seen as f64));
    report.row(row.against("touched", &one(TOUCHES as f64)).exact().at_least(1.0));
}

fn seconds(action: impl FnOnce()) -> f64 {
    let start = Instant::now();
    action();
    start.elapsed().as_secs_f64()
}

fn use_all(vm: &Vm, gib: u64) {
    vm.guest(&format!("fill a {}M", gib * 1024 - 128));
    vm.guest("free a");
}

fn virtio_mem_args(gib: u64) -> String {
    format!(
        "-m slots=0,maxmem={}G \
         -object memory-backend-memfd,id=more,size={gib}G,share=on,reserve=off \
         -device virtio-mem-pci,id=vmem0,memdev=more",
        2 + gib
    )
}

/// Sets the size of QEMU's device, and waits until it has that size.
fn plug(vm: &Vm, bytes: u64) {
    let path = "/machine/peripheral/vmem0";
    let request = json!({ "path": path, "property": "requested-size", "value": bytes });
    vm.qmp("qom-set", request);
    until("the guest's driver to come to the requested size", || {
        let size = vm.qmp("qom-get", json!({ "path": path, "property": "size" }));
        (size.as_u64() == Some(bytes)).then_some(())
    });
}
