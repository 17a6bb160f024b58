//! The sides of the figures: what takes memory from a guest. All VMs of a figure are made here.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebb_sys::meminfo::MemInfo;
use ebb_units::HUGE_BYTES;
use vmtest::assets::{self, Kernel};
use vmtest::{Guest, Host, Vm};

use super::api;
use crate::bench::blocks::Blocks;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::taken::Taken;
use crate::bench::vm as vms;
use crate::interrupt;
use crate::plot::Series;

pub const MIB: u64 = 1 << 20;
const KERNEL: &str = "6.1-cloud";
/// The guest's memory that is not filled before the measurement, so that programs have room.
const ROOM_MIB: u64 = 64;
/// The part of a guest's memory that is taken from it, in percent.
const TAKEN_PERCENT: u64 = 30;
/// The least part of it that must really be taken, in percent.
const LEAST_PERCENT: u64 = 95;
/// Most requests for it.
const TRIES: usize = 4;
/// The address that QEMU's user network gives to a guest, and the one it has itself.
const ADDRESSES: &str = "10.0.2.15/24 10.0.2.2";
/// Time after which a guest has nothing more to report: its kernel waits two seconds.
const STAYS: Duration = Duration::from_secs(3);
/// Longest time for its reports.
const SETTLES: Duration = Duration::from_secs(60);
/// How much was taken, in MiB.
pub const TAKEN: &str = "taken";

/// What takes memory from a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Ebb, by the guest's page metadata, which it then watches.
    VProbe,
    /// Ebb evicts to the store, and reads back what is touched, freed by the guest or not. So would
    /// a host whose devices can fault.
    Iopf,
    /// QEMU's virtio-balloon.
    Balloon,
    /// Free page reporting by QEMU's virtio-balloon.
    Reporting,
    /// Nothing.
    Nobody,
}

/// Setup of a VM.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub memory_mib: u64,
    pub cpus: u32,
    /// The ext4 image of the VM's disk, if it has one. Writes to the disk are lost at the VM's end.
    pub image: Option<&'a Path>,
    /// Forwarded ports in QEMU's words, such as `tcp:127.0.0.1:4000-:80`, if it has a network.
    pub forwarded: Option<&'a str>,
}

impl Side {
    /// Returns the side's name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Side::VProbe => "V-Probe",
            Side::Iopf => "evict and read back (IOPF stand-in)",
            Side::Balloon => "virtio-balloon",
            Side::Reporting => "free page reporting",
            Side::Nobody => "no reclaim",
        }
    }

    pub fn is_ebb(self) -> bool {
        matches!(self, Side::VProbe | Side::Iopf)
    }

    /// Starts a VM. Its disk is at `/mnt`. The VMs of all sides differ only in whether Ebb goes on
    /// managing them, and in whether the balloon reports free pages.
    ///
    /// # Errors
    /// The guest's kernel is missing.
    ///
    /// # Panics
    /// The test bench panics.
    pub fn start(self, setup: &Setup<'_>) -> anyhow::Result<Vm> {
        let kernel = assets::kernel(KERNEL).map_err(anyhow::Error::msg)?;
        let host = Host::new();
        if self == Side::Iopf {
            // Such a host does not know what the guest has freed.
            host.set("EBB_READ_FREED", "true");
        }
        let vm = host.run(self.guest(kernel, setup));
        match self.is_ebb() {
            true => drop(vm.wait_trusted()),
            false => drop(vm.detach()),
        }
        if setup.image.is_some() {
            vm.guest("mount ext4 /dev/vda /mnt");
        }
        if setup.forwarded.is_some() {
            vm.guest(&format!("network {ADDRESSES}"));
        }
        Ok(vm)
    }

    fn guest(self, kernel: Kernel, setup: &Setup<'_>) -> Guest {
        let reports = if self == Side::Reporting { "on" } else { "off" };
        let guest = Guest::of(kernel)
            .memory(&format!("{}M", setup.memory_mib))
            .cpus(setup.cpus)
            .backing("auto")
            .mode("strict")
            .privileged()
            .qemu_args(&format!(
                "-device virtio-balloon-pci,id=balloon,free-page-reporting={reports}"
            ));
        let guest = match setup.image {
            None => guest,
            Some(image) => guest.qemu_args(&format!(
                "-drive file={},if=none,id=disk,format=raw,snapshot=on \
                 -device virtio-blk-pci,drive=disk",
                image.display()
            )),
        };
        match setup.forwarded {
            None => guest,
            Some(forwarded) => guest.qemu_args(&format!(
                "-netdev user,id=net,hostfwd={forwarded} -device virtio-net-pci,netdev=net"
            )),
        }
    }

    /// Takes 30 % of the guest's memory, all at once. Free page reporting takes all that is free.
    ///
    /// # Errors
    /// It gets much less.
    pub fn take(self, vm: &Vm, memory_mib: u64, figures: &mut Figures) -> anyhow::Result<()> {
        let wanted = memory_mib * MIB * TAKEN_PERCENT / 100;
        // A balloon has whole pages.
        let (before, wanted) = (vm.host_bytes(), wanted.next_multiple_of(HUGE_BYTES));
        let taken = || before.saturating_sub(vm.host_bytes());
        match self {
            Side::VProbe | Side::Iopf => {
                // A reclaim of memory that the guest has never used gives the host nothing.
                for _ in 0..TRIES {
                    match wanted.saturating_sub(taken()) {
                        0 => break,
                        left if self == Side::VProbe => drop(api::reclaim(vm, left)?),
                        left => drop(api::evict(vm, left)?),
                    }
                }
                let enough = wanted * LEAST_PERCENT / 100;
                ensure!(taken() >= enough, "the host got {} of {wanted} bytes", taken());
            }
            Side::Balloon => {
                let left = memory_mib * MIB - wanted;
                vms::balloon(vm, left);
                let is_there = || (vms::balloon_bytes(vm) == left).then_some(());
                vmtest::until("the balloon's end", is_there);
            }
            // The guest has reported a part already.
            Side::Reporting => settle(vm)?,
            Side::Nobody => {}
        }
        add(figures, TAKEN, taken() as f64 / MIB as f64);
        Ok(())
    }
}

