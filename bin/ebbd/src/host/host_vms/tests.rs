//! What two looks at made-up VMs tell together.

use ebb_inspect::Counters;
use ebb_observe::{Manager, NotKnown};

use super::*;

fn vm(pid: i32, name: Option<&str>, obstacle: Option<&str>) -> Found {
    Found {
        pid,
        name: name.map(Into::into),
        uuid: None,
        manager: Manager::Unknown,
        memory_bytes: 1 << 30,
        obstacle: obstacle.map(Into::into),
    }
}

/// A guest that boots.
fn guest(pid: i32) -> Guest {
    Guest { pid, name: None, observed: Ok(observed(Err(NotKnown::Counters))) }
}

fn observed(usage: Result<Usage, NotKnown>) -> Observed {
    Observed { memory_bytes: 1 << 30, resident_bytes: 7, usage }
}

/// What is told of these VMs, whose guests all boot. The VM of process 6 is managed.
fn tell(found: Vec<Found>) -> Vec<HostVm> {
    let guests = found.iter().map(|vm| guest(vm.pid)).collect();
    let managed = BTreeMap::from([(6, "old".parse().unwrap())]);
    told(both(guests, found), &managed, |name| ["old", "detached"].contains(&name.as_str()))
}

#[test]
fn each_vm_is_managed_or_has_a_name_for_it_or_a_reason_against_it() {
    let told = tell(vec![
        vm(1, Some("web"), None),
        vm(2, Some("web"), None),
        vm(3, Some("a b"), None),
        vm(4, None, None),
        vm(5, Some("db"), Some("its RAM is no shared memfd")),
        vm(6, Some("x"), Some("it has a userfaultfd already")),
        vm(7, Some("detached"), None),
    ]);
    let in_words = |vm: &HostVm| match (&vm.managed_as, &vm.attach_as, &vm.obstacle) {
        (Some(name), None, None) => format!("{} is {name}", vm.pid),
        (None, Some(name), None) => format!("{} as {name}", vm.pid),
        (None, None, Some(why)) => format!("{}: {why}", vm.pid),
        _ => panic!("{vm:?}"),
    };
    assert_eq!(
        told.iter().map(in_words).collect::<Vec<_>>(),
        [
            "1 as web",
            "2 as vm-2",
            "3 as vm-3",
            "4 as vm-4",
            "5: its RAM is no shared memfd",
            "6 is old",
            "7 as vm-7",
        ]
    );
}

#[test]
fn what_is_not_known_has_a_reason() {
    let counters = Counters {
        total_bytes: 100,
        free_bytes: 30,
        cache_bytes: 20,
        cold_cache_bytes: 10,
        anonymous_bytes: 40,
        slab_bytes: 5,
        ..Counters::default()
    };
    let usage = Usage { release: "6.1".into(), counters, reclaimable_bytes: 25 };
    let of = |observed| plain(vm(7, None, None), Guest { pid: 7, name: None, observed });
    let known = of(Ok(observed(Ok(usage))));
    assert_eq!((known.resident_bytes, known.reason), (Some(7), None));
    let expected = GuestUsage {
        release: "6.1".into(),
        total_bytes: 100,
        used_bytes: 50,
        anonymous_bytes: 40,
        slab_bytes: 5,
        cache_bytes: 20,
        cold_cache_bytes: 10,
        free_bytes: 30,
        reclaimable_bytes: 25,
    };
    assert_eq!(known.usage, Some(expected));
    let boots = of(Ok(observed(Err(NotKnown::Counters))));
    assert_eq!((boots.resident_bytes, boots.usage), (Some(7), None));
    assert!(boots.reason.is_some_and(|why| why.contains("still booting")));
    let hidden = of(Err("its RAM is in /disk".into()));
    assert_eq!((hidden.resident_bytes, hidden.usage), (None, None));
    assert_eq!(hidden.reason.as_deref(), Some("its RAM is in /disk"));
}

#[test]
fn an_answer_has_a_bound() {
    let most = i32::try_from(HOST_VMS_MAX).unwrap();
    let told = tell((1..=most + 5).map(|pid| vm(pid, None, None)).collect());
    assert_eq!((told.len(), told[0].pid, told.last().unwrap().pid), (HOST_VMS_MAX, 1, most));
}

#[test]
fn what_only_one_look_has_seen_is_left_out() {
    let both = both(vec![guest(1), guest(2)], vec![vm(2, None, None), vm(3, None, None)]);
    let pids: Vec<(i32, i32)> = both.iter().map(|(found, guest)| (found.pid, guest.pid)).collect();
    assert_eq!(pids, [(2, 2)]);
}
