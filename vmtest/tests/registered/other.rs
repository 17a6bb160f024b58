//! A system that is not Linux registers: `guest/other`. The helpers, not the host, know its page
//! metadata.

mod reclaimed;
mod registration;
mod system;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::{Puncher, Ram};
use ebb_vprobe::State;
use vmtest::until;

use self::registration::Registration;
use self::system::{Other, Shape, field};
use crate::reading;

const SMALL: Shape = Shape { frame_bytes: 40, memory_mib: 512, arguments: &[] };
/// Half of its memory lies above 4 GiB, with a range of metadata of its own.
const LARGE: Shape =
    Shape { frame_bytes: 96, memory_mib: 512, arguments: &["-machine", "max-ram-below-4g=256M"] };
/// The bits of DR7 that enable breakpoint 0.
const BREAKPOINT_0: u64 = 0b11;

/// Blocks of each order, as the system itself tells.
fn told_blocks(other: &mut Other) -> Vec<(u64, u64)> {
    let lines = other.ask("free");
    let (last, orders) = lines.split_last().expect("an answer");
    let blocks: Vec<(u64, u64)> =
        orders.iter().map(|line| (field(line, "order"), field(line, "blocks"))).collect();
    let bytes = blocks.iter().map(|(order, count)| (count << order) * FRAME_BYTES).sum::<u64>();
    assert_eq!(bytes, field(last, "bytes"));
    blocks
}

/// Checks that the helpers tell of as many blocks as the system.
fn assert_agrees(other: &mut Other, ram: &Ram, registration: &Registration) {
    let blocks = reading::free_blocks(ram, &registration.record);
    for (order, count) in told_blocks(other) {
        let seen = blocks.values().filter(|found| **found == order).count() as u64;
        assert_eq!(seen, count, "blocks of order {order}");
    }
}

fn assert_right(other: &mut Other, line: &str) {
    assert_eq!(other.number(line, "wrong"), 0, "{line}");
}

fn is_armed(other: &Other, registration: &Registration) -> bool {
    let at = registration.record.virtual_address();
    other.vm.register("DR7") & BREAKPOINT_0 != 0 && other.vm.register("DR0") == at
}

fn wait_armed(other: &Other, registration: &Registration, wanted: bool) {
    until(format_args!("a proof that is up: {wanted}"), || {
        (is_armed(other, registration) == wanted).then_some(())
    });
}

fn registers(shape: Shape, ranges: usize) {
    let mut other = Other::start(shape);
    let ram = other.vm.ram();
    let registration = Registration::find(&ram);
    let record = &registration.record;
    assert_eq!(record.page_size().bytes() as u64, shape.frame_bytes);
    assert_eq!((record.state(), record.ranges().len()), (State::Registered, ranges));
    for line in other.ask("about").iter().filter(|line| line.starts_with("frames ")) {
        let (first, end) = (Gfn(field(line, "frames")), Gfn(field(line, "to")));
        assert!(record.page_at(first).is_some() && record.page_at(end).is_none(), "{line}");
    }
    assert_agrees(&mut other, &ram, &registration);
    assert_right(&mut other, "take 20");
    assert_agrees(&mut other, &ram, &registration);
    assert_right(&mut other, "loop 3");
    assert_right(&mut other, "check");
    assert_agrees(&mut other, &ram, &registration);
    other.ask("tidy");
    other.ask("give 20");
    assert_agrees(&mut other, &ram, &registration);
    other.ask("quit");
    other.vm.wait_end();
}

#[test]
fn its_free_blocks_are_seen() {
    registers(SMALL, 1);
}

#[test]
fn two_ranges_of_larger_metadata_are_read() {
    registers(LARGE, 2);
}

fn proves(shape: Shape) {
    let mut other = Other::start(shape);
    let ram = other.vm.ram();
    let first = Registration::find(&ram);
    assert!(is_armed(&other, &first), "before anybody has acknowledged it");
    first.accept(&ram);
    wait_armed(&other, &first, false);
    let lines = other.ask("answer");
    assert!(lines.contains(&"answer 0x1".into()), "{lines:?}");
    assert_eq!(lines.last().expect("an answer"), "ok acknowledged");
    first.acknowledge(&ram, 0);
    wait_armed(&other, &first, true);
    first.accept(&ram);
    wait_armed(&other, &first, false);
    other.ask("withdraw");
    assert_eq!(first.now(&ram).state(), State::Withdrawn);
    other.ask("register");
    let second = Registration::find(&ram);
    assert_ne!(second.record.token(), first.record.token());
    wait_armed(&other, &second, true);
    other.ask("withdraw");
    assert!(!is_armed(&other, &second), "nothing is to be proved");
    other.reset();
    let third = Registration::find(&ram);
    assert_eq!(third.record.state(), State::Registered);
    assert_ne!(third.record.token(), second.record.token());
    assert!(is_armed(&other, &third), "after a reset");
    assert_agrees(&mut other, &ram, &third);
}

#[test]
fn it_proves_that_it_registered() {
    proves(SMALL);
}

#[test]
fn the_other_one_proves_it_too() {
    proves(LARGE);
}

/// A test of the test: what the system says of its memory can be believed.
#[test]
fn lost_memory_is_noticed() {
    let mut other = Other::start(SMALL);
    let puncher = Puncher::new(other.vm.ram());
    let registration = Registration::find(puncher.ram());
    assert_right(&mut other, "take 40");
    let used = reading::free_blocks(puncher.ram(), &registration.record);
    other.ask("give 40");
    let free = reading::free_blocks(puncher.ram(), &registration.record);
    let mut was_used = free.iter().filter(|(gfn, order)| used.get(gfn) != Some(order));
    let (&first, &order) = was_used.next().expect("blocks that were used");
    puncher.punch(FrameRange::new(first, 1 << order)).expect("a hole");
    let lines = other.ask("take 1000");
    let last = lines.last().expect("an answer");
    assert_eq!((field(last, "wrong"), field(last, "zeroed")), (0, 1 << order), "free memory");
    assert_right(&mut other, "check");
    puncher.punch(FrameRange::new(first, 1)).expect("a hole");
    assert_eq!(other.number("check", "wrong"), FRAME_BYTES / 8, "memory in use");
}
