//! Front ends that connect, disconnect, and connect again.

use std::fs;
use std::hint;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use ebb_block::{
    Access, AllResident, Backend, Dma, DmaFault, Image, Nobody, Options, Segment, StartError,
};
use testkit::disk::{
    EVENT_IDX, FREE, IN, IOERR, OK, OUT, RINGS, Ring, connect, connect_without, sealable_memory,
    shared_memory,
};
use testkit::front_end::{DEADLINE, FrontEnd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const RAM_BYTES: u64 = 4 << 20;
/// Offset of the field that turns the write cache on or off.
const WRITEBACK: u32 = 32;

struct Bench {
    directory: tempfile::TempDir,
    backend: Option<Backend>,
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let file = fs::File::create(directory.path().join("image")).unwrap();
        file.set_len(16 << 20).unwrap();
        let mut bench = Bench { directory, backend: None };
        bench.start();
        bench
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn start(&mut self) {
        self.start_with(Arc::new(AllResident));
    }

    fn start_with(&mut self, dma: Arc<dyn Dma>) {
        let image = Image::open(&self.directory.path().join("image"), false).unwrap();
        let observer = Arc::new(Nobody);
        let backend = Backend::start(&self.socket(), image, dma, observer, Options::default());
        self.backend = Some(backend.unwrap());
    }

    fn connect(&self, ring: &Ring) -> FrontEnd {
        connect(&self.socket(), ring, ring.used())
    }
}

/// Memory whose used ring is evicted: its first pins fail, and then its index comes back.
struct EvictedRing {
    memory: GuestMemoryMmap,
    index: u16,
    asked: AtomicU32,
}

impl Dma for EvictedRing {
    fn pin(&self, segments: &[Segment], _: Access) -> Result<(), DmaFault> {
        let holds = |s: &&Segment| (s.gpa.0..s.gpa.0 + u64::from(s.bytes)).contains(&RINGS.used);
        let Some(segment) = segments.iter().find(holds) else { return Ok(()) };
        match self.asked.fetch_add(1, Ordering::SeqCst) {
            0..5 => return Err(DmaFault::NotNow(segment.gpa)),
            5 => self.memory.write_obj(self.index, GuestAddress(RINGS.used + 2)).unwrap(),
            _ => {}
        }
        Ok(())
    }

    fn unpin(&self, _: &[Segment]) {}
}

#[test]
fn an_evicted_used_ring_is_back_before_its_index_is_read() {
    let mut bench = Bench::new();
    bench.backend = None;
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    let (memory, index) = (ring.memory.clone(), 3);
    let dma = Arc::new(EvictedRing { memory, index, asked: AtomicU32::new(0) });
    bench.start_with(dma.clone());
    ring.next = index;
    let front_end = connect(&bench.socket(), &ring, index);
    let status = ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
    front_end.finish(&ring);
    assert_eq!((ring.used(), ring.get(status, 1)), (index + 1, vec![OK]));
    assert!(dma.asked.load(Ordering::SeqCst) > 5);
}

/// Whoever pins this address panics.
struct Broken(u64);

impl Dma for Broken {
    fn pin(&self, segments: &[Segment], _: Access) -> Result<(), DmaFault> {
        let holds = |s: &Segment| (s.gpa.0..s.gpa.0 + u64::from(s.bytes)).contains(&self.0);
        assert!(!segments.iter().any(holds), "on purpose");
        Ok(())
    }

    fn unpin(&self, _: &[Segment]) {}
}

/// The thread of a queue, and the one that accepts front ends.
#[test]
fn a_panic_is_told_whichever_thread_it_ends() {
    for (at, serves_others) in [(FREE, true), (RINGS.used, false)] {
        let mut bench = Bench::new();
        bench.backend = None;
        bench.start_with(Arc::new(Broken(at)));
        let (told, texts) = channel();
        bench.backend.as_ref().unwrap().on_panic(move |text| told.send(text).unwrap());
        let mut ring = Ring::new(shared_memory(RAM_BYTES));
        ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
        // A front end that is cut off while it connects fails.
        let cut_off = catch_unwind(AssertUnwindSafe(|| bench.connect(&ring)));
        assert_eq!(texts.recv_timeout(DEADLINE).as_deref(), Ok("on purpose"), "{at:#x}");
        if serves_others {
            // A queue that is not served any more costs the front end its connection, and no more.
            let mut ring = Ring::new(shared_memory(RAM_BYTES));
            let front_end = bench.connect(&ring);
            let status = ring.prepare(IN, 0, &[], &[(FREE + 0x4000, 4096)]);
            front_end.finish(&ring);
            assert_eq!(ring.get(status, 1), [OK]);
        }
        drop(cut_off);
    }
}

#[test]
fn one_front_end_comes_after_the_other() {
    let mut bench = Bench::new();
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    ring.put(FREE, &[3; 4096]);
    for round in 0..20 {
        let front_end = bench.connect(&ring);
        ring.prepare(OUT, round * 8, &[(FREE, 4096)], &[]);
        ring.prepare(IN, round * 8, &[], &[(FREE + 0x4000, 4096)]);
        front_end.finish(&ring);
        assert_eq!(ring.get(FREE + 0x4000, 4096), [3; 4096]);
    }
    let backend = bench.backend.take().unwrap();
    assert_eq!((backend.counts().reads, backend.counts().writes), (20, 20));
    backend.stop();
    assert!(!bench.socket().exists());
}

fn file_of(ring: &Ring) -> Arc<fs::File> {
    let region = ring.memory.iter().next().unwrap();
    region.file_offset().unwrap().arc().clone()
}

/// Checks that the next front end is served, whatever the last one does.
fn served_next(bench: &Bench) {
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    let front_end = bench.connect(&ring);
    ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
    front_end.finish(&ring);
}

#[test]
fn half_a_message_keeps_no_front_end_out() {
    let bench = Bench::new();
    let mut half = UnixStream::connect(bench.socket()).unwrap();
    half.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    served_next(&bench);
}

/// As QEMU does whose back-end died while the guest had no driver: it waits for each answer.
#[test]
fn a_front_end_may_go_on_with_what_it_has_negotiated() {
    const SET_FEATURES: u32 = 2;
    const SET_VRING_NUM: u32 = 8;
    /// The protocol's version, and that an answer is expected.
    const NEED_REPLY: u32 = 1 | 1 << 3;
    const REPLY: u32 = 1 | 1 << 2;
    /// Virtio 1, and features of the protocol.
    const FEATURES: u64 = 1 << 32 | 1 << 30;
    let bench = Bench::new();
    let mut stream = UnixStream::connect(bench.socket()).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    for (request, body) in [(SET_FEATURES, FEATURES), (SET_VRING_NUM, 256 << 32)] {
        let header = [request, NEED_REPLY, 8].map(u32::to_ne_bytes);
        stream.write_all(header.as_flattened()).unwrap();
        stream.write_all(&body.to_ne_bytes()).unwrap();
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).unwrap();
        let done = [request, REPLY, 8, 0, 0].map(u32::to_ne_bytes);
        assert_eq!(answer, done.as_flattened());
    }
    drop(stream);
    served_next(&bench);
}

