//! Queues that no correct driver makes.

mod driver;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use driver::*;
use ebb_vhost::{Access, AllResident, Dma, DmaFault, Segment};
use ebb_virtio_mem::{Device, DeviceParts, NotSaved, Options, Saved};
use ebb_virtio_mem_user::solo::Solo;
use testkit::virtqueue::{Piece, Rings};

struct Bench {
    driver: Driver,
    solo: Solo,
}

impl Bench {
    fn new(requested_blocks: u64) -> Bench {
        Bench::with(RINGS, requested_blocks)
    }

    fn with(rings: Rings, requested_blocks: u64) -> Bench {
        Bench::behind(rings, requested_blocks, Arc::new(AllResident))
    }

    fn behind(rings: Rings, requested_blocks: u64, dma: Arc<dyn Dma>) -> Bench {
        let driver = Driver::new();
        let parts = DeviceParts {
            memory: Box::new(driver.vm.file_memory()),
            record: Box::new(NotSaved),
            notify: Box::new(|| {}),
        };
        let options = Options { spare_bytes: 4 * BLOCK, ..Options::default() };
        let device = Device::start(Saved::new(GEOMETRY).unwrap(), options, parts).unwrap();
        device.request_bytes(requested_blocks * BLOCK).unwrap();
        let memory = driver.vm.memory.clone();
        let solo = Solo::new(Arc::new(device), memory, rings, dma).unwrap();
        Bench { driver, solo }
    }

    fn plugged(&self) -> u64 {
        self.solo.device().sizes().plugged_bytes / BLOCK
    }

    /// Serves all requests. Returns how many bytes the used ring says were written to the last
    /// chain.
    fn serve(&mut self, slot: u16) -> u32 {
        self.solo.serve();
        assert!(self.solo.runs());
        assert_eq!(self.driver.used(), self.driver.next);
        self.driver.used_at(slot).1
    }
}

#[test]
fn a_chain_may_be_cut_anywhere() {
    let mut bench = Bench::new(4);
    let line = bench.driver.new_line();
    bench.driver.vm.put(line, &plug(0, 1).to_bytes());
    let readable: Vec<Piece> = (0..24).map(|at| (line + at, 1)).collect();
    let writable = [(line + 32, 3), (line + 35, 6), (line + 41, 5)];
    let slot = bench.driver.offer(&readable, &writable);
    assert_eq!(bench.serve(slot), 10);
    assert_eq!(bench.driver.vm.get(line + 32), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff]);
    assert_eq!(bench.plugged(), 1);
}

#[test]
fn a_chain_without_room_for_an_answer_is_no_request() {
    let mut bench = Bench::new(4);
    let line = bench.driver.new_line();
    bench.driver.vm.put(line, &plug(0, 1).to_bytes());
    for writable in [&[][..], &[(line + 32, 9)], &[(1 << 40, 10)]] {
        let slot = bench.driver.offer(&[(line, 24)], writable);
        assert_eq!(bench.serve(slot), 0, "{writable:?}");
    }
    // A request that cannot be read is not answered either.
    let slot = bench.driver.offer(&[(1 << 40, 24)], &[(line + 32, 10)]);
    assert_eq!(bench.serve(slot), 0);
    assert_eq!(bench.plugged(), 0);
    // A request that is too short is answered with an error.
    let slot = bench.driver.offer(&[(line, 23)], &[(line + 32, 10)]);
    assert_eq!(bench.serve(slot), 10);
    assert_eq!(bench.driver.answer(line + 32), ERROR);
}

