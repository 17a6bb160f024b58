//! A VM that is being started. If the process that starts it dies before the VM is on record, its
//! QEMU is stopped for ever, and the next daemon ends it.

use std::io;
use std::path::{Path, PathBuf};

use ebb_api::VmName;
use ebb_sys::process::Process;
use ebb_sys::user_namespace::PIDS;
use ebb_vm::{handed, launch};
use serde::{Deserialize, Serialize};

use crate::support::life::{Dead, Life};
use crate::support::state_file;
use crate::system::cgroup;

const FILE: &str = "start.json";

/// The mark of a start. It exists from before QEMU runs until the VM is on record. A directory with
/// a mark and no record belongs to a VM whose start was cut off.
#[derive(Serialize, Deserialize)]
struct Mark {
    qemu: Qemu,
    /// The directories of its control group.
    cgroups: Vec<PathBuf>,
    /// The file of its tiers, if one was made.
    file: Option<PathBuf>,
}

/// How to recognize the QEMU that was about to run. QEMU may have handed its descriptors to other
/// processes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Qemu {
    /// Its user.
    User(u32),
    /// Its user is this number plus its process number. The same holds for processes that it
    /// starts.
    UserFrom(u32),
    /// Its VM's name on its command line: it has no user of its own.
    Named(VmName),
    /// Its program, as an earlier daemon marked it. It may be a script, so it tells nothing.
    Program(PathBuf),
}

impl Qemu {
    /// Whether this is that QEMU, or the process that was about to become it. The user is checked
    /// first: nothing else is asked of others' processes, so nobody else can make that fail.
    fn is(&self, process: &Process) -> io::Result<bool> {
        let own = Process::own()?;
        let user = process.user()?;
        let is_ours = user == own.user()?;
        let is_its = match self {
            Qemu::User(uid) => user == *uid,
            Qemu::UserFrom(base) => (*base..base.saturating_add(PIDS)).contains(&user),
            Qemu::Program(_) => is_ours,
            // Its program does not matter: a script may stand for QEMU.
            Qemu::Named(name) => is_ours && launch::is_of(&process.command_line()?, name.as_str()),
        };
        Ok(is_its || (is_ours && process.program()? == own.program()?))
    }
}

/// Marks a VM whose QEMU is about to be started.
///
/// # Errors
/// Those of write(2).
pub fn mark(
    directory: &Path,
    qemu: Qemu,
    cgroups: &[PathBuf],
    file: Option<&Path>,
) -> io::Result<()> {
    let mark = Mark { qemu, cgroups: cgroups.to_owned(), file: file.map(Path::to_owned) };
    state_file::save(&directory.join(FILE), &mark)
}

/// Removes the mark: the VM is on record, or must not be ended when it no longer is.
///
/// # Errors
/// Those of unlink(2).
pub fn unmark(directory: &Path) -> io::Result<()> {
    state_file::remove(&directory.join(FILE))
}

/// Checks that the mark of a start can be read, if there is one.
///
/// # Errors
/// Says what to do about it.
pub fn check(directory: &Path) -> io::Result<()> {
    load(directory).map(drop)
}

fn load(directory: &Path) -> io::Result<Option<Mark>> {
    let path = directory.join(FILE);
    state_file::load(&path).map_err(|error| {
        let (path, kind) = (path.display(), error.kind());
        let message = format!(
            "the mark of a start that was cut off cannot be read ({error}): end the QEMU of that VM \
             if it runs, and remove {path}"
        );
        io::Error::new(kind, message)
    })
}

/// Ends the processes of a VM that is not on record, if its start was cut off; none: it was not.
///
/// # Errors
/// It is not known now whether its QEMU runs, or it does not end.
pub fn end(directory: &Path) -> io::Result<Option<Dead>> {
    let Some(mark) = load(directory)? else { return Ok(None) };
    // QEMU has this directory open from its first moment on.
    let sockets = handed::socket_directory(directory);
    let (dead, ended) = Life::end_all_with(&sockets, |process| mark.qemu.is(process))?;
    let pids: Vec<String> = ended.iter().map(i32::to_string).collect();
    let qemu = if pids.is_empty() { "none".into() } else { pids.join(" ") };
    tracing::warn!(
        "{}: its process died while it started this VM, which is given up; QEMU ended: {qemu}",
        directory.display()
    );
    cgroup::remove(&mark.cgroups);
    mark.file.iter().try_for_each(|file| state_file::remove_if_there(file))?;
    Ok(Some(dead))
}
