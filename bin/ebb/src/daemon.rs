//! Finds the daemon, and starts it if it does not run.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use ebb_api::{advice, route};
use ebb_sys::private_dir::{self, PrivateDirError};

/// Longest start of a daemon: it listens once it has read its records.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Longest time that a killed daemon keeps its run directory: until its memory is taken down.
const DEATH_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for an answer of a daemon that listens. One that is silent for longer is stuck.
const GREETING_LIMIT: Duration = Duration::from_secs(30);
const POLL_EVERY: Duration = Duration::from_millis(10);
const LOG_TAIL_BYTES: u64 = 16 << 10;
/// Tells a daemon that `ebb` has started it.
const BACKGROUND: &str = "--background";

/// Returns a connection to the daemon of `run_dir`, and starts the daemon if there is none.
pub fn connect(run_dir: &Path) -> anyhow::Result<UnixStream> {
    let run_dir = std::path::absolute(run_dir).context("the run directory")?;
    match living(&run_dir)? {
        Some(stream) => Ok(stream),
        None => start(&run_dir),
    }
}

/// Returns the pid of the process that listens there, or `None` if nobody does or that
/// cannot be found out.
pub fn pid(run_dir: &Path) -> Option<i32> {
    let stream = listening(run_dir).ok()??;
    Some(rustix::net::sockopt::socket_peercred(&stream).ok()?.pid.as_raw_pid())
}

/// Variables that are settings of a daemon: what `docs/cli.md` lists, but for its places.
const SETTINGS: [&str; 23] = [
    "EBB_ALLOW_KEYS_ON_DISK",
    "EBB_COMPRESSED",
    "EBB_CONFIG",
    "EBB_FORGET_BY",
    "EBB_HEAT_PERIOD_S",
    "EBB_HEAT_WINDOWS",
    "EBB_HEAT_WINDOW_MS",
    "EBB_LISTEN",
    "EBB_LOG",
    "EBB_METADATA_BY",
    "EBB_MOVE_RATE",
    "EBB_PRESSURE_STALL",
    "EBB_QEMU",
    "EBB_READ_FREED",
    "EBB_SWAP_DIR",
    "EBB_SWAP_KEEP_FREE",
    "EBB_SWAP_MAX",
    "EBB_SWAP_MAX_EACH",
    "EBB_TLS_CERT",
    "EBB_TLS_KEY",
    "EBB_TOKENS",
    "EBB_VM_USER",
    "EBB_WHEN_SWAP_IS_FULL",
];

/// The settings of this command that a running daemon was not started with: what is wrong, and what
/// to do. `None` also for a daemon that no `ebb` has started, which may have them as options.
pub fn other_settings(stream: &UnixStream) -> Option<String> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    if peer.uid != rustix::process::geteuid() {
        return None;
    }
    let pid = peer.pid.as_raw_pid();
    let its = |file: &str| fs::read(format!("/proc/{pid}/{file}")).ok();
    let names = others(&its("cmdline")?, &its("environ")?, |name| env::var_os(name))?;
    let end = advice::end(pid);
    Some(format!(
        "ebbd runs already, without your {names}: {end}, and the next command starts one with it"
    ))
}

/// The settings of which a daemon with this command line and environment has another value.
fn others(
    command: &[u8],
    environment: &[u8],
    wanted: impl Fn(&str) -> Option<OsString>,
) -> Option<String> {
    // As `spawn` starts it: one with more options may have the settings among them.
    let words: Vec<&[u8]> = command.split(|&byte| byte == 0).collect();
    let by_ebb = matches!(words[..], [_, first, second, _, b""]
        if first == BACKGROUND.as_bytes() && second == b"--run-dir");
    let is_other = |name: &&str| {
        wanted(name).is_some_and(|want| setting(environment, name) != Some(want.as_encoded_bytes()))
    };
    let names = SETTINGS.into_iter().filter(is_other).collect::<Vec<_>>().join(", ");
    (by_ebb && !names.is_empty()).then_some(names)
}

