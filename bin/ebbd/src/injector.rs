//! Having a VMM make system calls, from a process of its own.
//!
//! For some tens of microseconds a thread of the VMM is stopped, or makes a call of ours. Whoever
//! dies meanwhile, it goes on where it was (`ebb_sys::inject`). A process of its own has no other
//! children whose end its tracing could take for the threads', and is nobody's to kill.

use std::ffi::CString;
use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_sys::inject::{self, Target};
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::Hva;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

/// The subcommand under which this program does the work.
pub const COMMAND: &str = "inject";
/// Major and minor number of `/dev/userfaultfd`.
const DEVICE: (u32, u32) = (10, 257);
/// A helper that has not ended by then is stopped or frozen, and is killed: by its own deadlines
/// it gives up before.
const TIMEOUT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// Makes a userfaultfd in the process; its number there.
///
/// # Errors
/// What the injection said, in words. None is left then that it still made.
pub fn make(process: &Process) -> io::Result<i32> {
    let before = process.userfaultfds()?;
    let out = run("make", process, &[]);
    let made = out.and_then(|out| {
        out.trim().parse().map_err(|_| io::Error::other(format!("no descriptor: {out}")))
    });
    if made.is_err() {
        let left = process.userfaultfds()?.into_iter().filter(|number| !before.contains(number));
        left.into_iter().try_for_each(|number| close(process, number))?;
    }
    made
}

/// Closes descriptor `fd` in the process.
///
/// # Errors
/// As [`make`].
pub fn close(process: &Process, fd: i32) -> io::Result<()> {
    run("close", process, &[fd as u64]).map(drop)
}

/// Takes ranges of shared memory out of the process's page table. What is not shared memory there
/// by now stays as it is.
///
/// # Errors
/// As [`make`].
pub fn forget(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run("forget", process, &numbers(ranges)).map(drop)
}

/// Has ranges of shared memory backed by small pages, whatever the host's setting.
///
/// # Errors
/// As [`make`].
pub fn no_huge_pages(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run("no-huge-pages", process, &numbers(ranges)).map(drop)
}

fn numbers(ranges: &[HvaRange]) -> Vec<u64> {
    ranges.iter().flat_map(|range| [range.start.0, range.bytes]).collect()
}

/// Runs a helper; what it said.
fn run(what: &str, process: &Process, numbers: &[u64]) -> io::Result<String> {
    let start_ticks = process.start_ticks()?;
    if process.has_ended()? {
        return Err(rustix::io::Errno::SRCH.into());
    }
    let words = numbers.iter().map(u64::to_string);
    // Not its path: an upgrade may have put another program there.
    let mut child = Command::new("/proc/self/exe")
        .args([COMMAND, what, &process.pid().to_string(), &start_ticks.to_string()])
        .args(words)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let ended = ends_in_time(&child).unwrap_or(true);
    if !ended {
        child.kill()?;
    }
    // Dropped once the helper has ended.
    let _left = Node::of(child.id());
    let output = child.wait_with_output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match (output.status.success(), ended) {
        (true, _) => Ok(text(&output.stdout)),
        (false, true) => Err(io::Error::other(text(&output.stderr))),
        (false, false) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn ends_in_time(child: &Child) -> io::Result<bool> {
    let process = Process::open(child.id() as i32)?;
    let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&TIMEOUT)))? > 0)
}

/// The work itself, as the subcommand; prints the result.
///
/// # Errors
/// In words.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    let word = |index: usize| arguments.get(index).map(String::as_str).unwrap_or_default();
    let process = Process::open(word(1).parse()?)?;
    let target = Target::new(&process, word(2).parse()?)?;
    let ranges = || ranges(arguments.get(3..).unwrap_or_default());
    match word(0) {
        "make" => println!("{}", make_either_way(&process, &target)?),
        "close" => inject::close(&target, word(3).parse()?)?,
        "forget" => inject::forget(&target, &ranges()?)?,
        "no-huge-pages" => inject::no_huge_pages(&target, &ranges()?)?,
        other => anyhow::bail!("{COMMAND}: there is no {other:?}"),
    }
    Ok(())
}

fn ranges(words: &[String]) -> anyhow::Result<Vec<HvaRange>> {
    let numbers: Vec<u64> = words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?;
    let (pairs, _) = numbers.as_chunks::<2>();
    Ok(pairs.iter().map(|&[start, bytes]| HvaRange { start: Hva(start), bytes }).collect())
}

/// userfaultfd(2) where the VMM may call it; else through a device node that
/// it can open, which a sandboxed VMM without privilege can.
fn make_either_way(process: &Process, target: &Target) -> io::Result<i32> {
    match inject::userfaultfd(target, None) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()) => {
            let node = Node::new(process.user()?)?;
            inject::userfaultfd(target, Some(&node.name()?))
        }
        made => made,
    }
}

/// A device node that the VMM's user may open and nobody else, for a moment. Who makes a helper
/// removes what a killed one leaves.
struct Node {
    directory: PathBuf,
}

impl Node {
    /// That of a helper.
    fn of(helper: u32) -> Node {
        Node { directory: Path::new("/dev").join(format!("ebb-{helper}")) }
    }

    fn new(user: u32) -> io::Result<Node> {
        let node = Node::of(std::process::id());
        std::fs::create_dir(&node.directory)?;
        std::fs::set_permissions(&node.directory, Permissions::from_mode(0o711))?;
        let device = makedev(DEVICE.0, DEVICE.1);
        mknodat(CWD, node.path(), FileType::CharacterDevice, Mode::empty(), device)?;
        std::fs::set_permissions(node.path(), Permissions::from_mode(0o600))?;
        chown(node.path(), Some(user), None)?;
        Ok(node)
    }

    fn path(&self) -> PathBuf {
        self.directory.join("userfaultfd")
    }

    fn name(&self) -> io::Result<CString> {
        CString::new(self.path().into_os_string().into_encoded_bytes()).map_err(io::Error::other)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        match std::fs::remove_dir_all(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                eprintln!("{}: {error}", self.directory.display());
            }
            _ => {}
        }
    }
}
