//! A driver, a guest that uses its memory, and a host that fails and dies on command. The memory is
//! that of a real file.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use ebb_virtio_mem::*;
use rustix::fs::{MemfdFlags, memfd_create};

pub const BLOCK: u64 = FRAME_BYTES;
pub const BLOCKS: u64 = 100;
pub const GEOMETRY: Geometry =
    Geometry { start: Gpa(1 << 32), region_bytes: BLOCKS * BLOCK, block_bytes: BLOCK, node: None };
pub const OPTIONS: Options =
    Options { inaccessible: true, prealloc: true, spare_bytes: 10 * BLOCK };

/// A countdown of steps. Something happens at the last one. A negative count means never.
pub struct Fuse(AtomicI64);

impl Fuse {
    fn new() -> Fuse {
        Fuse(AtomicI64::new(-1))
    }

    pub fn set(&self, steps: i64) {
        self.0.store(steps, SeqCst);
    }

    fn burns_down(&self) -> bool {
        self.0.fetch_sub(1, SeqCst) == 0
    }
}

/// The part that outlives the device's process.
pub struct Host {
    pub file: File,
    saved: Mutex<Saved>,
    pub plug_fails: Fuse,
    pub unplug_fails: Fuse,
    pub save_fails: Fuse,
    /// Makes the process die before or after one of its changes of memory or record.
    pub dies: Fuse,
    pub notices: AtomicU64,
}

struct Death;

impl Host {
    pub fn new() -> Arc<Host> {
        let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(GEOMETRY.region_bytes).unwrap();
        Arc::new(Host {
            file,
            saved: Mutex::new(Saved::new(GEOMETRY).unwrap()),
            plug_fails: Fuse::new(),
            unplug_fails: Fuse::new(),
            save_fails: Fuse::new(),
            dies: Fuse::new(),
            notices: AtomicU64::new(0),
        })
    }

    /// Returns the bytes of memory that the region has.
    pub fn bytes(&self) -> u64 {
        self.file.metadata().unwrap().blocks() * 512
    }

    /// Returns the bytes that the record says are plugged.
    pub fn recorded_bytes(&self) -> u64 {
        self.saved.lock().unwrap().plugged_bytes()
    }

    fn step(&self) {
        if self.dies.burns_down() {
            panic_any(Death);
        }
    }
}

struct HostMemory(Arc<Host>, FileMemory);

