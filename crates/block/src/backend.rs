//! Serves a disk at a socket, to one front end after the other.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use ebb_sys::panics::Panics;
use ebb_vhost::socket::{SocketError, listen, tired};
use ebb_vhost::{Dma, Parted as Left, Passage, changes_memory};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use thiserror::Error;
use vhost::vhost_user::Error as ProtocolError;
use vhost_user_backend::{Error as DaemonError, VhostUserBackend, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::block_locks::{BlockLocks, wake_up};
use crate::config::{Config, SECTOR_BYTES};
use crate::counters::Counts;
use crate::device::Device;
use crate::image::Image;
use crate::job::Disk;
use crate::observer::Observer;
use crate::request::ID_BYTES;
use crate::used_rings::UsedRings;

/// Most queues that a disk may have. Each queue has a thread.
pub const QUEUES_MAX: u16 = 64;

/// How a disk is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Most queues that a front end can use, 1 to [`QUEUES_MAX`]. Each queue has a thread.
    pub queues: u16,
    /// Whether to use io_uring where the host has it. Otherwise transfers run in the queues'
    /// threads.
    pub use_ring: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { queues: 1, use_ring: true }
    }
}

/// Why a disk is not served.
#[derive(Debug, Error)]
pub enum StartError {
    /// The number of queues is 0 or too large.
    #[error("a disk has 1 to {QUEUES_MAX} queues, not {0}")]
    Queues(u16),
    /// The socket is in use, or cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The host has no thread or descriptor left.
    #[error("starting a disk: {0}")]
    Host(#[from] io::Error),
}

/// A disk that is being served, until it is dropped.
pub struct Backend {
    disk: Arc<Disk>,
    stop: Arc<Stop>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

/// Tells the server thread to end.
struct Stop {
    wanted: AtomicBool,
    wake: OwnedFd,
}

/// Whether the driver has turned the cache off, as a file beside the socket: after a restart of
/// this process the front end does not tell it again.
#[derive(Clone)]
pub(crate) struct CacheMode {
    writethrough: PathBuf,
}

impl CacheMode {
    fn beside(socket: &Path) -> CacheMode {
        let mut name = socket.as_os_str().to_owned();
        name.push(".writethrough");
        CacheMode { writethrough: name.into() }
    }

    fn is_writeback(&self) -> bool {
        !self.writethrough.exists()
    }

    pub(crate) fn store(&self, writeback: bool) -> io::Result<()> {
        if !writeback {
            return fs::write(&self.writethrough, "");
        }
        match fs::remove_file(&self.writethrough) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Backend {
    /// Serves `image` at `socket` until it is stopped. A front end that loses its connection may
    /// connect again, to this process or to the next one that serves the same image at the same
    /// socket: nothing is lost (docs/decisions/0010-*).
    ///
    /// # Errors
    /// The socket is in use, or cannot be made.
    pub fn start(
        socket: &Path,
        image: Image,
        dma: Arc<dyn Dma>,
        observer: Arc<dyn Observer>,
        options: Options,
    ) -> Result<Backend, StartError> {
        if !(1..=QUEUES_MAX).contains(&options.queues) {
            return Err(StartError::Queues(options.queues));
        }
        let listener = listen(socket)?;
        let cache_mode = CacheMode::beside(socket);
        let disk = Arc::new(disk(image, dma, observer, options.queues, cache_mode.is_writeback()));
        let stop = Arc::new(Stop {
            wanted: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?,
        });
        let server =
            Server { listener, disk: disk.clone(), stop: stop.clone(), options, cache_mode };
        let run = move || {
            server.disk.panics.catch(|| server.run());
        };
        let thread = thread::Builder::new().name("block".into()).spawn(run)?;
        Ok(Backend { disk, stop, socket: socket.into(), thread: Some(thread) })
    }

    /// Sets the function that is told of a panic in a thread of this disk, with the panic's text.
    /// The disk is not served any more then, or only in part, and its driver waits: this process
    /// must end. A panic that came before is told at once.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        self.disk.panics.on_panic(tell);
    }

    /// Returns the counters of this disk.
    pub fn counts(&self) -> Counts {
        self.disk.counters.counts()
    }

    /// Returns the image that is served.
    pub fn image(&self) -> &Image {
        &self.disk.image
    }

    /// Ends every I/O, closes the connection and the image, and removes the socket.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.wanted.store(true, Ordering::SeqCst);
        wake_up(&self.stop.wake);
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::debug!("{}: {error}", self.socket.display());
        }
    }
}

impl Stop {
    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }
}

