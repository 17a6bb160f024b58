//! `ebbd vm`: the process of one VM. It serves the VM's faults, disks and memory devices, and its
//! part of the REST interface. It needs no other process of Ebb's for that. See
//! `docs/decisions/0044-*`.

mod begin;
mod serving;
mod start_qemu;
mod tiers;

use std::io::{self, Write};
use std::time::Instant;

use anyhow::Context;
use ebb_api::route;

use self::serving::Service;
use crate::model::api_error::failed;
use crate::model::task::{Task, TaskResult};
use crate::support::{log, privileges};
use crate::system::process_lock;

/// The subcommand on `ebbd`'s command line.
pub const COMMAND: &str = "vm";

/// Runs the process: reads a [`Task`] from standard input, and answers [`TaskResult`] on standard
/// output.
///
/// # Errors
/// The task cannot be parsed, or nobody reads the answer about a VM that is not managed.
pub fn main() -> anyhow::Result<()> {
    ebb_sys::heap::give_back_large();
    let task: Task = serde_json::from_reader(io::stdin().lock()).context("the task")?;
    log::to_stderr(Some(&task.site.log_dir.join(route::LOG_FILE)), Some(&task.name));
    privileges::of_daemon().context("giving up privileges")?;
    let directory = task.site.directory(&task.name);
    let taken = process_lock::take(&directory, Instant::now()).and_then(|lock| {
        // Once the lock is free, the directory may be removed, or another process may begin.
        match is_child_of(task.parent) {
            true => Ok((lock, Service::new(&directory)?)),
            false => Err(io::Error::other("ebbd died before it began")),
        }
    });
    let (_lock, service) = match taken {
        Ok(taken) => taken,
        Err(error) => return say(&TaskResult::Refused(failed("the VM's process")(error))),
    };
    match begin::begin(&task) {
        Ok(Some(begun)) => Ok(service.run(&task, begun)?),
        Ok(None) => say(&TaskResult::Over),
        Err(refused) => say(&TaskResult::Refused(refused)),
    }
}

fn is_child_of(parent: u32) -> bool {
    rustix::process::getppid().is_some_and(|pid| pid.as_raw_pid().unsigned_abs() == parent)
}

/// Writes the answer to standard output.
fn say(result: &TaskResult) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, result)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
