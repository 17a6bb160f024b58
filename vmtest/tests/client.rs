//! Clients on other machines, and the Python client, against a real daemon with a real VM.

use std::path::PathBuf;
use std::process::Command;

use ebb_api::VmSummary;
use vmtest::{Guest, Host, Listening, Ran, Vm, until_fits};

const MIB: u64 = 1 << 20;

fn run(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm
}

fn client(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../clients/python")).join(file)
}

/// Python that finds the client, in the host's run directory.
fn python(host: &Host) -> Command {
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", client("")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("EBB_RUN_DIR", host.run_directory());
    command.env_remove("EBB_HOST");
    command
}

#[test]
fn python_has_a_vm_give_memory_back() {
    let host = Host::new();
    let listening = Listening::new(&host);
    let vm = run(&host);
    let give_back = client("examples/give_back.py");
    for is_remote in [false, true] {
        vm.guest("fill kept 50M");
        vm.guest("fill freed 200M");
        vm.guest("free freed");
        let before = vm.host_bytes();
        let mut command = python(&host);
        if is_remote {
            listening.tell(&mut command, true);
        }
        let said = Ran::of(command.arg(&give_back)).ok();
        assert!(
            said.contains(&format!("{}: ", vm.name())) && said.contains(" MiB in all"),
            "{said}"
        );
        let after = vm.host_bytes();
        assert!(after + 100 * MIB < before, "{before} {after}: {said}");
        assert_eq!(vm.guest("check kept"), "0");
        vm.guest("free kept");
    }
    let mut command = python(&host);
    let refused = Ran::of(listening.tell(&mut command, false).arg(&give_back));
    assert!(refused.stderr.contains("this token may only look"), "{refused:?}");
}

/// What a program of a user's does: it looks, changes, and hears why it cannot.
const CALLS: &str = r#"
import sys
from ebb_client import *
name, ebb = sys.argv[1], Client.from_environment()
assert [vm.name for vm in ebb.list()] == [name]
assert ebb.status(name).limit.bytes is None
assert ebb.status(name, counts=True).memory_bytes == 512 << 20
assert ebb.limit(name, LimitRequest(bytes=400 << 20)).bytes == 400 << 20
assert ebb.limit(name, LimitRequest()).bytes is None
assert ebb.auto(name, AutoRequest(on=True, keep_bytes=1 << 20)).keep_bytes == 1 << 20
assert ebb.rule(name, RuleRequest(class_="batch")).mode == "off"
assert ebb.pilot().vms[0].class_ == "batch"
assert ebb.openapi()["info"]["title"] == "Ebb"
def refusal(call):
    try:
        call()
    except EbbError as error:
        return error
assert refusal(lambda: ebb.status("nobody")).code == "unknown_vm"
assert any(event.state and event.vm == name for event in ebb.events(follow=False, type="state"))
assert ebb.rule(name, RuleRequest(class_="normal")) and next(ebb.events()).number > 0
assert refusal(lambda: ebb.limit(name, LimitRequest(bytes=1))).status == 422
print(refusal(lambda: ebb.attach(AttachRequest(name="other", pid=1))).status)
assert ebb.detach(name).restored_bytes >= 0
assert ebb.list() == []
"#;

#[test]
fn python_calls_what_the_daemon_has() {
    let host = Host::new();
    let listening = Listening::new(&host);
    for (is_remote, status) in [(false, "400\n"), (true, "403\n")] {
        let vm = run(&host);
        let mut command = python(&host);
        if is_remote {
            listening.tell(&mut command, true);
        }
        assert_eq!(Ran::of(command.args(["-c", CALLS, vm.name()])).ok(), status);
    }
}

#[test]
fn ebb_asks_another_host() {
    let host = Host::new();
    let listening = Listening::new(&host);
    let vm = run(&host);
    let (read, control) = (false, true);
    let ebb = |control: bool, line: &str| listening.ebb(&host, control, line);
    let listed: Vec<VmSummary> = serde_json::from_str(&ebb(read, "list --json").ok()).expect("VMs");
    assert_eq!(listed[0].name.as_str(), vm.name());
    assert!(ebb(read, &format!("status {}", vm.name())).ok().contains("512 MiB"));
    assert!(ebb(read, "events").ok().contains(&format!("{} state ", vm.name())));
    ebb(control, &format!("limit {} 400M", vm.name())).ok();
    assert_eq!(vm.status().limit.bytes, Some(400 * MIB));
    for (control, line, why) in [
        (read, format!("limit {} 300M", vm.name()), "this token may only look"),
        (read, "status nobody".into(), "there is no VM nobody"),
        (control, "run --name a --memory 1G --kernel /bin/true".into(), "only on its own host"),
        (control, "attach --name a --pid 1".into(), "only on its own host"),
        (control, "doctor".into(), "the host that it runs on"),
        (read, "--ca /dev/null list".into(), "it has no certificate"),
        (read, "--token-file /dev/null list".into(), "is no file"),
        (read, "--host https://127.0.0.1:1 list".into(), "https://127.0.0.1:1: Connection refused"),
        (read, "--host http://127.0.0.1:1 list".into(), "only over TLS"),
    ] {
        let refused = ebb(control, &line).refused();
        assert!(refused.contains(why), "{line}: {refused}");
    }
    assert_eq!(vm.status().limit.bytes, Some(400 * MIB));
    // Without the file, this machine's authorities count, and none knows the certificate.
    let mut unknown = host.command("ebb");
    let refused = Ran::of(listening.tell(&mut unknown, read).env_remove("EBB_CA").arg("list"));
    let refused = refused.refused();
    assert!(refused.contains("--ca"), "{refused}");
    // The certificate has another name.
    let other = listening.url.replace("localhost", "127.0.0.1");
    let refused = ebb(read, &format!("--host {other} list")).refused();
    assert!(refused.contains("its TLS is refused: "), "{refused}");
}

#[test]
fn a_daemon_without_its_files_does_not_start() {
    let host = Host::new();
    let mut command = host.command("ebbd");
    let why = Ran::of(command.args(["--listen", "127.0.0.1:0"])).refused();
    assert!(why.contains("--listen needs --tls-cert"), "{why}");
    host.set("EBB_LISTEN", "127.0.0.1:0");
    host.set("EBB_TLS_CERT", "/nowhere/ebbd.crt");
    host.set("EBB_TLS_KEY", "/nowhere/ebbd.key");
    host.set("EBB_TOKENS", "/nowhere/tokens");
    let why = host.ebb("pool 1G").refused();
    assert!(why.contains("/nowhere/ebbd.crt: No such file"), "{why}");
    until_fits("no process", || host.processes(), Vec::is_empty);
}
