//! The life of a place's VMs: each works until the end, or until it is killed.

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use super::chance::Chance;
use super::place::Place;
use super::shared::{Phase, Shared};
use super::spoil;
use super::work::Work;
use crate::vm::Vm;

/// Runs VMs of this place until the soak is over.
pub fn live(shared: &Shared<'_>, place: &Place, mut chance: Chance) {
    while !shared.is_at(Phase::Last) {
        let Err(why) = guarded(|| one(shared, place, &mut chance)) else { continue };
        if !place.is_doomed() {
            shared.fail(why);
        }
        place.leave();
    }
}

/// Runs one VM to its end.
fn one(shared: &Shared<'_>, place: &Place, chance: &mut Chance) -> Result<(), String> {
    let gate = shared.gate.start();
    if shared.is_at(Phase::Last) {
        return Ok(());
    }
    let started = place.start(&shared.host, shared.files.path(), shared.number());
    drop(gate);
    let vm = &started.vm;
    let done = guarded(|| work(shared, place, vm, chance));
    let complaints = vm.complaints();
    // They count here, and a killed guest may have complained.
    vm.forgive();
    let done = match (done, complaints.is_empty() || place.is_doomed()) {
        (Ok(()), false) => Err(format!("{}: its kernel complains: {complaints:?}", vm.name())),
        (done, _) => done,
    };
    if done.is_err() && !place.is_doomed() {
        keep_evidence(shared, place, vm);
    }
    done?;
    place.leave();
    if !shared.is_at(Phase::Over) {
        place.check_disk(started);
    }
    Ok(())
}

fn work(shared: &Shared<'_>, place: &Place, vm: &Vm, chance: &mut Chance) -> Result<(), String> {
    let mut work = Work::new(shared, place, vm)?;
    while !shared.is_at(Phase::Last) {
        if shared.plan.spoils && work.holds_something() {
            spoil::flip_bytes(vm.pid());
        }
        work.step(chance)?;
        if !shared.is_at(Phase::Calm) {
            shared.pause(chance.pause(0, 60), Phase::Calm);
        }
    }
    if !shared.is_at(Phase::Over) {
        work.finish()?;
        vm.power_off();
    }
    Ok(())
}

/// Does the work, and turns a panic into an error.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(reason(panic.as_ref())))
}

fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").to_owned()
}

/// Keeps what tells why a VM failed, before its end removes it.
fn keep_evidence(shared: &Shared<'_>, place: &Place, vm: &Vm) {
    let Some(to) = shared.plan.evidence else { return };
    let text = |name: &str, text: &str| {
        let written = fs::create_dir_all(to).and_then(|()| fs::write(to.join(name), text));
        written.unwrap_or_else(|error| eprintln!("{}: {error}", to.display()));
    };
    text(&format!("{}-console.txt", vm.name()), &vm.console().text());
    text(&format!("{}-status.txt", vm.name()), &vm.ebb("status --verbose").stdout);
    text("list.txt", &shared.host.ebb("list").stdout);
    let kind = format!("{:?}, after {:?}\n", place.kind, shared.began.elapsed());
    text(&format!("{}-kind.txt", vm.name()), &kind);
    let run = shared.host.run_directory();
    for directory in [&run, &run.join("vms").join(vm.name())] {
        copy_logs(directory, to, if *directory == run { "" } else { vm.name() });
    }
}

fn copy_logs(from: &Path, to: &Path, before: &str) {
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains(".log") || name.ends_with(".json") {
            let copied = fs::copy(entry.path(), to.join(format!("{before}{name}")));
            let _ = copied.map_err(|error| eprintln!("{name}: {error}"));
        }
    }
}
