//! Figure 11: `redis-benchmark` writes random keys with values of 2 KiB into a database in the guest,
//! after 30 % of the guest's memory was taken.

use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vmtest::{Host, Scratch, Vm, assets};

use super::side::{self, Setup, Side};
use crate::bench::hyperalloc::fig7;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::taken::Taken;
use crate::interrupt;
use crate::plot::{Figure, Panel};

const NAME: &str = "vprobe-fig11";
const SIDES: [Side; 4] = [Side::VProbe, Side::Nobody, Side::Iopf, Side::Reporting];
/// Memory of a guest: in a quick run, and in a full one.
const MEMORY_MIB: [u64; 2] = [384, 512];
const CPUS: u32 = 2;
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
/// Requests: in a quick run, and in a full one. A key takes 2.5 kB, so the database grows into memory
/// that was taken: Ebb takes what the guest would use last.
const REQUESTS: [u64; 2] = [120_000, 300_000];
const KEYS: u64 = 150_000;
const VALUE_BYTES: u64 = 2048;
/// Connections at once. Of the client's usual 50, QEMU's user network loses some for ever.
const CONNECTIONS: u32 = 8;
const PORT: u16 = 6379;
/// What of Debian the client needs.
const CLIENT: [&str; 6] = [
    "./usr/bin/redis-benchmark",
    "./usr/lib/x86_64-linux-gnu",
    "./usr/lib64",
    "./bin",
    "./lib",
    "./lib64",
];
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest time for all requests.
const PATIENCE: Duration = Duration::from_secs(900);
/// Goal: least requests a second, as a ratio to that without reclaim.
const GOAL: f64 = 0.999;
/// Percentile of a request's time.
const PERCENT: f64 = 99.99;

const QPS: &str = "requests";
const TAIL: &str = "a request, p99.99";
const COURSE: &str = "course";

/// Runs the benchmark.
///
/// # Errors
/// QEMU has no user network, or there is no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let (mut report, mut blocks) = side::begin(session, NAME)?;
    let is_full = usize::from(!session.identity.quick);
    let (count, requests) = (BLOCKS[is_full], REQUESTS[is_full]);
    let memory_mib = MEMORY_MIB[is_full];
    report.note(format!(
        "A guest of {memory_mib} MiB with {CPUS} vCPUs runs redis-server behind QEMU's user network; \
         redis-benchmark on the host sends {requests} SETs of {KEYS} random keys, {VALUE_BYTES} bytes each, by {CONNECTIONS} connections; \
         {count} VMs of each side. A balloon is left out: what it takes, the database cannot use."
    ));
    let (ground, client) = (Host::new(), unpack_client()?);
    let image = fig7::image(&ground)?;
    let (here, forwarded) = side::forward("tcp", PORT)?;
    let setup =
        Setup { memory_mib, cpus: CPUS, image: Some(image.image()), forwarded: Some(&forwarded) };
    let sides = (&SIDES[..], |side: Side| side.name().to_owned());
    let taken = blocks.take(&mut report, "redis", sides, count, |side| {
        one(side, &setup, (client.path(), here, requests))
    })?;
    side::note_taken(&mut report, &taken);
    rows(&mut report, &taken);
    plot(&report, &taken)?;
    Ok(report)
}

/// Unpacks the client and its libraries.
fn unpack_client() -> anyhow::Result<Scratch> {
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = sweep::scratch()?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(directory.path());
    let output = tar.args(CLIENT).output().context("tar does not start")?;
    ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    Ok(directory)
}

fn one(
    side: Side,
    setup: &Setup<'_>,
    (client, server, requests): (&Path, SocketAddr, u64),
) -> anyhow::Result<Figures> {
    let vm = side.start(setup)?;
    let mut figures = Figures::new();
    side::use_all(&vm)?;
    start_server(&vm);
    side.take(&vm, setup.memory_mib, &mut figures)?;
    let begun = Instant::now();
    let text = benchmark(client, server, requests)?;
    add(&mut figures, QPS, requests as f64 / begun.elapsed().as_secs_f64());
    add(&mut figures, TAIL, tail_ms(&text).context("redis-benchmark tells no percentiles")?);
    for qps in course(&text) {
        add(&mut figures, COURSE, qps);
    }
    Ok(figures)
}

