//! Figure 10: a server in the guest takes 2 MiB for each datagram and keeps them, after 30 % of the
//! guest's memory was taken.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmtest::Vm;

use super::side::{self, Setup, Side};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::{percentile_us, us};
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::taken::Taken;
use crate::interrupt;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vprobe-fig10";
const SIDES: [Side; 4] = [Side::VProbe, Side::Nobody, Side::Iopf, Side::Reporting];
/// Memory of a guest: in a quick run, and in a full one.
const MEMORY_MIB: [u64; 2] = [1024, 2048];
const CPUS: u32 = 2;
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
const PORT: u16 = 4000;
/// Memory for each request.
const REQUEST_MIB: u64 = 2;
/// Datagrams before the measurement, which take no memory.
const WARM_UP: usize = 20;
/// The guest's memory that requests leave to it, besides what all programs leave.
const SPARED_MIB: u64 = 64;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait for the answer to a datagram of the warm-up, which may get lost.
const PATIENCE_WARM: Duration = Duration::from_millis(500);
/// Goal: the greatest 90th percentile, as a ratio to that without reclaim.
const GOAL: f64 = 1.7;

const LATENCY: &str = "latency";
/// Percentiles: name of the figure, and percent.
const PERCENTILES: [(&str, usize); 3] = [("p50", 50), ("p90", 90), ("p99", 99)];
/// The percentile with the goal.
const JUDGED: usize = 90;

/// Runs the benchmark.
///
/// # Errors
/// QEMU has no user network.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let (mut report, mut blocks) = side::begin(session, NAME)?;
    let is_full = usize::from(!session.identity.quick);
    let (count, memory_mib) = (BLOCKS[is_full], MEMORY_MIB[is_full]);
    report.note(format!(
        "A guest of {memory_mib} MiB with {CPUS} vCPUs behind QEMU's user network; the client is on the \
         host. The server keeps {REQUEST_MIB} MiB for each request, until nearly all memory is used; {count} \
         VMs of each side. A balloon is left out: the guest would run out of memory."
    ));
    let (here, forwarded) = side::forward("udp", PORT)?;
    let setup = Setup { memory_mib, cpus: CPUS, image: None, forwarded: Some(&forwarded) };
    let sides = (&SIDES[..], |side: Side| side.name().to_owned());
    let taken = blocks.take(&mut report, "UDP", sides, count, |side| one(side, &setup, here))?;
    side::note_taken(&mut report, &taken);
    rows(&mut report, &taken);
    plot(&report, &taken)?;
    Ok(report)
}

fn one(side: Side, setup: &Setup<'_>, server: SocketAddr) -> anyhow::Result<Figures> {
    let vm = side.start(setup)?;
    let mut figures = Figures::new();
    side::use_all(&vm)?;
    vm.guest(&format!("udp {PORT} {REQUEST_MIB}M"));
    let client = UdpSocket::bind("127.0.0.1:0")?;
    client.connect(server)?;
    warm_up(&client)?;
    let requests = side::room_mib(&vm)?.saturating_sub(SPARED_MIB) / REQUEST_MIB;
    side.take(&vm, setup.memory_mib, &mut figures)?;
    let mut times = ask(&client, requests)?;
    for &time in &times {
        add(&mut figures, LATENCY, us(time));
    }
    for (name, percent) in PERCENTILES {
        add(&mut figures, name, percentile_us(&mut times, percent));
    }
    check(&vm)?;
    Ok(figures)
}

/// Exchanges empty datagrams until the network has learned its addresses.
fn warm_up(client: &UdpSocket) -> anyhow::Result<()> {
    client.set_read_timeout(Some(PATIENCE_WARM))?;
    let mut answered = 0;
    let begun = Instant::now();
    while answered < WARM_UP {
        interrupt::check()?;
        ensure!(begun.elapsed() < PATIENCE, "the server does not answer");
        client.send(&[])?;
        answered += usize::from(client.recv(&mut [0; 8]).is_ok());
    }
    // An answer that came late would pass for another one.
    client.set_read_timeout(Some(PATIENCE_WARM))?;
    while client.recv(&mut [0; 8]).is_ok() {}
    Ok(())
}

/// Sends one request after the other. Returns how long each answer took.
fn ask(client: &UdpSocket, requests: u64) -> anyhow::Result<Vec<Duration>> {
    client.set_read_timeout(Some(PATIENCE))?;
    let mut times = Vec::new();
    for number in 0..requests {
        interrupt::check()?;
        let mut answer = [0; 8];
        let begun = Instant::now();
        client.send(&number.to_le_bytes())?;
        client.recv(&mut answer).with_context(|| format!("the answer to request {number}"))?;
        times.push(begun.elapsed());
        ensure!(u64::from_le_bytes(answer) == number, "an answer to another request");
    }
    Ok(times)
}

/// Checks that the guest still answers after all its memory was used.
fn check(vm: &Vm) -> anyhow::Result<()> {
    ensure!(vm.guest("ping") == "done", "the guest is not well");
    Ok(())
}

fn rows(report: &mut Report, taken: &Taken) {
    for (figure, percent) in PERCENTILES {
        let label = format!("a request, {figure}");
        let judge = |row: Row| if percent == JUDGED { row.at_most(GOAL) } else { row };
        side::compare(report, taken, (&label, "us", figure), &SIDES[1..], judge);
    }
}

/// Draws how many requests took no longer, of the last block.
fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    let series = taken.names().map(|name| {
        let mut times = taken.course(name, LATENCY);
        times.sort_by(f64::total_cmp);
        let part = |number: usize| 100.0 * number as f64 / times.len() as f64;
        let points = (1..).zip(&times).map(|(number, time)| (time / 1e3, part(number))).collect();
        Series { name: name.into(), points, is_bound: false }
    });
    let panel = Panel { series: series.collect(), ..Panel::default() };
    let title = "A server that takes 2 MiB for each datagram (V-Probe, fig. 10)";
    let (x_label, y_label) = ("ms", "% of requests within");
    report.plot(&Figure { title, x_label, y_label, panels: &[panel] })
}