/// The value of a variable in an environment as /proc shows it: `NAME=VALUE`, each ended by a NUL.
fn setting<'e>(environment: &'e [u8], name: &str) -> Option<&'e [u8]> {
    let value = |line: &'e [u8]| line.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
    environment.split(|&byte| byte == 0).find_map(value)
}

/// Returns a connection to a daemon that answers. A killed daemon still accepts connections while
/// its memory is taken down, and then closes them: the result is `None`.
fn living(run_dir: &Path) -> anyhow::Result<Option<UnixStream>> {
    let Some(stream) = listening(run_dir)? else { return Ok(None) };
    if greets(stream)
        .with_context(|| format!("the ebbd of {} does not answer", run_dir.display()))?
    {
        return listening(run_dir);
    }
    Ok(None)
}

/// Whether the daemon says anything at all before it closes the connection.
fn greets(mut stream: UnixStream) -> io::Result<bool> {
    stream.set_read_timeout(Some(GREETING_LIMIT))?;
    stream.set_write_timeout(Some(GREETING_LIMIT))?;
    let request =
        format!("GET {} HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n", route::VERSION);
    let answer = stream.write_all(request.as_bytes()).and_then(|()| stream.read(&mut [0]));
    match answer {
        Ok(count) => Ok(count > 0),
        Err(error) => match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(false),
            _ => Err(error),
        },
    }
}

/// Connects to the daemon's socket, or returns `None` if no daemon listens.
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
            "{} is not accessible: ebb talks to a root-only socket, so run ebb as root",
            path.display()
        ),
        _ => anyhow!("{}: {error}", path.display()),
    }
}

fn start(run_dir: &Path) -> anyhow::Result<UnixStream> {
    let program = find()?;
    private_dir::make(run_dir).map_err(|error| match error {
        PrivateDirError::Io(path, error) => explain(error, &path),
        error => anyhow!(error).context("run directory"),
    })?;
    let (log, file) = open_log(run_dir)?;
    let old_bytes = file.metadata()?.len();
    let start = || {
        let log = file.try_clone()?;
        spawn(&program, run_dir, log)
            .with_context(|| format!("{} does not start", program.display()))
    };
    wait(start, run_dir).with_context(|| match last_line(&log, old_bytes) {
        Some(line) => format!("ebbd does not run: {line}"),
        None => format!("ebbd does not run and wrote nothing to {}", log.display()),
    })
}

/// Returns the daemon's log, if `ebb` has started a daemon.
pub fn log(run_dir: &Path) -> Option<PathBuf> {
    let mut all =
        [log_dir(run_dir), run_dir.into()].map(|dir| dir.join(route::LOG_FILE)).into_iter();
    all.find(|log| log.exists())
}

fn log_dir(run_dir: &Path) -> PathBuf {
    let named = env::var_os("EBB_LOG_DIR").map(PathBuf::from);
    route::log_dir(run_dir, named.as_deref())
}

/// Opens the daemon's log in the logs' directory, or in the run directory if that fails.
fn open_log(run_dir: &Path) -> anyhow::Result<(PathBuf, File)> {
    let dir = log_dir(run_dir);
    let open = |path: &Path| File::options().append(true).create(true).mode(0o600).open(path);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    let log = dir.join(route::LOG_FILE);
    if let Ok(file) = made.and_then(|()| open(&log)) {
        return Ok((log, file));
    }
    let log = run_dir.join(route::LOG_FILE);
    let file = open(&log).map_err(|error| explain(error, &log))?;
    Ok((log, file))
}

/// Returns `ebbd` beside this program, or the first one in PATH.
fn find() -> anyhow::Result<PathBuf> {
    let beside = env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = beside.into_iter().chain(env::split_paths(&path));
    dirs.find_map(|dir| Some(dir.join("ebbd")).filter(|file| file.is_file()))
        .context("no ebbd beside ebb or in PATH; install both together")
}

