//! Reclaiming the memory that a guest has freed, with a disk that reaches memory by itself, as a
//! passed-through device does (`--disk IMG,dma=strict`): Ebb's automatic reclaim, against QEMU's
//! free page reporting.

use vmtest::{Disk, Guest, Host, Vm, until};

use super::report::Report;
use super::rounds::Rounds;
use super::row::Row;
use super::session::Session;

const MIB: u64 = 1 << 20;
const FILL: &str = "fill a 600M";
/// The guest's command: it reads the disk into memory that no processor has touched since it was
/// reclaimed.
const READ: &str = "disk /dev/vda 256M";
/// Bytes in use below which all free memory has been reclaimed.
const TAKEN_BYTES: u64 = 300 * MIB;

/// Who reclaims the guest's free memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taker {
    Ebb,
    Reporting,
}

/// Figures, one each round.
#[derive(Default)]
struct Figures {
    requests: Rounds,
    failed: Rounds,
    refused: Rounds,
    reclaimed_mib: Rounds,
}

/// Runs the benchmark.
///
/// # Errors
/// None. Failures panic, as in tests.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("dma");
    report.note(
        "A guest of 1 GiB fills 600 MiB and frees them; once they are the host's it writes 256 MiB \
         to its disk and reads them back through its page cache, or as much of them as it can.",
    );
    let rounds = if quick { 1 } else { 5 };
    let [ebb, reporting] = [Taker::Ebb, Taker::Reporting].map(|taker| measure(taker, rounds));
    let row = |what: &str, unit, ebb: &Rounds, other: &Rounds| {
        Row::new(what, unit, ebb).against("free page reporting", other)
    };
    let rows = [
        row("requests", "a round", &ebb.requests, &reporting.requests),
        row("failed requests", "a round", &ebb.failed, &reporting.failed).at_most(0.0),
        row("accesses refused", "a round", &ebb.refused, &reporting.refused),
        row("free memory to the host", "MiB", &ebb.reclaimed_mib, &reporting.reclaimed_mib),
    ];
    rows.into_iter().for_each(|row| report.row(row));
    Ok(report)
}

fn measure(taker: Taker, rounds: usize) -> Figures {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "512M");
    let guest = Guest::debian("6.1-cloud").memory("1G").strict_disk(&disk);
    let vm = match taker {
        Taker::Ebb => host.run(guest),
        Taker::Reporting => {
            host.run(guest.qemu_args("-device virtio-balloon-pci,free-page-reporting=on"))
        }
    };
    if taker == Taker::Ebb {
        vm.ebb("auto on --interval 100ms").ok();
    } else {
        // The guest's kernel complains about these errors.
        vm.forgive();
    }
    let mut figures = Figures::default();
    (0..rounds).for_each(|_| figures.round(&vm, taker));
    figures
}

impl Figures {
    fn round(&mut self, vm: &Vm, taker: Taker) {
        vm.guest(FILL);
        let full_bytes = vm.host_bytes();
        vm.guest("free a");
        vm.guest("dropcaches");
        until("free memory to go to the host", || (vm.host_bytes() < TAKEN_BYTES).then_some(()));
        self.reclaimed_mib.push((full_bytes.saturating_sub(vm.host_bytes()) / MIB) as f64);
        let before = vm.status().disks;
        let answer = vm.try_guest(READ);
        let after = vm.status().disks;
        assert!(
            taker == Taker::Reporting || answer.as_ref().is_ok_and(|wrong| wrong == "0"),
            "{answer:?}"
        );
        self.requests.push((after.requests - before.requests) as f64);
        self.failed.push((after.failed_requests - before.failed_requests) as f64);
        self.refused.push((after.dma_faults - before.dma_faults) as f64);
    }
}
