//! Memory that is not available now, or never: no request ends without its status.

mod driver;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use driver::*;
use ebb_block::{Backend, Nobody, Observer, Options};
use testkit::disk::{DISCARD, FREE, IN, OK, RINGS, Ring, connect, shared_memory};

const IMAGE_BYTES: u64 = 1 << 20;
/// The header of a driver's first request.
const HEADER: u64 = 0x1_0000;
const STATUS: u64 = HEADER + 16;
const TABLE: u64 = FREE + 0x8000;

fn drivers() -> Vec<(tempfile::NamedTempFile, Driver)> {
    let all = [(true, true), (true, false), (false, true), (false, false)];
    let driver = |(watched, use_ring)| {
        let (file, image) = image(IMAGE_BYTES, false, true);
        file.as_file().write_all_at(&[7; 8192], 0).unwrap();
        let observer: Arc<dyn Observer> =
            if watched { Arc::new(Watcher::default()) } else { Arc::new(Nobody) };
        (file, Driver::new(image, observer, use_ring))
    };
    all.into_iter().map(driver).collect()
}

/// Offers a read of one block to [`FREE`], with an indirect table.
fn offer_indirect(driver: &mut Driver) {
    driver.put(HEADER, &0u128.to_le_bytes());
    driver.put(STATUS, &[0xff]);
    let pieces = [(HEADER, 16, 1, 1), (FREE, 4096, 3, 2), (STATUS, 1, 2, 0)];
    for (index, (gpa, bytes, flags, next)) in pieces.into_iter().enumerate() {
        let word = u128::from(gpa) | bytes << 64 | flags << 96 | next << 112;
        driver.put(TABLE + 16 * index as u64, &word.to_le_bytes());
    }
    let word = u128::from(TABLE) | 48 << 64 | 4 << 96;
    driver.put(RINGS.descriptors, &word.to_le_bytes());
    driver.put(RINGS.available + 2, &[1, 0, 0, 0]);
    driver.next = 1;
}

#[test]
fn a_read_waits_for_memory_that_cannot_be_had_now() {
    for (_file, mut driver) in drivers() {
        for (slot, unavailable) in [HEADER, STATUS, FREE, FREE + 4096].into_iter().enumerate() {
            driver.put(FREE, &[0; 8192]);
            // Each request has a line of its own.
            let line = if unavailable < FREE { 32 * slot as u64 } else { 0 };
            *driver.gate.unavailable.lock().unwrap() = Some((unavailable + line, 5));
            assert_eq!(
                driver.read(0, &[(FREE, 4096), (FREE + 4096, 4096)]),
                OK,
                "{unavailable:#x}"
            );
            assert_eq!(*driver.gate.unavailable.lock().unwrap(), Some((unavailable + line, 0)));
            assert_eq!(driver.get(FREE, 8192), [7; 8192]);
            assert_eq!((driver.used(), driver.used_at(slot as u16).1), (slot as u16 + 1, 8193));
        }
        let counts = driver.counts();
        assert_eq!((counts.reads, counts.failed, counts.dma_faults), (4, 0, 0));
    }
}

#[test]
fn a_write_waits_for_memory_that_cannot_be_had_now() {
    for (file, mut driver) in drivers() {
        driver.put(FREE, &[5; 8192]);
        // Whole blocks, and a part of one.
        for (sector, bytes) in [(8, 8192), (65, 512)] {
            *driver.gate.unavailable.lock().unwrap() = Some((FREE, 5));
            assert_eq!(driver.write(sector, &[(FREE, bytes)]), OK);
            let mut content = vec![0; bytes as usize];
            file.as_file().read_exact_at(&mut content, sector * 512).unwrap();
            assert!(content.iter().all(|byte| *byte == 5));
        }
        // The range to discard is in this memory.
        *driver.gate.unavailable.lock().unwrap() = Some((RAM_BYTES - 16, 5));
        assert_eq!(driver.range(DISCARD, 8, 8, 0), OK);
        assert_eq!(driver.counts().failed, 0);
    }
}

