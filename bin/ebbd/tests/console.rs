//! The process between a guest's serial port and its readers. This test takes QEMU's place.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

const MOST_BYTES: u64 = 1 << 20;

fn command(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    command
        .arg("console")
        .args(["--from", "console.qemu", "--socket", "console.sock"])
        .args(["--log", "console.log", "--messages", "qemu.log"])
        .current_dir(directory);
    command
}

fn start(directory: &Path) -> (UnixStream, Child) {
    let qemu = UnixListener::bind(directory.join("console.qemu")).unwrap();
    let mut child =
        command(directory).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (port, _) = qemu.accept().unwrap();
    let mut greeting = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"ready\n");
    (port, child)
}

/// Reads a log with its previous part, and checks that it is short.
fn read(directory: &Path, name: &str) -> String {
    let part = |name: String| fs::read(directory.join(name)).unwrap_or_default();
    let (now, before) = (part(name.into()), part(format!("{name}.1")));
    assert!(now.len() as u64 <= MOST_BYTES && before.len() as u64 <= MOST_BYTES, "{name}");
    String::from_utf8([before, now].concat()).unwrap()
}

#[test]
fn a_guest_that_prints_for_ever_fills_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (mut port, mut child) = start(directory.path());
    let mut messages = child.stdin.take().unwrap();
    let line = |number: u32| format!("{number:0>63}\n");
    let count = 100_000;
    for number in 0..count {
        port.write_all(line(number).as_bytes()).unwrap();
        messages.write_all(line(number).as_bytes()).unwrap();
    }
    drop((port, messages));
    assert!(child.wait().unwrap().success());
    for name in ["console.log", "qemu.log"] {
        let text = read(directory.path(), name);
        let first = count - text.lines().count() as u32;
        assert!(first < count - 10_000, "{name}: too little is kept");
        assert!(text == (first..count).map(line).collect::<String>(), "{name}");
    }
    assert!(UnixStream::connect(directory.path().join("console.sock")).is_err());
}

#[test]
fn readers_come_and_go_and_type_and_one_that_does_not_read_delays_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let (mut port, mut child) = start(directory.path());
    let socket = directory.path().join("console.sock");
    let connect = || UnixStream::connect(&socket).unwrap();
    for _ in 0..100 {
        drop(connect());
    }
    let (mut one, idle, mut two) = (connect(), connect(), connect());
    // What a reader types arrives after the reader has joined.
    let mut typed = [0; 6];
    one.write_all(b"one").unwrap();
    port.read_exact(&mut typed[..3]).unwrap();
    two.write_all(b"two").unwrap();
    port.read_exact(&mut typed[3..]).unwrap();
    assert_eq!(&typed, b"onetwo");
    let text = "to all of you\n".repeat(100_000);
    let readers = [one, two].map(|mut stream| {
        let length = text.len();
        std::thread::spawn(move || {
            let mut read = vec![0; length];
            stream.read_exact(&mut read).map(|()| read)
        })
    });
    port.write_all(text.as_bytes()).unwrap();
    for reader in readers {
        assert!(reader.join().unwrap().unwrap() == text.as_bytes());
    }
    drop(idle);
    assert!(read(directory.path(), "console.log").ends_with("to all of you\n"));
    drop(port);
    assert!(child.wait().unwrap().success());
}

/// Forbids this thread's future processes to filter system calls.
fn deny_filters() {
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let rules = [(libc::SYS_seccomp, Vec::new())].into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, TargetArch::x86_64);
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

#[test]
fn one_that_cannot_be_confined_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let _qemu = UnixListener::bind(directory.path().join("console.qemu")).unwrap();
    let path = directory.path().to_owned();
    let start = move || {
        deny_filters();
        command(&path).stdin(Stdio::null()).output().unwrap()
    };
    let output = std::thread::spawn(start).join().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success());
    assert!(text.starts_with("giving up privileges: ") && text.contains("not permitted"), "{text}");
    assert!(!directory.path().join("console.sock").exists());
}
