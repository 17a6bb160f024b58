//! Growing and shrinking a VM: Table 1 and Figures 3 to 8 of virtio-mem's paper, and how long it
//! takes. `docs/benchmarks.md` explains each row.

mod mechanism;
mod plug;
mod speed;
mod steps;
mod unmovable;

use anyhow::{Context, ensure};
use ebb_api::{ResizeReport, SizeState};
use vmtest::{Vm, until};

pub use plug::run as plug;
pub use speed::run as fig7;
pub use steps::{fig3, tab1};
pub use unmovable::run as fig5;

use super::rounds::Rounds;

const MIB: u64 = 1 << 20;
const KERNEL: &str = "6.1-cloud";
/// Kernel option: plugged memory is only for movable pages.
const MOVABLE: &str = "memhp_default_state=online_movable";

fn one(figure: f64) -> Rounds {
    [figure].into_iter().collect()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

fn resize(vm: &Vm, words: &str) -> anyhow::Result<ResizeReport> {
    let ran = vm.ebb(&format!("resize {words} --json"));
    // The resize may have stopped short.
    ensure!(matches!(ran.code, Some(0 | 3)), "resize {words}: {}", ran.stderr);
    serde_json::from_str(&ran.stdout).context("a report")
}

/// Resizes a VM, and fails if the size is not reached.
fn reach(vm: &Vm, words: &str) -> anyhow::Result<ResizeReport> {
    let report = resize(vm, words)?;
    ensure!(report.state == SizeState::Reached, "resize {words}: {}", report.stopped_by);
    Ok(report)
}

fn node_mib(vm: &Vm, node: usize) -> f64 {
    let text = vm.guest(&format!("cat /sys/devices/system/node/node{node}/meminfo"));
    let mut words = text.split_whitespace().skip_while(|&word| word != "MemTotal:").skip(1);
    words.next().and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

/// Returns for how many blocks of 128 MiB Linux keeps metadata.
fn blocks(vm: &Vm) -> f64 {
    let text = vm.guest("sh ls -d /sys/devices/system/memory/memory* | wc -l");
    text.trim().parse().unwrap_or(f64::NAN)
}

/// Returns the number of blocks once it is stable: Linux removes a block a little after the device
/// has it.
fn settled_blocks(vm: &Vm) -> f64 {
    let mut before = blocks(vm);
    until("the blocks to stay", || {
        let now = blocks(vm);
        let stays = now == before;
        before = now;
        stays.then_some(now)
    })
}