/// The device gives no memory to unplugged blocks by its own accesses: sections 5.15.6.1 and
/// 5.15.6.2.
#[test]
fn the_device_keeps_off_what_is_unplugged() {
    let mut bench = Bench::new(4);
    let block = |index: u64| GEOMETRY.start.0 + index * BLOCK;
    let line = bench.driver.new_line();
    bench.driver.vm.put(line, &plug(1, 1).to_bytes());
    let slot = bench.driver.offer(&[(line, 24)], &[(block(1), 10)]);
    assert_eq!(bench.serve(slot), 0);
    let slot = bench.driver.offer(&[(block(3), 24)], &[(line + 32, 10)]);
    assert_eq!(bench.serve(slot), 0);
    assert_eq!((bench.plugged(), bench.driver.vm.region_bytes()), (0, 0));
    // The answer may be in a plugged block, unless the request unplugs that block.
    let slot = bench.driver.offer(&[(line, 24)], &[(line + 32, 10)]);
    assert_eq!(bench.serve(slot), 10);
    bench.driver.vm.put(line, &state(1, 1).to_bytes());
    let slot = bench.driver.offer(&[(line, 24)], &[(block(1) + 100, 10)]);
    assert_eq!(bench.serve(slot), 10);
    bench.driver.vm.put(line, &unplug(1, 1).to_bytes());
    let slot = bench.driver.offer(&[(line, 24)], &[(block(1) + 100, 10)]);
    assert_eq!(bench.serve(slot), 0);
    assert_eq!((bench.plugged(), bench.driver.vm.region_bytes()), (0, 0));
}

#[test]
fn a_loop_is_no_chain() {
    let mut bench = Bench::new(4);
    let word = 0x1_0000_u128 | 24 << 64 | 1 << 96;
    bench.driver.vm.put(RINGS.descriptors, &word.to_le_bytes());
    let slot = bench.driver.make_available(0);
    assert_eq!(bench.serve(slot), 0);
}

#[test]
fn rings_that_make_no_sense_are_served_no_more() {
    let mut bench = Bench::new(4);
    bench.driver.make_available(RINGS.size);
    bench.solo.serve();
    assert!(!bench.solo.runs(), "a head beyond the table");
    let mut bench = Bench::new(4);
    bench.driver.vm.put(RINGS.available + 2, &(RINGS.size + 1).to_le_bytes());
    bench.solo.serve();
    assert!(!bench.solo.runs(), "more than there is room for");
    // One place is beyond RAM, the other in unplugged memory.
    for used in [RAM_BYTES - 4, GEOMETRY.start.0] {
        let mut bench = Bench::with(Rings { used, ..RINGS }, 4);
        bench.solo.serve();
        assert!(!bench.solo.runs(), "the used ring at {used:#x}");
    }
}

/// Memory that cannot be had now for five pins: pin number `from`, counted from 0, and the four
/// after it.
#[derive(Default)]
struct Unavailable {
    asked: AtomicU32,
    from: u32,
}

impl Dma for Unavailable {
    fn pin(&self, segments: &[Segment], _: Access) -> Result<(), DmaFault> {
        let asked = self.asked.fetch_add(1, SeqCst);
        let unavailable = (self.from..self.from + 5).contains(&asked);
        if unavailable { Err(DmaFault::NotNow(segments[0].gpa)) } else { Ok(()) }
    }

    fn unpin(&self, _: &[Segment]) {}
}

#[test]
fn memory_that_cannot_be_had_now_is_waited_for() {
    // The pins are of the rings, a descriptor, the request, the place of the answer, and the
    // answer.
    let mut from = 0;
    loop {
        let unavailable = Arc::new(Unavailable { from, ..Unavailable::default() });
        let mut bench = Bench::behind(RINGS, 4, unavailable.clone());
        let line = bench.driver.new_line();
        bench.driver.vm.put(line, &plug(0, 1).to_bytes());
        let slot = bench.driver.offer(&[(line, 24)], &[(line + 32, 10)]);
        assert_eq!(bench.serve(slot), 10, "{from}");
        assert_eq!((bench.driver.answer(line + 32), bench.plugged()), (ACK, 1), "{from}");
        if unavailable.asked.load(SeqCst) <= from {
            break;
        }
        from += 1;
    }
    assert!(from >= 5);
}
