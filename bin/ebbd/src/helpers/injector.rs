//! Makes a VMM execute system calls, from a process of its own.
//!
//! For some tens of microseconds, a thread of the VMM is stopped or makes an injected call. If any
//! process dies meanwhile, the thread goes on where it was (`ebb_sys::inject`). The helper is a
//! process of its own: it has no other children whose end its tracing could take for that of the
//! threads, and nobody else kills it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{anyhow, bail};
use ebb_sys::inject::{self, Door, Target};
use ebb_sys::process::Process;
use ebb_sys::remote_ring::{RemoteRing, RingParams};
use ebb_sys::uffd::HvaRange;
use ebb_sys::uffd_node::{self, Node};
use ebb_units::Hva;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// The subcommand of the helper.
pub const COMMAND: &str = "inject";
/// Longest time for a helper. One that has not ended by then is stopped or frozen, since its own
/// deadlines are shorter, and is killed.
const TIMEOUT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };
/// Longest line of a helper that has a ring.
const LINE_BYTES: u64 = 1024;

/// Makes a userfaultfd in the process. Returns its number there.
///
/// # Errors
/// The message of the injection. No userfaultfd is left then that it made. One that watches memory
/// already is of another pager, and stays.
pub fn make(process: &Process) -> io::Result<i32> {
    make_with(process, &[])
}

/// As [`make`], by a descriptor of `/dev/userfaultfd` that the process has.
///
/// # Errors
/// Those of [`make`].
pub fn make_by(process: &Process, device: i32) -> io::Result<i32> {
    make_with(process, &[u64::try_from(device).map_err(io::Error::other)?])
}

fn make_with(process: &Process, numbers: &[u64]) -> io::Result<i32> {
    let before = process.userfaultfds()?;
    let out = run("make", process, numbers);
    let made = out.and_then(|out| {
        out.trim().parse().map_err(|_| io::Error::other(format!("no descriptor: {out}")))
    });
    if made.is_err() {
        for number in process.userfaultfds()? {
            if !before.contains(&number) && !process.may_watch(number)? {
                close(process, number)?;
            }
        }
    }
    made
}

/// Closes userfaultfd `fd` in the process, unless it is already closed.
///
/// # Errors
/// Those of [`make`]. A thread of the process may still be about to close it.
pub fn close(process: &Process, fd: i32) -> io::Result<()> {
    run("close", process, &[fd as u64]).map(drop)
}

/// Removes ranges of shared memory from the process's page table. What is no longer shared memory
/// there stays as it is.
///
/// # Errors
/// Those of [`make`].
pub fn forget(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run("forget", process, &numbers(ranges)).map(drop)
}

/// As [`forget`], but only as far as it gets while a thread is stopped once. Returns how many bytes
/// of the ranges that is, from the first one on.
///
/// # Errors
/// Those of [`make`].
pub fn forget_once(process: &Process, ranges: &[HvaRange]) -> io::Result<u64> {
    let out = run("forget-once", process, &numbers(ranges))?;
    out.trim().parse().map_err(|_| io::Error::other(format!("no number of bytes: {out}")))
}

/// Makes a ring in the process, by which its page table is emptied without stopping a thread. The
/// process has no descriptor of it afterwards.
///
/// # Errors
/// Those of [`make`]. In words: the host or the process's filter forbids it.
pub fn ring(process: &Process) -> io::Result<RemoteRing> {
    let mut child = spawn("ring", process, &[], Stdio::piped())?;
    let taken = take_ring(&mut child);
    // Now the helper ends.
    drop(child.stdin.take());
    match (output_of(child), taken) {
        (Ok(_), taken) => taken,
        (Err(error), _) => Err(error),
    }
}

/// Takes the ring from the helper, which has it until its standard input is closed.
fn take_ring(child: &mut Child) -> io::Result<RemoteRing> {
    let output = child.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
    let mut fds = [PollFd::from_borrowed_fd(output.as_fd(), PollFlags::IN)];
    if rustix::io::retry_on_intr(|| poll(&mut fds, Some(&TIMEOUT)))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut line = String::new();
    BufReader::new(output.take(LINE_BYTES)).read_line(&mut line)?;
    let made = line.trim().split_once(' ').and_then(|(number, params)| {
        Some((number.parse::<i32>().ok()?, params.parse::<RingParams>().ok()?))
    });
    let (number, params) = made.ok_or(io::ErrorKind::InvalidData)?;
    RemoteRing::new(Process::open(child.id() as i32)?.descriptor(number)?, &params)
}