/// Starts the database, and waits until it answers.
fn start_server(vm: &Vm) {
    vm.guest(&format!(
        "sh chroot /mnt /usr/local/bin/redis-server --port {PORT} --bind 0.0.0.0 --protected-mode no \
         --save '' --appendonly no --daemonize no >/dev/null 2>&1 </dev/null &"
    ));
    vmtest::until("redis-server", || {
        vm.try_guest(&format!("sh echo PING | nc -w 1 127.0.0.1 {PORT} | grep PONG"))
            .is_ok()
            .then_some(())
    });
}

/// Runs `redis-benchmark` to its end. Returns what it prints.
fn benchmark(root: &Path, server: SocketAddr, requests: u64) -> anyhow::Result<String> {
    let output: PathBuf = root.join("output");
    let mut command = Command::new("chroot");
    command.arg(root).arg("/usr/bin/redis-benchmark").args(["-t", "set"]);
    for (key, value) in [
        ("-h", server.ip().to_string()),
        ("-p", server.port().to_string()),
        ("-n", requests.to_string()),
        ("-r", KEYS.to_string()),
        ("-d", VALUE_BYTES.to_string()),
        ("-c", CONNECTIONS.to_string()),
    ] {
        command.arg(key).arg(value);
    }
    command.stdin(Stdio::null()).stdout(fs::File::create(&output)?);
    let child = command.stderr(Stdio::piped()).spawn().context("chroot does not start")?;
    let ended = wait(child)?;
    ensure!(ended.is_empty(), "redis-benchmark: {ended}");
    Ok(String::from_utf8_lossy(&fs::read(output)?).into_owned())
}

/// Waits for the client's end. Returns why it failed, or nothing.
fn wait(mut child: Child) -> anyhow::Result<String> {
    let begun = Instant::now();
    loop {
        let is_late = begun.elapsed() > PATIENCE;
        if let Err(why) = interrupt::check() {
            end(&mut child);
            return Err(why);
        }
        if is_late {
            end(&mut child);
            bail!("redis-benchmark does not end");
        }
        match child.try_wait()? {
            None => thread::sleep(LOOK_EVERY),
            Some(status) if status.success() => return Ok(String::new()),
            Some(status) => {
                let mut errors = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    stderr.read_to_string(&mut errors)?;
                }
                return Ok(format!("{status} {}", errors.trim()));
            }
        }
    }
}

fn end(child: &mut Child) {
    // It has ended by itself, or it ends now.
    let _ = (child.kill(), child.wait());
}

/// Returns the time within which this part of the requests was answered, in milliseconds, from
/// lines such as `99.994% <= 1.207 milliseconds (cumulative count 99994)`.
fn tail_ms(text: &str) -> Option<f64> {
    text.lines().find_map(|line| {
        let (percent, rest) = line.trim().split_once("% <= ")?;
        let is_enough = percent.parse::<f64>().ok()? >= PERCENT;
        is_enough.then(|| rest.split_whitespace().next()?.parse().ok())?
    })
}

/// Returns the requests a second over time, from pieces such as `SET: rps=12345.6 (overall: ...)`.
fn course(text: &str) -> impl Iterator<Item = f64> + '_ {
    let pieces = text.split("rps=").skip(1);
    pieces.filter_map(|piece| piece.split_whitespace().next()?.parse().ok())
}

fn rows(report: &mut Report, taken: &Taken) {
    let others = &SIDES[1..];
    side::compare(report, taken, (QPS, "1/s", QPS), others, |row| row.at_least(GOAL));
    side::compare(report, taken, (TAIL, "ms", TAIL), others, |row| row);
}

/// Draws the last block.
fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    // The client prints four times a second.
    let panel = Panel { series: side::courses(taken, COURSE, 0.25), ..Panel::default() };
    let title = "SETs of 2 KiB in a database (V-Probe, fig. 11)";
    report.plot(&Figure { title, x_label: "s", y_label: "requests/s", panels: &[panel] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_and_course_are_read() {
        let text = "SET: rps=0.0 (overall: 0.0) avg_msec=nan\rSET: rps=812.5 (overall: 700.0)\n\
            Latency by percentile distribution:\n0.000% <= 0.100 milliseconds (cumulative count 1)\n\
            99.988% <= 7.503 milliseconds (cumulative count 98)\n\
            99.994% <= 8.007 milliseconds (cumulative count 99)\n\
            100.000% <= 9.1 milliseconds (cumulative count 100)\n";
        assert_eq!(tail_ms(text), Some(8.007));
        assert_eq!(course(text).collect::<Vec<_>>(), [0.0, 812.5]);
        assert_eq!(tail_ms("0.1% <= 3 milliseconds"), None);
    }
}
