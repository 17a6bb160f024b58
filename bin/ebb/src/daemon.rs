//! Finds the daemon, and starts it where it does not run.

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use ebb_api::route;

/// Taking up VMs left by a dead daemon comes before its socket; the last I/O to their
/// disks may take a minute to end.
const START_LIMIT: Duration = Duration::from_secs(120);
/// A daemon that lost the race for the run directory ends before the winner listens.
const RACE_LIMIT: Duration = Duration::from_secs(2);
const POLL_EVERY: Duration = Duration::from_millis(10);
const LOG_TAIL_BYTES: u64 = 16 << 10;

/// A connection to the daemon of `run_dir`.
pub fn connect(run_dir: &Path) -> anyhow::Result<UnixStream> {
    let run_dir = std::path::absolute(run_dir).context("the run directory")?;
    match listening(&run_dir)? {
        Some(stream) => Ok(stream),
        None => start(&run_dir),
    }
}

/// `None` where no daemon listens.
fn listening(run_dir: &Path) -> anyhow::Result<Option<UnixStream>> {
    let socket = run_dir.join(route::SOCKET_FILE);
    match UnixStream::connect(&socket) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
            _ => Err(explain(error, &socket)),
        },
    }
}

fn explain(error: io::Error, path: &Path) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::PermissionDenied => anyhow!(
            "{} is not accessible: ebb talks to a root-only socket, run it as root",
            path.display()
        ),
        _ => anyhow!("{}: {error}", path.display()),
    }
}

fn start(run_dir: &Path) -> anyhow::Result<UnixStream> {
    let program = find()?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(run_dir);
    made.map_err(|error| explain(error, run_dir))?;
    let log = run_dir.join(route::LOG_FILE);
    let file = File::options().append(true).create(true).mode(0o600).open(&log);
    let file = file.map_err(|error| explain(error, &log))?;
    let old_bytes = file.metadata()?.len();
    let child = spawn(&program, run_dir, file)
        .with_context(|| format!("{} does not start", program.display()))?;
    wait(child, run_dir).with_context(|| match last_line(&log, old_bytes) {
        Some(line) => format!("ebbd does not run: {line}"),
        None => format!("ebbd does not run and wrote nothing to {}", log.display()),
    })
}

/// `ebbd` beside this program, else the first in PATH.
fn find() -> anyhow::Result<PathBuf> {
    let beside = env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = beside.into_iter().chain(env::split_paths(&path));
    dirs.find_map(|dir| Some(dir.join("ebbd")).filter(|file| file.is_file()))
        .context("no ebbd beside ebb or in PATH; install both together")
}

fn spawn(program: &Path, run_dir: &Path, log: File) -> io::Result<Child> {
    Command::new(program)
        .arg("--background")
        .arg("--run-dir")
        .arg(run_dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
}

fn wait(mut child: Child, run_dir: &Path) -> anyhow::Result<UnixStream> {
    let mut deadline = Instant::now() + START_LIMIT;
    let mut ended = None;
    while Instant::now() < deadline {
        if let Some(stream) = listening(run_dir)? {
            return Ok(stream);
        }
        if ended.is_none() {
            ended = child.try_wait()?;
            if ended.is_some_and(|status| !status.success()) {
                deadline = Instant::now() + RACE_LIMIT;
            }
        }
        thread::sleep(POLL_EVERY);
    }
    match ended {
        Some(status) => bail!("it ended with {status}"),
        None => bail!("it does not listen after {} s", START_LIMIT.as_secs()),
    }
}

/// The log's last line, if it was written after the first `old_bytes`.
fn last_line(log: &Path, old_bytes: u64) -> Option<String> {
    let from = fs::metadata(log).ok()?.len().saturating_sub(LOG_TAIL_BYTES).max(old_bytes);
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines().rev().find(|line| !line.trim().is_empty()).map(str::to_owned)
}