#[test]
fn memory_that_goes_away_ends_its_connection_alone() {
    let bench = Bench::new();
    // Without the whole queue, and without its used ring.
    for bytes in [0, RINGS.used] {
        let ring = Ring::new(shared_memory(RAM_BYTES));
        let front_end = bench.connect(&ring);
        file_of(&ring).set_len(bytes).unwrap();
        front_end.kick();
        served_next(&bench);
    }
}

#[test]
fn a_request_whose_memory_went_away_fails() {
    let bench = Bench::new();
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    let front_end = bench.connect(&ring);
    file_of(&ring).set_len(FREE).unwrap();
    // The kernel reads a whole block directly, into memory that no longer exists.
    let status = ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
    front_end.finish(&ring);
    assert_eq!(ring.get(status, 1), [IOERR]);
}

#[test]
fn memory_that_can_be_sealed_does_not_go_away() {
    let bench = Bench::new();
    let mut ring = Ring::new(sealable_memory(RAM_BYTES));
    let front_end = bench.connect(&ring);
    front_end.wait();
    assert!(file_of(&ring).set_len(0).is_err());
    ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
    front_end.finish(&ring);
}

#[test]
fn a_stopped_queue_has_answered_all_that_it_took() {
    let bench = Bench::new();
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    let front_end = bench.connect(&ring);
    for n in 0..30 {
        ring.prepare(IN, n * 512, &[], &[(FREE, 0x4_0000)]);
    }
    front_end.kick();
    let base = front_end.stop();
    assert_eq!(base, ring.used());
    // The rest is left for the next front end.
    drop(front_end);
    connect(&bench.socket(), &ring, base).finish(&ring);
}