/// The other side of [`ring`].
fn give_ring(target: &Target) -> anyhow::Result<()> {
    let (ring, params) = inject::ring(target)?;
    println!("{} {params}", ring.as_raw_fd());
    io::stdout().flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}

/// Has ranges of shared memory backed by small pages, whatever the host's setting.
///
/// # Errors
/// Those of [`make`].
pub fn no_huge_pages(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run("no-huge-pages", process, &numbers(ranges)).map(drop)
}

fn numbers(ranges: &[HvaRange]) -> Vec<u64> {
    ranges.iter().flat_map(|range| [range.start.0, range.bytes]).collect()
}

/// Runs a helper, and returns what it printed.
fn run(what: &str, process: &Process, numbers: &[u64]) -> io::Result<String> {
    output_of(spawn(what, process, numbers, Stdio::null())?)
}

fn spawn(what: &str, process: &Process, numbers: &[u64], input: Stdio) -> io::Result<Child> {
    let start_ticks = process.start_ticks()?;
    if process.has_ended()? {
        return Err(Errno::SRCH.into());
    }
    let words = numbers.iter().map(u64::to_string);
    // Not by its path: an upgrade may have put another program there.
    Command::new("/proc/self/exe")
        .args([COMMAND, what, &process.pid().to_string(), &start_ticks.to_string()])
        .args(words)
        .process_group(0)
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// Waits for a helper's end, and returns what it printed.
fn output_of(mut child: Child) -> io::Result<String> {
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
        (false, true) => {
            let message = text(&output.stderr);
            Err(io::Error::other(message.strip_prefix("ebbd: ").unwrap_or(&message).to_owned()))
        }
        (false, false) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn ends_in_time(child: &Child) -> io::Result<bool> {
    let process = Process::open(child.id() as i32)?;
    let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&TIMEOUT)))? > 0)
}

/// Carries out the subcommand, and prints the result.
///
/// # Errors
/// A message in words.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    let word = |index: usize| arguments.get(index).map(String::as_str).unwrap_or_default();
    let process = Process::open(word(1).parse()?)?;
    let target = Target::new(&process, word(2).parse()?).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            anyhow!("it may not be traced ({error}): run ebbd as root, with CAP_SYS_PTRACE")
        }
        _ => error.into(),
    })?;
    let ranges = || ranges(arguments.get(3..).unwrap_or_default());
    match word(0) {
        "make" => match arguments.get(3) {
            None => println!("{}", make_userfaultfd(&process, &target)?),
            Some(device) => {
                let door = Door::Descriptor(device.parse()?);
                println!("{}", inject::userfaultfd(&target, door)?);
            }
        },
        "close" => match inject::close(&target, word(3).parse()?) {
            // A thread that was sent before has closed it.
            Err(error) if is(&error, Errno::BADF) => {}
            closed => closed?,
        },
        "ring" => give_ring(&target)?,
        "forget" => inject::forget(&target, &ranges()?)?,
        "forget-once" => println!("{}", inject::forget_once(&target, &ranges()?)?),
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

/// Makes a userfaultfd by userfaultfd(2) if the VMM may call that, else through a device node that
/// the VMM can open. A sandboxed VMM without privileges can do the latter.
fn make_userfaultfd(process: &Process, target: &Target) -> anyhow::Result<i32> {
    match inject::userfaultfd(target, Door::Call) {
        Err(error) if is(&error, Errno::PERM) => make_through_node(process.user()?, target),
        Err(error) if is(&error, Errno::NOSYS) => {
            bail!("{error}: boot a kernel built with CONFIG_USERFAULTFD")
        }
        made => Ok(made?),
    }
}

fn make_through_node(user: u32, target: &Target) -> anyhow::Result<i32> {
    let closed = |error: io::Error| {
        let (why, advice) = uffd_node::why_closed(&error);
        anyhow!("{why}: {advice}")
    };
    let node = Node::make(user).map_err(closed)?;
    inject::userfaultfd(target, Door::Node(&node.name()?)).map_err(|error| match node.open() {
        // The VMM is in another control group, or another process traces it.
        Ok(_) if is(&error, Errno::PERM) => anyhow!(
            "it may not open a node of /dev/userfaultfd ({error}), which ebbd may: end a debugger \
             that traces it, allow its device control group c 10:N rwm, where /proc/misc has N \
             userfaultfd, or set vm.unprivileged_userfaultfd=1"
        ),
        _ => closed(error),
    })
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}
