//! A device process dies before, after and between all its steps, and another one takes its place.
//! The driver waits for its answer, and the next process finds the same request in the queue.

mod driver;

use std::collections::BTreeSet;

use driver::*;
use ebb_virtio_mem::*;

/// More steps than any request takes.
const STEPS: i64 = 100;

fn before() -> Driver {
    let mut driver = Driver::with(40);
    for (first, count) in [(0, 4), (10, 6), (30, 1)] {
        assert_eq!(driver.ask(plug(first, count)), Response::Ack);
    }
    driver.request_blocks(20);
    driver
}

/// Returns the blocks that the guest uses while it waits for this request's answer.
fn in_use(driver: &Driver, request: Request) -> BTreeSet<u64> {
    let mut blocks = driver.believed.clone();
    match request {
        Request::Unplug(given) => range(given).for_each(|block| {
            blocks.remove(&block);
        }),
        Request::UnplugAll => blocks.clear(),
        _ => {}
    }
    blocks
}

/// Dies at each step in turn. Returns how many steps there were.
fn die_everywhere(request: Request) -> i64 {
    for steps in 0..STEPS {
        let mut driver = before();
        if driver.ask_and_die(request, steps).is_some() {
            return steps;
        }
        let in_use = in_use(&driver, request);
        driver.check_content(&in_use);
        // Every byte of a plugged block has memory here.
        let [memory, recorded] = [driver.host.bytes(), driver.host.recorded_bytes()];
        assert!(memory >= recorded, "{steps}: {memory} bytes, {recorded} on record");
        assert!(recorded >= in_use.len() as u64 * BLOCK, "in use, and not on record");
        driver.restart();
        driver.check_content(&in_use);
        let [_, plugged, _] = driver.blocks();
        let bytes = driver.host.bytes();
        assert!(bytes <= plugged * BLOCK, "{steps}: {bytes} bytes for {plugged} blocks");
        assert_eq!(driver.ask(request), Response::Ack, "{request:?}, died at step {steps}");
        driver.check();
        // The change was acknowledged once. A second request is an error, as the driver knows now.
        if !matches!(request, Request::UnplugAll) {
            assert_eq!(driver.ask(request), Response::Error);
        }
    }
    panic!("{request:?} has no end");
}

#[test]
fn no_block_is_lost_by_a_death() {
    assert!(die_everywhere(plug(4, 6)) >= 4);
    assert!(die_everywhere(unplug(10, 6)) >= 5);
    assert!(die_everywhere(UNPLUG_ALL) >= 11);
}

/// A request fails, and the process dies while the request is undone.
#[test]
fn no_block_is_lost_by_a_death_on_the_way_back() {
    for steps in 0..STEPS {
        let mut driver = before();
        driver.host.unplug_fails.set(2);
        let answer = driver.ask_and_die(UNPLUG_ALL, steps);
        driver.host.unplug_fails.set(-1);
        driver.restart();
        if let Some(answer) = answer {
            assert_eq!((answer, steps > 8), (Response::Busy, true));
            assert_eq!(driver.blocks(), [50, 11, 20]);
            return;
        }
        assert_eq!(driver.ask(UNPLUG_ALL), Response::Ack, "died at step {steps}");
        driver.check();
    }
    panic!("it has no end");
}

/// The start itself dies, again and again.
#[test]
fn a_start_may_die_too() {
    let mut driver = before();
    assert_eq!(driver.ask_and_die(unplug(10, 6), 2), None);
    for steps in 0..STEPS {
        driver.host.dies.set(steps);
        let again = std::panic::catch_unwind(|| start(&driver.host).map(|_| ()));
        driver.host.dies.set(-1);
        if let Ok(result) = again {
            result.unwrap();
            driver.restart();
            assert_eq!(driver.ask(unplug(10, 6)), Response::Ack);
            return driver.check();
        }
    }
    panic!("it never starts");
}

/// A sensible driver does not repeat a request that was answered before the death.
#[test]
fn another_request_than_the_last_is_a_new_one() {
    let mut driver = before();
    driver.restart();
    assert_eq!(driver.ask(state(30, 1)), Response::AckState(BlockState::Plugged));
    assert_eq!(driver.ask(plug(30, 1)), Response::Error);
    driver.restart();
    assert_eq!(driver.ask(plug(10, 6)), Response::Error);
    driver.check();
}
