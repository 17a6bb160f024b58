//! The pilot on a real VM: what it takes, what it gives back, and that nothing is lost by it.
//!
//! The host is never made short of memory: a reserve of nearly all of it stands for that.

use std::collections::BTreeSet;

use ebb_api::{PilotDecision, PilotStatus};
use vmtest::{Guest, Host, Vm, require, until, until_or};

const MIB: u64 = 1 << 20;
/// Tasks that wait for memory do not count, as other tests cause some.
const NO_STALLS: (&str, &str) = ("EBB_PRESSURE_STALL", "0");

fn host() -> Host {
    let host = Host::new();
    host.set(NO_STALLS.0, NO_STALLS.1);
    host
}

fn run(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm
}

fn pilot(host: &Host) -> PilotStatus {
    serde_json::from_str(&host.ebb("pilot --json").ok()).expect("a status")
}

/// Waits for a decision that was carried out, and returns it.
fn wait_done(host: &Host, what: &str, why: &str) -> PilotDecision {
    let wanted = || {
        let is_wanted = |decision: &PilotDecision| {
            let outcome = decision.outcome.as_deref().unwrap_or_default();
            let is_done = outcome == "done" || outcome.starts_with("reclaimed");
            is_done && decision.action.starts_with(what) && decision.why.contains(why)
        };
        pilot(host).decisions.into_iter().find(is_wanted)
    };
    until_or(wanted).unwrap_or_else(|| panic!("{what}, {why}: {}", host.ebb("pilot").ok()))
}

/// Waits until so much content is evicted.
fn wait_evicted(vm: &Vm, bytes: u64) {
    let evicted = || {
        let limit = vm.status().limit;
        limit.saved_bytes + limit.on_disk_bytes
    };
    until_or(|| (evicted() >= bytes).then_some(()))
        .unwrap_or_else(|| panic!("{} evicted: {}", evicted(), vm.host().ebb("pilot").ok()));
}

#[test]
fn the_pilot_takes_what_is_not_used_and_gives_back_what_is_missed() {
    let host = host();
    let vm = run(&host);
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    vm.guest("fill kept 100M");
    vm.ebb("rule --class batch").ok();
    // On a tight host, a batch VM is relieved: there is something beyond the reserve.
    let reserve = tight();
    host.ebb(&format!("pilot on --reserve {reserve}")).ok();
    let reclaimed = wait_done(&host, "reclaim ", " free, keeps 0 B");
    assert!(reclaimed.action.ends_with(" of free memory"), "{reclaimed:?}");
    wait_done(&host, "limit none -> ", "what it uses least");
    wait_evicted(&vm, 40 * MIB);
    let status = vm.status();
    assert!(status.resident_bytes < 300 * MIB, "{}", status.resident_bytes);

    // The guest misses what was evicted within the last seconds.
    assert_eq!(vm.guest("check kept"), "0");
    wait_done(&host, "limit ", "of evicted memory came back within seconds");
    let text = host.ebb("pilot").ok();
    assert!(text.contains("  pilot         on\n") && text.contains(" batch "), "{text}");

    // The policy decides the like from what was recorded. On a busy host that may be too few looks.
    let (mut number, mut simulated) = (0, String::new());
    let is_decided = until_or(|| {
        number += 1;
        let trace = host.directory().join(format!("trace{number}"));
        let recorded = host.ebb(&format!("record {} --for 3s", trace.display())).ok();
        assert!(recorded.contains(" looks"), "{recorded}");
        let ran = host.ebb(&format!("simulate {} --reserve {reserve}", trace.display()));
        // It refuses a trace without a look.
        simulated = ran.stdout + &ran.stderr;
        simulated.contains(&format!("{}: limit ", vm.name())).then_some(())
    });
    assert!(is_decided.is_some(), "{simulated}");

    host.ebb("pilot off").ok();
    until("no limit", || vm.status().limit.bytes.is_none().then_some(()));
    assert_eq!(vm.guest("check kept"), "0");
}

/// All of the host's memory, and what is available of it.
fn host_memory() -> (u64, u64) {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("procfs");
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    };
    (bytes("MemTotal:"), bytes("MemAvailable:"))
}

