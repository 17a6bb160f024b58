//! A device dies and comes back behind a relay, and the front end notices nothing.

mod driver;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use driver::front_end::FrontEnd;
use driver::*;
use ebb_vhost::{AllResident, relay, socket};
use ebb_virtio_mem::{Options, Request, StateFile};
use ebb_virtio_mem_user::{Backend, Setup};
use testkit::front_end::stream;

struct Bench {
    directory: tempfile::TempDir,
    driver: Driver,
    backend: Option<Backend>,
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let mut bench = Bench { directory, driver: Driver::new(), backend: None };
        bench.start();
        let (listener, device) =
            (socket::listen(&bench.path("front")).unwrap(), bench.path("device"));
        // The thread ends with the test's process.
        thread::spawn(move || relay::run(&listener, &device));
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&mut self) {
        let (record, saved) = StateFile::open_or_create(&self.path("state"), GEOMETRY).unwrap();
        let setup = Setup {
            saved,
            options: Options::default(),
            memory: Box::new(self.driver.vm.file_memory()),
            record: Box::new(record),
            dma: Arc::new(AllResident),
        };
        self.backend = Some(Backend::start(&self.path("device"), setup).unwrap());
    }

    fn stop(&mut self) {
        self.backend.take().unwrap().stop();
    }

    fn request_blocks(&self, blocks: u64) {
        self.backend.as_ref().unwrap().device().request_bytes(blocks * BLOCK).unwrap();
    }

    fn connect(&self) -> FrontEnd {
        FrontEnd::connect(&self.path("front"), &self.driver)
    }

    fn ask(&mut self, front_end: &FrontEnd, request: Request) -> u8 {
        let at = self.driver.prepare(request);
        front_end.finish(&self.driver);
        self.driver.answer(at)
    }
}

#[test]
fn a_device_may_come_back() {
    let mut bench = Bench::new();
    bench.request_blocks(20);
    let mut front_end = bench.connect();
    for block in 0..20 {
        assert_eq!(bench.ask(&front_end, plug(block, 1)), ACK);
        bench.stop();
        bench.start();
    }
    assert_eq!(front_end.sizes()[1], 20 * BLOCK);
    // Notifications arrive as before.
    bench.request_blocks(5);
    front_end.notice();
    assert_eq!(bench.ask(&front_end, unplug(5, 15)), ACK);
    assert_eq!(front_end.stop(), 21);
}

#[test]
fn a_request_without_a_server_is_answered_by_the_next_one() {
    let mut bench = Bench::new();
    bench.request_blocks(3);
    let mut front_end = bench.connect();
    front_end.wait();
    bench.stop();
    let at = bench.driver.prepare(plug(0, 3));
    front_end.kick();
    let sizes = thread::spawn(move || (front_end.sizes(), front_end));
    bench.start();
    let (sizes, front_end) = sizes.join().unwrap();
    assert_eq!(sizes[2], 3 * BLOCK);
    front_end.finish(&bench.driver);
    assert_eq!(bench.driver.answer(at), ACK);
    bench.stop();
    // A stopped queue stands behind all that its driver has asked for.
    bench.driver.prepare(unplug(0, 1));
    let stopped = thread::spawn(move || front_end.stop());
    bench.start();
    assert_eq!(stopped.join().unwrap(), 2);
}

#[test]
fn half_a_message_keeps_no_front_end_out() {
    let bench = Bench::new();
    let mut half = stream(&bench.path("front"));
    half.write_all(&[1, 0, 0, 0, 1]).unwrap();
    bench.connect().wait();
}

/// A returning device must not announce anything on a queue that the front end has stopped
/// meanwhile: QEMU 11 then ends by SIGSEGV.
#[test]
fn a_device_that_comes_back_to_stop_announces_nothing() {
    let mut bench = Bench::new();
    let mut front_end = bench.connect();
    front_end.notice();
    bench.stop();
    let notified = front_end.stop_and_go(|| bench.start());
    assert_eq!(notified, []);
}

#[test]
fn one_front_end_comes_after_the_other() {
    let mut bench = Bench::new();
    bench.request_blocks(6);
    for block in 0..6 {
        let front_end = bench.connect();
        assert_eq!(bench.ask(&front_end, plug(block, 1)), ACK);
    }
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    (0..10).for_each(|_| bench.connect().wait());
    // Other tests run at the same time.
    assert!(descriptors() < before + 60);
}
