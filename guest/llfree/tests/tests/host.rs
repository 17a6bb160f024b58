//! What the host's side does with a guest that keeps the rules, and with one
//! that does not.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use ebb_llfree::layout::{HEADER_WORDS, MAGIC, MAX_FRAMES};
use ebb_llfree::{CHUNK_AREAS, Error, Header, Host, HostError, Kind, Layout, LayoutError};
use llfree_tests::{Allocator, Region, c_layout, c_write_header, offsets};
use proptest::prelude::*;

const AREAS: usize = 24;
const FRAMES: u64 = AREAS as u64 * 512;

#[test]
fn hard_reclaimed_areas_are_neither_got_nor_put() {
    let region = Region::new(FRAMES, 1).unwrap();
    for zone in [&region.zone(()) as &dyn Allocator, &region.c_zone(())] {
        let host = region.host();
        (0..AREAS).for_each(|area| host.hard_reclaim(area).unwrap());
        assert_eq!(host.hard_reclaim(3), Err(HostError::InUse));
        for order in 0..=10 {
            assert_eq!(zone.get(order, Kind::Movable, 0), Err(Error::Memory));
            assert_eq!(zone.get_at(0, order), Err(Error::Taken));
            assert_eq!(zone.put(0, order), Err(Error::NotAllocated));
            assert!(!zone.is_free(0, order));
        }
        assert_eq!(zone.verify(), Ok(0));
        (0..AREAS).for_each(|area| host.return_area(area).unwrap());
        assert_eq!(host.return_area(0), Err(HostError::NotTaken));
        assert_eq!(zone.verify(), Ok(FRAMES));
        (0..AREAS).for_each(|area| host.install(area));
        assert_eq!(zone.verify(), Ok(FRAMES));
    }
}

#[test]
fn areas_without_memory_come_last() {
    let region = Region::new(FRAMES, 1).unwrap();
    for zone in [&region.zone(()) as &dyn Allocator, &region.c_zone(())] {
        let host = region.host();
        // Whole trees, and parts of one.
        let evicted = |area: &usize| *area < 8 || area.is_multiple_of(3);
        (0..AREAS).filter(evicted).for_each(|area| host.soft_reclaim(area).unwrap());
        for order in [0, 5, 8, 9] {
            let mut got = Vec::new();
            while let Ok(frame) = zone.get(order, Kind::Movable, 0) {
                got.push(frame);
            }
            let area = |frame: &u64| (frame / 512) as usize;
            let first = got.iter().position(|frame| evicted(&area(frame))).unwrap();
            assert!(got[first..].iter().all(|frame| evicted(&area(frame))), "order {order}");
            assert_eq!(got.len() as u64, FRAMES >> order);
            got.into_iter().for_each(|frame| zone.put(frame, order).unwrap());
            zone.drain();
            assert_eq!(zone.verify(), Ok(FRAMES));
        }
        (0..AREAS).for_each(|area| host.install(area));
    }
}

#[test]
fn areas_without_memory_come_before_trees_of_another_kind() {
    for is_c in [false, true] {
        let region = Region::new(FRAMES, 1).unwrap();
        let (rust, c, host) = (region.zone(()), region.c_zone(()), region.host());
        let zone: &dyn Allocator = if is_c { &c } else { &rust };
        let tree = |kind| zone.get(0, kind, 0).unwrap() / 4096;
        let movable = tree(Kind::Movable);
        assert_ne!(tree(Kind::Unmovable), movable);
        zone.drain();
        let soft = (0..AREAS).filter(|&area| host.soft_reclaim(area).is_ok()).count();
        assert_eq!(soft, AREAS - 2);
        // What is left of its own tree, and the free one.
        assert!((1..2 * 4096).all(|_| tree(Kind::Unmovable) != movable));
        assert_eq!(tree(Kind::Unmovable), movable);
    }
}

#[test]
fn a_frame_of_an_area_without_memory_is_touched_before_it_is_handed_out() {
    let region = Region::new(2 * 512, 1).unwrap();
    let touched = std::sync::Mutex::new(Vec::new());
    let touch = |frame| touched.lock().unwrap().push(frame);
    for zone in [&region.zone(touch) as &dyn Allocator, &region.c_zone(touch)] {
        let host = region.host();
        (0..2).for_each(|area| host.soft_reclaim(area).unwrap());
        for order in 0..=10 {
            let frame = zone.get(order, Kind::Unmovable, 0).unwrap();
            let wanted = if order == 10 { vec![0, 512] } else { vec![frame] };
            assert_eq!(std::mem::take(&mut *touched.lock().unwrap()), wanted);
            zone.put(frame, order).unwrap();
            zone.get_at(frame, order).unwrap();
            assert_eq!(std::mem::take(&mut *touched.lock().unwrap()), wanted);
            zone.put(frame, order).unwrap();
            zone.drain();
        }
        (0..2).for_each(|area| host.install(area));
    }
}

#[test]
fn scanning_finds_what_is_free_whole() {
    let region = Region::new(100 * 512 + 100, 1).unwrap();
    let (zone, host) = (region.c_zone(()), region.host());
    assert_eq!(host.areas(), 101);
    assert_eq!([0, 1, 2].map(|chunk| host.free_areas(chunk)), [u64::MAX, (1 << 36) - 1, 0]);
    zone.get_at(63 * 512, 0).unwrap();
    zone.get_at(64 * 512, 9).unwrap();
    assert_eq!(host.free_areas(0), u64::MAX >> 1);
    assert_eq!(host.free_areas(1), ((1 << 36) - 1) & !1);
    assert_eq!(CHUNK_AREAS, 64);
}

