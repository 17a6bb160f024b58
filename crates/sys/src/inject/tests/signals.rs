//! Tests of signals to a process in which a call is made.

use rustix::process::Pid;

use super::*;

/// The place of [`may_die_here`] after which a thread is seized.
const SEIZED: u64 = 1;

fn goes_on(helper: Child) -> Output {
    kill_process(Pid::from_child(&helper), Signal::CONT).unwrap();
    helper.wait_with_output().unwrap()
}

#[test]
fn a_signal_that_comes_meanwhile_is_not_lost() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("read");
    let pid = Pid::from_child(&victim.child);
    for place in [SEIZED, INTO_A_CALL] {
        let helper = paused_at(helper_for(format!("close {} 9999", victim.pid())), place);
        victim.drain();
        kill_process(pid, Signal::USR1).unwrap();
        // The victim stops on delivery of the signal, or is stopped already.
        wait_until(&format!("/proc/{}/status", victim.pid()), |text| is_in_state(text, "t"));
        assert!(said(&goes_on(helper)).contains("code: 9,"));
        let mut said = [0; 100];
        victim.rounds.read_exact(&mut said).unwrap();
        assert!(said.contains(&b'!'), "the signal is lost");
    }
    victim.ends_well();
}

#[test]
fn a_stopped_process_stays_stopped() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let status = format!("/proc/{}/status", victim.pid());
    let pid = Pid::from_child(&victim.child);
    kill_process(pid, Signal::STOP).unwrap();
    wait_until(&status, |status| is_in_state(status, "T"));
    let output = helper_for(format!("close {} 9999", victim.pid())).output().unwrap();
    assert!(said(&output).contains("code: 9,"), "{output:?}");
    wait_until(&status, |status| is_in_state(status, "T"));
    kill_process(pid, Signal::CONT).unwrap();
    victim.ends_well();
}