/// A reserve with which the host is tight, as long as nobody takes a fifth of what is available.
fn tight() -> String {
    format!("{}M", host_memory().1 / MIB * 3 / 4)
}

fn is_limit_after(number: Option<u64>) -> impl Fn(&PilotDecision) -> bool {
    move |one| one.action.starts_with("limit") && Some(one.number) > number
}

#[test]
fn nothing_in_use_is_taken_while_the_swap_files_are_full() {
    let host = host();
    let vm = run(&host);
    vm.guest("fill kept 150M");
    host.ebb(&format!("pilot on --reserve {} --swap-max 4K", tight())).ok();
    // Once there is a swap file that takes something, nothing more is decided about limits.
    wait_done(&host, "limit none -> ", "what it uses least");
    let full = until("the quota to be reached", || {
        let status = pilot(&host);
        let host = status.host.filter(|host| host.contains(" of 4 KiB"))?;
        (!host.contains("swap files 0 B")).then_some(status.decisions.first().map(|it| it.number))
    });
    let text = host.ebb("pilot").ok();
    assert!(text.contains("while swap files take 4 KiB or more"), "{text}");
    // The host's figures differ from look to look.
    let mut hosts = BTreeSet::new();
    until("some looks", || {
        hosts.extend(pilot(&host).host);
        (hosts.len() > 3).then_some(())
    });
    let later = pilot(&host).decisions.iter().filter(|one| is_limit_after(full)(one)).count();
    assert!(later <= 1, "one may have been decided meanwhile: {}", host.ebb("pilot").ok());
    // Without the quota it goes on.
    host.ebb("pilot --swap-max 0").ok();
    until("a lower limit", || {
        pilot(&host).decisions.iter().any(is_limit_after(full)).then_some(())
    });
    host.ebb("pilot off").ok();
    assert_eq!(vm.guest("check kept"), "0");
}

/// A guest from which nothing can be taken but what it unplugs: Ebb does not see what of its memory
/// is free, and an operator has set its limit. It has 1 GiB plugged. Nearly all of its memory is
/// free, and resident.
fn run_unseen(host: &Host) -> Vm {
    host.set("EBB_METADATA_BY", "registration");
    let guest = Guest::debian("6.1-cloud").memory("512M").cpus(1).grow_to("2G");
    let vm = host.run(guest.append("memhp_default_state=online_movable"));
    vm.ebb("resize 1536M").ok_or_short();
    until("plugged memory", || (plugged_mib(&vm) == 1024).then_some(()));
    vm.ebb("resize off").ok();
    until("the guest to use it", || (vm.meminfo()["MemTotal"] > 1400 * MIB).then_some(()));
    vm.ebb("limit 1530M").ok();
    vm.guest("fill freed 1200M");
    vm.guest("free freed");
    vm
}

fn plugged_mib(vm: &Vm) -> u64 {
    vm.status().size.plugged_bytes / MIB
}

/// What the pilot has had guests unplug, as it knows it.
fn unplugged_bytes(host: &Host) -> u64 {
    pilot(host).vms.iter().map(|vm| vm.unplugged_bytes).sum()
}

/// Turns the pilot on for a host that lacks memory, and waits until the guest has unplugged some.
fn wait_unplugged(host: &Host, vm: &Vm) {
    host.ebb("pilot on --reserve 90%").ok();
    wait_done(host, "plugged memory 1 GiB -> ", "its guest can spare ");
    until("less plugged memory", || (plugged_mib(vm) <= 960).then_some(()));
}

