//! Tests of calls injected into a victim that checks itself. The helpers that inject are killed at
//! every possible place, are too slow, or meet a frozen process.

mod calls;
mod descriptors;
mod forgetting;
mod freezer;
mod signals;

use std::env;
use std::fs;
use std::io::Read;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::process::{Signal, kill_process};

use super::*;
use crate::process::Vma;

/// Returns a setting of the helper, from its environment.
fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

pub(super) fn timeout(usual: Duration) -> Duration {
    setting("EBB_TIMEOUT_MS").map_or(usual, Duration::from_millis)
}

/// Kills or stops a helper if this is the chosen place.
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
        "make" => userfaultfd(&target, Door::Call).map(drop),
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
    let error = userfaultfd(&target, Door::Call).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    let descriptors = process.descriptors().unwrap();
    assert!(!descriptors.iter().any(|(_, link)| link.contains("userfaultfd")), "{descriptors:?}");
    victim.ends_well();
}
