//! A daemon without VMs, and its configuration file.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use ebb_api::{PilotMode, PilotStatus, route};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;
use testkit::require;

fn as_root() -> Result<(), String> {
    geteuid().is_root().then_some(()).ok_or_else(|| "only root can run ebbd".into())
}

/// A daemon, killed at the latest when this is dropped.
struct Daemon {
    base: TempDir,
    child: Child,
    lines: Receiver<String>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn path_of(base: &TempDir, name: &str) -> PathBuf {
    base.path().join(name)
}

fn command(base: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    command.arg("--run-dir").arg(path_of(base, "run")).arg("--swap-dir").arg(base.path());
    command.arg("--config").arg(path_of(base, "ebb.toml")).env_remove("EBB_LOG");
    command
}

/// The lines of a process's messages, as they come.
fn lines(stderr: ChildStderr) -> Receiver<String> {
    let (to, lines) = mpsc::channel();
    // The thread ends with the process.
    thread::spawn(move || {
        BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| to.send(line))
    });
    lines
}

impl Daemon {
    /// Starts a daemon with a file of this text, and waits until it tells systemd that it is ready.
    fn start(text: &str) -> Daemon {
        let base = tempfile::tempdir().unwrap();
        fs::write(path_of(&base, "ebb.toml"), text).unwrap();
        let notify = UnixDatagram::bind(path_of(&base, "notify")).unwrap();
        notify.set_read_timeout(Some(testkit::deadline())).unwrap();
        let mut command = command(&base);
        command.env("NOTIFY_SOCKET", path_of(&base, "notify")).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = lines(child.stderr.take().unwrap());
        let daemon = Daemon { base, child, lines };
        let mut heard = [0; 32];
        let length = notify.recv(&mut heard).expect("it is ready in time");
        assert_eq!(&heard[..length], b"READY=1");
        daemon
    }

    fn write(&self, text: &str) {
        fs::write(path_of(&self.base, "ebb.toml"), text).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Has it read the file again, and returns the line that says what came of it.
    fn reload(&self) -> String {
        self.signal(Signal::HUP);
        loop {
            let line = self.lines.recv_timeout(testkit::deadline()).expect("a line in time");
            if line.contains("is read again") || line.contains("nothing is changed") {
                return line;
            }
        }
    }

    fn pilot(&self) -> PilotStatus {
        let run = path_of(&self.base, "run");
        serde_json::from_str(&get(&run.join(route::SOCKET_FILE), route::PILOT)).unwrap()
    }
}

/// The body of the daemon's answer.
fn get(socket: &Path, path: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    body.to_owned()
}

#[test]
fn a_daemon_starts_with_its_file_and_reads_it_again() {
    require!(as_root());
    let mut daemon = Daemon::start("[pilot]\nmode = \"dry-run\"\nreserve = \"20%\"\n");
    let status = daemon.pilot();
    assert_eq!((status.mode, status.reserve_percent), (PilotMode::DryRun, Some(20)));
    daemon.write("[daemon]\nswap-max = \"1G\"\n[pilot]\nmode = \"on\"\nreserve = \"20%\"\n");
    let line = daemon.reload();
    assert!(line.contains("ebb.toml is read again: the pilot has a new mode; only"), "{line}");
    assert!(line.ends_with(" changes swap-max"), "{line}");
    let before = daemon.pilot();
    assert_eq!((before.mode, before.reserve_percent), (PilotMode::On, Some(20)));
    daemon.write("[pilot]\nmode = \"off\"\nreserve = \"10 GB/s\"\n");
    let line = daemon.reload();
    let place = format!("{}:3:11: ", path_of(&daemon.base, "ebb.toml").display());
    assert!(line.contains(&place) && line.contains("is no size"), "{line}");
    let after = daemon.pilot();
    assert_eq!((after.mode, after.reserve_percent), (before.mode, before.reserve_percent));
    daemon.signal(Signal::TERM);
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn a_daemon_with_a_wrong_file_does_not_start() {
    require!(as_root());
    let base = tempfile::tempdir().unwrap();
    let file = path_of(&base, "ebb.toml");
    for (text, said) in [
        (Some("[daemon]\nswap-maximum = 1\n"), ":2:1: [daemon] has no key \"swap-maximum\""),
        (Some("[pilot]\nreserve = \"999T\"\n"), ":2:11: reserve: a reserve of 999 TiB is more"),
        (None, ": No such file"),
    ] {
        match text {
            Some(text) => fs::write(&file, text).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        let output = command(&base).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        let said = format!("ebbd: {}{said}", file.display());
        assert!(stderr.lines().last().is_some_and(|line| line.starts_with(&said)), "{stderr}");
    }
}