fn fails(fuse: &Fuse) -> io::Result<()> {
    if fuse.burns_down() { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
}

impl BlockMemory for HostMemory {
    fn plug(&mut self, frames: FrameRange, prealloc: bool) -> io::Result<()> {
        self.0.step();
        fails(&self.0.plug_fails)?;
        self.1.plug(frames, prealloc)?;
        self.0.step();
        Ok(())
    }

    fn unplug(&mut self, frames: FrameRange) -> io::Result<()> {
        self.0.step();
        fails(&self.0.unplug_fails)?;
        // The process may die in the middle.
        let half = frames.count / 2;
        self.1.unplug(FrameRange::new(frames.start, frames.count - half))?;
        self.0.step();
        if half > 0 {
            let rest =
                FrameRange::new(FrameRange::new(frames.start, frames.count - half).end(), half);
            self.1.unplug(rest)?;
        }
        self.0.step();
        Ok(())
    }
}

struct HostRecord(Arc<Host>);

impl Record for HostRecord {
    fn keep(&mut self, state: &Saved) -> io::Result<()> {
        self.0.step();
        fails(&self.0.save_fails)?;
        // The state goes through its bytes, as in a file.
        *self.0.saved.lock().unwrap() = Saved::from_bytes(&state.to_bytes(0)).unwrap().0;
        self.0.step();
        Ok(())
    }
}

/// A device process and its guest.
pub struct Driver {
    pub host: Arc<Host>,
    pub device: Device,
    /// Blocks that the guest believes to be plugged. It has written to each of them.
    pub believed: BTreeSet<u64>,
}

pub fn start(host: &Arc<Host>) -> Result<Device, StartError> {
    let file = host.file.try_clone().unwrap();
    let notified = host.clone();
    let parts = DeviceParts {
        memory: Box::new(HostMemory(host.clone(), FileMemory::new(file, 0, &GEOMETRY))),
        record: Box::new(HostRecord(host.clone())),
        notify: Box::new(move || {
            notified.notices.fetch_add(1, SeqCst);
        }),
    };
    let saved = host.saved.lock().unwrap().clone();
    Device::start(saved, OPTIONS, parts)
}

pub fn named(first: u64, count: u16) -> Named {
    Named { start: Gpa(GEOMETRY.start.0 + first * BLOCK), count }
}

pub fn plug(first: u64, count: u16) -> Request {
    Request::Plug(named(first, count))
}

pub fn unplug(first: u64, count: u16) -> Request {
    Request::Unplug(named(first, count))
}

pub fn state(first: u64, count: u16) -> Request {
    Request::State(named(first, count))
}

pub const UNPLUG_ALL: Request = Request::UnplugAll;

impl Driver {
    pub fn new() -> Driver {
        let host = Host::new();
        let device = start(&host).unwrap();
        Driver { host, device, believed: BTreeSet::new() }
    }

    /// Makes a driver with `blocks` blocks requested.
    pub fn with(blocks: u64) -> Driver {
        let driver = Driver::new();
        driver.request_blocks(blocks);
        driver
    }

    pub fn request_blocks(&self, blocks: u64) {
        self.device.request_bytes(blocks * BLOCK).unwrap();
    }

    pub fn notices(&self) -> u64 {
        self.host.notices.load(SeqCst)
    }

    /// Returns the usable, plugged and requested size, in blocks.
    pub fn blocks(&self) -> [u64; 3] {
        let Sizes { usable_bytes, plugged_bytes, requested_bytes } = self.device.sizes();
        [usable_bytes, plugged_bytes, requested_bytes].map(|bytes| {
            assert!(bytes.is_multiple_of(BLOCK));
            bytes / BLOCK
        })
    }

    pub fn ask(&mut self, request: Request) -> Response {
        let response = self.device.answer(request).unwrap();
        self.learn(request, response);
        response
    }

    /// Delivers the answer to the guest, which then uses what it has.
    pub fn learn(&mut self, request: Request, response: Response) {
        if response != Response::Ack {
            return;
        }
        match request {
            Request::Plug(blocks) => {
                for block in range(blocks) {
                    assert!(self.believed.insert(block));
                    self.host.file.write_all_at(&[mark(block)], block * BLOCK).unwrap();
                }
            }
            Request::Unplug(blocks) => {
                range(blocks).for_each(|block| assert!(self.believed.remove(&block)));
            }
            Request::UnplugAll => self.believed.clear(),
            Request::State(_) => {}
        }
    }

    /// Checks what must hold whenever no request is in flight.
    pub fn check(&self) {
        let believed = self.believed.len() as u64;
        let [usable, plugged, requested] = self.blocks();
        assert_eq!(plugged, believed);
        assert!(requested <= usable && usable <= BLOCKS);
        assert!(self.believed.last().is_none_or(|last| *last < usable));
        assert_eq!(self.host.bytes(), believed * BLOCK, "memory without a block");
        self.check_content(&self.believed);
        for block in 0..BLOCKS {
            let touch = self.device.guard().judge(named(block, 1).start, true);
            assert_eq!(touch == Touch::Plugged, self.believed.contains(&block));
        }
    }

    pub fn check_content(&self, blocks: &BTreeSet<u64>) {
        for &block in blocks {
            let mut byte = [0];
            self.host.file.read_exact_at(&mut byte, block * BLOCK).unwrap();
            assert_eq!(byte, [mark(block)], "block {block} has lost its content");
        }
    }

    /// Makes a request; the process dies after `steps` steps. Returns `None` if it did.
    pub fn ask_and_die(&mut self, request: Request, steps: i64) -> Option<Response> {
        self.host.dies.set(steps);
        let result = catch_unwind(AssertUnwindSafe(|| self.device.answer(request)));
        self.host.dies.set(-1);
        match result {
            Ok(response) => Some(response.unwrap()),
            Err(death) => {
                assert!(death.is::<Death>(), "another panic");
                None
            }
        }
    }

    /// Starts the next process.
    pub fn restart(&mut self) {
        self.device = start(&self.host).unwrap();
    }
}

/// Returns the byte that the guest writes into a block.
fn mark(block: u64) -> u8 {
    block as u8 | 0x80
}

pub fn range(blocks: Named) -> std::ops::Range<u64> {
    let first = (blocks.start.0 - GEOMETRY.start.0) / BLOCK;
    first..first + u64::from(blocks.count)
}
