//! Front ends that connect, disconnect, connect again, and send invalid messages.

mod driver;

use std::fs;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use driver::front_end::FrontEnd;
use driver::*;
use ebb_units::FrameRange;
use ebb_vhost::AllResident;
use ebb_virtio_mem::{BlockMemory, Options, Request, StateFile};
use ebb_virtio_mem_user::{Backend, Setup, StartError};
use testkit::front_end::{DEADLINE, stream};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

struct Bench {
    directory: tempfile::TempDir,
    backend: Option<Backend>,
}

impl Bench {
    fn new(vm: &Vm) -> Bench {
        let mut bench = Bench { directory: tempfile::tempdir().unwrap(), backend: None };
        bench.start(vm);
        bench
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn start(&mut self, vm: &Vm) {
        self.backend = Some(self.try_start(vm).unwrap());
    }

    fn try_start(&self, vm: &Vm) -> Result<Backend, StartError> {
        let path = self.directory.path().join("state");
        let (record, saved) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
        let setup = Setup {
            saved,
            options: Options { spare_bytes: 4 * BLOCK, ..Options::default() },
            memory: Box::new(vm.file_memory()),
            record: Box::new(record),
            dma: Arc::new(AllResident),
        };
        Backend::start(&self.socket(), setup)
    }

    fn stop(&mut self) {
        self.backend.take().unwrap().stop();
    }

    fn request_blocks(&self, blocks: u64) {
        self.backend.as_ref().unwrap().device().request_bytes(blocks * BLOCK).unwrap();
    }
}

/// Makes a request and waits for the answer.
fn ask(front_end: &FrontEnd, driver: &mut Driver, request: Request) -> u8 {
    let at = driver.prepare(request);
    front_end.finish(driver);
    driver.answer(at)
}

#[test]
fn a_front_end_sees_what_changes() {
    let mut driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    // One notification comes at the start, for changes that the front end may have missed.
    front_end.notice();
    assert_eq!(front_end.sizes(), [0, 0, 0]);
    bench.request_blocks(8);
    front_end.notice();
    assert_eq!(front_end.sizes(), [12, 0, 8].map(|blocks| blocks * BLOCK));
    assert_eq!(ask(&front_end, &mut driver, plug(0, 9)), NACK);
    assert_eq!(ask(&front_end, &mut driver, plug(0, 8)), ACK);
    assert_eq!(front_end.sizes(), [12, 8, 8].map(|blocks| blocks * BLOCK));
    driver.vm.touch(3);
    assert!(driver.vm.region_bytes() > 0);
    bench.request_blocks(2);
    front_end.notice();
    assert_eq!(ask(&front_end, &mut driver, unplug(2, 6)), ACK);
    assert_eq!(driver.vm.region_bytes(), 0);
    assert_eq!(front_end.config(0, 56)[..8], BLOCK.to_le_bytes());
    assert_eq!(front_end.config(60, 100), [0; 100]);
}

#[test]
fn one_front_end_comes_after_the_other() {
    let mut driver = Driver::new();
    let mut bench = Bench::new(&driver.vm);
    bench.request_blocks(20);
    for block in 0..20 {
        let front_end = FrontEnd::connect(&bench.socket(), &driver);
        assert_eq!(ask(&front_end, &mut driver, plug(block, 1)), ACK);
    }
    bench.stop();
    assert!(!bench.socket().exists());
    bench.start(&driver.vm);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    assert_eq!(front_end.sizes(), [24, 20, 20].map(|blocks| blocks * BLOCK));
    assert_eq!(ask(&front_end, &mut driver, unplug(0, 20)), ACK);
}

/// A front end learns of a change that happened while there was none.
#[test]
fn a_change_in_between_is_announced_to_the_next() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    drop(FrontEnd::connect(&bench.socket(), &driver));
    bench.request_blocks(1);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    front_end.notice();
    assert_eq!(front_end.sizes()[2], BLOCK);
}

