//! Tests of devices that a QEMU has, gets and no longer has.

use ebb_units::{FrameRange, Gfn};
use serde_json::json;

use super::*;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::machine::{self, Machine};

/// A VM whose memory in use may be evicted, and a QEMU without devices.
fn evicting() -> Option<(VmContext, Machine, Qemu)> {
    let (mut cx, machine) = machine::context()?;
    cx.record.note(|record| record.evicts = true);
    let qemu = Qemu::of(&mut cx);
    Some((cx, machine, qemu))
}

fn refusal(answer: Answer<()>) -> String {
    answer.expect_err("it is refused").to_string()
}

#[test]
fn for_a_device_that_cannot_wait_the_guest_stops_until_all_is_back() {
    let Some((mut cx, _machine, qemu)) = evicting() else { return };
    let mut devices = Devices::default();
    assert!(devices.look(&mut cx).is_none() && cx.may_take().is_ok());
    assert_eq!(qemu.told(), [""; 0]);
    qemu.plugs("vfio-pci");
    let narrowed = devices.look(&mut cx).expect("all must come back");
    assert_eq!(narrowed.reach, Reach::Nothing);
    assert_eq!(qemu.told(), ["stop"]);
    // Also the next process lets it go on only once all is back.
    assert!(cx.record.begin && devices.must_stay_stopped(&cx));
    let why = refusal(cx.may_take());
    assert!(why.contains("no memory is reclaimed because of vfio-pci x"), "{why}");
    devices.settle(&narrowed, Err(io::ErrorKind::StorageFull.into()));
    assert!(devices.must_stay_stopped(&cx));
    assert!(devices.why_stopped().is_some_and(|why| why.contains("all its memory is back")));
    devices.settle(&narrowed, Ok(0));
    assert!(!devices.must_stay_stopped(&cx) && devices.why_stopped().is_none());
    assert!(devices.look(&mut cx).is_none(), "nothing is owed any more");
}

#[test]
fn a_device_of_another_process_leaves_free_memory() {
    for evicts in [false, true] {
        let Some((mut cx, _machine, qemu)) = evicting() else { return };
        cx.record.note(|record| record.evicts = evicts);
        qemu.plugs("vhost-user-fs-pci");
        // If nothing in use was evicted, nothing must come back.
        let narrowed = Devices::default().look(&mut cx).map(|narrowed| narrowed.reach);
        assert_eq!(narrowed, evicts.then_some(Reach::FreeOnly));
        assert_eq!(qemu.told().len(), usize::from(evicts));
        assert!(cx.may_take().is_ok());
        let why = refusal(cx.may_evict_beside_devices());
        assert!(why.contains("in use is not evicted because of vhost-user-fs-pci x"), "{why}");
    }
}

#[test]
fn a_qemu_that_does_not_tell_may_have_any_device() {
    let Some((mut cx, machine)) = machine::context() else { return };
    machine.evict(&mut cx, FrameRange::new(Gfn(0), 8));
    let mut devices = Devices::default();
    assert!(devices.look(&mut cx).is_none() && !cx.reaching.is_complete);
    assert!(cx.may_take().is_ok() && cx.may_evict_beside_devices().is_err());
    assert!(devices.must_stay_stopped(&cx));
    let _qemu = Qemu::of(&mut cx);
    assert!(devices.look(&mut cx).is_none());
    assert!(cx.may_evict_beside_devices().is_ok() && !devices.must_stay_stopped(&cx));
}

/// The guest need not stop for it.
#[test]
fn a_migration_that_shares_the_memory_is_cancelled() {
    let Some((mut cx, _machine, qemu)) = evicting() else { return };
    let shares = json!([{ "capability": "x-ignore-shared", "state": true }]);
    qemu.answers("query-migrate-capabilities", shares);
    qemu.answers("query-migrate", json!({ "status": "active" }));
    let narrowed = Devices::default().look(&mut cx);
    assert!(narrowed.is_some_and(|narrowed| narrowed.reach == Reach::Nothing));
    assert_eq!(qemu.told(), ["migrate_cancel"]);
    assert!(!cx.record.begin);
}

#[test]
fn memory_that_qemu_no_longer_has_is_put_on_record_and_dropped() {
    let Some((mut cx, _machine)) = machine::with_files(2) else { return };
    let all_bytes = cx.memory_bytes();
    Devices::default().keep_regions(&mut cx, &mut OpenFiles::default());
    assert_eq!([0, 1].map(|file| cx.pager.ram().is_unplugged(file)), [false, true]);
    assert_eq!(cx.memory_bytes(), all_bytes / 2);
    let kept = Record::load(cx.record.directory()).expect("a record").expect("it is there");
    let unplugged: Vec<bool> = kept.regions.iter().map(|region| region.unplugged).collect();
    assert_eq!(unplugged, [false, true]);
}
