//! With plentiful memory: what it costs that Ebb serves the guest's disk and knows its blocks by
//! content, against QEMU's own virtio-blk with equal settings.

use std::path::Path;

use super::compare;
use super::keeper::Keeper;
use super::medium::Medium;
use super::rig::{self, Rig};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vswapper-plentiful";
const FILE: &str = "a file through the page cache";
const MEMORY: &str = "the guest's memory";
/// Not 1 GiB: QEMU's buffer for translated code has that length, and [`super::pin`] knows the
/// guest's memory by its length.
const MEMORY_MIB: u64 = 1280;
const IMAGE_BYTES: u64 = 700 << 20;
const MIB: f64 = (1 << 20) as f64;

/// One kind of access: how much in all, how many bytes at once, and on how many threads.
struct Job {
    what: &'static str,
    access: &'static str,
    mib: u64,
    at_once: &'static str,
    threads: u32,
}

const fn job(
    what: &'static str,
    access: &'static str,
    mib: u64,
    at_once: &'static str,
    threads: u32,
) -> Job {
    Job { what, access, mib, at_once, threads }
}

const JOBS: [Job; 7] = [
    job("reads in order, 128 KiB", "read", 512, "128K", 1),
    job("reads in order, 128 KiB, 4 threads", "read", 512, "128K", 4),
    job("random reads, 4 KiB", "random-read", 16, "4K", 1),
    job("random reads, 4 KiB, 8 threads", "random-read", 32, "4K", 8),
    job("writes in order, 128 KiB", "write", 256, "128K", 1),
    job("random writes, 4 KiB", "random-write", 16, "4K", 1),
    job("random writes, 4 KiB, 8 threads", "random-write", 32, "4K", 8),
];

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        work::random_file(&at.join("file"), work::FILE_BYTES)
    })?;
    let sides = [Keeper::Ebb, Keeper::Nobody];
    let context = (session, &mut blocks, &mut report);
    let taken = compare::take(context, "plentiful", &sides, |keeper| one(keeper, &image))?;
    rows(&mut report, &taken);
    report.plot(&Figure {
        title: "A guest's disk by Ebb and by QEMU, memory plentiful",
        x_label: "job, as in the table",
        y_label: "MiB/s",
        panels: &[picture(&taken)],
    })?;
    Ok(report)
}

fn one(keeper: Keeper, image: &Path) -> anyhow::Result<Figures> {
    let setup = Setup::new(keeper, Medium::Ssd, [MEMORY_MIB; 2], image);
    let rig = Rig::start(&Setup { cpus: 2, ..setup })?;
    compare::counting(&rig, |figures| {
        let file_s = work::seconds(&rig.vm, "read /mnt/file")?;
        compare::add(figures, FILE, work::FILE_BYTES as f64 / MIB / file_s);
        compare::add(figures, MEMORY, rig.vm.guest("bench mem 3").parse()?);
        rig.vm.guest("umount /mnt");
        for Job { what, access, mib, at_once, threads } in &JOBS {
            let work = format!("disk /dev/vda {access} {mib}M {at_once} {threads}");
            compare::add(figures, what, *mib as f64 / work::seconds(&rig.vm, &work)?);
        }
        Ok(())
    })
}

fn rows(report: &mut Report, taken: &Taken) {
    let against = "QEMU's virtio-blk with an iothread";
    let both = |figure: &str| {
        [Keeper::Ebb, Keeper::Nobody].map(|keeper| taken.rounds(&keeper.name(), figure))
    };
    let units = JOBS.iter().map(|job| (job.what, "MiB/s"));
    for (what, unit) in units.chain([(FILE, "MiB/s"), (MEMORY, "pages/s")]) {
        let [ebb, qemu] = both(what);
        let row = Row::new(what, unit, &ebb).failed(taken.failed());
        report.row(row.against_vms(against, &qemu).at_least(1.0));
    }
    for metric in compare::COUNTED {
        let [ebb, qemu] = both(metric.figure);
        report.row(Row::new(metric.what, metric.unit, &ebb).against(against, &qemu));
    }
}

fn picture(taken: &Taken) -> Panel {
    let series = |keeper: Keeper, name: &str| {
        let median = |job: &Job| taken.rounds(&keeper.name(), job.what).median();
        let points = (1..).zip(&JOBS).map(|(x, job)| (f64::from(x), median(job))).collect();
        Series { name: name.into(), points, is_bound: false }
    };
    let series = vec![series(Keeper::Ebb, "Ebb"), series(Keeper::Nobody, "QEMU's virtio-blk")];
    Panel { series, ..Panel::default() }
}
