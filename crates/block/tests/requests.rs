//! Requests one by one: what they do, what they may not do, and what the observer sees.

mod driver;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use driver::*;
use ebb_block::{Direction, Nobody};
use ebb_units::Gfn;
use testkit::disk::{
    DISCARD, FLUSH, FREE, GET_ID, IN, IOERR, OK, OUT, RINGS, UNSUPP, WRITE_ZEROES,
};
use testkit::virtqueue::Piece;

const IMAGE_BYTES: u64 = 1 << 20;
const SECTORS: u64 = IMAGE_BYTES / 512;

fn plain() -> (tempfile::NamedTempFile, Driver) {
    let (file, image) = image(IMAGE_BYTES, false, true);
    (file, Driver::new(image, Arc::new(Nobody), true))
}

fn content(file: &tempfile::NamedTempFile, offset: u64, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    file.as_file().read_exact_at(&mut read, offset).unwrap();
    read
}

#[test]
fn what_is_written_is_read() {
    let (file, mut driver) = plain();
    driver.put(FREE, &[1; 4096]);
    driver.put(FREE + 0x3000, &[2; 8192]);
    assert_eq!(driver.write(8, &[(FREE, 4096), (FREE + 0x3000, 8192)]), OK);
    assert_eq!(content(&file, 4096, 4096), [1; 4096]);
    assert_eq!(content(&file, 8192, 8192), [2; 8192]);
    let to = FREE + 0x1_0000;
    assert_eq!(driver.read(16, &[(to, 4096)]), OK);
    assert_eq!(driver.get(to, 4096), [2; 4096]);
    assert_eq!(driver.used_at(1).1, 4097);
    assert_eq!(driver.request(FLUSH, 0, &[], &[]), OK);
    let counts = driver.counts();
    assert_eq!((counts.reads, counts.writes, counts.flushes, counts.failed), (1, 1, 1, 0));
    assert_eq!((counts.read_bytes, counts.written_bytes), (4096, 12288));
}

#[test]
fn unaligned_requests_leave_their_neighbours_alone() {
    let (file, mut driver) = plain();
    file.as_file().write_all_at(&[9; 16384], 0).unwrap();
    driver.put(FREE + 3, &[1; 1024]);
    assert_eq!(driver.write(7, &[(FREE + 3, 1000), (FREE + 1003, 24)]), OK);
    let expected = [&[9; 3584][..], &[1; 1024], &[9; 11776]].concat();
    assert_eq!(content(&file, 0, 16384), expected);
    assert_eq!(driver.read(6, &[(FREE + 0x5001, 1536)]), OK);
    assert_eq!(driver.get(FREE + 0x5001, 1536), expected[3072..4608]);
}

#[test]
fn requests_beyond_the_limits_fail_and_do_nothing() {
    let (file, mut driver) = plain();
    driver.put(FREE, &[1; 4096]);
    assert_eq!(driver.write(SECTORS - 7, &[(FREE, 4096)]), IOERR);
    assert_eq!(driver.write(u64::MAX, &[(FREE, 4096)]), IOERR);
    assert_eq!(driver.read(SECTORS, &[(FREE, 512)]), IOERR);
    assert_eq!(driver.write(0, &[(FREE, 100)]), IOERR);
    assert_eq!(driver.write(0, &[(RAM_BYTES - 512, 1024)]), IOERR);
    assert_eq!(driver.read(0, &[(u64::MAX - 511, 512)]), IOERR);
    let many: Vec<Piece> = (0..127).map(|n| (FREE + n * 512, 512)).collect();
    assert_eq!(driver.write(0, &many), IOERR);
    assert_eq!(driver.write(0, &many[1..]), OK);
    assert_eq!(driver.counts().failed, 7);
    assert_eq!(content(&file, 126 * 512, 4096), [0; 4096]);
}

