//! What a single thread may rely on, of both implementations.

use ebb_llfree::{Error, Fill, Kind};
use llfree_tests::{Allocator, Region};

/// Each test is one function over an allocator. Here it runs over both, with slots that all cores
/// share and with slots of their own.
macro_rules! for_both {
    ($($name:ident($frames:expr);)*) => {
        mod rust {
            use super::*;
            $(#[test]
            fn $name() {
                for cores in [1, 2] {
                    let region = Region::new($frames, cores).unwrap();
                    super::$name(&region.zone(()));
                }
            })*
        }
        mod c {
            use super::*;
            $(#[test]
            fn $name() {
                for cores in [1, 2] {
                    let region = Region::new($frames, cores).unwrap();
                    super::$name(&region.c_zone(()));
                }
            })*
        }
    };
}

for_both! {
    all_frames_come_once_and_come_back(10_000);
    all_huge_frames_come_once_and_come_back(20_000);
    impossible_frames_and_orders_are_refused(FRAMES);
    a_huge_frame_is_freed_in_parts(FRAMES);
    parts_are_freed_as_a_huge_frame(FRAMES);
    kinds_keep_to_trees_of_their_own(64 * 4096);
    small_blocks_leave_free_areas_whole(64 * 4096);
    the_fullest_area_is_filled_first(64 * 4096);
    a_free_area_is_left_whole_while_another_tree_has_room(64 * 4096);
    greater_blocks_do_not_move_a_slot_with_claims(64 * 4096);
    claims_keep_no_frame_from_others(FRAMES);
}

const FRAMES: u64 = 10_000;

fn all_frames_come_once_and_come_back(zone: &impl Allocator) {
    let mut seen = vec![false; FRAMES as usize];
    for _ in 0..FRAMES {
        let frame = zone.get(0, Kind::Movable, 0).unwrap();
        assert!(!std::mem::replace(&mut seen[frame as usize], true), "{frame} twice");
    }
    assert_eq!(zone.get(0, Kind::Movable, 0), Err(Error::Memory));
    assert_eq!(zone.verify().unwrap(), 0);
    for frame in 0..FRAMES {
        zone.put(frame, 0).unwrap();
        assert_eq!(zone.put(frame, 0), Err(Error::NotAllocated));
    }
    assert_eq!(zone.verify().unwrap(), FRAMES);
}

fn all_huge_frames_come_once_and_come_back(zone: &impl Allocator) {
    let mut got = Vec::new();
    while let Ok(frame) = zone.get(9, Kind::Movable, 0) {
        got.push(frame);
    }
    got.sort_unstable();
    assert_eq!(got, (0..39).map(|huge| huge * 512).collect::<Vec<_>>());
    for frame in got {
        zone.put(frame, 9).unwrap();
        assert_eq!(zone.put(frame, 9), Err(Error::NotAllocated));
    }
    assert_eq!(zone.verify().unwrap(), 20_000);
}

fn impossible_frames_and_orders_are_refused(zone: &impl Allocator) {
    for order in [11, 64, 255] {
        assert_eq!(zone.get(order, Kind::Movable, 0), Err(Error::Order));
        assert_eq!(zone.put(0, order), Err(Error::Order));
        assert_eq!(zone.get_at(0, order), Err(Error::Order));
        assert!(!zone.is_free(0, order));
    }
    for (frame, order) in [(FRAMES, 0), (1, 1), (512, 10), (9728, 9), (u64::MAX, 0), (1 << 63, 10)]
    {
        assert_eq!(zone.put(frame, order), Err(Error::Frame));
        assert_eq!(zone.get_at(frame, order), Err(Error::Frame));
        assert!(!zone.is_free(frame, order));
    }
    assert!(zone.get(0, Kind::Movable, u32::MAX).is_ok());
}

fn a_huge_frame_is_freed_in_parts(zone: &impl Allocator) {
    for order in 0..9u8 {
        let huge = zone.get(9, Kind::Movable, 0).unwrap();
        assert_eq!(zone.get_at(huge, order), Err(Error::Taken));
        for part in (0..512).step_by(1 << order) {
            zone.put(huge + part, order).unwrap();
            assert_eq!(zone.put(huge + part, order), Err(Error::NotAllocated));
            assert_eq!(zone.put(huge, 9), Err(Error::NotAllocated));
        }
        assert_eq!(zone.verify().unwrap(), FRAMES);
        zone.get_at(huge, 9).unwrap();
        zone.put(huge, 9).unwrap();
    }
}

fn parts_are_freed_as_a_huge_frame(zone: &impl Allocator) {
    (0..1024).for_each(|frame| zone.get_at(frame, 0).unwrap());
    zone.put(512, 9).unwrap();
    zone.get_at(512, 9).unwrap();
    zone.put(0, 10).unwrap();
    assert_eq!(zone.put(0, 10), Err(Error::NotAllocated));
    assert_eq!(zone.verify().unwrap(), FRAMES);
}

fn kinds_keep_to_trees_of_their_own(zone: &impl Allocator) {
    let mut owners = std::collections::BTreeMap::new();
    for round in 0..20_000 {
        let (kind, order) = match round % 50 {
            0 => (2, 9),
            other => (other % 2, 0),
        };
        let movable = if kind == 0 { Kind::Unmovable } else { Kind::Movable };
        let frame = zone.get(order, movable, 0).unwrap();
        assert_eq!(*owners.entry(frame / 4096).or_insert(kind), kind, "tree {}", frame / 4096);
    }
    assert!(owners.len() > 40);
}

