//! A slot whose tree is used up: threads that share it look for another tree at the same time.
//!
//! The zone has two trees. The first is used up, and the slot has no claims. The second is free.

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::run;
use super::words::Words;
use crate::layout::{AREA_FRAMES, TREE_AREAS, TREE_FRAMES};
use crate::{Fill, Kind, Zone};

/// What a thread does with the zone. Returns the first frame of the block that it got.
type Call = fn(&Zone<'_>) -> Option<u64>;

const GET: Call = |zone| Some(zone.get(0, Kind::Movable, 0).unwrap());
const GET_GREATER: Call = |zone| Some(zone.get(3, Kind::Movable, 0).unwrap());
const DRAIN: Call = |zone| {
    zone.drain();
    None
};

fn used_up() -> Words {
    let words = Words::new(2 * TREE_FRAMES);
    let zone = words.zone(());
    zone.format(Fill::Free);
    assert_eq!(zone.get(0, Kind::Movable, 0), Ok(0));
    // Ends the slot's claims.
    zone.get_at(0, 9).unwrap_err();
    (0..9).for_each(|order| zone.get_at(1 << order, order).unwrap());
    (1..TREE_AREAS as u64).for_each(|area| zone.get_at(area * AREA_FRAMES, 9).unwrap());
    words
}

/// Runs every order of the calls. Whoever comes first, all blocks are in one area.
fn all_at_once(calls: &'static [Call], used_frames: u64) {
    run(1, move || {
        let words = Arc::new(used_up());
        let start = |&call: &Call| {
            let words = words.clone();
            thread::spawn(move || call(&words.zone(())))
        };
        let threads: Vec<_> = calls.iter().map(start).collect();
        let got = threads.into_iter().filter_map(|thread| thread.join().unwrap());
        let mut got: Vec<u64> = got.collect();
        got.sort_unstable();
        assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "{got:?}");
        assert!(got.iter().all(|frame| frame / AREA_FRAMES == TREE_AREAS as u64), "{got:?}");
        words.check_reserved();
        let zone = words.zone(());
        assert_eq!(zone.verify(), Ok(TREE_FRAMES - used_frames));
        zone.drain();
        words.check_reserved();
        assert_eq!(zone.verify(), Ok(TREE_FRAMES - used_frames));
    });
}

#[test]
fn all_go_to_the_same_area() {
    all_at_once(&[GET, GET], 2);
    all_at_once(&[GET, GET_GREATER], 9);
    all_at_once(&[GET_GREATER, GET_GREATER], 16);
}

#[test]
fn the_slot_is_drained_meanwhile() {
    all_at_once(&[GET, DRAIN], 1);
    all_at_once(&[GET_GREATER, DRAIN], 8);
    all_at_once(&[GET, GET, DRAIN], 2);
}