#[test]
fn wrong_directions_and_kinds_are_refused() {
    let (_file, mut driver) = plain();
    assert_eq!(driver.request(IN, 0, &[(FREE, 512)], &[(FREE, 512)]), IOERR);
    assert_eq!(driver.request(OUT, 0, &[(FREE, 512)], &[(FREE, 512)]), IOERR);
    assert_eq!(driver.request(FLUSH, 0, &[(FREE, 512)], &[]), IOERR);
    for kind in [2, 5, 14, u32::MAX] {
        assert_eq!(driver.request(kind, 0, &[], &[]), UNSUPP);
    }
}

#[test]
fn a_header_that_is_none_fails() {
    let (_file, mut driver) = plain();
    let slot = driver.offer(&[(FREE, 15)], &[(FREE + 64, 1)]);
    let lost = driver.offer(&[(u64::MAX, 16)], &[(FREE + 65, 1)]);
    driver.serve();
    assert_eq!(driver.get(FREE + 64, 2), [IOERR; 2]);
    assert_eq!((driver.used_at(slot).1, driver.used_at(lost).1), (1, 1));
    assert_eq!(driver.counts().failed, 2);
    assert_eq!(driver.read(0, &[(FREE, 512)]), OK);
}

#[test]
fn chains_without_a_place_for_a_status_stop_the_queue() {
    // Without a status, empty, and outside memory.
    let chains: [(&[Piece], &[Piece]); 4] = [
        (&[(FREE, 16)], &[]),
        (&[(FREE, 0)], &[]),
        (&[(FREE, 16), (FREE, 0)], &[(FREE, 0)]),
        (&[(FREE, 16)], &[(RAM_BYTES, 1)]),
    ];
    for (readable, writable) in chains {
        let (_file, mut driver) = plain();
        assert_eq!(driver.read(0, &[(FREE, 512)]), OK);
        driver.offer(readable, writable);
        driver.prepare(IN, 0, &[], &[(FREE, 512)]);
        driver.solo.serve();
        assert!(!driver.solo.runs());
        assert_eq!(driver.used(), 1);
    }
}

#[test]
fn a_request_may_be_cut_anywhere() {
    let (file, mut driver) = plain();
    file.as_file().write_all_at(&[7; 4096], 0).unwrap();
    // The header in three pieces, data and status in two.
    driver.put(FREE, &[0; 16]);
    driver.put(FREE + 0x1000, &[0xff; 1024]);
    driver.offer(
        &[(FREE, 1), (FREE + 1, 7), (FREE + 8, 8)],
        &[(FREE + 0x1000, 500), (FREE + 0x1000 + 500, 13)],
    );
    driver.serve();
    assert_eq!(driver.get(FREE + 0x1000, 514), [&[7; 512][..], &[OK, 0xff]].concat());
    // Header and data in one piece.
    driver.put(FREE, &(1u128 | 8 << 64).to_le_bytes());
    driver.put(FREE + 16, &[5; 512]);
    driver.offer(&[(FREE, 528)], &[(FREE + 0x1000, 1)]);
    driver.serve();
    assert_eq!(content(&file, 4096, 512), [5; 512]);
}

