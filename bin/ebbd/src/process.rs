//! `ebbd vm`: the process of one VM. It serves the VM's faults, disks and memory devices, and its
//! part of the REST interface. It needs no other process of Ebb's for that. See
//! `docs/decisions/0044-*`.

mod answer;
mod begin;
mod serving;
mod start_qemu;
mod tiers;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io;
use std::panic::{self, PanicHookInfo};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use ebb_api::route;
use ebb_pager::panic_text;

use self::answer::say;
use self::serving::Service;
use crate::model::api_error::failed;
use crate::model::task::{Task, TaskResult};
use crate::support::{log, privileges};
use crate::system::process_lock;

/// Runs the process: reads a [`Task`] from standard input, and answers [`TaskResult`] on standard
/// output.
///
/// # Errors
/// The task cannot be parsed, or nobody reads the answer about a VM that is not managed.
pub fn main() -> anyhow::Result<()> {
    ebb_sys::heap::give_back_large();
    let task: Task = serde_json::from_reader(io::stdin().lock()).context("the task")?;
    log::to_stderr(Some(&task.site.log_dir.join(route::LOG_FILE)), Some(&task.name));
    panic::set_hook(Box::new(log_panic));
    serve(&task).with_context(|| task.name.clone())
}

fn serve(task: &Task) -> anyhow::Result<()> {
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
    match begin::begin(task) {
        Ok(Some(begun)) => Ok(service.run(task, begun)?),
        Ok(None) => say(&TaskResult::Over),
        Err(refused) => say(&TaskResult::Refused(refused)),
    }
}

/// Logs a panic as a message: the standard library's text would not name the VM.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let (thread, backtrace) = (thread::current(), Backtrace::capture());
    let thread = thread.name().unwrap_or("without a name");
    let at = panic.location().map(|at| format!(" at {at}")).unwrap_or_default();
    let text = panic_text(panic.payload());
    match backtrace.status() {
        // Somebody wants other messages only, but this is the last one of its thread.
        _ if !tracing::enabled!(tracing::Level::ERROR) => {
            eprintln!("thread {thread} panicked{at}: {text}");
        }
        BacktraceStatus::Captured => {
            tracing::error!("thread {thread} panicked{at}: {text}\n{backtrace}");
        }
        _ => tracing::error!("thread {thread} panicked{at}: {text}"),
    }
}

fn is_child_of(parent: u32) -> bool {
    rustix::process::getppid().is_some_and(|pid| pid.as_raw_pid().unsigned_abs() == parent)
}
