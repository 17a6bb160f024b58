//! Runs `ebb` with its own run directory, against a socket that the test serves.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use serde_json::Value;

const EBB: &str = env!("CARGO_BIN_EXE_ebb");

/// Result of a run of `ebb`.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(Output { status, stdout, stderr }: Output) -> Ran {
        Ran {
            code: status.code(),
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }
}

impl Ran {
    pub fn is_one_line_with(&self, text: &str) -> bool {
        self.stderr.starts_with("ebb: ")
            && self.stderr.contains(text)
            && self.stderr.lines().count() == 1
            && self.stdout.is_empty()
    }
}

/// A command line about to run.
pub struct Line(pub Command);

impl Line {
    fn new(program: &Path, run_dir: &Path, line: &str) -> Line {
        let mut command = Command::new(program);
        command.arg("--run-dir").arg(run_dir).args(line.split(' '));
        command.env_remove("EBB_RUN_DIR").env_remove("EBB_HOST");
        Line(command)
    }

    pub fn env(mut self, name: &str, value: &Path) -> Line {
        self.0.env(name, value);
        self
    }

    pub fn run(mut self) -> Ran {
        Ran::from(self.0.output().unwrap())
    }

    /// Runs with a terminal as standard error, where lines end with `\r\n`.
    pub fn run_on_terminal(mut self) -> Ran {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = openpt(flags).unwrap();
        unlockpt(&terminal).unwrap();
        let peer = ioctl_tiocgptpeer(&terminal, flags).unwrap();
        self.0.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(peer);
        let child = self.0.spawn().unwrap();
        // This process's copy of the peer is in the command.
        drop(self);
        let mut stderr = Vec::new();
        // It fails (EIO) once the program has ended, and keeps what it has read until then.
        let _ = File::from(terminal).read_to_end(&mut stderr);
        let output = child.wait_with_output().unwrap();
        Ran::from(Output { stderr, ..output })
    }
}

pub fn command(run_dir: &Path, line: &str) -> Line {
    Line::new(Path::new(EBB), run_dir, line)
}

pub fn ebb(run_dir: &Path, line: &str) -> Ran {
    command(run_dir, line).run()
}

/// A directory for one test.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn run_dir(&self) -> PathBuf {
        self.path().join("run")
    }

    /// Returns a command line of a copy of `ebb` that has nothing installed beside it.
    pub fn own_ebb(&self, line: &str) -> Line {
        let program = self.path().join("ebb");
        if !program.exists() {
            install(Path::new(EBB), &program);
        }
        Line::new(&program, &self.run_dir(), line)
    }

    pub fn script(&self, name: &str, body: &str) {
        let text = self.path().join("script");
        fs::write(&text, format!("#!/bin/sh\n{body}\n")).unwrap();
        install(&text, &self.path().join(name));
    }

    /// Gives one answer on the socket where `ebb --run-dir PATH` looks for the daemon.
    pub fn daemon(&self, answer: Answer) -> Daemon {
        self.daemon_of(Answer::text(200, "{}"), answer)
    }

    /// Serves as [`Dir::daemon`] does, and gives `version` when `ebb` asks for the version, which
    /// it does first.
    pub fn daemon_of(&self, version: Answer, answer: Answer) -> Daemon {
        self.daemon_by(version, move |_| answer.clone())
    }

    /// Serves as [`Dir::daemon_of`] does, and answers each request by its first line.
    pub fn daemon_by(
        &self,
        version: Answer,
        answer: impl Fn(&str) -> Answer + Send + 'static,
    ) -> Daemon {
        let listener = UnixListener::bind(self.path().join("ebbd.sock")).unwrap();
        let (to, requests) = mpsc::channel();
        // The thread ends with the test's process.
        thread::spawn(move || {
            loop {
                let (mut stream, _) = listener.accept().unwrap();
                let request = Request::read(&stream);
                if request.line.starts_with("GET /v1/version ") {
                    stream.write_all(version.0.as_deref().unwrap_or_default().as_bytes()).unwrap();
                    continue;
                }
                let answer = answer(&request.line);
                // The test may not want to see the request.
                let _ = to.send(request);
                match answer.0 {
                    None => loop {
                        thread::park();
                    },
                    Some(text) => stream.write_all(text.as_bytes()).unwrap(),
                }
            }
        });
        Daemon(requests)
    }
}

/// Copies a program by another process. A program that this process has open for writing cannot be
/// run, and a child that another test is about to start would inherit the descriptor.
fn install(from: &Path, to: &Path) {
    let mut command = Command::new("install");
    assert!(command.args(["-m", "755"]).args([from, to]).status().unwrap().success());
}

/// The daemon's answer, byte for byte, or `None` for a daemon that never answers.
#[derive(Clone)]
pub struct Answer(Option<String>);

impl Answer {
    pub fn json(status: u16, body: &Value) -> Answer {
        Answer::text(status, &body.to_string())
    }

    pub fn text(status: u16, body: &str) -> Answer {
        let length = body.len();
        Answer(Some(format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}")))
    }

    pub fn nothing() -> Answer {
        Answer(Some(String::new()))
    }

    pub fn never() -> Answer {
        Answer(None)
    }
}

/// The other end of the socket.
pub struct Daemon(Receiver<Request>);

impl Daemon {
    /// Returns the first request other than the one for the version.
    pub fn request(self) -> Request {
        self.0.recv().unwrap()
    }

    /// Returns the first lines of all requests that it has answered.
    pub fn lines(self) -> Vec<String> {
        self.0.try_iter().map(|request| request.line).collect()
    }
}

/// A request that `ebb` sent.
pub struct Request {
    pub line: String,
    pub body: Value,
}

impl Request {
    fn read(stream: &UnixStream) -> Request {
        let mut reader = BufReader::new(stream);
        let mut head = reader.by_ref().lines().map(Result::unwrap).take_while(|l| !l.is_empty());
        let line = head.next().unwrap();
        let length = head.fold(0, |length, line| match line.split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                value.parse().unwrap()
            }
            _ => length,
        });
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        Request { line, body: serde_json::from_slice(&body).unwrap_or(Value::Null) }
    }
}
