//! `ebbd`: manages the VMs of a host and returns their unused memory to it. The program is
//! `src/bin/ebbd.rs`. Beside [`main`], only what fuzz targets need is public.
#![forbid(unsafe_code)]

mod commands;
mod helpers;
mod host;
mod model;
mod options;
mod process;
mod rest;
mod serve;
mod support;
mod system;
mod vm;

pub use host::pilot::on_record as pilot_on_record;
pub use host::pool::on_record as pool_on_record;
pub use model::record::Record;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use ebb_api::{advice, route};
use ebb_store::Table;
use ebb_sys::private_dir;
use ebb_units::Bytes;
use rustix::fs::{FlockOperation, flock};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

use self::commands::{disk, memory};
use self::helpers::{console, injector, relay};
use self::host::{
    history, lasting, pilot, pool, pool_keeper, pressure_watch, recovery, registry, swap_dir,
};
use self::model::record::Settings;
use self::model::site::Site;
use self::model::task;
use self::options::{Arguments, Source};
use self::rest::{dashboard, http, own_pages, server, tcp};
use self::serve::swap_room;
use self::support::{log, notify, private_socket, privileges};
use self::system::{calibration, cgroup};
use self::vm::tiering;

/// Least compressed memory of a VM: a chunk for each size of compressed pages, and as many again.
const COMPRESSED_MIN_BYTES: u64 = 1 << 20;

/// Each VM that is being recovered has a thread that waits for its process, however long that takes.
/// Other VMs, and all requests, must find one as well. A thread is made only when it is needed.
const WAITING_THREADS_MOST: usize = 8192;

/// The daemon's program.
pub fn main() {
    let result = privileges::close_up().map_err(Into::into).and_then(|()| run());
    if let Err(error) = result {
        eprintln!("ebbd: {}", chain(&error));
        std::process::exit(if error.is::<Owned>() { route::EXIT_OWNED } else { 1 });
    }
}

/// An error and its causes in one line. Some errors already say their cause.
fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |mut line, cause| {
        if !line.contains(&cause) {
            line += if line.is_empty() { "" } else { ": " };
            line += &cause;
        }
        line
    })
}

fn run() -> anyhow::Result<()> {
    let _log = log::AtEnd;
    let command = std::env::args().nth(1);
    if let Some(command) = &command {
        name_process(command);
    }
    match command.as_deref() {
        Some(injector::COMMAND) => {
            injector::main(&std::env::args().skip(2).collect::<Vec<String>>())
        }
        Some(disk::COMMAND) => disk::main(std::env::args().skip(2)),
        Some(memory::COMMAND) => memory::main(std::env::args().skip(2)),
        Some(console::COMMAND) => console::main(std::env::args().skip(2)),
        Some(relay::COMMAND) => relay::main(std::env::args().skip(2)),
        Some(task::COMMAND) => process::main(),
        _ => {
            let (arguments, source) = options::read()?;
            serve(&arguments, source)
        }
    }
}

/// Names this process in lists of processes, unless a user starts it: most others are started as
/// `/proc/self/exe`, which such lists show as `exe`.
fn name_process(command: &str) {
    let name = match command {
        task::COMMAND => c"ebbd-vm",
        injector::COMMAND => c"ebbd-inject",
        console::COMMAND => c"ebb-console",
        relay::COMMAND => c"ebbd-relay",
        _ => return,
    };
    // It works as well without.
    let _ = rustix::thread::set_name(name);
}

/// Another daemon has the run directory. The caller may try again once that daemon has ended.
#[derive(Debug, thiserror::Error)]
#[error("another ebbd runs with {}{}", .0.display(), how_to_end(.1))]
struct Owned(PathBuf, Option<i32>);

/// Advice on how to end the other daemon, if its process number is known.
fn how_to_end(pid: &Option<i32>) -> String {
    pid.map(|pid| format!(": {}, or name another directory", advice::end(pid))).unwrap_or_default()
}

