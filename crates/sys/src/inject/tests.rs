//! Tests of calls injected into a victim that checks itself. The helpers that inject are killed at
//! every possible place, are too slow, or meet a frozen process.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::process::{Pid, Signal, kill_process};

use super::*;
use crate::uffd::{Uffd, Watch};

/// Returns a setting of the helper, from its environment.
fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

pub(super) fn timeout(usual: Duration) -> Duration {
    setting("EBB_TIMEOUT_MS").map_or(usual, Duration::from_millis)
}

/// Kills or stops a helper if this is the place that it was told.
pub(super) fn may_die_here() {
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let place = PASSED.fetch_add(1, Relaxed);
    if setting("EBB_DIE_AT") == Some(place) {
        kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
    if setting("EBB_PAUSE_AT") == Some(place) {
        // SAFETY: nothing here handles this signal. It goes to this very thread; another thread's
        // stop would reach it only some steps later.
        assert_eq!(unsafe { libc::raise(libc::SIGSTOP) }, 0);
    }
}

/// Returns a test of this program, to run in a process of its own.
fn again(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--test-threads=1", "--nocapture"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Injects one call. `EBB_HELPER` says which call, into which process, and its arguments.
#[test]
#[ignore = "a process that other tests start"]
fn helper() {
    let Ok(words) = env::var("EBB_HELPER") else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let process = Process::open(number(1) as i32).unwrap();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let range = || HvaRange { start: Hva(number(2)), bytes: number(3) };
    let result = match words[0] {
        "close" => {
            target.inside(|thread| thread.call(libc::SYS_close, [number(2), 0, 0])).map(drop)
        }
        "close-userfaultfd" => close(&target, number(2) as i32),
        "make" => userfaultfd(&target, None).map(drop),
        "forget" => forget(&target, &[range()]),
        "populate" => {
            let arguments = [number(2), number(3), libc::MADV_POPULATE_READ as u64];
            target.inside(|thread| thread.call(libc::SYS_madvise, arguments)).map(drop)
        }
        // The call waits until something is written.
        _ => target.inside(|thread| thread.call(libc::SYS_read, [0, number(2), 1])).map(drop),
    };
    println!("{result:?}");
}

fn helper_for(words: String) -> Command {
    let mut command = again("inject::tests::helper");
    command.env("EBB_HELPER", words);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A victim. It is killed at the end, unless the test lets it end.
struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    rounds: ChildStdout,
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Victim {
    fn of(habit: &str) -> Victim {
        let mut command = again("nothing");
        command.env("EBB_VICTIM", habit).stdin(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let (input, rounds) = (child.stdin.take(), child.stdout.take().unwrap());
        let mut victim = Victim { child, input, rounds };
        victim.goes_on();
        victim
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn process(&self) -> Process {
        Process::open(self.pid()).unwrap()
    }

    /// Returns its shared memory, which it does not touch.
    fn shared(&self) -> Vma {
        let mut mappings = self.process().mappings().unwrap().into_iter();
        mappings.find(|vma| vma.name.starts_with("/memfd:victim")).unwrap()
    }

    /// Waits for two more rounds: the first may have ended before.
    fn goes_on(&mut self) {
        self.drain();
        let mut byte = [0];
        for _ in 0..2 {
            while byte[0] != b'#' {
                let got = self.rounds.read(&mut byte).unwrap();
                assert_eq!(got, 1, "the victim ended: {:?}", self.child.wait());
            }
            byte[0] = 0;
        }
    }

    fn drain(&mut self) {
        rustix::io::ioctl_fionbio(&self.rounds, true).unwrap();
        while self.rounds.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
        rustix::io::ioctl_fionbio(&self.rounds, false).unwrap();
    }

    /// Ends the victim, and checks that it found nothing wrong in all its rounds.
    fn ends_well(mut self) {
        self.goes_on();
        self.input = None;
        std::io::copy(&mut self.rounds, &mut std::io::sink()).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// Whether this process may trace others.
fn may_trace() -> bool {
    let victim = Victim::of("nanosleep");
    let output = helper_for(format!("close {} 9999", victim.pid())).output().unwrap();
    let may = !said(&output).contains("code: 1,") && output.status.success();
    if !may {
        eprintln!("SKIPPED: tracing is not permitted here: {output:?}");
    }
    may
}

/// Waits until the text of a file of `/proc` or a cgroup is as wanted.
fn wait_until(path: &str, mut says: impl FnMut(&str) -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !says(&fs::read_to_string(path).unwrap()) {
        assert!(Instant::now() < end, "{path} does not say what it should");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_in_state(status: &str, states: &str) -> bool {
    let state = status.lines().find_map(|line| line.strip_prefix("State:\t"));
    state.is_some_and(|state| states.contains(&state[..1]))
}

/// Starts a helper that waits in a call of the victim until something is written to the victim.
fn helper_in_a_call(victim: &Victim) -> Child {
    let room = victim.shared().start.0;
    let mut helper = helper_for(format!("read {} {room}", victim.pid())).spawn().unwrap();
    let calls = format!("/proc/{}/syscall", victim.pid());
    let in_call = format!("0 0x0 {room:#x} 0x1 ");
    wait_until(&calls, |call| {
        assert!(call.starts_with(&in_call) || helper.try_wait().unwrap().is_none());
        call.starts_with(&in_call)
    });
    helper
}

fn kill(mut helper: Child) {
    helper.kill().unwrap();
    helper.wait().unwrap();
}

#[test]
fn whoever_dies_at_any_step_leaves_the_thread_as_it_was() {
    if !may_trace() {
        return;
    }
    for habit in super::victim::HABITS {
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
    let output = helper.env("EBB_TIMEOUT_MS", "50").output().unwrap();
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
    let uffd = Uffd::from(process.descriptor(userfaultfd(&target, None).unwrap()).unwrap());
    uffd.handshake(0).unwrap();
    let shared = victim.shared();
    let range = HvaRange { start: shared.start, bytes: shared.bytes };
    uffd.register(range, Watch::MissingAndWrite).unwrap();
    // Waits until the sleep that the first stop cut short is over.
    victim.goes_on();
    // Nobody answers the fault.
    let words = format!("populate {} {} {}", victim.pid(), range.start.0, range.bytes);
    let output = helper_for(words).env("EBB_TIMEOUT_MS", "50").output().unwrap();
    assert!(said(&output).contains("ends it by itself"), "{output:?}");
    uffd.zero(range, true).unwrap();
    victim.goes_on();
    victim.ends_well();
}

/// A cgroup for the victim. At the end it is thawed and removed.
struct Freezer {
    directory: PathBuf,
    parent: PathBuf,
    words: [(&'static str, &'static str); 2],
    state: (&'static str, &'static str),
    pid: i32,
}

impl Freezer {
    /// Makes a cgroup of each kind that this host has mounted.
    fn all(pid: i32) -> Vec<Freezer> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut all = Vec::new();
        for mount in mounts.lines() {
            let words: Vec<&str> = mount.split(' ').collect();
            let (words, state) = match (words[2], words[3].split(',').any(|o| o == "freezer")) {
                ("cgroup", true) => (
                    [("freezer.state", "FROZEN"), ("freezer.state", "THAWED")],
                    ("freezer.state", "FROZEN\n"),
                ),
                ("cgroup2", _) => (
                    [("cgroup.freeze", "1"), ("cgroup.freeze", "0")],
                    ("cgroup.events", "frozen 1"),
                ),
                _ => continue,
            };
            let parent = PathBuf::from(mount.split(' ').nth(1).unwrap());
            let directory = parent.join(format!("ebb-test-{pid}"));
            if fs::create_dir(&directory).is_ok() {
                fs::write(directory.join("cgroup.procs"), pid.to_string()).unwrap();
                all.push(Freezer { directory, parent, words, state, pid });
            }
        }
        all
    }

    fn freeze(&self) {
        fs::write(self.directory.join(self.words[0].0), self.words[0].1).unwrap();
        let path = self.directory.join(self.state.0);
        wait_until(path.to_str().unwrap(), |text| text.contains(self.state.1));
    }

    fn thaw(&self) {
        fs::write(self.directory.join(self.words[1].0), self.words[1].1).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        let moved = fs::write(self.parent.join("cgroup.procs"), self.pid.to_string());
        let removed = moved.and_then(|()| fs::remove_dir(&self.directory));
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

#[test]
fn a_frozen_process_finds_back_once_it_is_thawed() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("read");
    for freezer in Freezer::all(victim.pid()) {
        freezer.freeze();
        let mut helper = helper_for(format!("close {} 9999", victim.pid()));
        let output = helper.env("EBB_TIMEOUT_MS", "50").output().unwrap();
        assert!(said(&output).contains("TimedOut"), "{output:?}");
        freezer.thaw();
        victim.goes_on();
        // The process is frozen amid a call, whose helper dies, too.
        let helper = helper_in_a_call(&victim);
        freezer.freeze();
        kill(helper);
        freezer.thaw();
        victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        victim.goes_on();
        // The process is frozen on its way into a call.
        let helper = helper_for(format!("close {} 9999", victim.pid()));
        let helper = paused_at(helper, INTO_A_CALL);
        fs::write(freezer.directory.join(freezer.words[0].0), freezer.words[0].1).unwrap();
        kill(helper);
        freezer.freeze();
        freezer.thaw();
        victim.goes_on();
    }
    victim.ends_well();
}

/// The place of [`may_die_here`] after which a thread is seized.
const SEIZED: u64 = 1;
/// The place of [`may_die_here`] after which a thread is about to make a call.
const INTO_A_CALL: u64 = 9;

/// Starts a helper, and returns once it has stopped at a place.
fn paused_at(mut helper: Command, place: u64) -> Child {
    let helper = helper.env("EBB_PAUSE_AT", place.to_string()).spawn().unwrap();
    wait_until(&format!("/proc/{}/status", helper.id()), |status| {
        assert!(!is_in_state(status, "Z"), "the helper ended");
        is_in_state(status, "T")
    });
    helper
}

/// A helper that is killed at the end. Before that, nobody sees the end of a process that it
/// traces.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

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

#[test]
fn another_thread_does_it_where_the_first_cannot_be_stopped() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("vfork");
    let output = helper_for(format!("close {} 9999", victim.pid())).output().unwrap();
    assert!(said(&output).contains("code: 9,"), "{output:?}");
    victim.ends_well();
}

#[test]
fn another_process_by_that_number_is_left_alone() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let start_ticks = process.start_ticks().unwrap();
    assert!(Target::new(&process, start_ticks + 1).is_err());
    let mut target = Target::new(&process, start_ticks).unwrap();
    // This is as if another process had taken the PID between the first look and the stop.
    target.start_ticks += 1;
    let error = userfaultfd(&target, None).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    let descriptors = process.descriptors().unwrap();
    assert!(!descriptors.iter().any(|(_, link)| link.contains("userfaultfd")), "{descriptors:?}");
    victim.ends_well();
}

#[test]
fn private_memory_is_not_forgotten() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let mappings = victim.process().mappings().unwrap();
    let private = mappings.iter().filter(|vma| vma.writable && !vma.shared_write);
    for vma in private {
        let words = format!("forget {} {} {}", victim.pid(), vma.start.0, vma.bytes);
        let output = helper_for(words).output().unwrap();
        assert!(said(&output).contains("Ok(())"), "{output:?}");
    }
    victim.ends_well();
}

/// Ranges that are left stay as they are, for the next call.
#[test]
fn a_thread_is_stopped_once_to_forget_what_can_wait() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let first = process.mappings().unwrap()[0].start;
    // Each range takes a look at the mappings.
    let ranges = vec![HvaRange { start: first, bytes: 4096 }; 100_000];
    let bytes = forget_once(&target, &ranges).unwrap();
    assert!(bytes > 0 && bytes < 4096 * ranges.len() as u64, "{bytes}");
    assert_eq!(forget_once(&target, &ranges[..1]).unwrap(), 4096);
    victim.ends_well();
}

#[test]
fn descriptors_come_and_go() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    for _ in 0..50 {
        let fd = userfaultfd(&target, None).unwrap();
        let there = process.descriptors().unwrap();
        assert!(there.contains(&(fd, "anon_inode:[userfaultfd]".to_owned())), "{there:?}");
        close(&target, fd).unwrap();
    }
    victim.ends_well();
}

#[test]
fn the_numbers_that_a_process_uses_stay_its_own() {
    use rustix::process::{Resource, Rlimit, prlimit};
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let before = process.descriptors().unwrap();
    let fd = userfaultfd(&target, None).unwrap();
    assert!(fd as u64 >= process.descriptors_max().unwrap().min(NUMBER_MAX) / 2, "{fd}");
    assert_eq!(process.descriptors().unwrap().len(), before.len() + 1);
    close(&target, fd).unwrap();
    assert_eq!(process.descriptors().unwrap(), before);
    // The process has room for one more descriptor.
    let next = (0..).find(|number| before.iter().all(|(used, _)| used != number)).unwrap();
    let limit = Rlimit { current: Some(next as u64 + 1), maximum: Some(next as u64 + 1) };
    prlimit(Some(Pid::from_child(&victim.child)), Resource::Nofile, limit).unwrap();
    assert_eq!(userfaultfd(&target, None).unwrap(), next);
    close(&target, next).unwrap();
    // A descriptor that is not a userfaultfd is not closed.
    assert_eq!(close(&target, 0).unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(process.descriptors().unwrap(), before);
    victim.ends_well();
}

#[test]
fn a_close_that_is_still_to_come_is_the_only_one() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("read");
    let (process, pid) = (victim.process(), Pid::from_child(&victim.child));
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let fd = userfaultfd(&target, None).unwrap();
    let words = format!("close-userfaultfd {} {fd}", victim.pid());
    let first = Killed(paused_at(helper_for(words.clone()), INTO_A_CALL));
    let refused = |why: &str| {
        for words in [words.clone(), format!("make {}", victim.child.id())] {
            let output = helper_for(words).env("EBB_TIMEOUT_MS", "50").output().unwrap();
            assert!(said(&output).contains(why), "{output:?}");
        }
        assert_eq!(process.userfaultfds().unwrap(), [fd]);
    };
    refused("traces thread");
    // The victim is stopped before the call, and nobody traces it any more.
    kill_process(pid, Signal::STOP).unwrap();
    drop(first);
    let status = format!("/proc/{}/status", victim.pid());
    wait_until(&status, |status| is_in_state(status, "T"));
    refused("has not ended an earlier call");
    kill_process(pid, Signal::CONT).unwrap();
    victim.goes_on();
    assert!(process.userfaultfds().unwrap().is_empty());
    victim.ends_well();
}

#[test]
fn large_ranges_go_in_pieces() {
    let range = HvaRange { start: Hva(4096), bytes: 2 * FORGET_BYTES + 8192 };
    let starts: Vec<u64> = pieces(range, FORGET_BYTES).map(|piece| piece.start.0).collect();
    assert_eq!(starts, [4096, 4096 + FORGET_BYTES, 4096 + 2 * FORGET_BYTES]);
    assert_eq!(pieces(range, FORGET_BYTES).map(|piece| piece.bytes).sum::<u64>(), range.bytes);
    assert_eq!(pieces(range, FORGET_BYTES).last().unwrap().bytes, 8192);
}
