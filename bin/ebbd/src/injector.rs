//! Making and closing a userfaultfd inside a VMM, from a process of its own.
//!
//! For some tens of microseconds a thread of the VMM runs with our registers.
//! Whoever kills the daemon in that moment must not kill the VM: so another
//! process does it, which nobody has reason to kill.

use std::ffi::CString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_sys::inject;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::Hva;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

/// The subcommand under which this program does the work.
pub const COMMAND: &str = "inject";
/// Major and minor number of `/dev/userfaultfd`.
const DEVICE: (u32, u32) = (10, 257);

/// Makes a userfaultfd in the process; its number there.
///
/// # Errors
/// What the injection said, in words.
pub fn make(process: &Process) -> io::Result<i32> {
    let out = run(&["make", &process.pid().to_string()])?;
    out.trim().parse().map_err(|_| io::Error::other(format!("no descriptor: {out}")))
}

/// Closes descriptor `fd` in the process.
///
/// # Errors
/// As [`make`].
pub fn close(process: &Process, fd: i32) -> io::Result<()> {
    run(&["close", &process.pid().to_string(), &fd.to_string()]).map(drop)
}

/// Takes ranges of shared memory out of the process's page table.
///
/// # Errors
/// As [`make`].
pub fn forget(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run_on(process, "forget", ranges)
}

/// Tells the kernel to give ranges of the process's memory no huge pages, whatever the host's
/// settings are or become.
///
/// # Errors
/// As [`make`].
pub fn small_pages(process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
    run_on(process, "small-pages", ranges)
}

fn run_on(process: &Process, what: &str, ranges: &[HvaRange]) -> io::Result<()> {
    let numbers = ranges.iter().flat_map(|range| [range.start.0, range.bytes]);
    let words: Vec<String> = numbers.map(|number| number.to_string()).collect();
    let pid = process.pid().to_string();
    let mut arguments = vec![what, &pid];
    arguments.extend(words.iter().map(String::as_str));
    run(&arguments).map(drop)
}

fn run(arguments: &[&str]) -> io::Result<String> {
    // Not its path: an upgrade may have put another program there.
    let output =
        Command::new("/proc/self/exe").arg(COMMAND).args(arguments).process_group(0).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(io::Error::other(text(&output.stderr))),
    }
}

/// The work itself, as the subcommand; prints the result.
///
/// # Errors
/// In words.
pub fn main(arguments: &[String]) -> anyhow::Result<()> {
    let number = |index: usize| -> anyhow::Result<i32> {
        Ok(arguments.get(index).map(String::as_str).unwrap_or_default().parse()?)
    };
    let process = Process::open(number(1)?)?;
    match arguments.first().map(String::as_str) {
        Some("make") => println!("{}", make_either_way(&process)?),
        Some("close") => inject::close(&process, number(2)?)?,
        Some("forget") => inject::forget(&process, &ranges(&arguments[2..])?)?,
        Some("small-pages") => { ranges(&arguments[2..])?.into_iter() }
            .try_for_each(|range| inject::no_huge_pages(&process, range))?,
        other => {
            anyhow::bail!("{COMMAND}: {other:?} is none of make, close, forget and small-pages")
        }
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
fn make_either_way(process: &Process) -> io::Result<i32> {
    match inject::userfaultfd(process, None) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()) => {
            let node = Node::new()?;
            inject::userfaultfd(process, Some(&node.name()?))
        }
        made => made,
    }
}

/// A device node anyone may open, in a directory nobody can list, for a moment.
struct Node {
    directory: PathBuf,
}

impl Node {
    fn new() -> io::Result<Node> {
        let directory = Path::new("/dev").join(format!("ebb-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let node = Node { directory };
        std::fs::set_permissions(&node.directory, std::fs::Permissions::from_mode(0o711))?;
        let device = makedev(DEVICE.0, DEVICE.1);
        mknodat(CWD, node.path(), FileType::CharacterDevice, Mode::empty(), device)?;
        std::fs::set_permissions(node.path(), std::fs::Permissions::from_mode(0o666))?;
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
        let removed = std::fs::remove_dir_all(&self.directory);
        if let Err(error) = removed {
            eprintln!("{}: {error}", self.directory.display());
        }
    }
}