/// Half of all frames come back at random: what is got next fills the gaps.
fn small_blocks_leave_free_areas_whole(zone: &impl Allocator) {
    let mut frames: Vec<u64> =
        (0..64 * 4096 / 4).map(|_| zone.get(0, Kind::Movable, 0).unwrap()).collect();
    let put: Vec<u64> = frames.iter().copied().filter(|frame| frame % 3 == 0).collect();
    frames.retain(|frame| frame % 3 != 0);
    put.iter().for_each(|&frame| zone.put(frame, 0).unwrap());
    zone.drain();
    let before = zone.free_areas();
    assert!(put.iter().all(|_| zone.get(0, Kind::Movable, 0).is_ok()));
    zone.drain();
    assert_eq!(zone.free_areas(), before);
}

/// The area of each of the next frames.
fn areas(zone: &impl Allocator, count: usize) -> Vec<u64> {
    (0..count).map(|_| zone.get(0, Kind::Movable, 0).unwrap() / 512).collect()
}

fn the_fullest_area_is_filled_first(zone: &impl Allocator) {
    assert!(areas(zone, 4096).iter().all(|&area| area < 8));
    let put = |area: u64, count: u64| {
        (area * 512..area * 512 + count).for_each(|frame| zone.put(frame, 0).unwrap());
    };
    [(2, 200), (3, 512), (5, 30), (6, 100)].into_iter().for_each(|(area, count)| put(area, count));
    zone.drain();
    for (area, count) in [(5, 30), (6, 100), (2, 200), (3, 512), (8, 1)] {
        assert_eq!(areas(zone, count), vec![area; count]);
    }
}

fn a_free_area_is_left_whole_while_another_tree_has_room(zone: &impl Allocator) {
    areas(zone, 2 * 4096);
    // The slot is in the second tree, in which an area becomes free as a whole.
    zone.put(8 * 512, 9).unwrap();
    (0..100).for_each(|frame| zone.put(frame, 0).unwrap());
    assert_eq!(areas(zone, 100), [0; 100]);
    assert_eq!(areas(zone, 512), [8; 512]);
    // Nothing is free in these two trees.
    assert_eq!(areas(zone, 1), [16]);
}

fn greater_blocks_do_not_move_a_slot_with_claims(zone: &impl Allocator) {
    assert_eq!(areas(zone, 1), [0]);
    (1..8).for_each(|area| zone.get_at(area * 512, 9).unwrap());
    let greater = [(); 4].map(|()| zone.get(8, Kind::Movable, 0).unwrap() / 256);
    // There is one in the slot's area. The others are together.
    assert_eq!(greater, [1, 16, 17, 18]);
    assert_eq!(areas(zone, 1), [0]);
}

fn claims_keep_no_frame_from_others(zone: &impl Allocator) {
    let frame = zone.get(0, Kind::Movable, 0).unwrap();
    zone.put(frame, 0).unwrap();
    // A slot has claims on the area now.
    assert!(zone.free_areas() < 19);
    zone.get_at(frame & !511, 9).unwrap();
    zone.put(frame & !511, 9).unwrap();
    let frame = zone.get(0, Kind::Unmovable, 1).unwrap();
    zone.put(frame, 0).unwrap();
    let huge = (0..19).filter(|_| zone.get(9, Kind::Movable, 0).is_ok()).count();
    assert_eq!(huge, 19);
    let rest = (0..).take_while(|_| zone.get(0, Kind::Movable, 0).is_ok()).count();
    assert_eq!(rest as u64, FRAMES - 19 * 512);
    zone.drain();
    assert_eq!(zone.verify().unwrap(), 0);
}

/// With slots of their own, cores take frames of trees that lie apart.
#[test]
fn cores_share_an_area_or_nothing() {
    for (cores, trees) in [(1, [0; 4]), (4, [0, 16, 32, 48])] {
        let region = Region::new(64 * 4096, cores).unwrap();
        for zone in [&region.zone(()) as &dyn Allocator, &region.c_zone(())] {
            let got = [0, 1, 2, 3].map(|core| zone.get(0, Kind::Movable, core).unwrap());
            assert_eq!(got.map(|frame| frame / 4096), trees);
            assert_eq!(got.map(|frame| frame % 4096 / 512), [0; 4]);
        }
    }
}

/// As a kernel does it: all is allocated, and what exists is put.
#[test]
fn a_zone_may_begin_allocated() {
    for c in [false, true] {
        let region = Region::new(FRAMES, 2).unwrap();
        let (rust, other) = (region.zone(()), region.c_zone(()));
        if c {
            other.format(Fill::Allocated)
        } else {
            rust.format(Fill::Allocated)
        };
        for zone in [&rust as &dyn Allocator, &other] {
            assert_eq!(zone.verify(), Ok(0));
            assert_eq!(zone.get(0, Kind::Movable, 0), Err(Error::Memory));
        }
        // A hole of three frames, and blocks as great as can be.
        (0..4).for_each(|pair| rust.put(pair * 1024, 10).unwrap());
        (4099..4608).for_each(|frame| other.put(frame, 0).unwrap());
        (9..19).for_each(|area| rust.put(area * 512, 9).unwrap());
        (9728..FRAMES).for_each(|frame| other.put(frame, 0).unwrap());
        assert_eq!(other.put(4096, 9), Err(Error::NotAllocated));
        assert_eq!(Allocator::verify(&rust), Ok(FRAMES - 3));
        assert_eq!(other.verify(), Ok(FRAMES - 3));
    }
}
