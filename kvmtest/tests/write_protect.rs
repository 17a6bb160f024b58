//! A guest that writes watched metadata waits until its block is back, and loses no write.

use ebb_pager::{Grain, Restored};
use ebb_units::{FrameRange, Gfn, Gpa};
use kvmtest::{Daemon, Machine, Program, Registers, Running, until};
use testkit::require;

const RAM_BYTES: u64 = 16 << 20;
/// The metadata frame that the guest writes all the time.
const METADATA: Gfn = Gfn(0x200);
/// The blocks that are reclaimed meanwhile.
const LARGE: Restored = Restored { head: Gfn(0x400), order: 9 };
const SMALL: Restored = Restored { head: Gfn(0x400), order: 0 };

fn frames(block: Restored) -> FrameRange {
    FrameRange::block(block.head, block.order)
}

fn word(writer: u64) -> Gpa {
    Gpa(METADATA.gpa().0 + writer * 8)
}

fn start(machine: &Machine, writer: u64) -> Running {
    machine.start(Program::Writer, Registers { rdi: word(writer).0, ..Registers::default() })
}

/// Empties a block, while the guest writes its metadata all the time.
fn take(daemon: &Daemon, block: Restored) {
    let claim = daemon.pager.blocks().claim(METADATA, block.head, block.order).unwrap();
    let claim = claim.and_then(|claim| claim.commit(true, 0));
    daemon.pager.blocks().empty(&mut claim.into_iter().collect(), true).unwrap();
}

#[test]
fn a_writer_waits_for_its_block() {
    require!(kvmtest::available());
    let machine = Machine::new(RAM_BYTES);
    let mut daemon = Daemon::take(&machine, Grain::Frame);
    daemon.pager.frames().watch_all_writes().unwrap();
    let writer = start(&machine, 0);
    until("the first write", || (machine.get(word(0)) > 0).then_some(()));
    machine.ram().populate(frames(LARGE)).unwrap();
    take(&daemon, LARGE);
    until("the writer to wait", || machine.fault_waits().then_some(()));
    let waiting = machine.get(word(0));
    assert!(machine.ram().is_hole(frames(LARGE)).unwrap());

    daemon.serve();
    assert_eq!(daemon.restored.recv().unwrap(), LARGE);
    assert!(!machine.ram().is_hole(frames(LARGE)).unwrap());
    until("the writer to go on", || (machine.get(word(0)) > waiting).then_some(()));
    machine.tell_to_leave(true);
    assert_eq!(writer.leave().r8, machine.get(word(0)));
}

fn loses_no_write(writers: u64) {
    const ROUNDS: u64 = 5000;
    let machine = Machine::new(RAM_BYTES);
    let mut daemon = Daemon::take(&machine, Grain::Frame);
    daemon.pager.frames().watch_all_writes().unwrap();
    daemon.serve();
    let running: Vec<_> = (0..writers).map(|writer| start(&machine, writer)).collect();
    let mut taken = 0;
    for _ in 0..ROUNDS {
        take(&daemon, SMALL);
        taken += until("the block to be back", || {
            let content = daemon.pager.ledger().content(METADATA);
            (content == ebb_ledger::Content::Resident).then(|| daemon.restored.try_iter().count())
        });
    }
    machine.tell_to_leave(true);
    for (writer, running) in (0..).zip(running) {
        assert_eq!(running.leave().r8, machine.get(word(writer)), "of writer {writer}");
    }
    let faults = daemon.pager.counters().metadata.load(std::sync::atomic::Ordering::Relaxed);
    eprintln!("{taken} of {ROUNDS} times taken, {faults} faults");
    assert!(taken as u64 > ROUNDS / 10, "{taken}");
}

#[test]
fn one_writer_loses_no_write() {
    require!(kvmtest::available());
    loses_no_write(1);
}

#[test]
fn two_writers_of_one_page_lose_no_write() {
    require!(kvmtest::available());
    loses_no_write(2);
}
