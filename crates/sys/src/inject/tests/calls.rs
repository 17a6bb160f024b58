//! Tests of a call whose helper dies, or that takes too long.

use std::io::Write;

use super::*;
use crate::inject::victim::HABITS;
use crate::uffd::{Uffd, Watch};

/// Time for a call that never ends, in which a thread also stops on a busy host.
const LONG_ENOUGH_MS: &str = "1000";

#[test]
fn a_helper_that_dies_at_any_step_leaves_the_thread_as_it_was() {
    if !may_trace() {
        return;
    }
    for habit in HABITS {
        let mut victim = Victim::of(habit);
        let mut steps = 0;
        loop {
            let mut command = helper_for(format!("close {} 9999", victim.pid()));
            let output = command.env("EBB_DIE_AT", steps.to_string()).output().unwrap();
            victim.goes_on();
            if output.status.success() {
                assert!(said(&output).contains("code: 9,"), "{output:?}");
                break;
            }
            steps += 1;
        }
        assert!(steps > 15, "{habit}: {steps} steps");
        victim.ends_well();
    }
}

#[test]
fn a_call_that_outlives_its_helper_ends_and_the_thread_goes_on() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("futex");
    kill(helper_in_a_call(&victim));
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    victim.goes_on();
    victim.ends_well();
}

#[test]
fn a_call_that_takes_too_long_is_given_up() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("ppoll");
    let room = victim.shared().start.0;
    let mut helper = helper_for(format!("read {} {room}", victim.pid()));
    let output = helper.env("EBB_TIMEOUT_MS", LONG_ENOUGH_MS).output().unwrap();
    assert!(said(&output).contains("was given up"), "{output:?}");
    victim.goes_on();
    victim.ends_well();
}

#[test]
fn a_call_that_cannot_be_given_up_ends_by_itself() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("nanosleep");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let uffd = Uffd::from(process.descriptor(userfaultfd(&target, Door::Call).unwrap()).unwrap());
    uffd.handshake(0).unwrap();
    let shared = victim.shared();
    let range = HvaRange { start: shared.start, bytes: shared.bytes };
    uffd.register(range, Watch::MissingAndWrite).unwrap();
    // Waits until the sleep that the first stop cut short is over.
    victim.goes_on();
    // Nobody answers the fault.
    let words = format!("populate {} {} {}", victim.pid(), range.start.0, range.bytes);
    let output = helper_for(words).env("EBB_TIMEOUT_MS", LONG_ENOUGH_MS).output().unwrap();
    assert!(said(&output).contains("ends it by itself"), "{output:?}");
    uffd.zero(range, true).unwrap();
    victim.goes_on();
    victim.ends_well();
}
