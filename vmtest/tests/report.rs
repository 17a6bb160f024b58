//! A bundle for a bug report, with a VM.

use std::fs;
use std::process::Command;

use ebb_api::{Event, VmStatus};
use vmtest::{Guest, Host, Ran};

#[test]
fn a_bundle_has_what_ebb_says_of_a_vm_and_none_of_its_memory() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm.ebb("limit 1T").refused();
    let file = host.directory().join("bundle.tar.gz");
    let printed = host.ebb(&format!("report {}", file.display())).ok();
    assert!(printed.contains("look through it before you send it"), "{printed}");
    let again = host.ebb(&format!("report {}", file.display())).refused();
    assert!(again.contains("give a new file"), "{again}");

    let place = host.directory().join("unpacked");
    fs::create_dir(&place).expect("a directory");
    let mut tar = Command::new("tar");
    Ran::of(tar.arg("-xzf").arg(&file).arg("--strip-components=1").current_dir(&place)).ok();
    let read = |name: &str| {
        fs::read_to_string(place.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let status = read(&format!("daemon/vms/{}.json", vm.name()));
    let status: VmStatus = serde_json::from_str(&status).expect("a status");
    assert_eq!((status.name.as_str(), status.pid), (vm.name(), vm.pid()));
    let events = read("daemon/events.json");
    let refusals = events
        .lines()
        .filter_map(|line| serde_json::from_str::<Event>(line).expect("an event").refusal);
    assert!(refusals.into_iter().any(|refusal| refusal.path.ends_with("/limit")), "{events}");
    for (name, has) in [
        ("README.txt", "host.txt: "),
        ("host.txt", "MemTotal:"),
        ("settings.txt", "EBB_ALLOW_KEYS_ON_DISK=true"),
        ("doctor.txt", "run directory"),
        ("run-directory.txt", "/vm.json"),
        ("ebbd.log", "listening on "),
        ("daemon/version.json", "\"version\""),
        ("daemon/started-with.txt", "--background"),
        ("daemon/history.json", "\"points\""),
        ("daemon/pilot.json", "\"mode\""),
        ("daemon/jobs.json", "[]"),
    ] {
        assert!(read(name).contains(has), "{name}: {}", read(name));
    }
    // Its console and its swap file's key are named, and not there.
    let mut find = Command::new("find");
    let names = Ran::of(find.arg(".").current_dir(&place)).ok();
    assert!(!names.contains("console") && !names.contains("key"), "{names}");
}