#[test]
fn ranges_are_zeroed_and_discarded() {
    let (file, mut driver) = plain();
    file.as_file().write_all_at(&[9; 0x8000], 0).unwrap();
    assert_eq!(driver.range(WRITE_ZEROES, 1, 9, 0), OK);
    assert_eq!(driver.range(WRITE_ZEROES, 16, 8, 1), OK);
    assert_eq!(driver.range(DISCARD, 32, 8, 0), OK);
    let expected = [&[9; 512][..], &[0; 4608], &[9; 3072], &[0; 4096], &[9; 4096]].concat();
    assert_eq!(content(&file, 0, 0x4000), expected);
    assert_eq!(driver.range(DISCARD, 0, 8, 1), UNSUPP);
    assert_eq!(driver.range(WRITE_ZEROES, 0, 8, 2), UNSUPP);
    assert_eq!(driver.range(WRITE_ZEROES, SECTORS - 1, 2, 0), IOERR);
    assert_eq!(driver.range(WRITE_ZEROES, u64::MAX, 1, 0), IOERR);
    assert_eq!(driver.range(WRITE_ZEROES, 0, u32::MAX, 0), IOERR);
    assert_eq!(driver.request(DISCARD, 0, &[(FREE, 15)], &[]), IOERR);
    assert_eq!(driver.request(DISCARD, 0, &[(FREE, 17 * 16)], &[]), IOERR);
    assert_eq!(driver.request(DISCARD, 0, &[], &[]), IOERR);
    let counts = driver.counts();
    assert_eq!((counts.discards, counts.write_zeroes, counts.failed), (1, 2, 8));
}

#[test]
fn a_disk_has_an_identity() {
    let (_file, mut driver) = plain();
    assert_eq!(driver.request(GET_ID, 0, &[], &[(FREE, 20)]), OK);
    let id = driver.get(FREE, 20);
    assert!(id.starts_with(b"ebb-") && id.iter().all(u8::is_ascii_graphic));
    assert_eq!(driver.request(GET_ID, 0, &[], &[(FREE + 64, 8)]), OK);
    assert_eq!(driver.get(FREE + 64, 9), [&id[..8], &[0]].concat());
}

#[test]
fn a_readonly_disk_is_not_written() {
    let (_file, image) = image(IMAGE_BYTES, true, true);
    let mut driver = Driver::new(image, Arc::new(Nobody), true);
    assert_eq!(driver.write(0, &[(FREE, 512)]), IOERR);
    assert_eq!(driver.range(WRITE_ZEROES, 0, 8, 0), IOERR);
    assert_eq!(driver.range(DISCARD, 0, 8, 0), IOERR);
    assert_eq!(driver.read(0, &[(FREE, 512)]), OK);
    assert_eq!(driver.request(FLUSH, 0, &[], &[]), OK);
}

#[test]
fn a_shrunk_image_fails_and_stays_short() {
    let (file, mut driver) = plain();
    file.as_file().set_len(8192).unwrap();
    for sector in [16, 15, SECTORS - 8] {
        assert_eq!(driver.write(sector, &[(FREE, 4096)]), IOERR);
        assert_eq!(driver.read(sector, &[(FREE, 4096)]), IOERR);
        assert_eq!(driver.range(WRITE_ZEROES, sector, 8, 0), IOERR);
    }
    assert_eq!(driver.write(8, &[(FREE, 4096)]), OK);
    assert_eq!(file.as_file().metadata().unwrap().len(), 8192);
}

#[test]
fn the_cache_can_be_turned_off() {
    let (file, mut driver) = plain();
    assert!(driver.solo.set_config(32, &[0]));
    driver.put(FREE, &[4; 4096]);
    assert_eq!(driver.write(0, &[(FREE, 4096)]), OK);
    assert_eq!(driver.range(WRITE_ZEROES, 1, 1, 0), OK);
    assert_eq!(content(&file, 0, 1024), [[4; 512], [0; 512]].concat());
}

#[test]
fn requests_end_in_the_order_in_which_they_came() {
    let (_file, mut driver) = plain();
    let mut heads = Vec::new();
    for round in 0..20u64 {
        // Long ones before short ones, and some that fail at once.
        let bytes = if round % 3 == 0 { 0x4_0000 } else { 4096 };
        let sector = if round % 5 == 4 { SECTORS } else { round * 8 };
        heads.push(driver.prepare(IN, sector, &[], &[(FREE, bytes)]));
        driver.prepare(OUT, round * 64, &[(FREE + 0x10_0000, 4096)], &[]);
    }
    driver.serve();
    let order: Vec<u32> = (0..40).map(|slot| driver.used_at(slot).0).collect();
    assert!(order.windows(2).all(|pair| pair[0] < pair[1]), "{order:?}");
}