fn spawn(program: &Path, run_dir: &Path, log: File) -> io::Result<Child> {
    Command::new(program)
        .arg(BACKGROUND)
        .arg("--run-dir")
        .arg(run_dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
}

/// Starts the daemon until one listens: this one, or one that somebody else started at the same
/// time. As long as a killed daemon has the run directory, a new one ends at once.
fn wait(start: impl Fn() -> anyhow::Result<Child>, run_dir: &Path) -> anyhow::Result<UnixStream> {
    let (began, mut child) = (Instant::now(), start()?);
    while began.elapsed() < START_LIMIT {
        if let Some(stream) = living(run_dir)? {
            return Ok(stream);
        }
        match child.try_wait()? {
            Some(status) if status.code() == Some(route::EXIT_OWNED) => {
                if began.elapsed() >= DEATH_LIMIT {
                    bail!("another ebbd has the run directory and does not listen");
                }
                thread::sleep(POLL_EVERY);
                child = start()?;
            }
            // A daemon that lost a race ends, and the winner may listen.
            Some(status) => match living(run_dir)? {
                Some(stream) => return Ok(stream),
                None => bail!("it ended with {status}"),
            },
            None => thread::sleep(POLL_EVERY),
        }
    }
    bail!("it does not listen after {} s", START_LIMIT.as_secs())
}

/// Returns the log's last line, if it was written after the first `old_bytes`.
fn last_line(log: &Path, old_bytes: u64) -> Option<String> {
    let from = fs::metadata(log).ok()?.len().saturating_sub(LOG_TAIL_BYTES).max(old_bytes);
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Of a wrong option, the first of several lines says what is wrong.
    let line = lines().find(|line| line.starts_with("error: ")).or_else(|| lines().next_back())?;
    Some(line.trim_start_matches("ebbd: ").trim_start_matches("error: ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_a_whole_line_of_the_environment() {
        let environment = b"EBB_SWAP_DIR=/swap\0EBB_QEMU=\0X_EBB_LOG=1\0";
        let value = |name: &str| setting(environment, name);
        assert_eq!(value("EBB_SWAP_DIR"), Some(&b"/swap"[..]));
        assert_eq!(value("EBB_QEMU"), Some(&b""[..]));
        assert_eq!((value("EBB_SWAP"), value("EBB_LOG")), (None, None));
    }

    #[test]
    fn only_a_daemon_that_ebb_started_is_asked_for_its_settings() {
        let wanted = |name: &str| (name == "EBB_SWAP_DIR").then(|| "/disk".into());
        let others = |command: &[u8], environment: &[u8]| others(command, environment, wanted);
        let started = b"ebbd\0--background\0--run-dir\0/run/ebb\0";
        let name = Some("EBB_SWAP_DIR".into());
        assert_eq!(others(started, b"EBB_SWAP_DIR=/other\0EBB_QEMU=q\0"), name);
        assert_eq!(others(started, b"HOME=/\0"), name);
        assert_eq!(others(started, b"EBB_SWAP_DIR=/disk\0"), None);
        assert_eq!(others(b"ebbd\0--swap-dir\0/disk\0", b""), None);
        assert_eq!(others(b"ebbd\0--background\0--swap-dir\0/disk\0", b""), None);
    }

    #[test]
    fn all_settings_are_in_the_list() {
        let page = include_str!("../../../docs/cli.md");
        let words = page.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let mut named: Vec<&str> = words.filter(|word| word.starts_with("EBB_")).collect();
        named.sort_unstable();
        named.dedup();
        let of_ebb = ["EBB_HOST", "EBB_TOKEN_FILE", "EBB_CA"];
        let places = ["EBB_", "EBB_RUN_DIR", "EBB_LOG_DIR"];
        named.retain(|name| !places.contains(name) && !of_ebb.contains(name));
        assert_eq!(named, SETTINGS);
    }
}