/// QEMU 11 ends by SIGSEGV if it gets a notification while the device is stopped, as it is during a
/// reset of the guest.
#[test]
fn a_stopped_device_announces_nothing() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    front_end.notice();
    assert_eq!(front_end.stop_and_go(|| bench.request_blocks(1)), []);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    front_end.notice();
    assert_eq!(front_end.sizes()[2], BLOCK);
}

#[test]
fn half_a_message_keeps_no_front_end_out() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    stream(&bench.socket()).write_all(&message(1, 1, &[0])[..6]).unwrap();
    let mut half = stream(&bench.socket());
    half.write_all(&message(2, 1, &[0])[..15]).unwrap();
    FrontEnd::connect(&bench.socket(), &driver).wait();
}

#[test]
fn memory_that_goes_away_ends_its_connection_alone() {
    let bench = Bench::new(&Driver::new().vm);
    for bytes in [0, RINGS.used] {
        let mut driver = Driver::new();
        driver.prepare(plug(0, 1));
        let file = driver.vm.memory.iter().next().unwrap().file_offset().unwrap().arc().clone();
        let front_end = FrontEnd::connect(&bench.socket(), &driver);
        file.set_len(bytes).unwrap();
        front_end.kick();
        let other = Driver::new();
        FrontEnd::connect(&bench.socket(), &other).wait();
    }
}

#[test]
fn a_stopped_queue_has_answered_all_that_it_took() {
    let mut driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    bench.request_blocks(30);
    let front_end = FrontEnd::connect(&bench.socket(), &driver);
    for block in 0..30 {
        driver.prepare(plug(block, 1));
    }
    front_end.kick();
    assert_eq!(front_end.stop(), driver.used());
    // The next front end gets the rest.
    drop(front_end);
    let mut front_end = FrontEnd::connect(&bench.socket(), &driver);
    front_end.finish(&driver);
    assert_eq!(front_end.sizes()[1], 30 * BLOCK);
}

/// The used ring tells what was answered, whatever a front end believes. This front end has never
/// seen an answer.
#[test]
fn a_request_is_answered_once() {
    let mut driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    bench.request_blocks(2);
    let front_end = FrontEnd::connect(&bench.socket(), &driver);
    assert_eq!(ask(&front_end, &mut driver, plug(0, 1)), ACK);
    drop(front_end);
    let front_end = FrontEnd::connect(&bench.socket(), &driver);
    assert_eq!(ask(&front_end, &mut driver, plug(1, 1)), ACK);
    assert_eq!(driver.used(), 2);
}

#[test]
fn a_new_front_end_is_signalled_at_once() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    FrontEnd::connect(&bench.socket(), &driver).wait();
    FrontEnd::connect(&bench.socket(), &driver).wait();
}

/// Memory of which no block can be plugged.
struct Broken;

impl BlockMemory for Broken {
    fn plug(&mut self, _: FrameRange, _: bool) -> io::Result<()> {
        panic!("on purpose")
    }

    fn unplug(&mut self, _: FrameRange) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_panic_of_the_devices_thread_is_told() {
    let mut driver = Driver::new();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let (record, saved) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
    let setup = Setup {
        saved,
        options: Options::default(),
        memory: Box::new(Broken),
        record: Box::new(record),
        dma: Arc::new(AllResident),
    };
    let socket = directory.path().join("socket");
    let backend = Backend::start(&socket, setup).unwrap();
    let (told, texts) = channel();
    backend.on_panic(move |text| told.send(text).unwrap());
    backend.device().request_bytes(BLOCK).unwrap();
    let front_end = FrontEnd::connect(&socket, &driver);
    driver.prepare(plug(0, 1));
    front_end.kick();
    assert_eq!(texts.recv_timeout(DEADLINE).as_deref(), Ok("on purpose"));
}

#[test]
fn a_socket_serves_one_device() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    let other = Bench { directory: tempfile::tempdir().unwrap(), backend: None };
    std::os::unix::fs::symlink(bench.socket(), other.socket()).unwrap();
    assert!(matches!(other.try_start(&driver.vm), Err(StartError::Socket(_))));
}