#[test]
fn what_a_guest_has_unplugged_comes_back_when_the_pilot_is_turned_off() {
    let host = host();
    let vm = run_unseen(&host);
    let before = vm.host_bytes();
    wait_unplugged(&host, &vm);
    assert!(vm.host_bytes() + 32 * MIB < before, "the host has it back");
    let text = host.ebb("pilot").ok();
    assert!(text.contains(" for the pilot\n"), "{text}");

    // The next processes know what is to be given back.
    host.kill9();
    host.start();
    until("the VM's figures", || (unplugged_bytes(&host) > 0).then_some(()));
    assert!(plugged_mib(&vm) < 1024);
    host.ebb("pilot off").ok();
    until("all of its memory", || (plugged_mib(&vm) == 1024).then_some(()));
    until("nothing to give back", || (unplugged_bytes(&host) == 0).then_some(()));
    vm.guest("fill kept 1200M");
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn a_guest_has_back_what_it_needs_and_an_operators_size_is_left_alone() {
    let host = host();
    let vm = run_unseen(&host);
    let whole = vm.meminfo()["MemTotal"];
    wait_unplugged(&host, &vm);
    // The VM's process does not wait for the pilot.
    host.kill_daemon();
    let mut last = 0;
    until("a guest at rest", || {
        let before = std::mem::replace(&mut last, vm.meminfo()["MemTotal"]);
        (before == last).then_some(())
    });
    assert!(last + 32 * MIB < whole, "{last} of {whole}");
    // It may unplug some more meanwhile, and then refuses.
    until("nearly all that it has to be in use", || {
        let available_mib = vm.meminfo()["MemAvailable"] / MIB;
        vm.try_guest(&format!("fill kept {}M", available_mib.saturating_sub(30))).ok()
    });
    until("all of its memory", || (vm.meminfo()["MemTotal"] + 16 * MIB > whole).then_some(()));
    assert_eq!(vm.guest("check kept"), "0");
    vm.guest("free kept");

    host.start();
    until("the pilot to go on", || (unplugged_bytes(&host) > 0).then_some(()));
    vm.ebb("resize 1400M").ok_or_short();
    until("the operator's size", || (plugged_mib(&vm) == 888).then_some(()));
    until("the pilot to hear of it", || (unplugged_bytes(&host) == 0).then_some(()));
    host.ebb("pilot off").ok();
    until("the pilot to be off", || pilot(&host).stage.is_none().then_some(()));
    let size = vm.status().size;
    let requested: u64 = size.devices.iter().map(|device| device.requested_bytes).sum();
    assert_eq!((size.plugged_bytes, requested), (888 * MIB, 888 * MIB), "{size:?}");
}

#[test]
fn the_pilot_outlives_all_processes() {
    let host = host();
    let vm = run(&host);
    vm.guest("fill kept 150M");
    host.ebb("pilot on --reserve 90%").ok();
    wait_done(&host, "limit none -> ", "what it uses least");
    wait_evicted(&vm, 10 * MIB);
    host.kill9();
    host.start();
    let again = wait_done(&host, "limit ", "the host is ");
    assert!(!again.action.starts_with("limit none"), "the limit is on record: {again:?}");
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn what_an_operator_has_set_is_left_alone() {
    let host = host();
    let (held, limited, free) = (run(&host), run(&host), run(&host));
    held.guest("fill freed 200M");
    held.guest("free freed");
    held.ebb("rule --hold on").ok();
    limited.ebb("limit 400M").ok();
    let before = held.host_bytes();
    host.ebb("pilot on --reserve 90%").ok();
    wait_done(&host, "limit none -> ", "what it uses least");
    let status = pilot(&host);
    let limits = status.decisions.iter().filter(|decision| {
        decision.action.starts_with("limit") && decision.outcome.as_deref() == Some("done")
    });
    assert!(limits.into_iter().all(|decision| decision.vm.as_str() == free.name()), "{status:?}");
    assert!(held.host_bytes() >= before, "it is held");
    assert_eq!(limited.status().limit.bytes, Some(400 * MIB));
    let of = |vm: &Vm| status.vms.iter().find(|seen| seen.name.as_str() == vm.name()).unwrap();
    assert!(of(&limited).left_alone.as_ref().unwrap().contains("ebb limit has set its limit"));
    // A limit that is set while the pilot has one is the operator's from then on.
    free.ebb("limit 450M").ok();
    let left_alone = || {
        let status = pilot(&host);
        let seen = status.vms.iter().find(|seen| seen.name.as_str() == free.name())?;
        seen.left_alone.clone().filter(|_| seen.limit_bytes.is_none())
    };
    until("the pilot to leave it alone", left_alone);
    host.ebb("pilot off").ok();
    held.ebb("rule --hold off").ok();
    assert_eq!(free.status().limit.bytes, Some(450 * MIB));
}

#[test]
fn a_dry_run_changes_nothing() {
    let host = host();
    let vm = run(&host);
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    let before = vm.host_bytes();
    host.ebb("pilot dry-run --reserve 90%").ok();
    until("both kinds of decisions", || (pilot(&host).decisions.len() >= 2).then_some(()));
    let text = host.ebb("pilot").ok();
    assert!(text.contains("dry run") && text.contains(": not done: dry run"), "{text}");
    assert!(vm.host_bytes() >= before && vm.status().limit.bytes.is_none());
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let host = host();
    let _vm = run(&host);
    for (line, why) in [
        ("pilot maybe", "is not one of on, off, dry-run"),
        ("pilot on --reserve 91%", "give 90% or less"),
        ("pilot on --reserve 900T", "more than nine tenths"),
        ("pilot on --stall 101", "give 0 to 100"),
        ("pilot on --swap-max much", "--swap-max"),
        ("rule nobody --class batch", "there is no VM nobody"),
        ("rule vm0 --class fast", "is not one of batch, normal, latency"),
        ("rule vm0 --weight 0", "give 1 to 10000"),
        ("rule vm0 --min 2G --max 1G", "is above the maximum of 1 GiB"),
    ] {
        let refused = host.ebb(line).refused();
        assert!(refused.contains(why), "{line}: {refused}");
    }
    let status = pilot(&host);
    assert_eq!(status.mode, ebb_api::PilotMode::Off);
}

/// A test that takes much of the host's memory, which the pilot of another test would see: no other
/// test runs beside it.
mod alone {
    use super::*;

    /// The largest reserve that the pilot takes.
    const MOST: &str = "90%";
    /// Most memory that a test takes from the host.
    const BALLAST_MOST_BYTES: u64 = 6 << 30;

    /// Takes enough memory for the host to be short with the largest reserve, while it is held.
    ///
    /// # Errors
    /// Nearly all of the host's memory is available, and that is a lot.
    fn ballast() -> Result<Vec<u8>, String> {
        let (total, available) = host_memory();
        let bytes = available.saturating_sub(total / 100 * 85);
        match bytes <= BALLAST_MOST_BYTES {
            true => Ok(vec![1; bytes as usize]),
            false => Err(format!("{available} bytes of {total} are available")),
        }
    }

    #[test]
    fn cold_memory_is_compressed_first_and_then_goes_to_the_disk() {
        let host = Host::in_memory();
        require!(host.as_ref());
        let host = host.expect("it is there");
        host.set(NO_STALLS.0, NO_STALLS.1);
        let vm = run(&host);
        vm.guest("fill soft 200M");
        host.ebb(&format!("pilot on --reserve {}", tight())).ok();
        let widened = wait_done(&host, "compressed memory 0 B -> ", "the host is tight");
        assert_eq!(widened.action, "compressed memory 0 B -> 64 MiB");
        wait_done(&host, "limit none -> ", "what it uses least");
        until_or(|| (vm.status().limit.compressed_pages > 1000).then_some(()))
            .unwrap_or_else(|| panic!("{}", host.ebb("pilot").ok()));
        let before = vm.status().limit;
        assert!(before.compressed_bytes > 0, "{before:?}");
        assert!(before.compressed_limit_bytes <= 64 * MIB, "{before:?}");

        let ballast = ballast();
        require!(ballast.as_ref());
        host.ebb(&format!("pilot --reserve {MOST}")).ok();
        wait_done(&host, "compressed memory 64 MiB -> ", "are compressed, and go to the swap file");
        until("pages that move to the disk", || {
            let moved_bytes = vm.status().limit.written_back_total_bytes;
            (moved_bytes > before.written_back_total_bytes).then_some(())
        });
        assert_eq!(vm.guest("check soft"), "0");

        drop(ballast);

        // Nothing of it outlives the pilot.
        host.ebb("pilot off").ok();
        until("no compressed memory", || {
            let limit = vm.status().limit;
            let has_pages = limit.compressed_limit_bytes > 0 || limit.compressed_pages > 0;
            (limit.bytes.is_none() && !has_pages).then_some(())
        });
        assert_eq!(vm.guest("check soft"), "0");
    }
}
