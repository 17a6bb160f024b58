//! What happens to a real VM is told by `ebb events`, in order and once.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};

use ebb_api::{ErrorCode, Event, EventType, VmChange};
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Guest, Host, Ran, Vm, until};

/// Tasks that wait for memory do not count, as other tests cause some.
const NO_STALLS: (&str, &str) = ("EBB_PRESSURE_STALL", "0");

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M").cpus(1)
}

/// What `ebb events` prints with these options.
fn events(host: &Host, options: &str) -> Vec<Event> {
    let lines = host.ebb(&format!("events --json {options}")).ok();
    lines.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

/// `ebb events -f` beside the test.
struct Follower {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Follower {
    fn new(host: &Host) -> Follower {
        let mut command = host.command("ebb");
        command.args(["events", "-f", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("ebb starts");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Follower { child, lines }
    }

    /// All events up to one that is meant.
    fn up_to(&mut self, is_meant: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut all = Vec::new();
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("a line") > 0, "it ends: {all:?}");
            let event: Event = serde_json::from_str(&line).expect("an event");
            let is_last = is_meant(&event);
            all.push(event);
            if is_last {
                return all;
            }
        }
    }

    /// How it ends.
    fn end(self) -> Ran {
        let output = self.child.wait_with_output().expect("its end");
        Ran {
            line: "events -f".into(),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into(),
            stderr: String::from_utf8_lossy(&output.stderr).into(),
        }
    }
}

fn changes_to(event: &Event, change: VmChange) -> bool {
    event.state.as_ref().is_some_and(|state| state.change == change)
}

fn wait_for(host: &Host, vm: &Vm, what: &str, is_meant: impl Fn(&Event) -> bool) -> Event {
    let options = format!("--vm {}", vm.name());
    until(what, || events(host, &options).into_iter().find(&is_meant))
}

/// The kind of an event that the test waits for, and what it is about.
fn told(event: &Event) -> Option<String> {
    match event.kind {
        EventType::State => event.state.as_ref().map(|state| state.change.to_string()),
        EventType::Refusal => event.refusal.as_ref().map(|it| format!("refused: {}", it.code)),
        // What the pilot decides after that depends on the host.
        EventType::Decision => event.decision.as_ref().map(|it| format!("decided: {}", it.action)),
        _ => None,
    }
}

#[test]
fn the_life_of_a_vm_is_told_in_order() {
    let host = Host::new();
    host.set(NO_STALLS.0, NO_STALLS.1);
    let vm = host.qemu(guest());
    vm.attach();
    vm.wait_trusted();
    let mut follower = Follower::new(&host);
    vm.ebb("limit 1G").refused();
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    host.ebb("pilot on --reserve 90%").ok();
    let decided = |event: &Event| {
        let outcome = event.decision.as_ref().map(|decision| decision.outcome.as_str());
        outcome.is_some_and(|outcome| outcome.starts_with("reclaimed "))
    };
    wait_for(&host, &vm, "a decision", decided);
    host.ebb("pilot off").ok();
    until("no limit", || vm.status().limit.bytes.is_none().then_some(()));
    host.kill_servers();
    wait_for(&host, &vm, "the next process", |event| changes_to(event, VmChange::Managed));
    vm.detach();
    vm.attach();
    vm.kill();

    let all = follower.up_to(|event| changes_to(event, VmChange::Ended));
    let mut kinds: Vec<String> = all.iter().filter_map(told).collect();
    kinds.dedup_by(|one, before| one.starts_with("decided") && before.starts_with("decided"));
    let [attached, refused, decided, rest @ ..] = &kinds[..] else { panic!("{kinds:?}") };
    assert_eq!((attached.as_str(), refused.as_str()), ("attached", "refused: not_allowed"));
    assert!(decided.starts_with("decided: "), "{kinds:?}");
    assert_eq!(rest, ["recovering", "managed", "detached", "attached", "ended"]);
    let is_about_it = |event: &Event| event.vm.as_ref().is_some_and(|of| of.as_str() == vm.name());
    assert!(all.iter().all(|event| is_about_it(event) || event.kind == EventType::Stage));
    assert!(all.is_sorted_by(|one, next| one.number < next.number && one.time <= next.time));
    let again: Vec<Event> = events(&host, "").into_iter().take(all.len()).collect();
    assert_eq!(again, all, "who asks later is told the same");

    let refusal = all.iter().find_map(|event| event.refusal.clone()).expect("a refusal");
    assert_eq!((refusal.method.as_str(), refusal.code), ("PUT", ErrorCode::NotAllowed));
    let since = all[all.len() - 2].number;
    let later = events(&host, &format!("--since {since}"));
    assert_eq!(later.first(), all.last());
    assert!(later.iter().all(|event| event.number > since), "{later:?}");
    let states = host.ebb(&format!("events --type state --vm {}", vm.name())).ok();
    assert!(
        states.lines().next().is_some_and(|line| line.ends_with(" state attached")),
        "{states}"
    );
}

#[test]
fn streams_end_with_the_daemon_and_the_next_one_says_what_may_be_missing() {
    let host = Host::new();
    let vm = host.run(guest());
    let mut follower = Follower::new(&host);
    let before = follower.up_to(|event| changes_to(event, VmChange::Started));
    let last = before.last().expect("an event").number;
    let daemon = host.daemon().and_then(Pid::from_raw).expect("a daemon");
    kill_process(daemon, Signal::TERM).expect("it runs");
    let why = follower.end().refused();
    assert!(why.contains("ebbd has ended"), "{why}");

    // The next `ebb` starts the next daemon, which finds the VM's process.
    let managed = wait_for(&host, &vm, "the VM", |event| changes_to(event, VmChange::Managed));
    assert!(managed.number > last, "numbers go on");
    let after = events(&host, &format!("--since {last}"));
    assert_eq!((after[0].kind, after[0].number), (EventType::Lost, last), "{after:?}");
    assert!(after.contains(&managed), "{after:?}");
}
