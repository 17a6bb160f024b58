//! Tests of each rule of virtio 1.2, section 5.15. The comment above a test names the section.

mod driver;

use std::sync::atomic::Ordering::SeqCst;

use driver::*;
use ebb_units::Gpa;
use ebb_virtio_mem::*;

const PLUGGED: Response = Response::AckState(BlockState::Plugged);
const UNPLUGGED: Response = Response::AckState(BlockState::Unplugged);
const MIXED: Response = Response::AckState(BlockState::Mixed);

fn raw(kind: u16, start: u64, count: u16) -> Vec<u8> {
    let mut bytes = vec![0xaa; REQUEST_BYTES];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[8..16].copy_from_slice(&start.to_le_bytes());
    bytes[16..18].copy_from_slice(&count.to_le_bytes());
    bytes
}

/// 5.15.3
#[test]
fn features_are_offered_as_the_host_says() {
    let host = Host::new();
    let features = |node, inaccessible| {
        let geometry = Geometry { node, ..GEOMETRY };
        let parts = DeviceParts {
            memory: Box::new(FileMemory::new(host.file.try_clone().unwrap(), 0, &geometry)),
            record: Box::new(NotSaved),
            notify: Box::new(|| {}),
        };
        let options = Options { inaccessible, ..OPTIONS };
        Device::start(Saved::new(geometry).unwrap(), options, parts).unwrap().features()
    };
    assert_eq!(features(None, false), 0);
    assert_eq!(features(Some(0), false), 1);
    assert_eq!(features(None, true), 2);
    assert_eq!(features(Some(7), true), 3);
}

