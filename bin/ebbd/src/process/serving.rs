//! Serves a VM until it is no longer managed. Everything that may be scarce is taken before the VM
//! is touched.

use std::convert::identity;
use std::fs::File;
use std::future::pending;
use std::io;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ebb_pager::panic_text;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use super::answer::say;
use super::begin::{Begun, OwnQemu};
use crate::model::site::api_socket;
use crate::model::task::{Task, TaskResult};
use crate::rest::http;
use crate::rest::vm_server::{self, Vm};
use crate::rest::works::Works;
use crate::support::state_file::remove_if_there;
use crate::support::{private_socket, privileges};
use crate::system::calibration::Calibrated;
use crate::system::last_words;
use crate::vm::publisher::Publisher;
use crate::vm::ready::Ready;

/// Descriptors to spare: one for `ebbd`, which waits for figures, two for requests, and some for
/// what the VM's worker opens at times. With fewer, a VM would be managed by a process that answers
/// nobody.
const SPARE_DESCRIPTORS: usize = 6;
/// Longest wait for the thread that notes how QEMU ended. It takes a moment.
const NOTE_LIMIT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What serves a VM that has yet to begin.
pub struct Service {
    runtime: Runtime,
    listener: UnixListener,
    path: SocketPath,
    worker: mpsc::Sender<WorkerStart>,
    thread: JoinHandle<()>,
    /// Descriptors reserved for connections.
    spare: Vec<File>,
}

/// Path of the VM's socket in its directory, removed when this is dropped.
struct SocketPath(PathBuf);

impl SocketPath {
    fn listen(path: PathBuf) -> io::Result<(UnixListener, SocketPath)> {
        let path = SocketPath(path);
        // This process has the VM's lock, so nobody listens there.
        let listener = private_socket::listen(&path.0, identity)?;
        Ok((listener, path))
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        if let Err(error) = remove_if_there(&self.0) {
            tracing::warn!("{}: {error}", self.0.display());
        }
    }
}

impl Service {
    /// Takes descriptors, a socket and a thread.
    ///
    /// # Errors
    /// One of these is not to be had.
    pub fn new(directory: &Path) -> io::Result<Service> {
        let (listener, path) = SocketPath::listen(api_socket(directory))?;
        let build = || Builder::new_current_thread().enable_all().build();
        // The builder panics if there are no descriptors.
        let runtime = catch_unwind(build);
        let runtime = runtime.map_err(|panic| io::Error::other(panic_text(&*panic)))??;
        let spare = (0..SPARE_DESCRIPTORS).map(|_| File::open("/dev/null"));
        let spare = spare.collect::<io::Result<Vec<File>>>()?;
        let (worker, start) = mpsc::channel();
        let at = directory.to_owned();
        let run = move || work(&start, &at);
        let start = || thread::Builder::new().name("worker".into()).spawn(run);
        let thread = privileges::as_vm_thread(start)??;
        Ok(Service { runtime, listener, path, worker, thread, spare })
    }

    /// Serves the VM until it is no longer managed. Ends this process if a thread of the VM panics;
    /// the next process recovers the VM.
    ///
    /// # Errors
    /// Those of accept(2).
    pub fn run(self, task: &Task, begun: Begun) -> io::Result<()> {
        let Service { runtime, listener, path: _path, worker, thread, spare } = self;
        drop(spare);
        let Begun { ready, qemu } = begun;
        let (publisher, latest) = Publisher::new();
        let vm = Vm {
            name: task.name.clone(),
            commands: ready.commands(),
            progress: ready.progress(),
            detaching: ready.detaching(),
            watching: ready.watching(),
            latest,
            works: Works::default(),
            counting: Arc::default(),
        };
        let calibrated = Calibrated::at(&task.site.run_dir);
        let (ended, end) = oneshot::channel();
        // The thread waits for it.
        let _ = worker.send(WorkerStart { ready, calibrated, publisher, ended });
        // `ebbd` may have ended; the VM is managed all the same.
        let _ = say(&TaskResult::Managed);
        tracing::info!("managed by process {}", std::process::id());
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            let ended = async { end.await.unwrap_or_default() };
            http::serve(listener, vm_server::router(vm), ended, pending()).await
        })?;
        // The thread has said that it ends.
        let _ = thread.join();
        qemu.into_iter().for_each(await_note);
        Ok(())
    }
}

/// What the worker's thread needs.
struct WorkerStart {
    ready: Ready,
    calibrated: Arc<Calibrated>,
    publisher: Publisher,
    /// Gets a message once the VM is no longer managed.
    ended: oneshot::Sender<()>,
}

/// Runs the worker of the VM, if one comes.
fn work(start: &Receiver<WorkerStart>, directory: &Path) {
    let Ok(WorkerStart { ready, calibrated, publisher, ended }) = start.recv() else { return };
    let run = AssertUnwindSafe(|| ready.run(calibrated, publisher));
    match catch_unwind(run) {
        Ok(farewell) => {
            if let Some((to, report)) = farewell {
                drop(to.send(Ok(report)));
            }
            // If this fails, nobody listens any more.
            let _ = ended.send(());
        }
        Err(panic) => last_words::end_process(directory, &panic_text(&*panic)),
    }
}

/// Waits until QEMU's end is noted, if QEMU has ended.
fn await_note(qemu: OwnQemu) {
    let began = Instant::now();
    let has_ended = qemu.process.has_ended().unwrap_or(false);
    while has_ended && !qemu.noting.is_finished() && began.elapsed() < NOTE_LIMIT {
        thread::sleep(LOOK_EVERY);
    }
}