/// Has the guest write nearly all its memory and free it, so that the host has given it memory
/// everywhere.
///
/// # Errors
/// The guest does not tell how much it has.
pub fn use_all(vm: &Vm) -> anyhow::Result<()> {
    vm.guest(&format!("fill all {}M", room_mib(vm)?));
    vm.guest("free all");
    Ok(())
}

/// Returns how much memory programs in the guest may take.
///
/// # Errors
/// The guest does not tell.
pub fn room_mib(vm: &Vm) -> anyhow::Result<u64> {
    let memory = MemInfo::parse(&vm.guest("cat /proc/meminfo"));
    let memory = memory.context("the guest does not tell MemAvailable")?;
    Ok((memory.available_bytes / MIB).saturating_sub(ROOM_MIB))
}

/// Waits until the guest has reported all that it had to report: the host's memory stays the same
/// for longer than the guest's kernel waits.
///
/// # Errors
/// The user interrupted, or it never ends.
pub fn settle(vm: &Vm) -> anyhow::Result<()> {
    let (begun, mut bytes, mut since) = (Instant::now(), vm.host_bytes(), Instant::now());
    while since.elapsed() < STAYS {
        interrupt::check()?;
        ensure!(begun.elapsed() < SETTLES, "the guest reports for more than {SETTLES:?}");
        thread::sleep(STAYS / 30);
        let now = vm.host_bytes();
        if now.abs_diff(bytes) >= HUGE_BYTES {
            (bytes, since) = (now, Instant::now());
        }
    }
    Ok(())
}

/// Returns a port of this host that is free, in the words in which QEMU forwards it to the guest's
/// port.
///
/// # Errors
/// There is none.
pub fn forward(protocol: &str, guest_port: u16) -> anyhow::Result<(SocketAddr, String)> {
    let here = match protocol {
        "udp" => UdpSocket::bind("127.0.0.1:0")?.local_addr()?,
        _ => TcpListener::bind("127.0.0.1:0")?.local_addr()?,
    };
    Ok((here, format!("{protocol}:{here}-:{guest_port}")))
}

/// Begins a figure: its report, with what all figures share, and its blocks.
///
/// # Errors
/// The results of an earlier session cannot be read.
pub fn begin(session: &Session, name: &'static str) -> anyhow::Result<(Report, Blocks)> {
    let mut report = Report::new(name);
    let blocks = Blocks::open(session, name)?;
    report.seeded(blocks.seed());
    note_terms(&mut report);
    Ok((report, blocks))
}

/// Adds a row for each of `others`, which compares a figure of V-Probe's with theirs. `judge` sets
/// the goal of the row against the VMs without reclaim.
pub fn compare(
    report: &mut Report,
    taken: &Taken,
    (label, unit, figure): (&str, &'static str, &str),
    others: &[Side],
    judge: impl Fn(Row) -> Row,
) {
    let of = |side: Side| taken.rounds(side.name(), figure);
    for &other in others {
        let row = Row::new(label, unit, &of(Side::VProbe)).failed(taken.failed());
        let row = row.against_vms(other.name(), &of(other));
        report.row(if other == Side::Nobody { judge(row) } else { row });
    }
}

/// Returns the courses of a figure in the last block, a line for each side. A value stands for
/// `seconds`.
pub fn courses(taken: &Taken, figure: &str, seconds: f64) -> Vec<Series> {
    let points = |name: &str| {
        let course = (1..).zip(taken.course(name, figure));
        course.map(|(number, value)| (f64::from(number) * seconds, value)).collect()
    };
    let line = |name: &str| Series { name: name.into(), points: points(name), is_bound: false };
    taken.names().map(line).collect()
}

/// Notes how much was taken from the guests of each side.
pub fn note_taken(report: &mut Report, taken: &Taken) {
    for side in [Side::VProbe, Side::Iopf] {
        let mib = taken.rounds(side.name(), TAKEN).median();
        report.note(format!("{}: {mib:.0} MiB taken at the beginning.", side.name()));
    }
}

fn note_terms(report: &mut Report) {
    report.note(
        "Guests are emulated, in strict mode where Ebb manages them, and have used nearly all their memory \
         before.",
    );
    report.note(
        "The IOPF stand-in is Ebb's eviction to a swap file without knowledge of what is free: no device here \
         can fault.",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(side: Side) -> Vec<String> {
        let setup = Setup {
            memory_mib: 1024,
            cpus: 2,
            image: Some(Path::new("/image")),
            forwarded: Some("tcp:127.0.0.1:4000-:80"),
        };
        side.guest(vms::no_kernel(), &setup).ebb_line("vm0", Path::new("/host/vm0"))
    }

    #[test]
    fn all_of_a_figures_vms_are_on_equal_terms() {
        let due = line(Side::VProbe);
        assert!(due.iter().any(|word| word.contains("hostfwd=tcp")), "{due:?}");
        for side in [Side::Iopf, Side::Balloon, Side::Nobody] {
            assert_eq!(line(side), due, "{}", side.name());
        }
        let reporting = line(Side::Reporting);
        let differs = reporting.iter().zip(&due).filter(|(one, other)| one != other);
        let differs: Vec<_> = differs.map(|(one, _)| one.as_str()).collect();
        assert_eq!(differs, ["virtio-balloon-pci,id=balloon,free-page-reporting=on"]);
    }
}