#[test]
fn rings_and_tables_that_cannot_be_had_now_are_waited_for() {
    for unavailable in [RINGS.used, TABLE] {
        for (_file, mut driver) in drivers() {
            *driver.gate.unavailable.lock().unwrap() = Some((unavailable, 5));
            offer_indirect(&mut driver);
            driver.serve();
            assert_eq!(*driver.gate.unavailable.lock().unwrap(), Some((unavailable, 0)));
            assert_eq!(driver.get(STATUS, 1), [OK]);
            assert_eq!(driver.get(FREE, 4096), [7; 4096]);
            assert_eq!((driver.used(), driver.used_at(0)), (1, (0, 4097)));
        }
    }
}

#[test]
fn no_request_ends_whose_status_no_device_may_write() {
    for (_file, mut driver) in drivers() {
        assert_eq!(driver.read(0, &[(FREE, 4096)]), OK);
        *driver.gate.closed_from.lock().unwrap() = Some(TABLE);
        driver.put(FREE + 64, &0u128.to_le_bytes());
        driver.put(TABLE, &[0xff]);
        driver.offer(&[(FREE + 64, 16)], &[(FREE, 512), (TABLE, 1)]);
        driver.prepare(IN, 0, &[], &[(FREE, 4096)]);
        driver.solo.serve();
        assert!(!driver.solo.runs());
        assert_eq!((driver.used(), driver.get(TABLE, 1)), (1, vec![0xff]));
    }
    for (_file, mut driver) in drivers() {
        *driver.gate.closed_from.lock().unwrap() = Some(TABLE);
        offer_indirect(&mut driver);
        driver.solo.serve();
        assert!(!driver.solo.runs());
        assert_eq!((driver.used(), driver.get(STATUS, 1)), (0, vec![0xff]));
    }
}

#[test]
fn a_queue_stops_while_requests_wait_and_does_them_later() {
    for (unavailable, requests_seen) in [(FREE, true), (HEADER + 32, false)] {
        let (file, image) = image(IMAGE_BYTES, false, true);
        file.as_file().write_all_at(&[7; 8192], 0).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let gate = Arc::new(Gate::default());
        let options = Options::default();
        let backend = Backend::start(&socket, image, gate.clone(), Arc::new(Nobody), options);
        let backend = backend.unwrap();
        let mut ring = Ring::new(shared_memory(RAM_BYTES));
        *gate.unavailable.lock().unwrap() = Some((unavailable, u32::MAX));
        let front_end = connect(&socket, &ring, 0);
        let first = ring.prepare(IN, 0, &[], &[(FREE + 0x1000, 4096)]);
        let waits = ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
        let behind = ring.prepare(IN, 0, &[], &[(FREE + 0x2000, 4096)]);
        front_end.kick();
        // The first is done. A request behind the one that waits may have ended, and is not
        // reported.
        let last = if requests_seen { behind } else { first };
        while ring.get(last, 1) != [OK] || ring.used() != 1 {
            std::thread::yield_now();
        }
        let base = front_end.stop();
        assert_eq!((base, ring.used()), (1, 1));
        assert_eq!(ring.get(waits, 1), [0xff]);
        drop(front_end);
        *gate.unavailable.lock().unwrap() = None;
        let front_end = connect(&socket, &ring, base);
        while ring.used() != ring.next {
            front_end.wait();
        }
        assert_eq!(ring.get(FREE, 0x3000), [7; 0x3000]);
        assert_eq!([waits, behind].map(|at| ring.get(at, 1)), [[OK], [OK]]);
        // A backend stops too while a request waits.
        *gate.unavailable.lock().unwrap() = Some((FREE, u32::MAX));
        ring.prepare(IN, 0, &[], &[(FREE, 4096)]);
        front_end.kick();
        backend.stop();
    }
}