/// A driver tells of a request only if the device asks for that by the event index behind the used
/// ring (virtio 1.2, section 2.7.10). Without that, a queue that is not served any more would never
/// hear of the next request.
#[test]
fn a_queue_asks_to_hear_of_the_next_request() {
    let (_file, mut driver) = plain();
    let event = RINGS.used + 4 + 8 * u64::from(RINGS.size);
    for count in 1..6 {
        for _ in 0..count {
            driver.prepare(IN, 0, &[], &[(FREE, 4096)]);
        }
        driver.serve();
        assert_eq!(driver.get(event, 2), driver.next.to_le_bytes());
    }
}

#[test]
fn memory_that_the_device_may_not_use_fails_the_request() {
    for observer in [true, false] {
        let (_file, image) = image(IMAGE_BYTES, false, true);
        let mut driver = match observer {
            true => Driver::new(image, Arc::new(Watcher::default()), true),
            false => Driver::new(image, Arc::new(Nobody), true),
        };
        *driver.gate.closed_from.lock().unwrap() = Some(FREE + 0x4000);
        assert_eq!(driver.read(0, &[(FREE, 4096), (FREE + 0x4000, 4096)]), IOERR);
        assert_eq!(driver.write(0, &[(FREE + 0x3000, 8192)]), IOERR);
        assert_eq!(driver.read(0, &[(FREE + 0x3000, 4096)]), OK);
        let counts = driver.counts();
        assert_eq!((counts.failed, counts.dma_faults), (2, 2));
    }
}

#[test]
fn the_observer_sees_what_moves() {
    let (_file, image) = image(IMAGE_BYTES, false, true);
    let watcher = Arc::new(Watcher::default());
    let mut driver = Driver::new(image, watcher.clone(), true);
    driver.put(FREE, &[1; 4096]);
    driver.put(FREE + 0x2000, &[2; 4096]);
    assert_eq!(driver.write(16, &[(FREE, 4096), (FREE + 0x2000, 4096)]), OK);
    // In the middle of a frame or a block: no frame equals a block.
    assert_eq!(driver.write(1, &[(FREE, 512)]), OK);
    assert_eq!(driver.write(32, &[(FREE + 512, 4096)]), OK);
    assert_eq!(driver.read(24, &[(FREE + 0x8000, 4096)]), OK);
    assert_eq!(driver.range(DISCARD, 80, 8, 0), OK);
    assert_eq!(driver.range(WRITE_ZEROES, 71, 2, 0), OK);
    let first = FREE / 4096;
    let expected = [
        (2, Gfn(first), Direction::Write, Box::new([1; 4096])),
        (3, Gfn(first + 2), Direction::Write, Box::new([2; 4096])),
        (3, Gfn(first + 8), Direction::Read, Box::new([2; 4096])),
    ];
    assert!(*watcher.moved.lock().unwrap() == expected);
    assert_eq!(*watcher.overwritten.lock().unwrap(), [2..4, 0..1, 4..5, 10..11, 8..10]);
}

#[test]
fn an_observer_that_cannot_save_stops_the_write() {
    let (file, image) = image(IMAGE_BYTES, false, true);
    let watcher = Arc::new(Watcher::default());
    let mut driver = Driver::new(image, watcher.clone(), true);
    *watcher.refuses.lock().unwrap() = true;
    driver.put(FREE, &[1; 4096]);
    assert_eq!(driver.write(0, &[(FREE, 4096)]), IOERR);
    assert_eq!(driver.range(DISCARD, 0, 8, 0), IOERR);
    assert_eq!(driver.range(WRITE_ZEROES, 0, 8, 0), IOERR);
    assert_eq!(content(&file, 0, 4096), [0; 4096]);
    assert!(watcher.moved.lock().unwrap().is_empty());
}
