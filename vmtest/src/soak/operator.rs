//! Asks all kinds of things of Ebb, whether they make sense at that moment or not.

use std::time::Instant;

use ebb_api::{ErrorCode, route};
use serde_json::{Value, json};

use super::chance::Chance;
use super::place::{Place, Running};
use super::request::{self, Answer};
use super::shared::{Phase, Shared};
use super::tally::count;

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    Reclaim,
    Auto,
    Limit,
    Evict,
    Resize,
    Share,
    Pool,
    Rule,
    Pilot,
    Heat,
    Status,
    Look,
    Detach,
    Observe,
}

/// How often what is asked.
const VERBS: [(u64, Verb); 14] = [
    (14, Verb::Reclaim),
    (5, Verb::Auto),
    (16, Verb::Limit),
    (8, Verb::Evict),
    (10, Verb::Resize),
    (3, Verb::Share),
    (2, Verb::Pool),
    (10, Verb::Rule),
    (10, Verb::Pilot),
    (3, Verb::Heat),
    (8, Verb::Status),
    (6, Verb::Look),
    (4, Verb::Detach),
    (2, Verb::Observe),
];

/// A request, ready to be sent.
struct Wanted {
    what: &'static str,
    method: &'static str,
    path: String,
    body: Value,
}

/// Asks until the soak is over.
pub fn ask(shared: &Shared<'_>, mut chance: Chance) {
    let places: Vec<&Place> = shared.places.iter().collect();
    while shared.pause(chance.pause(20, 900), Phase::Calm) {
        let place = chance.of(&places);
        if let Some(vm) = place.running() {
            one(shared, place, &vm, &mut chance);
        }
    }
}

fn one(shared: &Shared<'_>, place: &Place, vm: &Running, chance: &mut Chance) {
    let verb = if vm.is_detached { Verb::Detach } else { chance.weighted(&VERBS) };
    if verb == Verb::Observe {
        let ran = shared.host.ebb(&format!("observe --pid {} --json", vm.pid));
        return shared.tally(|tally| {
            count(&mut tally.requests, "observe");
            if ran.code != Some(0) {
                tally.refused("observe", ran.stderr.trim_end());
            }
        });
    }
    let wanted = wanted(verb, vm, chance);
    let socket = shared.host.run_directory().join(route::SOCKET_FILE);
    let began = Instant::now();
    let matters = || !shared.is_at(Phase::Over) && !(shared.plan.is_interrupted)();
    let asked = (wanted.method, &*wanted.path, &wanted.body);
    let answer = request::send(&socket, asked, matters);
    let ms = began.elapsed().as_millis() as u64;
    if verb == Verb::Detach {
        note_detached(place, vm, &answer);
    }
    match answer {
        Answer::Done => shared.tally(|tally| tally.answered(wanted.what, ms)),
        Answer::Refused(code, why) => shared.tally(|tally| {
            tally.answered(wanted.what, ms);
            tally.refused(code.as_str(), &format!("{}: {why}", wanted.what));
        }),
        Answer::Nobody => shared.tally(|tally| {
            count(&mut tally.requests, wanted.what);
            tally.refused("no daemon", wanted.what);
        }),
        Answer::Silent => shared.fail(format!("{} {}: no answer", vm.name, wanted.what)),
    }
}

/// Notes what became of a detach or an attach. An outcome that is not known is found out by the
/// next one.
fn note_detached(place: &Place, vm: &Running, answer: &Answer) {
    let is_detached = match answer {
        Answer::Done => !vm.is_detached,
        Answer::Refused(ErrorCode::Taken, _) => false,
        Answer::Refused(ErrorCode::UnknownVm | ErrorCode::VmOver, _) => true,
        _ => vm.is_detached,
    };
    place.set_detached(&vm.name, is_detached);
}

fn wanted(verb: Verb, vm: &Running, chance: &mut Chance) -> Wanted {
    let of_vm = |route| route::of_vm(route, &vm.name);
    let ask = |what, method, path, body| Wanted { what, method, path, body };
    let percent = |chance: &mut Chance, least, most| {
        vm.memory_bytes / 100 * chance.within(least, most) / MIB * MIB
    };
    // Nothing, in place of a size, once in some times.
    let or_off = |chance: &mut Chance, bytes: u64| (!chance.once_in(4)).then_some(bytes);
    match verb {
        Verb::Reclaim => {
            let bytes = chance.once_in(3).then(|| chance.within(1, 64) * MIB);
            ask("reclaim", "POST", of_vm(route::RECLAIM), json!({ "bytes": bytes }))
        }
        Verb::Auto => {
            let body = json!({ "on": !chance.once_in(3), "interval_ms": chance.within(300, 4000) });
            ask("auto", "PUT", of_vm(route::AUTO), body)
        }
        Verb::Limit => {
            let bytes = percent(chance, 30, 95);
            ask("limit", "PUT", of_vm(route::LIMIT), json!({ "bytes": or_off(chance, bytes) }))
        }
        Verb::Evict => {
            let body = json!({ "bytes": chance.within(1, 48) * MIB });
            ask("evict", "POST", of_vm(route::EVICT), body)
        }
        Verb::Resize => {
            let bytes = match vm.max_bytes > vm.memory_bytes {
                true => chance.within(vm.memory_bytes / MIB, vm.max_bytes / MIB) * MIB,
                false => percent(chance, 75, 100),
            };
            ask("resize", "PUT", of_vm(route::SIZE), json!({ "bytes": or_off(chance, bytes) }))
        }
        Verb::Share => {
            let bytes = percent(chance, 50, 90);
            ask("share", "PUT", of_vm(route::SHARE), json!({ "bytes": or_off(chance, bytes) }))
        }
        Verb::Pool => {
            let bytes = chance.within(400, 2000) * MIB;
            let body = json!({ "bytes": or_off(chance, bytes) });
            ask("pool", "PUT", route::POOL.to_owned(), body)
        }
        Verb::Rule => ask("rule", "PUT", of_vm(route::RULE), rule(vm, chance)),
        Verb::Pilot => {
            let mode = chance.weighted(&[(6, "on"), (2, "dry_run"), (2, "off")]);
            let body = json!({ "mode": mode, "reserve_percent": chance.of(&[5, 10, 40, 90, 90]) });
            ask("pilot", "PUT", route::PILOT.to_owned(), body)
        }
        Verb::Heat => ask("heat", "POST", of_vm(route::HEAT), json!({ "fresh": true })),
        Verb::Status => ask("status", "GET", of_vm(route::VM), Value::Null),
        Verb::Look => {
            let path = chance.of(&[route::VMS, route::TOP, route::PILOT, route::POOL]);
            ask("look", "GET", path.to_owned(), Value::Null)
        }
        Verb::Detach | Verb::Observe if vm.is_detached => {
            let body = json!({ "name": vm.name, "pid": vm.pid, "qmp": vm.qmp });
            ask("attach", "POST", route::ATTACH.to_owned(), body)
        }
        Verb::Detach | Verb::Observe => ask("detach", "DELETE", of_vm(route::VM), Value::Null),
    }
}

fn rule(vm: &Running, chance: &mut Chance) -> Value {
    json!({
        "class": chance.of(&["batch", "normal", "latency"]),
        "weight": chance.of(&[1, 100, 10_000]),
        "min_bytes": if chance.once_in(3) { vm.memory_bytes / 2 } else { 0 },
        "max_bytes": if chance.once_in(4) { vm.memory_bytes / 4 * 3 } else { 0 },
        "hold": chance.once_in(5),
    })
}
