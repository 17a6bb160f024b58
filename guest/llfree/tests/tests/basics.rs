//! What a single thread may rely on, of both implementations.

use ebb_llfree::{Error, Kind};
use llfree_tests::{Allocator, Region};

/// Each test is one function over an allocator; here it runs over both.
macro_rules! for_both {
    ($($name:ident($frames:expr);)*) => {
        mod rust {
            use super::*;
            $(#[test]
            fn $name() {
                let region = Region::new($frames, 2).unwrap();
                super::$name(&region.zone(()));
            })*
        }
        mod c {
            use super::*;
            $(#[test]
            fn $name() {
                let region = Region::new($frames, 2).unwrap();
                super::$name(&region.c_zone(()));
            })*
        }
    };
}

for_both! {
    all_frames_come_once_and_come_back(10_000);
    all_huge_frames_come_once_and_come_back(20_000);
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