/// Makes what the queues share, before there is any queue.
pub(crate) fn disk(
    image: Image,
    dma: Arc<dyn Dma>,
    observer: Arc<dyn Observer>,
    queues: u16,
    writeback: bool,
) -> Disk {
    let sectors = image.bytes() / SECTOR_BYTES;
    Disk {
        id: id(image.path()),
        wants_content: observer.wants_content(),
        config: Config::new(sectors, queues, writeback),
        locks: Arc::new(BlockLocks::default()),
        counters: Arc::default(),
        image,
        dma,
        observer,
        panics: Panics::default(),
    }
}

/// Makes the disk's ID from its path. It tells the guest nothing else about the host.
fn id(path: &Path) -> [u8; ID_BYTES] {
    let mut hasher = DefaultHasher::new();
    std::path::absolute(path).unwrap_or_else(|_| path.into()).hash(&mut hasher);
    let text = format!("ebb-{:016x}", hasher.finish());
    *text.as_bytes().first_chunk().unwrap_or(&[b'0'; ID_BYTES])
}

/// The thread that accepts front ends.
struct Server {
    listener: UnixListener,
    disk: Arc<Disk>,
    stop: Arc<Stop>,
    options: Options,
    cache_mode: CacheMode,
}

/// Why a front end was disconnected.
#[derive(Debug, Error)]
enum Parted {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Left(#[from] Left),
    #[error("{0}")]
    Protocol(DaemonError),
    #[error("a thread that served it has ended, and it is to connect again")]
    ThreadEnded,
}

impl From<DaemonError> for Parted {
    fn from(error: DaemonError) -> Parted {
        Parted::Protocol(error)
    }
}

/// Ends the queues' threads when dropped, before their owner joins them.
struct Closing<'a>(&'a Device);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Server {
    fn run(&self) {
        while let Some(stream) = self.wait_front_end() {
            let path = self.disk.image.path();
            match self.serve(stream) {
                Ok(()) => tracing::debug!("{}: the front end has disconnected", path.display()),
                Err(error) => tracing::warn!("{}: front end: {error}", path.display()),
            }
        }
    }

    /// Waits for the next front end. `None`: the disk is to stop.
    fn wait_front_end(&self) -> Option<UnixStream> {
        while !self.stop.is_wanted() {
            let mut events = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::new(&self.stop.wake, PollFlags::IN),
            ];
            // An interrupted poll reports no event, and then accept finds nobody.
            let _ = poll(&mut events, None);
            match self.listener.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) => tired(&error),
            }
        }
        None
    }

    fn serve(&self, stream: UnixStream) -> Result<(), Parted> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let (disk, cache_mode) = (self.disk.clone(), self.cache_mode.clone());
        let Options { queues, use_ring } = self.options;
        let mut used_rings = UsedRings::new(disk.dma.clone(), memory.clone(), queues);
        let device = Arc::new(Device::new(disk, &memory, queues, use_ring, cache_mode)?);
        let mut daemon = VhostUserDaemon::new("block".into(), device.clone(), memory)?;
        let _closing = Closing(&device);
        for (index, handler) in daemon.get_epoll_handlers().iter().enumerate() {
            if let Some((fd, number)) = device.wake_event(index) {
                handler.register_listener(fd, EventSet::IN, number)?;
            }
        }
        let offered = device.protocol_features().bits();
        device.watch_threads();
        let (mut passage, listener) = Passage::new(stream, offered)?;
        daemon.start(&mut listener.into())?;
        let ended = device.ended();
        let ends = [self.stop.wake.as_fd(), device.kept().broken(), ended.event()];
        let left = passage.run(&ends, |message| {
            if !used_rings.admit(message, !device.is_paused())? {
                return Ok(false);
            }
            if changes_memory(message) {
                device.pause();
            }
            Ok(true)
        });
        let has_ended = ended.is_any();
        // Ends both sides: the library stops too, and nothing that it does waits for a queue.
        drop(passage);
        device.close();
        let end = daemon.wait();
        match (left, end) {
            _ if device.kept().is_broken() => Err(Left::Memory.into()),
            (Err(left), _) if !matches!(left, Left::Closed) => Err(left.into()),
            (_, Err(DaemonError::WaitDaemon(panic))) => {
                self.disk.panics.tell(&*panic);
                Err(Parted::ThreadEnded)
            }
            (_, Err(error)) if !has_closed(&error) => Err(error.into()),
            _ if has_ended => Err(Parted::ThreadEnded),
            _ => Ok(()),
        }
    }
}

fn has_closed(error: &DaemonError) -> bool {
    use ProtocolError::{Disconnected, PartialMessage};
    matches!(error, DaemonError::HandleRequest(Disconnected | PartialMessage))
}
