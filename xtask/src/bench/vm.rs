//! Real VMs with stock kernels, as benchmarks need them.

use std::time::{Duration, Instant};

use serde_json::json;
#[cfg(test)]
use vmtest::assets::Kernel;
use vmtest::{Guest, Host, Vm};

use super::bare;
use super::report::Report;

pub const GIB: u64 = 1 << 30;
const KERNEL: &str = "6.1-cloud";

/// Makes a guest of `gib` GiB. Ebb chooses its backing and mode.
pub fn guest(gib: u64) -> Guest {
    Guest::debian(KERNEL).memory(&format!("{gib}G"))
}

/// Returns the kinds of memory to measure on: huge pages, too, if the host gives them.
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

/// Notes what the VM's memory is really made of.
pub fn note_backing(report: &mut Report, what: &str, vm: &Vm) {
    report.note(format!(
        "{what}: {:.0} % of the {:.1} GiB that QEMU has mapped are huge pages.",
        huge_percent(vm),
        bare::mapped_bytes(vm.pid()).0 as f64 / GIB as f64
    ));
}

/// Returns how much of what QEMU has mapped is in huge pages, in percent.
pub fn huge_percent(vm: &Vm) -> f64 {
    let (all, huge) = bare::mapped_bytes(vm.pid());
    100.0 * huge as f64 / all.max(1) as f64
}

/// Makes the guest do something. Returns how long that took.
pub fn timed(vm: &Vm, request: &str) -> Duration {
    let start = Instant::now();
    vm.guest(request);
    start.elapsed()
}

/// Replaces the daemon by a new one, whose counters begin at zero.
pub fn restart_daemon(vm: &Vm) {
    vm.host().kill9();
    vm.host().start();
    vm.wait_trusted();
}

/// Returns the process that serves the only VM of a host.
pub fn server(host: &Host) -> anyhow::Result<i32> {
    host.servers().first().copied().ok_or_else(|| anyhow::anyhow!("no VM is served"))
}

/// Tells the guest's balloon driver how much memory the guest should have.
pub fn balloon(vm: &Vm, guest_bytes: u64) {
    vm.qmp("balloon", json!({ "value": guest_bytes }));
}

/// Returns the guest's current memory, as its balloon driver tells it.
pub fn balloon_bytes(vm: &Vm) -> u64 {
    vm.qmp("query-balloon", json!({}))["actual"].as_u64().unwrap_or(0)
}

/// Returns the options of a command line, each with its value.
pub fn options(line: &[String]) -> Vec<String> {
    let mut options: Vec<String> = Vec::new();
    for word in line {
        match options.last_mut() {
            Some(last) if !word.starts_with('-') => *last += &format!(" {word}"),
            _ => options.push(word.clone()),
        }
    }
    options
}

/// Returns a kernel whose files do not exist, for tests of command lines.
#[cfg(test)]
pub fn no_kernel() -> Kernel {
    Kernel {
        package: "linux".into(),
        vmlinuz: "/vmlinuz".into(),
        initrd: "/initrd".into(),
        qemu_directory: None,
        vprobe: Err("no guest of a benchmark has it".into()),
    }
}
