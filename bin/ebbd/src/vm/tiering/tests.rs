//! Tests of what becomes of a monitoring's figures.

use ebb_api::Backing;
use ebb_heat::{Access, Levels, Observer};
use ebb_sys::pagemap::Pagemap;
use ebb_units::Gfn;
use ebb_vm::reach::{DeviceKind, MemoryUser};

use super::*;
use crate::model::tiers::Tiers;
use crate::vm::context::machine;

/// Frames that were read in each window. All others were not used.
const HOT: FrameRange = FrameRange::new(Gfn(1), 2);
const WINDOWS: u8 = 4;

fn tiering(cx: &VmContext) -> Tiering {
    Tiering::new(cx, Calibrated::at(cx.record.directory()))
}

/// Ends a monitoring that has seen the hot frames.
fn end_monitoring(tiering: &mut Tiering, cx: &mut VmContext) {
    let frames: Vec<FrameRange> = cx.pager.ram().regions().map(|region| region.frames()).collect();
    let mut levels = Levels::new(&frames, 0);
    for _ in 0..WINDOWS {
        levels.next_window();
        levels.saw(HOT, Access::Read);
    }
    let by = By::Vmm(Pagemap::open(&cx.process).expect("its page table"));
    tiering.end(cx, Run { windows: WINDOWS, ..Run::new(by, String::new(), levels) });
}

#[test]
fn memory_that_nothing_tells_of_is_not_monitored() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    cx.record.note(|record| record.backing = Backing::Hugetlb);
    let mut tiering = tiering(&cx);
    let why = tiering.ask(&cx, HeatRequest::default()).expect_err("nobody tells").to_string();
    assert!(why.contains("hugetlb pages"), "{why}");
    assert!(!tiering.report().monitoring && !tiering.may_be_due(&cx));
}

#[test]
fn heat_is_known_from_a_monitoring_until_a_reset() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let mut tiering = tiering(&cx);
    let begins = |tiering: &mut Tiering, cx: &VmContext, fresh| {
        tiering.ask(cx, HeatRequest { fresh }).expect("it can be monitored")
    };
    assert!(begins(&mut tiering, &cx, false) && tiering.report().monitoring);
    assert!(tiering.may_be_due(&cx) && tiering.recent_heat().is_none());
    end_monitoring(&mut tiering, &mut cx);
    let heat = tiering.recent_heat().expect("it was found just now");
    assert!(heat.of(HOT.start) > 0 && heat.hot_bytes() > 0);
    assert_eq!([0, 3].map(|gfn| heat.of(Gfn(gfn))), [0, 0]);
    assert_eq!([false, true].map(|fresh| begins(&mut tiering, &cx, fresh)), [false, true]);
    tiering.on_reset();
    assert!(tiering.recent_heat().is_none());
    assert!(begins(&mut tiering, &cx, false), "the next kernel uses other memory");
}

#[test]
fn pages_are_placed_by_heat_unless_a_device_is_in_the_way() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let tiers = Tiers {
        ladder: "node0=32M,node1=32M".into(),
        fast_bytes: 32 << 20,
        limit_bytes: None,
        compressed_bytes: 0,
        file: None,
        slots: 0,
    };
    cx.record.note(|record| record.tiers = Some(tiers));
    let mut tiering = tiering(&cx);
    let next = |tiering: &mut Tiering| tiering.placing.as_mut().expect("nodes").next.take();
    cx.reaching.found = vec![MemoryUser { name: "vfio-pci".into(), kind: DeviceKind::Vfio }];
    end_monitoring(&mut tiering, &mut cx);
    assert!(next(&mut tiering).is_none());
    cx.reaching.found.clear();
    end_monitoring(&mut tiering, &mut cx);
    let known = next(&mut tiering).expect("it is placed next");
    // Half of the windows, and a quarter.
    assert_eq!((known.kernel_degree, known.margin_degrees), (2, 1));
    let on_fast = vec![(FrameRange::new(Gfn(0), 4), vec![0; 4])];
    let order: Vec<u32> = order::order(&on_fast, &known).iter().map(|heat| heat.degree).collect();
    let hot = u32::from(WINDOWS);
    assert_eq!(order, [0, 0, hot, hot]);
    end_monitoring(&mut tiering, &mut cx);
    tiering.on_reset();
    assert!(next(&mut tiering).is_none(), "another kernel may run");
}
