//! A device as a process uses it: its state is in a file, and threads look at it while it works.

mod driver;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use driver::{BLOCK, BLOCKS, GEOMETRY, Host, OPTIONS, UNPLUG_ALL, plug, state, unplug};
use ebb_units::FrameRange;
use ebb_virtio_mem::*;

fn device(path: &Path, memory: Box<dyn BlockMemory>) -> Device {
    let (record, saved) = StateFile::open_or_create(path, GEOMETRY).unwrap();
    let parts = DeviceParts { memory, record: Box::new(record), notify: Box::new(|| {}) };
    Device::start(saved, OPTIONS, parts).unwrap()
}

#[test]
fn it_comes_back_from_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let host = Host::new();
    let open = || {
        let memory = FileMemory::new(host.file.try_clone().unwrap(), 0, &GEOMETRY);
        device(&path, Box::new(memory))
    };
    let mut sizes = open().sizes();
    assert_eq!(sizes, Sizes::default());
    for round in 0..10 {
        let device = open();
        assert_eq!(device.sizes(), sizes);
        assert_eq!(host.bytes(), sizes.plugged_bytes);
        device.request_bytes((20 + round) * BLOCK).unwrap();
        assert_eq!(device.answer(plug(round * 2, 2)), Ok(Response::Ack));
        let taken = device.answer(unplug(round * 2, 1));
        assert_eq!(taken, Ok(Response::Ack));
        sizes = device.sizes();
        assert_eq!(sizes.plugged_bytes, (round + 1) * BLOCK);
    }
    let device = open();
    assert_eq!(device.answer(state(0, 20)), Ok(Response::AckState(BlockState::Mixed)));
    assert_eq!(device.answer(state(19, 1)), Ok(Response::AckState(BlockState::Plugged)));
    assert_eq!(device.answer(UNPLUG_ALL), Ok(Response::Ack));
    assert_eq!(host.bytes(), 0);
}

/// Memory whose calls take as long as the test wants.
struct Slow {
    began: Sender<()>,
    go_on: Receiver<()>,
    is_slow: bool,
}

impl BlockMemory for Slow {
    fn plug(&mut self, _: FrameRange, _: bool) -> io::Result<()> {
        self.is_slow = true;
        Ok(())
    }

    fn unplug(&mut self, _: FrameRange) -> io::Result<()> {
        if self.is_slow {
            self.began.send(()).unwrap();
            self.go_on.recv().unwrap();
        }
        Ok(())
    }
}

#[test]
fn a_drivers_reads_do_not_wait_for_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (began, has_begun) = channel();
    let (release, go_on) = channel();
    let memory = Slow { began, go_on, is_slow: false };
    let device = device(&directory.path().join("state"), Box::new(memory));
    device.request_bytes(20 * BLOCK).unwrap();
    assert_eq!(device.answer(plug(0, 20)), Ok(Response::Ack));
    thread::scope(|scope| {
        let unplugging = scope.spawn(|| device.answer(unplug(0, 20)));
        has_begun.recv().unwrap();
        let mut plugged = [0; 8];
        device.read_config(40, &mut plugged);
        assert_eq!(u64::from_le_bytes(plugged), 20 * BLOCK, "no notification yet");
        assert_eq!(device.guard().judge(GEOMETRY.start, true), Touch::Forbidden);
        release.send(()).unwrap();
        assert_eq!(unplugging.join().unwrap(), Ok(Response::Ack));
        assert_eq!(device.sizes().plugged_bytes, 0);
    });
}

/// Two queues of requests, and a host that changes the requested size.
#[test]
fn threads_see_sizes_that_go_together() {
    let directory = tempfile::tempdir().unwrap();
    let host = Host::new();
    let memory = FileMemory::new(host.file.try_clone().unwrap(), 0, &GEOMETRY);
    let device = device(&directory.path().join("state"), Box::new(memory));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut looks = 0u64;
            while !done.load(SeqCst) {
                let sizes = device.sizes();
                assert!(sizes.requested_bytes <= sizes.usable_bytes, "{sizes:?}");
                assert!(sizes.plugged_bytes <= sizes.usable_bytes, "{sizes:?}");
                looks += 1;
            }
            looks
        });
        let works = [0, 40].map(|base| {
            let device = &device;
            scope.spawn(move || {
                for round in 0..200 {
                    device.request_bytes((round * 7 + base) % (BLOCKS + 1) * BLOCK).unwrap();
                    let _ = device.answer(plug(base + round % 30, 3)).unwrap();
                    let _ = device.answer(unplug(base + round % 20, 2)).unwrap();
                    if round % 50 == 0 {
                        assert_eq!(device.answer(UNPLUG_ALL), Ok(Response::Ack));
                    }
                }
            })
        });
        works.into_iter().for_each(|work| work.join().unwrap());
        done.store(true, SeqCst);
        looks.join().unwrap();
    });
    assert_eq!(host.bytes(), device.sizes().plugged_bytes);
}