/// The same numbers on both sides, and the same refusals.
#[test]
fn layouts_and_headers_are_the_same() {
    for frames in [1, 511, 512, 513, 4096, 100_000, 1 << 20, MAX_FRAMES, 0, MAX_FRAMES + 1] {
        for cores in [1, 2, 64, 4096, 0, 4097] {
            let layout = Layout::new(frames, cores).ok();
            assert_eq!(layout.as_ref().map(offsets), c_layout(frames, cores));
        }
    }
    let gib = Layout::new(1 << 18, 1).unwrap();
    assert_eq!(gib.slots_bytes - gib.bits_bytes, 33 * 1024 + 256);
    let region = Region::new(FRAMES, 3).unwrap();
    let header = Header::read(region.header()).unwrap();
    let zeroed = Header { base_frame: 1 << 20, slots: 64, cores: 7, ..header };
    assert!(c_write_header(&region, &zeroed));
    assert_eq!(Header::read(region.header()), Ok(zeroed));
    for bad in [
        Header { base_frame: 512, ..header },
        Header { base_frame: u64::MAX - 1023, ..header },
        Header { frames: 0, ..header },
        Header { cores: 0, ..header },
        Header { trees: 32, ..header },
    ] {
        assert!(!c_write_header(&region, &bad));
        assert!(bad.write(region.header()).is_err());
    }
}

#[test]
fn a_header_of_something_else_is_refused() {
    let region = Region::new(FRAMES, 1).unwrap();
    let words = region.header();
    assert_eq!(Header::read(&words[1..]), Err(LayoutError::Short));
    words[1].store(2, Relaxed);
    assert_eq!(Header::read(words), Err(LayoutError::Version(2)));
    words[0].store(!MAGIC, Relaxed);
    assert_eq!(Header::read(words), Err(LayoutError::Magic(!MAGIC)));
}

/// Any of the host's calls.
fn call(host: &Host<'_>, which: u8, area: usize) {
    match which % 5 {
        0 => drop(host.hard_reclaim(area)),
        1 => drop(host.return_area(area)),
        2 => drop(host.soft_reclaim(area)),
        3 => host.install(area),
        _ => drop(host.free_areas(area)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_host_believes_nothing(
        areas in prop::collection::vec(any::<u16>(), AREAS),
        trees in prop::collection::vec(any::<u32>(), AREAS / 8),
        calls in prop::collection::vec((any::<u8>(), 0..2 * AREAS), 1..100),
    ) {
        let region = Region::new(FRAMES, 1).unwrap();
        let parts = region.parts();
        parts.areas.iter().zip(&areas).for_each(|(word, &area)| word.store(area, Relaxed));
        parts.trees.iter().zip(&trees).for_each(|(word, &tree)| word.store(tree, Relaxed));
        calls.iter().for_each(|&(which, area)| call(&region.host(), which, area));
    }

    /// The guest's side in Rust is not hardened, but safe: no panic here either.
    #[test]
    fn garbage_does_no_harm_to_a_guest_in_rust(
        words in prop::collection::vec(any::<u64>(), 64),
        calls in prop::collection::vec((0..12u8, any::<u8>(), 0..FRAMES), 1..60),
    ) {
        let region = Region::new(FRAMES, 2).unwrap();
        let layout = region.layout();
        let count = ((layout.total_bytes - layout.bits_bytes) / 8) as usize;
        let state = region.words(layout.bits_bytes, count);
        state.iter().zip(words.iter().cycle()).for_each(|(word, &value)| word.store(value, Relaxed));
        let zone = region.zone(());
        for (order, which, frame) in calls {
            match which % 4 {
                0 => drop(zone.get(order, Kind::Movable, u32::from(which))),
                1 => drop(zone.put(frame, order)),
                2 => drop(zone.get_at(frame, order)),
                _ => zone.drain(),
            }
        }
    }

    #[test]
    fn any_words_are_a_header_or_none(words in prop::collection::vec(any::<u64>(), HEADER_WORDS)) {
        let region = Region::new(FRAMES, 1).unwrap();
        for (word, value) in region.header().iter().zip(words).skip(1) {
            word.store(value, Relaxed);
        }
        let version = region.header()[1].load(Relaxed) & !0xffff_ffff | 1;
        region.header()[1].store(version, Relaxed);
        if let Ok(header) = Header::read(region.header()) {
            assert!(header.frames <= MAX_FRAMES && header.bits.is_multiple_of(64));
        }
    }
}

/// A guest that writes its words all the time, at random.
#[test]
fn a_guest_that_writes_all_the_time_does_not_delay_the_host() {
    let region = Region::new(FRAMES, 1).unwrap();
    let (guest, done) = (region.again().unwrap(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (parts, mut seed) = (guest.parts(), 1u64);
            while !done.load(Relaxed) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let word = if seed >> 63 == 0 { 512 } else { (seed >> 40) as u16 };
                parts.areas[(seed >> 33) as usize % AREAS].store(word, Relaxed);
                parts.trees[(seed >> 33) as usize % (AREAS / 8)]
                    .store((seed >> 20) as u32, Relaxed);
            }
        });
        let host = region.host();
        (0..200_000).for_each(|turn: usize| call(&host, (turn % 251) as u8, turn % (AREAS + 2)));
        done.store(true, Relaxed);
    });
}
