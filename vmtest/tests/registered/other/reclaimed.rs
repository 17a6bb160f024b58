//! Ebb reclaims memory from a system that it knows by its registration only.

use ebb_api::{Mechanism, ReclaimReport};
use vmtest::until;

use super::registration::Registration;
use super::system::{Other, field};
use super::{LARGE, SMALL, assert_right};

/// Memory that is reclaimed at least from a system that uses little: of 512 MiB, Ebb leaves 64, and
/// the system's own metadata and few blocks take some.
const LEAST_BYTES: u64 = 256 << 20;

/// The word of a record that names the frame behind those of its first range (`docs/vprobe.md`).
const FRAMES_END: usize = 28;

/// Reclaims as soon as the registration is known.
fn wait_reclaim(other: &Other) -> u64 {
    let ran = until("a registration that Ebb knows", || {
        let ran = other.vm.ebb("reclaim --json");
        (ran.code == Some(0)).then_some(ran)
    });
    serde_json::from_str::<ReclaimReport>(&ran.ok()).expect("a report").bytes
}

/// Has the system take and give blocks at random, while Ebb reclaims what is free.
fn works_meanwhile(other: &mut Other) {
    const LINE: &str = "loop 4";
    other.begin(LINE);
    for _ in 0..10 {
        other.vm.ebb("reclaim").ok();
    }
    let lines = other.end(LINE);
    assert_eq!(field(lines.last().expect("an answer"), "wrong"), 0, "{lines:?}");
}

/// Reclaims what is free, and loses nothing of what is not.
fn gives_memory(other: &mut Other) {
    // In release mode only memory that was used can be reclaimed.
    let taken = other.number("take 1000", "blocks");
    other.ask(&format!("give {taken}"));
    assert_right(other, "take 20");
    let bytes = wait_reclaim(other);
    assert!(bytes >= LEAST_BYTES, "{bytes}");
    assert_eq!(other.ask("answer").last().expect("an answer"), "ok acknowledged");
    let status = other.vm.status();
    assert!(status.guest.trusted && status.guest.registered, "{:?}", status.guest);
    assert_eq!(status.mechanism, Mechanism::VProbe, "{}", status.mechanism_reason);
    assert_right(other, "check");
    // Takes memory that was reclaimed.
    assert_right(other, "take 40");
    assert_right(other, "check");
    other.ask("give 60");
    works_meanwhile(other);
    other.ask("tidy");
}

#[test]
fn ebb_starts_it_and_reclaims() {
    let mut other = Other::run(LARGE);
    gives_memory(&mut other);
    assert_right(&mut other, "take 30");
    other.vm.ebb("evict --bytes 20M").ok();
    assert_right(&mut other, "check");
    other.ask("quit");
    other.vm.wait_end();
}

#[test]
fn in_strict_mode_memory_is_back_before_it_is_used() {
    let mut other = Other::start(SMALL);
    other.vm.attach("--mode strict");
    gives_memory(&mut other);
    let status = other.vm.status();
    assert!(status.faults.metadata > 0, "{:?}", status.faults);
    assert_eq!(status.faults.early, 0, "no frame was used before its metadata was written");
    other.vm.ebb("detach").ok();
    assert_right(&mut other, "check");
}

#[test]
fn the_status_says_why_a_hostile_record_is_refused() {
    const WHY: &str = "not trusted: its registration is refused: range 0 of the metadata has \
                       another size than the metadata of the frames that it describes";
    let mut other = Other::start(SMALL);
    let ram = other.vm.ram();
    // The kernel proves this record as its own.
    Registration::find(&ram).forge(&ram, |words| words[FRAMES_END] += 1);
    other.vm.attach("--mode strict");
    until("a refusal in the status", || other.vm.ebb("status").ok().contains(WHY).then_some(()));
    assert!(other.vm.ebb("reclaim").refused().contains("not trusted"));
    assert_eq!(other.vm.status().emptied_bytes, 0);
    other.ask("withdraw");
    other.ask("register");
    assert!(wait_reclaim(&other) >= LEAST_BYTES);
    assert_right(&mut other, "take 20");
}

#[test]
fn what_is_withdrawn_is_believed_no_more() {
    let mut other = Other::start(SMALL);
    other.vm.attach("--mode strict");
    assert!(wait_reclaim(&other) >= LEAST_BYTES);
    other.ask("withdraw");
    let why = until("a refusal", || {
        let ran = other.vm.ebb("reclaim");
        (ran.code != Some(0)).then(|| ran.refused())
    });
    assert!(why.contains("was withdrawn by its kernel"), "{why}");
    let status = other.vm.status();
    assert_eq!(status.emptied_bytes, 0, "all is back, because nobody tells any more what is free");
    other.ask("register");
    assert!(wait_reclaim(&other) >= LEAST_BYTES);
    works_meanwhile(&mut other);
}

#[test]
fn a_reset_ends_a_registration() {
    let mut other = Other::start(LARGE);
    other.vm.attach("--mode strict");
    assert!(wait_reclaim(&other) >= LEAST_BYTES);
    other.reset();
    assert_right(&mut other, "take 30");
    assert!(wait_reclaim(&other) > 0);
    assert_right(&mut other, "check");
    works_meanwhile(&mut other);
}

#[test]
fn the_next_process_asks_for_a_new_proof() {
    let mut other = Other::start(SMALL);
    other.vm.attach("--mode strict");
    assert_right(&mut other, "take 20");
    wait_reclaim(&other);
    let registration = Registration::find(&other.vm.ram());
    let away = other.vm.status().emptied_bytes;
    // It cannot prove anything while it stands still.
    other.vm.stopped(|| {
        other.vm.host.kill_servers();
        until("a question for the proof", || {
            let ran = other.vm.ebb("reclaim");
            assert_ne!(ran.code, Some(0), "{ran:?}");
            (!registration.is_acknowledged(&other.vm.ram())).then_some(())
        });
        let why = other.vm.ebb("reclaim").refused();
        assert!(why.contains("has not proved its registration again"), "{why}");
        assert_eq!(other.vm.status().emptied_bytes, away, "nothing is lost, nothing comes back");
    });
    assert_right(&mut other, "check");
    other.ask("give 20");
    wait_reclaim(&other);
    works_meanwhile(&mut other);
    assert!(other.vm.status().guest.registered);
}

#[test]
fn who_attaches_it_again_asks_for_a_new_proof() {
    let mut other = Other::start(SMALL);
    other.vm.attach("");
    wait_reclaim(&other);
    other.vm.ebb("detach").ok();
    assert_eq!(other.ask("answer").last().expect("an answer"), "ok acknowledged");
    other.vm.attach("");
    wait_reclaim(&other);
    works_meanwhile(&mut other);
}