/// Whether the device asks to be told of the request that was made available last (virtio 1.2,
/// section 2.7.10).
fn is_kick_wanted(ring: &Ring, has_event_indices: bool) -> bool {
    // The request must be visible before the driver looks.
    fence(Ordering::SeqCst);
    match has_event_indices {
        true => {
            let event = RINGS.used + 4 + 8 * u64::from(RINGS.size);
            ring.get(event, 2) == ring.next.wrapping_sub(1).to_le_bytes()
        }
        false => ring.get(RINGS.used, 2) == [0, 0],
    }
}

/// Requests come while the device polls, while it sleeps, and just when it stops polling.
#[test]
fn a_driver_that_kicks_only_where_it_is_asked_to_is_served() {
    for has_event_indices in [false, true] {
        let bench = Bench::new();
        let mut ring = Ring::new(shared_memory(RAM_BYTES));
        let without = if has_event_indices { 0 } else { EVENT_IDX };
        let front_end = connect_without(without, &bench.socket(), &ring, 0);
        for round in 0..3000 {
            (0..round * 7919 % 6000).for_each(|_| hint::spin_loop());
            let status = ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
            if is_kick_wanted(&ring, has_event_indices) {
                front_end.kick();
            }
            let end = Instant::now() + DEADLINE;
            while ring.used() != ring.next {
                assert!(Instant::now() < end, "nobody has heard of request {round}");
                thread::yield_now();
            }
            assert_eq!(ring.get(status, 1), [OK]);
        }
    }
}

/// Whoever serves it next may look at it only once it is kicked.
#[test]
fn a_stopped_queue_asks_to_be_kicked() {
    let bench = Bench::new();
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    for _ in 0..50 {
        let front_end = bench.connect(&ring);
        for n in 0..8 {
            ring.prepare(IN, n * 512, &[], &[(FREE, 4096)]);
        }
        front_end.kick();
        front_end.stop();
        assert!(is_kick_wanted(&ring, false));
        drop(front_end);
        bench.connect(&ring).finish(&ring);
    }
}

#[test]
fn a_new_front_end_is_signalled_at_once() {
    let bench = Bench::new();
    let ring = Ring::new(shared_memory(RAM_BYTES));
    bench.connect(&ring).wait();
    bench.connect(&ring).wait();
}

#[test]
fn a_backend_stops_with_and_without_a_front_end() {
    let mut bench = Bench::new();
    bench.backend.take().unwrap().stop();
    bench.start();
    let mut ring = Ring::new(shared_memory(RAM_BYTES));
    let front_end = bench.connect(&ring);
    for n in 0..60 {
        ring.prepare(IN, n * 512, &[], &[(FREE, 0x4_0000)]);
    }
    front_end.kick();
    bench.backend.take().unwrap().stop();
    bench.start();
    bench.connect(&ring).finish(&ring);
}

#[test]
fn a_connection_leaves_no_descriptor_behind() {
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let bench = Bench::new();
    let ring = Ring::new(shared_memory(RAM_BYTES));
    // Each front end waits until the one before has disconnected.
    let connect = || (0..3).for_each(|_| bench.connect(&ring).wait());
    connect();
    let before = count();
    (0..10).for_each(|_| connect());
    // Other tests of this process run at the same time.
    assert!(count() < before + 40, "{before} descriptors, and now {}", count());
}

#[test]
fn the_cache_stays_off_for_the_next_process() {
    let mut bench = Bench::new();
    let ring = Ring::new(shared_memory(RAM_BYTES));
    let mut front_end = bench.connect(&ring);
    assert_eq!(front_end.config(WRITEBACK, 1), [1]);
    front_end.set_config(WRITEBACK, &[0]);
    assert_eq!(front_end.config(WRITEBACK, 1), [0]);
    bench.backend.take().unwrap().stop();
    bench.start();
    let mut front_end = bench.connect(&ring);
    assert_eq!(front_end.config(WRITEBACK, 1), [0]);
    front_end.set_config(WRITEBACK, &[1]);
    assert_eq!(front_end.config(WRITEBACK, 1), [1]);
    assert!(!bench.directory.path().join("socket.writethrough").exists());
}

#[test]
fn a_socket_serves_one_disk() {
    let bench = Bench::new();
    let path = bench.directory.path().join("other");
    fs::File::create(&path).unwrap().set_len(4096).unwrap();
    let start = |queues| {
        let image = Image::open(&path, false).unwrap();
        let options = Options { queues, ..Options::default() };
        let (dma, observer) = (Arc::new(AllResident), Arc::new(Nobody));
        Backend::start(&bench.socket(), image, dma, observer, options).err().unwrap()
    };
    assert!(matches!(start(1), StartError::Socket(_)));
    assert!(matches!(start(0), StartError::Queues(0)));
}