fn serve(arguments: &Arguments, source: Source) -> anyhow::Result<()> {
    if arguments.background {
        // Fails where this process already leads a group, that is, where it has left the session.
        let _ = rustix::process::setsid();
    }
    let run_dir = std::path::absolute(&arguments.run_dir)?;
    let log_dir = std::path::absolute(route::log_dir(&run_dir, arguments.log_dir.as_deref()))?;
    log::to_stderr(Some(&log_dir.join(route::LOG_FILE)), None);
    let _lock = lock_run_dir(&run_dir)?;
    let remote = arguments.tcp.open()?;
    let swap_dir = swap_dir::SwapDir::new(&run_dir, arguments.swap_dir.as_deref())?;
    swap_dir.begin(&run_dir).map_err(anyhow::Error::msg)?;
    check_compressed(arguments.compressed, &run_dir)?;
    arguments.monitoring.check().map_err(anyhow::Error::msg)?;
    tiering::check_rate(arguments.move_rate).map_err(anyhow::Error::msg)?;
    privileges::of_daemon().context("giving up privileges")?;
    let settings = Settings {
        compressed_bytes: arguments.compressed.0,
        read_freed: arguments.read_freed,
        monitoring: arguments.monitoring,
        move_rate: arguments.move_rate.0,
        when_swap_is_full: arguments.swap_room.when_swap_is_full,
        swap_quota: arguments.swap_room.quota(),
        forget_by: arguments.forget_by,
        metadata_by: arguments.metadata_by,
    };
    let site = Site {
        run_dir: run_dir.clone(),
        log_dir,
        swap_dir: swap_dir.path().to_owned(),
        settings,
        vm_user: arguments.vm_user.clone(),
    };
    let shared = registry::SharedByVms {
        pool: pool::PoolRecord::open(&run_dir).context("the pool's record, pool.json")?,
        pilot_record: pilot::PilotRecord::open(&run_dir)
            .context("the pilot's record, pilot.json: remove it")?,
        calibrated: calibration::Calibrated::open(&run_dir)
            .context("the calibration's record, calibration.json: remove it")?,
        table: table(&run_dir),
    };
    let daemon = registry::Daemon::new(site, swap_dir, shared, arguments.allow_keys_on_disk);
    options::begin(&daemon, &source).map_err(anyhow::Error::msg)?;
    cgroup::clear_left(true);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(WAITING_THREADS_MOST)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async {
        recovery::recover_all(&daemon).context("recovering the VMs of the earlier daemon")?;
        let stall_percent = Some(arguments.pressure_stall).filter(|&percent| percent > 0);
        listen(daemon, &run_dir, remote, stall_percent, source).await
    });
    // Does not wait for requests to a VM's process: that process goes on.
    runtime.shutdown_background();
    ended
}

/// Opens the table in which swap files tell each other what they take. Without room for it, each
/// swap file keeps to what it sees by itself.
fn table(run_dir: &Path) -> Option<Arc<Table>> {
    let opened = swap_room::open_table(run_dir);
    opened.map_err(|error| tracing::warn!("swap.shared: {error}: swap files share no quota")).ok()
}

/// Refuses compressed memory whose content could reach a disk in the clear.
fn check_compressed(size: Bytes, run_dir: &Path) -> anyhow::Result<()> {
    if size.0 == 0 {
        return Ok(());
    }
    if size.0 < COMPRESSED_MIN_BYTES {
        bail!(
            "--compressed {size} is too little: give {} or more, or 0",
            Bytes(COMPRESSED_MIN_BYTES)
        );
    }
    let run = run_dir.display();
    if !ebb_store::is_in_memory(run_dir).with_context(|| format!("run directory {run}"))? {
        bail!("--compressed needs a run directory in memory, and {run} is not on tmpfs");
    }
    Ok(())
}

/// Makes the run directory and locks it: one daemon for each directory.
fn lock_run_dir(run_dir: &Path) -> anyhow::Result<File> {
    private_dir::make(run_dir).context("run directory")?;
    let path = run_dir.join("ebbd.lock");
    let lock = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let lock = lock.with_context(|| path.display().to_string())?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(Owned(run_dir.to_owned(), listener(run_dir)).into())
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Process number of the daemon that listens in this directory.
fn listener(run_dir: &Path) -> Option<i32> {
    let stream = ebb_vm::dial(&run_dir.join(route::SOCKET_FILE), Instant::now()).ok()?;
    Some(rustix::net::sockopt::socket_peercred(&stream).ok()?.pid.as_raw_pid())
}

async fn listen(
    daemon: registry::Daemon,
    run_dir: &Path,
    remote: Option<tcp::Listener>,
    stall_percent: Option<u32>,
    source: Source,
) -> anyhow::Result<()> {
    let path = run_dir.join(route::SOCKET_FILE);
    // This process has the lock, so nobody listens there.
    let listener = private_socket::listen(&path, |error| {
        anyhow::Error::new(error).context(path.display().to_string())
    })?;
    let listener = UnixListener::from_std(listener).with_context(|| path.display().to_string())?;
    let (ended, at_once) = (asked_to_end(1)?, asked_to_end(2)?);
    let events = Arc::clone(daemon.events());
    let ended = async move {
        ended.await;
        events.close();
    };
    let reloading = tokio::spawn(options::keep(daemon.clone(), source)?);
    tracing::info!("listening on {}", path.display());
    notify::ready();
    let keeper = lasting::spawn("the pool's keeper", &daemon, pool_keeper::keep);
    let watch = move |daemon| pressure_watch::watch(daemon, stall_percent);
    let watcher = lasting::spawn("the watch over the host's memory", &daemon, watch);
    let keep = move |daemon| pilot::keep(daemon, stall_percent);
    let pilot = lasting::spawn("the pilot", &daemon, keep);
    let history = lasting::spawn("history", &daemon, history::keep);
    let router = server::router(daemon);
    let serving_others = async {
        match remote {
            Some(remote) => {
                remote.serve_apart(router.clone(), asked_to_end(1)?, asked_to_end(2)?).await
            }
            None => Ok(()),
        }
    };
    let local = own_pages::only(dashboard::beside(router.clone()));
    tokio::try_join!(http::serve(listener, local, ended, at_once), serving_others)?;
    reloading.abort();
    history.abort();
    pilot.abort();
    keeper.abort();
    watcher.abort();
    // The VMs stay as they are, for the next daemon.
    fs::remove_file(&path)?;
    Ok(())
}

/// Waits until so many signals have asked for the end.
fn asked_to_end(times: u32) -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        for _ in 0..times {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
    })
}
