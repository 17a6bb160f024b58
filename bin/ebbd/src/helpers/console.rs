//! `ebbd console`: a process for each VM that Ebb started, between the guest's serial port and its
//! readers. It writes what the guest prints, and QEMU's own messages, to bounded logs. It lives as
//! long as QEMU and needs no daemon.

use std::io::{self, BufRead, BufReader, PipeReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;

use crate::support::bounded_log::BoundedLog;

/// The subcommand on `ebbd`'s command line.
pub const COMMAND: &str = "console";
/// Its name among processes, to tell it from the daemon.
const NAME: &str = "ebb-console";
/// Longest time for which a reader may read nothing before it is disconnected: meanwhile the
/// guest's port waits.
const READER_PATIENCE: Duration = Duration::from_secs(5);
/// Most readers that are connected.
const READERS: usize = 16;

/// Stands between a guest's serial port and its readers.
#[derive(Parser)]
#[command(name = "ebbd console")]
struct Arguments {
    /// QEMU's socket
    #[arg(long)]
    from: PathBuf,
    /// Where readers connect
    #[arg(long)]
    socket: PathBuf,
    /// The log of what the guest prints
    #[arg(long)]
    log: PathBuf,
    /// The log of what comes on standard input: QEMU's messages
    #[arg(long)]
    messages: PathBuf,
}

/// QEMU's side of the console.
pub fn from(directory: &Path) -> PathBuf {
    directory.join("console.qemu")
}

/// The socket to which readers connect.
pub fn socket(directory: &Path) -> PathBuf {
    directory.join("console.sock")
}

/// The log of what the guest prints.
pub fn log(logs: &Path) -> PathBuf {
    logs.join("console.log")
}

/// Starts the process, once QEMU listens. It is connected when this returns.
///
/// # Errors
/// Those of fork(2), or what the process itself says.
pub fn start(directory: &Path, logs: &Path, messages: Option<PipeReader>) -> io::Result<Child> {
    let mut child = Command::new("/proc/self/exe")
        .arg0(NAME)
        .arg(COMMAND)
        .arg("--from")
        .arg(from(directory))
        .arg("--socket")
        .arg(socket(directory))
        .arg("--log")
        .arg(log(logs))
        .arg("--messages")
        .arg(logs.join("qemu.log"))
        .stdin(messages.map_or_else(Stdio::null, |pipe| Stdio::from(OwnedFd::from(pipe))))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // Signals to the daemon's group must not end this process.
        .process_group(0)
        .spawn()?;
    let mut answer = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut answer)?;
    }
    if answer.trim_end() == "ready" {
        return Ok(child);
    }
    let ended = child.wait()?;
    let why = match answer.trim_end() {
        "" => format!("ebbd console ended ({ended})"),
        why => why.to_owned(),
    };
    Err(io::Error::other(format!("{}: {why}", socket(directory).display())))
}

/// Starts the process again if it was killed: QEMU still listens.
///
/// # Errors
/// Those of [`start`].
pub fn restart_if_gone(directory: &Path, logs: &Path) -> io::Result<()> {
    match ebb_vm::dial(&socket(directory), Instant::now()) {
        // Only these two errors prove that nobody listens.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) => {}
        _ => return Ok(()),
    }
    let mut child = start(directory, logs, None)?;
    thread::spawn(move || child.wait());
    Ok(())
}

/// Runs `ebbd console` with these arguments.
///
/// # Errors
/// QEMU does not listen, or the readers' socket cannot be made.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd console".to_owned()].into_iter().chain(words));
    let confined = crate::support::privileges::of_device(false).context("giving up privileges");
    let begun = confined.and_then(|()| begin(&arguments));
    // Nobody reads standard error: the process that started this one reads one line.
    let answer = begun.as_ref().map_or_else(|error| format!("{error:#}"), |_| "ready".into());
    writeln!(io::stdout(), "{answer}")?;
    let (port, listener) = begun?;
    let messages = arguments.messages;
    let noting = thread::spawn(move || note(&messages));
    let readers = Arc::new(Readers { port: port.try_clone()?, streams: Mutex::default() });
    let admitting = Arc::clone(&readers);
    thread::spawn(move || admitting.admit(&listener));
    readers.serve(port, BoundedLog::open(&arguments.log));
    // Waits for QEMU's last messages.
    let _ = noting.join();
    Ok(())
}

fn begin(arguments: &Arguments) -> anyhow::Result<(UnixStream, UnixListener)> {
    let port = UnixStream::connect(&arguments.from)?;
    let listener = ebb_vhost::socket::listen(&arguments.socket)?;
    listener.set_nonblocking(false)?;
    Ok((port, listener))
}

/// Logs QEMU's messages up to their end.
fn note(path: &Path) {
    let (mut log, mut bytes) = (BoundedLog::open(path), [0; 4096]);
    let mut input = io::stdin().lock();
    loop {
        match input.read(&mut bytes) {
            // QEMU would wait at a pipe that nobody reads.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(length @ 1..) => log.write(&bytes[..length]),
            _ => return,
        }
    }
}

/// The readers that are connected.
struct Readers {
    port: UnixStream,
    streams: Mutex<Vec<UnixStream>>,
}

impl Readers {
    /// Sends what the guest prints to all readers, as long as there is a guest.
    fn serve(&self, mut port: UnixStream, mut log: BoundedLog) {
        let mut bytes = [0; 16 << 10];
        loop {
            let length = match port.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(length @ 1..) => length,
                _ => return,
            };
            log.write(&bytes[..length]);
            self.streams().retain_mut(|stream| {
                let read = stream.write_all(&bytes[..length]);
                if read.is_err() {
                    // This also ends the reader's thread here.
                    let _ = stream.shutdown(Shutdown::Both);
                }
                read.is_ok()
            });
        }
    }

    fn admit(self: Arc<Self>, listener: &UnixListener) {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // There is no descriptor: there may be one soon.
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let readers = Arc::clone(&self);
            // A reader beyond the bound finds the connection closed.
            let _ = readers.join(stream);
        }
    }

    fn join(self: Arc<Self>, stream: UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(READER_PATIENCE))?;
        let typed = stream.try_clone()?;
        let mut streams = self.streams();
        // Readers that have left are noticed only when something is printed.
        streams.retain(|stream| !has_left(stream));
        if streams.len() < READERS {
            streams.push(stream);
            drop(streams);
            thread::Builder::new().spawn(move || self.hear(typed))?;
        }
        Ok(())
    }

    /// Sends what a reader types to the guest.
    fn hear(&self, mut typed: UnixStream) {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = typed.read(&mut bytes) {
            if (&self.port).write_all(&bytes[..length]).is_err() {
                return;
            }
        }
    }

    fn streams(&self) -> MutexGuard<'_, Vec<UnixStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the other end is closed.
fn has_left(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut end = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::empty())];
    poll(&mut end, Some(&Timespec::default())).is_ok_and(|found| found > 0)
}