#[test]
fn a_connection_leaves_no_descriptor_behind() {
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    // A front end has to wait until the one before it has disconnected.
    let connect = || (0..3).for_each(|_| FrontEnd::connect(&bench.socket(), &driver).wait());
    connect();
    let before = count();
    (0..10).for_each(|_| connect());
    // Other tests run at the same time.
    assert!(count() < before + 60, "{before} descriptors, and now {}", count());
}

fn message(request: u32, flags: u32, body: &[u64]) -> Vec<u8> {
    let header = [request, flags, 8 * body.len() as u32].map(u32::to_ne_bytes);
    let body: Vec<u8> = body.iter().flat_map(|word| word.to_ne_bytes()).collect();
    [header.as_flattened(), &body].concat()
}

const NEED_REPLY: u32 = 1 | 1 << 3;

/// A front end that asks for an acknowledgement learns that its message was refused.
#[test]
fn nonsense_is_refused() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    let mut front_end = stream(&bench.socket());
    front_end.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut ask = |request: u32, body: &[u64]| {
        front_end.write_all(&message(request, NEED_REPLY, body)).unwrap();
        let mut answer = [0; 20];
        front_end.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], request.to_ne_bytes());
        u64::from_ne_bytes(answer[12..].try_into().unwrap())
    };
    assert_eq!(ask(3, &[]), 0, "an owner is fine");
    // Features and protocol features that nobody offers.
    assert_eq!(ask(2, &[1 << 63]), 1);
    assert_eq!(ask(16, &[1 << 63]), 1);
    // Tables without files, without regions, and shorter than they say.
    assert_eq!(ask(5, &[1, 0, 4096, 0, 0]), 1);
    assert_eq!(ask(5, &[0]), 1);
    assert_eq!(ask(5, &[u64::from(u32::MAX)]), 1);
    // Another ring, an invalid size, a place outside memory, no file.
    assert_eq!(ask(8, &[64 << 32 | 1]), 1);
    assert_eq!(ask(8, &[63 << 32]), 1);
    assert_eq!(ask(8, &[65536 << 32]), 1);
    assert_eq!(ask(9, &[0, 0, 0, 0, 0]), 1);
    assert_eq!(ask(12, &[0]), 1);
    assert_eq!(ask(12, &[1 << 8]), 1);
    assert_eq!(ask(13, &[1]), 1);
    assert_eq!(ask(13, &[1 << 8]), 0, "no signals are wanted");
    // A channel without a file, configuration of the wrong length, an unknown request.
    assert_eq!(ask(21, &[]), 1);
    assert_eq!(ask(24, &[1 << 32]), 1);
    assert_eq!(ask(24, &[4096 << 32]), 1);
    assert_eq!(ask(99, &[]), 1);
    assert_eq!(ask(0, &[]), 1);
}

/// A front end that does not ask for an acknowledgement loses the connection, and the next one is
/// served.
#[test]
fn a_front_end_that_makes_no_sense_is_disconnected() {
    let driver = Driver::new();
    let bench = Bench::new(&driver.vm);
    for bytes in [
        message(1, 0, &[]),
        message(2, 1, &[1 << 63]),
        message(12, 1, &[7]),
        [1u32, 1, u32::MAX].map(u32::to_ne_bytes).concat(),
    ] {
        let mut front_end = stream(&bench.socket());
        front_end.set_read_timeout(Some(DEADLINE)).unwrap();
        front_end.write_all(&bytes).unwrap();
        assert_eq!(front_end.read(&mut [0]).unwrap(), 0, "{bytes:?}");
    }
    // Half a message, and no more.
    stream(&bench.socket()).write_all(&[1, 0, 0]).unwrap();
    FrontEnd::connect(&bench.socket(), &driver).wait();
}

#[test]
fn a_silent_front_end_delays_no_request() {
    let driver = Driver::new();
    let mut bench = Bench::new(&driver.vm);
    let mut silent = stream(&bench.socket());
    silent.write_all(&[1, 0, 0]).unwrap();
    bench.request_blocks(1);
    bench.stop();
}
