//! Real VMs with stock kernels, as benchmarks want them.

use std::time::{Duration, Instant};

use serde_json::json;
use vmtest::{Guest, Host, Vm};

use super::bare;
use super::report::Report;

pub const GIB: u64 = 1 << 30;
const KERNEL: &str = "6.1-cloud";

/// A guest of so many GiB, its backing and mode chosen by Ebb.
pub fn guest(gib: u64) -> Guest {
    Guest::debian(KERNEL).memory(&format!("{gib}G"))
}

/// The kinds of memory to measure on: huge pages where the host gives them.
pub fn backings(report: &mut Report) -> Vec<&'static str> {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let setting = std::fs::read_to_string(path).unwrap_or_default();
    match setting.contains("[never]") || setting.contains("[deny]") || setting.is_empty() {
        true => {
            report.note("The host gives shared memory no huge pages: those rows are left out.");
            vec!["small"]
        }
        false => vec!["thp", "small"],
    }
}

/// Says what the VM's memory is made of in truth.
pub fn note_backing(report: &mut Report, what: &str, vm: &Vm) {
    report.note(format!(
        "{what}: {:.0} % of the {:.1} GiB that QEMU has mapped are huge pages.",
        huge_percent(vm),
        bare::mapped_bytes(vm.pid()).0 as f64 / GIB as f64
    ));
}

/// The part of what QEMU has mapped.
pub fn huge_percent(vm: &Vm) -> f64 {
    let (all, huge) = bare::mapped_bytes(vm.pid());
    100.0 * huge as f64 / all.max(1) as f64
}

/// Has the guest do something, and how long that took.
pub fn timed(vm: &Vm, request: &str) -> Duration {
    let start = Instant::now();
    vm.guest(request);
    start.elapsed()
}

/// Starts a daemon in the place of this one. Its counts begin anew.
pub fn restart_daemon(vm: &Vm) {
    vm.host().kill9();
    vm.host().start();
    vm.wait_trusted();
}

/// The process that serves the one VM of a host.
pub fn server(host: &Host) -> anyhow::Result<i32> {
    host.servers().first().copied().ok_or_else(|| anyhow::anyhow!("no VM is served"))
}

/// Tells the guest's balloon driver how much memory the guest is to have.
pub fn balloon(vm: &Vm, guest_bytes: u64) {
    vm.qmp("balloon", json!({ "value": guest_bytes }));
}

/// What the guest has now, by its balloon driver.
pub fn balloon_bytes(vm: &Vm) -> u64 {
    vm.qmp("query-balloon", json!({}))["actual"].as_u64().unwrap_or(0)
}
