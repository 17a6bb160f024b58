//! Blocks that come back although the guest does not use them: it has only written their metadata,
//! as when it takes their neighbour on a free list.

use std::path::Path;

use anyhow::Context;
use ebb_api::VmStatus;
use vmtest::assets::{self, Kernel};
use vmtest::{Guest, Host, Vm};

use super::side::{self, MIB};
use crate::bench::hyperalloc::fig7;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::taken::Taken;
use crate::bench::work;

const NAME: &str = "vprobe-spurious";
const KERNEL: &str = "6.1-cloud";
const MEMORY_MIB: u64 = 1024;
const CPUS: u32 = 2;
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
/// How long the guest works, in seconds.
const SECONDS: [u64; 2] = [15, 60];

const SPURIOUS: &str = "spurious restores a second";
const SHARE: &str = "spurious, of all restores";
const RESTORES: &str = "restores a second";
const RECLAIMED: &str = "reclaimed a second";
const EARLY: &str = "first touches of reclaimed frames a second";

/// The least blocks to reclaim.
#[derive(Clone, Copy)]
struct Side {
    order: u8,
    name: &'static str,
}

const SIDES: [Side; 2] = [
    Side { order: 9, name: "blocks of 2 and 4 MiB" },
    Side { order: 10, name: "blocks of 4 MiB only" },
];

/// Runs the benchmark.
///
/// # Errors
/// There is no Debian to run, or the host permits no loop device.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let (mut report, mut blocks) = side::begin(session, NAME)?;
    let is_full = usize::from(!session.identity.quick);
    let (count, seconds) = (BLOCKS[is_full], SECONDS[is_full]);
    report.note(format!(
        "A guest of {MEMORY_MIB} MiB with {CPUS} vCPUs in strict mode runs stress-ng for {seconds} s (memory, \
         forks, files), while free memory is reclaimed each second; {count} VMs of each side."
    ));
    let ground = Host::new();
    let image = fig7::image(&ground)?;
    let sides = (&SIDES[..], |side: Side| side.name.to_owned());
    let taken = blocks
        .take(&mut report, "stress-ng", sides, count, |side| one(side, image.image(), seconds))?;
    rows(&mut report, &taken);
    Ok(report)
}

fn one(side: Side, image: &Path, seconds: u64) -> anyhow::Result<Figures> {
    let kernel = assets::kernel(KERNEL).map_err(anyhow::Error::msg)?;
    let vm = Host::new().run(guest(kernel, side, image));
    vm.wait_trusted();
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("sh busybox mount -t proc proc /mnt/proc");
    side::use_all(&vm)?;
    vm.ebb("auto on --interval 1s").ok();
    let before = vm.status();
    let took = stress(&vm, seconds)?;
    Ok(figures(&before, &vm.status(), took))
}

fn guest(kernel: Kernel, side: Side, image: &Path) -> Guest {
    Guest::of(kernel)
        .memory(&format!("{MEMORY_MIB}M"))
        .cpus(CPUS)
        .backing("auto")
        .mode("strict")
        .min_order(side.order)
        .privileged()
        .qemu_args(&format!(
            "-drive file={},if=none,id=disk,format=raw,snapshot=on -device virtio-blk-pci,drive=disk",
            image.display()
        ))
}

/// Works in the guest. Returns how many seconds it took.
fn stress(vm: &Vm, seconds: u64) -> anyhow::Result<f64> {
    let what = format!(
        "program /mnt stress-ng --quiet --temp-path /root --vm 1 --vm-bytes 300M --vm-hang 1 \
         --mmap 1 --mmap-bytes 128M --fork 2 --hdd 1 --hdd-bytes 64M --timeout {seconds}"
    );
    work::seconds(vm, &what).context("stress-ng")
}

fn figures(before: &VmStatus, after: &VmStatus, seconds: f64) -> Figures {
    let a_second = |count: fn(&VmStatus) -> u64| (count(after) - count(before)) as f64 / seconds;
    let restores = a_second(|status| status.faults.metadata);
    let spurious = a_second(|status| status.faults.spurious);
    let mut figures = Figures::new();
    add(&mut figures, RESTORES, restores);
    add(&mut figures, SPURIOUS, spurious);
    add(&mut figures, SHARE, 100.0 * spurious / restores.max(f64::MIN_POSITIVE));
    add(&mut figures, EARLY, a_second(|status| status.faults.early));
    add(&mut figures, RECLAIMED, a_second(|status| status.reclaimed_total_bytes) / MIB as f64);
    figures
}

fn rows(report: &mut Report, taken: &Taken) {
    let [ebb, other] = SIDES.map(|side| side.name);
    for (figure, unit) in
        [(SPURIOUS, "1/s"), (SHARE, "%"), (RESTORES, "1/s"), (EARLY, "1/s"), (RECLAIMED, "MiB/s")]
    {
        let row = Row::new(figure, unit, &taken.rounds(ebb, figure)).failed(taken.failed());
        report.row(row.against_vms(other, &taken.rounds(other, figure)));
    }
}
