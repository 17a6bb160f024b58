//! The dashboard in Debian's Chromium, against a real daemon with a real VM. Playwright drives the
//! browser (`dashboard/browse.py`), and makes the pictures: in the directory that `EBB_PICTURES`
//! names, or in the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_api::{PilotMode, PilotStatus};
use testkit::target::target_directory;
use vmtest::{Guest, Host, Listening, Ran, Vm, require};

const MIB: u64 = 1 << 20;
/// How `scripts/playwright` ends where there is no browser, or Playwright cannot be installed.
const EXIT_UNAVAILABLE: i32 = 69;

/// Looks at the page with a token that may only look, or one that may `control`. `others` are two
/// VMs that are not managed: Ebb could manage the first one.
///
/// # Errors
/// That is not possible here.
fn browse(listening: &Listening, vm: &Vm, others: [&Vm; 2], control: bool) -> Result<(), String> {
    let pictures = std::env::var_os("EBB_PICTURES");
    let pictures = pictures.map_or_else(|| target_directory().join("dashboard"), PathBuf::from);
    fs::create_dir_all(&pictures).expect("a directory");
    let (token, role) = match control {
        true => (&listening.control, "control"),
        false => (&listening.read, "read"),
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(here.join("../scripts/playwright"));
    command.arg(here.join("tests/dashboard/browse.py")).arg(&listening.url).arg(vm.name());
    let pids = [vm, others[0], others[1]].map(|vm| vm.pid().to_string());
    let asked = Ran::of(command.arg(token).arg(role).arg(&pictures).args(pids));
    if asked.code == Some(EXIT_UNAVAILABLE) {
        return Err(asked.stderr.trim().into());
    }
    assert_eq!(asked.code, Some(0), "{}{}", asked.stdout, asked.stderr);
    Ok(())
}

fn pilot(host: &Host) -> PilotStatus {
    serde_json::from_str(&host.ebb("pilot --json").ok()).expect("a status")
}

#[test]
fn a_browser_shows_a_vm_and_controls_it_only_with_leave() {
    let host = Host::new();
    let listening = Listening::new(&host);
    let other = || Guest::debian("6.1-cloud").memory("256M").cpus(1);
    let (free, private) = (host.qemu(other()), host.qemu(other().ram("ram")));
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm.guest("fill kept 100M");
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    // Faults that are over before somebody looks.
    vm.ebb("evict --bytes 1G").ok();
    assert_eq!(vm.guest("check kept"), "0");
    require!(browse(&listening, &vm, [&free, &private], false));
    assert!(!pilot(&host).vms[0].hold, "a token that may look changes nothing");
    // Free memory, about which the pilot can decide something.
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    require!(browse(&listening, &vm, [&free, &private], true));
    let found = pilot(&host);
    assert!(found.vms[0].hold, "{found:?}");
    assert_eq!(found.mode, PilotMode::DryRun);
    assert_eq!(vm.status().limit.bytes, Some(400 * MIB));
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(host.list().len(), 1, "nobody has managed the others");
}