/// 5.15.4
#[test]
fn the_driver_reads_the_sizes_as_they_are() {
    let mut driver = Driver::with(20);
    assert_eq!(driver.ask(plug(3, 5)), Response::Ack);
    let field = |offset: u32| {
        let mut bytes = [0; 8];
        driver.device.read_config(offset, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    let fields: Vec<u64> = (0..7).map(|index| field(index * 8)).collect();
    let expected = [BLOCK, 0, GEOMETRY.start.0, BLOCKS * BLOCK, 30 * BLOCK, 5 * BLOCK, 20 * BLOCK];
    assert_eq!(fields, expected);
}

/// 5.15.4.2: plugged_size changes without a notification; 2.5.1.
#[test]
fn only_what_the_host_changes_is_announced() {
    let mut driver = Driver::new();
    let mut generation = driver.device.generation();
    let mut changed = |driver: &Driver| {
        let before = std::mem::replace(&mut generation, driver.device.generation());
        (driver.notices(), before != generation)
    };
    assert_eq!(changed(&driver), (0, false));
    driver.request_blocks(20);
    assert_eq!(changed(&driver), (1, true));
    driver.request_blocks(20);
    assert_eq!(changed(&driver), (1, false));
    driver.ask(plug(0, 9));
    assert_eq!(changed(&driver), (1, true));
    driver.ask(state(0, 9));
    assert_eq!(changed(&driver), (1, false));
    driver.ask(unplug(0, 4));
    assert_eq!(changed(&driver), (1, true));
    driver.request_blocks(3);
    assert_eq!(changed(&driver), (2, true));
    driver.ask(UNPLUG_ALL);
    assert_eq!(driver.blocks(), [13, 0, 3]);
    assert_eq!(changed(&driver), (2, true));
}

/// 5.15.4.2
#[test]
fn the_usable_region_grows_with_the_request_and_shrinks_when_all_is_unplugged() {
    let mut driver = Driver::new();
    assert_eq!(driver.blocks(), [0, 0, 0]);
    for (request, usable) in [(20, 30), (50, 60), (10, 60), (95, 100), (100, 100), (0, 100)] {
        driver.request_blocks(request);
        assert_eq!(driver.blocks(), [usable, 0, request]);
    }
    driver.request_blocks(5);
    driver.ask(plug(99, 1));
    driver.ask(unplug(99, 1));
    assert_eq!(driver.blocks()[0], 100);
    driver.ask(UNPLUG_ALL);
    assert_eq!(driver.blocks(), [15, 0, 5]);
    driver.request_blocks(0);
    driver.ask(UNPLUG_ALL);
    assert_eq!(driver.blocks(), [0, 0, 0]);
}

/// 5.15.4.2
#[test]
fn sizes_that_a_device_cannot_have_are_refused() {
    let driver = Driver::with(20);
    let size = |bytes| driver.device.request_bytes(bytes).unwrap_err();
    assert_eq!(size(BLOCK + 1), SizeError::Alignment { block_bytes: BLOCK });
    let too_large = SizeError::TooLarge { region_bytes: BLOCKS * BLOCK };
    assert_eq!(size((BLOCKS + 1) * BLOCK), too_large);
    assert_eq!(size(u64::MAX - BLOCK + 1), too_large);
    assert_eq!((driver.blocks(), driver.notices()), ([30, 0, 20], 1));
}

/// 5.15.5.2
#[test]
fn a_device_reset_changes_no_block() {
    let mut driver = Driver::with(20);
    driver.device.negotiated(F_UNPLUGGED_INACCESSIBLE);
    driver.ask(plug(3, 5));
    driver.device.reset();
    driver.check();
    assert_eq!(driver.device.guard().judge(named(0, 1).start, false), Touch::Readable);
}

/// 5.15.6.1 and 5.15.6.2
#[test]
fn touches_are_judged() {
    let mut driver = Driver::with(20);
    driver.ask(plug(3, 5));
    let guard = driver.device.guard().clone();
    let judge = |block: u64, is_write| guard.judge(Gpa(named(block, 1).start.0 + 5), is_write);
    driver.device.negotiated(0);
    assert_eq!([judge(3, true), judge(7, false)], [Touch::Plugged; 2]);
    assert_eq!([judge(0, false), judge(29, false)], [Touch::Readable; 2]);
    assert_eq!(guard.violations(), 0);
    assert_eq!([judge(0, true), judge(30, false), judge(99, true)], [Touch::Forbidden; 3]);
    assert_eq!(guard.violations(), 3);
    driver.device.negotiated(F_UNPLUGGED_INACCESSIBLE);
    assert_eq!(judge(0, false), Touch::Forbidden);
    assert_eq!(judge(3, false), Touch::Plugged);
    assert_eq!([judge(100, true), guard.judge(Gpa(0), true)], [Touch::Outside; 2]);
    assert_eq!(guard.violations(), 4);
    // A feature that was not offered has no effect.
    let host = Host::new();
    let parts = DeviceParts {
        memory: Box::new(FileMemory::new(host.file.try_clone().unwrap(), 0, &GEOMETRY)),
        record: Box::new(NotSaved),
        notify: Box::new(|| {}),
    };
    let options = Options { inaccessible: false, ..OPTIONS };
    let device = Device::start(Saved::new(GEOMETRY).unwrap(), options, parts).unwrap();
    device.request_bytes(BLOCK).unwrap();
    device.negotiated(u64::MAX);
    assert_eq!(device.guard().judge(GEOMETRY.start, false), Touch::Readable);
}

/// 5.15.6
#[test]
fn a_malformed_request_is_an_error() {
    let mut driver = Driver::with(20);
    driver.ask(plug(0, 1));
    let error = Response::Error.to_bytes();
    for kind in [4, 0x100, u16::MAX] {
        assert_eq!(driver.device.handle(&raw(kind, GEOMETRY.start.0, 1)), Ok(error));
    }
    for length in 0..REQUEST_BYTES {
        let bytes = raw(2, 0, 0);
        assert_eq!(driver.device.handle(&bytes[..length]), Ok(error));
    }
    driver.check();
}

/// 5.15.6.3.2, 5.15.6.4.2 and 5.15.6.6.2
#[test]
fn blocks_that_are_none_are_an_error() {
    let mut driver = Driver::with(20);
    driver.ask(plug(0, 20));
    driver.ask(unplug(10, 5));
    let start = GEOMETRY.start.0;
    for kind in [0, 1, 3] {
        for (address, count) in [
            (start + 1, 1),
            (start + BLOCK / 2, 1),
            (start, 0),
            (start - BLOCK, 1),
            (start + 30 * BLOCK, 1),
            (start + 29 * BLOCK, 2),
            (start, u16::MAX),
            (0, 1),
            (u64::MAX - BLOCK + 1, u16::MAX),
        ] {
            let answer = driver.device.handle(&raw(kind, address, count));
            assert_eq!(answer, Ok(Response::Error.to_bytes()), "{kind} {address:#x} {count}");
        }
    }
    driver.check();
}

/// 5.15.6.3.2
#[test]
fn plugged_blocks_cannot_be_plugged() {
    let mut driver = Driver::with(20);
    assert_eq!(driver.ask(plug(5, 5)), Response::Ack);
    for (first, count) in [(5, 5), (5, 1), (9, 1), (4, 2), (9, 2), (0, 20)] {
        assert_eq!(driver.ask(plug(first, count)), Response::Error);
    }
    driver.check();
    assert_eq!(driver.ask(plug(0, 5)), Response::Ack);
    assert_eq!(driver.ask(plug(10, 10)), Response::Ack);
    driver.check();
}

/// 5.15.6.4.2
#[test]
fn unplugged_blocks_cannot_be_unplugged() {
    let mut driver = Driver::with(20);
    driver.ask(plug(5, 5));
    for (first, count) in [(4, 1), (10, 1), (4, 2), (9, 2), (0, 20)] {
        assert_eq!(driver.ask(unplug(first, count)), Response::Error);
    }
    driver.check();
    assert_eq!(driver.ask(unplug(6, 2)), Response::Ack);
    assert_eq!(driver.ask(unplug(6, 2)), Response::Error);
    driver.check();
}

/// 5.15
#[test]
fn no_more_is_plugged_than_is_requested() {
    let mut driver = Driver::with(20);
    assert_eq!(driver.ask(plug(0, 21)), Response::Nack);
    assert_eq!(driver.ask(plug(0, 20)), Response::Ack);
    assert_eq!(driver.ask(plug(20, 1)), Response::Nack);
    driver.request_blocks(10);
    assert_eq!(driver.ask(unplug(0, 9)), Response::Ack);
    assert_eq!(driver.ask(plug(0, 1)), Response::Nack);
    assert_eq!(driver.ask(unplug(9, 2)), Response::Ack);
    assert_eq!(driver.ask(plug(0, 2)), Response::Nack);
    assert_eq!(driver.ask(plug(0, 1)), Response::Ack);
    driver.check();
}

/// 5.15.6.6.2
#[test]
fn the_state_of_blocks_is_reported() {
    let mut driver = Driver::with(20);
    driver.ask(plug(5, 5));
    for (first, count, expected) in [
        (5, 1, PLUGGED),
        (5, 5, PLUGGED),
        (4, 1, UNPLUGGED),
        (10, 20, UNPLUGGED),
        (4, 2, MIXED),
        (9, 2, MIXED),
        (0, 30, MIXED),
    ] {
        assert_eq!(driver.ask(state(first, count)), expected, "{first} {count}");
    }
}

/// 5.15.6.3.2: BUSY if the host has no memory.
#[test]
fn a_plug_that_fails_leaves_the_block_unplugged() {
    let mut driver = Driver::with(20);
    driver.ask(plug(0, 5));
    driver.host.plug_fails.set(0);
    assert_eq!(driver.ask(plug(5, 5)), Response::Busy);
    driver.check();
    assert_eq!(driver.ask(state(5, 5)), UNPLUGGED);
    assert_eq!(driver.ask(plug(5, 5)), Response::Ack);
    driver.check();
}

/// 5.15.6.4.2
#[test]
fn an_unplug_that_fails_leaves_the_block_plugged() {
    let mut driver = Driver::with(20);
    driver.ask(plug(0, 10));
    driver.host.unplug_fails.set(0);
    assert_eq!(driver.ask(unplug(3, 4)), Response::Busy);
    driver.check();
    driver.restart();
    driver.check();
    assert_eq!(driver.ask(unplug(3, 4)), Response::Ack);
    driver.check();
}

/// 5.15.6.5.2: all or none. Blocks that were already unplugged get memory again.
#[test]
fn an_unplug_of_all_that_fails_leaves_all_plugged() {
    for fails_at in 0..3 {
        let mut driver = Driver::with(20);
        let answers = [0, 5, 10].map(|first| driver.ask(plug(first, 3)));
        assert_eq!(answers, [Response::Ack; 3]);
        driver.request_blocks(9);
        driver.host.unplug_fails.set(fails_at);
        assert_eq!(driver.ask(UNPLUG_ALL), Response::Busy);
        assert_eq!(driver.blocks(), [30, 9, 9]);
        assert_eq!(driver.ask(state(0, 14)), MIXED);
        let usable = [0, 5, 10].map(|first| driver.ask(state(first, 3)));
        assert_eq!(usable, [PLUGGED; 3]);
        driver.restart();
        assert_eq!(driver.blocks(), [30, 9, 9]);
        assert_eq!(driver.ask(UNPLUG_ALL), Response::Ack);
        assert_eq!(driver.blocks(), [19, 0, 9]);
        driver.check();
    }
}

#[test]
fn a_device_that_cannot_go_back_stops() {
    let mut driver = Driver::with(20);
    assert_eq!([0, 5].map(|first| driver.ask(plug(first, 3))), [Response::Ack; 2]);
    driver.host.unplug_fails.set(1);
    driver.host.plug_fails.set(0);
    assert!(driver.device.answer(UNPLUG_ALL).is_err());
    assert!(driver.device.answer(state(0, 1)).is_err());
    assert!(matches!(driver.device.request_bytes(BLOCK), Err(SizeError::Stopped(_))));
    // The driver still waits for its answer.
    driver.restart();
    assert_eq!(driver.ask(UNPLUG_ALL), Response::Ack);
    driver.check();
}

#[test]
fn a_device_whose_state_cannot_be_kept_stops() {
    for request in [plug(10, 5), unplug(0, 2), UNPLUG_ALL] {
        let mut driver = Driver::with(20);
        driver.ask(plug(0, 5));
        driver.host.save_fails.set(0);
        assert!(driver.device.answer(request).is_err());
        assert!(driver.device.handle(&request.to_bytes()).is_err());
        driver.restart();
        driver.check();
        assert_eq!(driver.ask(request), Response::Ack);
        driver.check();
    }
    let host = Host::new();
    host.save_fails.set(0);
    assert!(matches!(start(&host), Err(StartError::Record(_))));
    host.unplug_fails.set(0);
    assert!(matches!(start(&host), Err(StartError::Memory(_))));
    assert_eq!(host.notices.load(SeqCst), 0);
}
