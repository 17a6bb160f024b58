//! `ebb top` with real VMs: its figures add up, and its keys do what they say.

use std::process::Command;

use ebb_api::{PilotStatus, Top, TopVm};
use vmtest::{Guest, Host, Ran, Screen, Vm, until_or};

const MIB: u64 = 1 << 20;
const SIZE: (u16, u16) = (30, 140);

fn run(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm
}

fn figures(host: &Host) -> Top {
    serde_json::from_str(&host.ebb("top --once --json").ok()).expect("figures")
}

fn of<'t>(top: &'t Top, vm: &Vm) -> &'t TopVm {
    top.vms.iter().find(|seen| seen.name.as_str() == vm.name()).expect("the VM")
}

fn top(host: &Host, more: &[&str]) -> Screen {
    Screen::of(host.command("ebb").arg("top").args(more), SIZE)
}

#[test]
fn columns_add_up_to_the_size() {
    let host = Host::new();
    let (limited, free) = (run(&host), run(&host));
    limited.guest("fill kept 200M");
    limited.ebb("limit 200M").ok();
    free.guest("fill freed 200M");
    free.guest("free freed");
    let seen = until_or(|| {
        let top = figures(&host);
        for vm in &top.vms {
            let parts = vm.parts.expect("parts");
            assert_eq!(parts.sum_bytes(), vm.memory_bytes, "{vm:?}");
        }
        let (of_limited, of_free) = (of(&top, &limited), of(&top, &free));
        let is_evicted = of_limited.parts.expect("parts").evicted_bytes() > 30 * MIB;
        let free_bytes = of_free.parts.expect("parts").free_bytes;
        let has_free = free_bytes.is_some_and(|bytes| bytes > 150 * MIB);
        (is_evicted && has_free && of_limited.faults_per_s.is_some()).then_some(top)
    });
    let seen = seen.unwrap_or_else(|| panic!("{:?}", figures(&host)));
    assert_eq!(of(&seen, &limited).limit_bytes, Some(200 * MIB));
    assert_eq!(of(&seen, &free).limit_bytes, None);
    assert!(seen.host.available_bytes < seen.host.total_bytes);
    // What was free is empty now.
    free.reclaim();
    let gone = || {
        let parts = of(&figures(&host), &free).parts.expect("parts");
        let free_bytes = parts.free_bytes.expect("it is trusted");
        (free_bytes < 150 * MIB && parts.empty_bytes > 200 * MIB).then_some(())
    };
    until_or(gone).unwrap_or_else(|| panic!("{:?}", figures(&host)));
    let text = host.ebb("top --once").ok();
    assert!(text.contains("  NAME") && text.contains(limited.name()), "{text}");
    assert!(host.ebb("top").refused().contains("use ebb list, or ebb top --once"));
    assert_eq!(limited.guest("check kept"), "0");
    // What had to come back for that took its time.
    let slowest_ns = || of(&figures(&host), &limited).fault_ns.as_ref()?.p99;
    until_or(slowest_ns).unwrap_or_else(|| panic!("{:?}", figures(&host)));
}

#[test]
fn keys_do_what_they_say() {
    let host = Host::new();
    let (first, second) = (run(&host), run(&host));
    let screen = top(&host, &[]);
    screen.wait(first.name(), true);
    screen.wait(second.name(), true);
    screen.press(&format!("/{}", &second.name()));
    screen.wait(&format!("names with: {}", second.name()), true);
    screen.wait(&format!("  {} ", first.name()), false);
    screen.press("\r");
    screen.wait("Enter one VM", true);
    screen.press("?");
    screen.wait("the sum of the six columns", true);
    screen.press(" ");
    screen.wait("the sum of the six columns", false);
    screen.press("\r");
    screen.wait(&format!("{}  512M of memory", second.name()), true);
    screen.wait("faults/s", true);
    screen.press("h");
    screen.wait("only looking", true);
    screen.resize(8, 40);
    screen.wait("Esc all VMs", true);
    screen.resize(SIZE.0, SIZE.1);
    // The daemon ends, and comes back. The VM does not notice.
    host.kill_daemon();
    screen.wait("NO ANSWER", true);
    host.start();
    screen.wait("NO ANSWER", false);
    screen.press("q");
    assert_eq!(screen.end(), (Some(0), true));
}

#[test]
fn a_vm_is_changed_only_with_leave() {
    let host = Host::new();
    let vm = run(&host);
    let screen = top(&host, &["--control"]);
    screen.wait(vm.name(), true);
    screen.press("h");
    screen.wait("y: yes, any other key: no", true);
    screen.press("n");
    screen.wait("nothing is changed", true);
    screen.press("hy");
    screen.wait(&format!("{} is held", vm.name()), true);
    let pilot: PilotStatus =
        serde_json::from_str(&host.ebb("pilot --json").ok()).expect("a status");
    assert!(pilot.vms[0].hold, "{pilot:?}");
    screen.press("l400M\r");
    screen.wait("set the limit", true);
    assert_eq!(vm.status().limit.bytes, None, "it asks first");
    screen.press("y");
    screen.wait("has a limit of 400 MiB", true);
    assert_eq!(vm.status().limit.bytes, Some(400 * MIB));
    screen.press("l1\ry");
    screen.wait("not done: ", true);
    screen.press("q");
    assert_eq!(screen.end(), (Some(0), true));
}

/// The time now, as `--at` takes it.
fn now() -> String {
    let mut date = Command::new("date");
    Ran::of(date.arg("+%Y-%m-%dT%H:%M:%S")).ok().trim().to_owned()
}

#[test]
fn the_past_outlives_the_daemon() {
    let host = Host::new();
    let vm = run(&host);
    let past = || {
        let ran = host.ebb_words(&["top", "--json", "--at", &now()]);
        let top = || serde_json::from_str::<Top>(&ran.stdout).expect("figures");
        (ran.code == Some(0)).then(top)
    };
    // Faults, so that the moment has their times.
    vm.guest("fill kept 50M");
    vm.ebb("evict --bytes 1G").ok();
    assert_eq!(vm.guest("check kept"), "0");
    let is_timed = |vm: &TopVm| vm.fault_ns.as_ref().is_some_and(|times| times.p99.is_some());
    let has_times = |top: &Top| top.vms.iter().any(is_timed);
    let before = until_or(|| past().filter(has_times)).unwrap_or_else(|| panic!("{}", host.log()));
    assert_eq!(of(&before, &vm).parts.expect("parts").sum_bytes(), 512 * MIB);
    host.kill_daemon();
    host.start();
    let after = past().expect("it is on record");
    assert!(after.at_unix_ms >= before.at_unix_ms, "{after:?}");
    let screen = top(&host, &["--at", &now()]);
    screen.wait("HISTORY ", true);
    screen.wait(vm.name(), true);
    // Right of the last moment is nothing, until the next one is written down.
    screen.press("\x1b[C");
    screen.press("\r");
    screen.wait("Left, Right time", true);
    screen.press("q");
    assert_eq!(screen.end(), (Some(0), true));
    assert!(
        host.ebb("top --json --at 1999-01-01T00:00").refused().contains("nothing is on record")
    );
}
