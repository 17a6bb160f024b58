//! Serving a device at a socket, to one front end after the other.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use ebb_sys::panics::Panics;
use ebb_vhost::socket::{SocketError, listen, tired};
use ebb_vhost::{Dma, Parted};
use ebb_virtio_mem::{BlockMemory, Device, DeviceParts, Options, Record, Saved};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use thiserror::Error;

use crate::gate::Gate;
use crate::ring::Next;
use crate::session::{Access, Session};

/// Pause before asking again for memory that could not be had.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// What a device is made of.
pub struct Setup {
    /// The state from which the device goes on.
    pub saved: Saved,
    /// Settings of the device.
    pub options: Options,
    /// Gives blocks their memory, and takes it.
    pub memory: Box<dyn BlockMemory>,
    /// Keeps the device's state.
    pub record: Box<dyn Record>,
    /// Gives access to the queue. The backend itself refuses it unplugged memory of the device's
    /// region.
    pub dma: Arc<dyn Dma>,
}

/// Why a device is not served.
#[derive(Debug, Error)]
pub enum StartError {
    /// The device does not start.
    #[error(transparent)]
    Device(#[from] ebb_virtio_mem::StartError),
    /// The socket cannot be made, so nobody can connect.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No thread or no descriptor can be had.
    #[error("starting a virtio-mem device: {0}")]
    Host(#[from] io::Error),
}

/// A device that is being served. Dropping it stops it.
pub struct Backend {
    device: Arc<Device>,
    signals: Arc<Signals>,
    access: Access,
    panics: Arc<Panics>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

/// Signals from other threads to the serving thread.
struct Signals {
    wake: OwnedFd,
    stop: AtomicBool,
    changed: AtomicBool,
    /// In the other direction: whether the queue runs.
    driven: AtomicBool,
}

impl Signals {
    fn raise(&self, which: &AtomicBool) {
        which.store(true, SeqCst);
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let mut count = [0; 8];
        // There may be nothing to read, if another event woke the thread.
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(SeqCst)
    }
}

impl Backend {
    /// Serves a device at `socket` until it is stopped. A front end that loses its connection may
    /// connect again, to this process or to the next one that starts with the kept state: nothing
    /// is lost.
    ///
    /// # Errors
    /// The socket is in use or cannot be made, or the device does not start.
    pub fn start(socket: &Path, setup: Setup) -> Result<Backend, StartError> {
        let Setup { saved, options, memory, record, dma } = setup;
        // The socket comes first: its owner owns the device and its memory.
        let listener = listen(socket)?;
        let signals = Arc::new(Signals {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
            stop: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            driven: AtomicBool::new(false),
        });
        let changed = signals.clone();
        let notify = Box::new(move || changed.raise(&changed.changed));
        let parts = DeviceParts { memory, record, notify };
        let device = Arc::new(Device::start(saved, options, parts)?);
        let gate = Arc::new(Gate::new(dma, device.guard().clone()));
        let access = Access { dma: gate, faults: Arc::default() };
        let server = Server {
            listener,
            device: device.clone(),
            signals: signals.clone(),
            access: access.clone(),
            socket: socket.into(),
        };
        let panics = Arc::<Panics>::default();
        let caught = Arc::clone(&panics);
        let run = move || {
            caught.catch(|| server.run());
        };
        let thread = Some(thread::Builder::new().name("virtio-mem".into()).spawn(run)?);
        Ok(Backend { device, signals, access, panics, socket: socket.into(), thread })
    }

    /// Sets the function that is told of a panic in the device's thread, with the panic's text. The
    /// device is not served any more then, and its driver waits: this process must end. A panic
    /// that came before is told at once.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        self.panics.on_panic(tell);
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether a driver has its queue running.
    pub fn is_driven(&self) -> bool {
        self.signals.driven.load(SeqCst)
    }

    /// Returns how many accesses to guest memory were refused.
    pub fn dma_faults(&self) -> u64 {
        self.access.faults.load(SeqCst)
    }

    /// Closes the connection and removes the socket. No request is left half done.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.signals.raise(&self.signals.stop);
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::debug!("{}: {error}", self.socket.display());
        }
    }
}

/// State of the serving thread.
struct Server {
    listener: UnixListener,
    device: Arc<Device>,
    signals: Arc<Signals>,
    access: Access,
    socket: PathBuf,
}

impl Server {
    fn run(self) {
        while let Some(stream) = self.wait_front_end() {
            let served = self.serve(stream);
            self.signals.driven.store(false, SeqCst);
            match served {
                Ok(()) | Err(Parted::Closed) => {
                    tracing::debug!("{}: the front end has disconnected", self.socket.display());
                }
                Err(why) => tracing::warn!("{}: front end: {why}", self.socket.display()),
            }
        }
    }

    /// Waits for the next front end. Returns `None` when the backend is stopped.
    fn wait_front_end(&self) -> Option<UnixStream> {
        while !self.signals.is_stopped() {
            let mut events = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::new(&self.signals.wake, PollFlags::IN),
            ];
            // An interrupted poll reports no event, and then accept finds nobody.
            let _ = poll(&mut events, None);
            self.signals.clear();
            match self.listener.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) => tired(&error),
            }
        }
        None
    }

    fn serve(&self, stream: UnixStream) -> Result<(), Parted> {
        let mut session = Session::new(&self.device, &self.access, stream);
        let mut next = Next::Asked;
        while !self.signals.is_stopped() {
            self.wait(&session, next)?;
            self.signals.clear();
            let changed = self.signals.changed.swap(false, SeqCst);
            // The wait may have ended because the backend is to stop.
            session.listen()?;
            if changed {
                session.announce();
            }
            next = session.serve();
            session.check()?;
            self.signals.driven.store(session.kick().is_some(), SeqCst);
        }
        Ok(())
    }

    /// Waits for the front end, the driver or another thread, but not beyond the time at which the
    /// queue must be served again.
    fn wait(&self, session: &Session<'_>, next: Next) -> Result<(), Parted> {
        let mut events = vec![
            PollFd::new(session.stream(), PollFlags::IN),
            PollFd::new(&self.signals.wake, PollFlags::IN),
        ];
        let kick = session.kick();
        events.extend(kick.map(|kick| PollFd::new(kick, PollFlags::IN)));
        let timeout = match next {
            Next::Now => Some(Timespec::default()),
            Next::Later => Some(PAUSE),
            Next::Asked => session.patience(),
        };
        match poll(&mut events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let kicked = events.get(2).is_some_and(|event| event.revents().contains(PollFlags::IN));
        if let Some(kick) = kick.filter(|_| kicked) {
            let mut count = [0; 8];
            // If somebody else has read it, there is nothing to read.
            let _ = rustix::io::read(kick, &mut count);
        }
        Ok(())
    }
}
