//! Memory is plentiful: what it costs that Ebb serves the guest's disk and knows its
//! blocks by content, against QEMU's own virtio-blk at equal settings.

use std::path::Path;

use vmtest::Scratch;

use super::medium::Medium;
use super::rig::{self, Keeper, Rig, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 1024;
const IMAGE_BYTES: u64 = 700 << 20;
const MIB: f64 = (1 << 20) as f64;

/// An access, how much of it, so many bytes at once on so many threads.
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

/// What one VM managed: MiB a second by job, of a file through the page cache, and pages
/// of its memory a second.
struct Run {
    disk: Vec<f64>,
    file: f64,
    memory: f64,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-plentiful");
    let directory = Scratch::new("ebb-bench-")?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        work::random_file(&at.join("file"), work::FILE_BYTES)
    })?;
    let rounds = if quick { 1 } else { 5 };
    let (mut ebb, mut qemu) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        qemu.push(one(Keeper::Nobody, &image)?);
        ebb.push(one(Keeper::Ebb, &image)?);
    }
    rows(&mut report, &ebb, &qemu);
    report.plot(&Figure {
        title: "A guest's disk by Ebb and by QEMU, memory plentiful",
        x_label: "job, as in the table",
        y_label: "MiB/s",
        panels: &[picture(&ebb, &qemu)],
    })?;
    Ok(report)
}

fn one(keeper: Keeper, image: &Path) -> anyhow::Result<Run> {
    let medium = Medium::Ssd;
    let setup = Setup::new(keeper, medium, [MEMORY_MIB; 2], image);
    let rig = Rig::start(&Setup { cpus: 2, ..setup })?;
    let file_s = work::seconds(&rig.vm, "read /mnt/file")?;
    let memory = rig.vm.guest("bench mem 3").parse()?;
    rig.vm.guest("umount /mnt");
    let disk = JOBS.iter().map(|job| {
        let Job { access, mib, at_once, threads, .. } = job;
        let work = format!("disk /dev/vda {access} {mib}M {at_once} {threads}");
        Ok(*mib as f64 / work::seconds(&rig.vm, &work)?)
    });
    let disk = disk.collect::<anyhow::Result<_>>()?;
    Ok(Run { disk, file: work::FILE_BYTES as f64 / MIB / file_s, memory })
}

fn rows(report: &mut Report, ebb: &[Run], qemu: &[Run]) {
    let against = "QEMU's virtio-blk";
    let mut row = |what: &str, unit, of: &dyn Fn(&Run) -> f64| {
        let rounds = |runs: &[Run]| runs.iter().map(of).collect::<Rounds>();
        report
            .row(Row::new(what, unit, &rounds(ebb)).against(against, &rounds(qemu)).at_least(1.0));
    };
    for (index, job) in JOBS.iter().enumerate() {
        row(job.what, "MiB/s", &|run| run.disk[index]);
    }
    row("a file through the page cache", "MiB/s", &|run| run.file);
    row("the guest's memory", "pages/s", &|run| run.memory);
}

fn picture(ebb: &[Run], qemu: &[Run]) -> Panel {
    let series = |name: &str, runs: &[Run]| {
        let median = |index| runs.iter().map(|run| run.disk[index]).collect::<Rounds>().median();
        let points = (0..JOBS.len()).map(|index| ((index + 1) as f64, median(index))).collect();
        Series { name: name.into(), points, is_bound: false }
    };
    let series = vec![series("Ebb", ebb), series("QEMU's virtio-blk", qemu)];
    Panel { series, ..Panel::default() }
}
