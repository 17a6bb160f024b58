//! Figure 9: the host downloads a file that is larger than the guest's memory from the guest, after
//! 30 % of the guest's memory was taken.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::side::{self, MIB, Setup, Side};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::session::Session;
use crate::bench::swap::rig;
use crate::bench::taken::Taken;
use crate::bench::{sweep, work};
use crate::interrupt;
use crate::plot::{Figure, Panel};

const NAME: &str = "vprobe-fig9";
const SIDES: [Side; 5] = [Side::VProbe, Side::Nobody, Side::Iopf, Side::Balloon, Side::Reporting];
/// Memory of a guest: in a quick run, and in a full one.
const MEMORY_MIB: [u64; 2] = [384, 512];
/// Size of the file, in percent of the guest's memory.
const FILE_PERCENT: u64 = 125;
/// Room of the file system besides the file.
const BESIDES_MIB: u64 = 200;
const CPUS: u32 = 2;
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
const PORT: u16 = 80;
const FILE: &str = "file";
/// Bytes that the client reads at once.
const CHUNK_BYTES: usize = 256 << 10;
/// Time over which a throughput is taken for the picture, and for the least one.
const WINDOW: Duration = Duration::from_secs(1);
/// Longest wait for more of the file.
const PATIENCE: Duration = Duration::from_secs(30);
/// Goal: least throughput, as a ratio to that without reclaim.
const GOAL: f64 = 0.995;

const MEAN: &str = "throughput";
const LEAST: &str = "least throughput of a second";
const COURSE: &str = "course";

/// Runs the benchmark.
///
/// # Errors
/// QEMU has no user network, or the host permits no loop device.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let (mut report, mut blocks) = side::begin(session, NAME)?;
    let is_full = usize::from(!session.identity.quick);
    let (count, memory_mib) = (BLOCKS[is_full], MEMORY_MIB[is_full]);
    let file_mib = memory_mib * FILE_PERCENT / 100;
    report.note(format!(
        "A guest of {memory_mib} MiB with {CPUS} vCPUs serves a file of {file_mib} MiB by sendfile(2), \
         from a disk of QEMU's that the host has in memory, through QEMU's user network; {count} VMs of each \
         side."
    ));
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), (file_mib + BESIDES_MIB) * MIB, |at| {
        work::random_file(&at.join(FILE), file_mib * MIB)
    })?;
    let (here, forwarded) = side::forward("tcp", PORT)?;
    let setup = Setup { memory_mib, cpus: CPUS, image: Some(&image), forwarded: Some(&forwarded) };
    let sides = (&SIDES[..], |side: Side| side.name().to_owned());
    let taken = blocks
        .take(&mut report, "TCP", sides, count, |side| one(side, &setup, (here, file_mib * MIB)))?;
    side::note_taken(&mut report, &taken);
    rows(&mut report, &taken);
    plot(&report, &taken)?;
    Ok(report)
}

fn one(
    side: Side,
    setup: &Setup<'_>,
    (server, file_bytes): (SocketAddr, u64),
) -> anyhow::Result<Figures> {
    let vm = side.start(setup)?;
    let mut figures = Figures::new();
    side::use_all(&vm)?;
    vm.guest(&format!("serve {PORT} /mnt/{FILE}"));
    side.take(&vm, setup.memory_mib, &mut figures)?;
    let arrivals = download(server, file_bytes)?;
    let last = arrivals.last().context("nothing came")?;
    add(&mut figures, MEAN, speed(file_bytes, last.0));
    let mut windows = windows(&arrivals);
    for &window in &windows {
        add(&mut figures, COURSE, window);
    }
    windows.sort_by(f64::total_cmp);
    add(&mut figures, LEAST, windows.first().copied().unwrap_or(f64::NAN));
    Ok(figures)
}

/// Downloads the file. Returns when how many bytes of it had come.
fn download(server: SocketAddr, file_bytes: u64) -> anyhow::Result<Vec<(Duration, u64)>> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let begun = Instant::now();
    let (mut arrivals, mut bytes) = (Vec::new(), 0);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        interrupt::check()?;
        match stream.read(&mut chunk).context("the rest of the file")? {
            0 => break,
            length => bytes += length as u64,
        }
        arrivals.push((begun.elapsed(), bytes));
    }
    ensure!(bytes == file_bytes, "{bytes} of {file_bytes} bytes came");
    Ok(arrivals)
}

/// Returns the throughput of each whole window, in MiB/s.
fn windows(arrivals: &[(Duration, u64)]) -> Vec<f64> {
    let (mut speeds, mut since, mut before) = (Vec::new(), Duration::ZERO, 0);
    for &(at, bytes) in arrivals {
        if at - since >= WINDOW {
            speeds.push(speed(bytes - before, at - since));
            (since, before) = (at, bytes);
        }
    }
    speeds
}

fn speed(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / MIB as f64 / time.as_secs_f64()
}

fn rows(report: &mut Report, taken: &Taken) {
    let others = &SIDES[1..];
    side::compare(report, taken, (MEAN, "MiB/s", MEAN), others, |row| row.at_least(GOAL));
    side::compare(report, taken, (LEAST, "MiB/s", LEAST), others, |row| row);
}

/// Draws the last block.
fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    let panel = Panel { series: side::courses(taken, COURSE, 1.0), ..Panel::default() };
    let title = "Download of a file larger than the guest's memory (V-Probe, fig. 9)";
    report.plot(&Figure { title, x_label: "s", y_label: "MiB/s", panels: &[panel] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole() {
        let at = |ms, mib: u64| (Duration::from_millis(ms), mib * MIB);
        let arrivals = [at(400, 1), at(1000, 3), at(1500, 4), at(3000, 7), at(3100, 8)];
        assert_eq!(windows(&arrivals), [3.0, 2.0]);
    }
}
