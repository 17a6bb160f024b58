//! Tests of the size controller with a QEMU that ends early.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;

use ebb_policy::resize::{BalloonPart, Driver};

use super::*;
use crate::vm::context::machine;

/// QEMU ends at its first command. The shared allocator's part is on record by then.
#[test]
fn a_goal_outlives_a_request_that_failed() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let listener = UnixListener::bind(&cx.record.qmp).expect("a socket");
    let qemu = std::thread::spawn(move || {
        let mut client = BufReader::new(listener.accept().expect("Ebb").0);
        client.get_mut().write_all(b"{\"QMP\":{}}\n").expect("a greeting");
        client.read_line(&mut String::new()).expect("qmp_capabilities");
        client.get_mut().write_all(b"{\"return\":{},\"id\":1}\n").expect("an answer");
        client.read_line(&mut String::new()).expect("balloon");
    });
    cx.qmp.reconnect();
    assert!(cx.qmp.is_connected());
    let initial_bytes = cx.initial_bytes();
    let (node_bytes, pluggers) = (vec![initial_bytes], Vec::new());
    cx.capabilities = Some(Capabilities { initial_bytes, node_bytes, pluggers, balloon: None });
    let parts = SizeParts {
        initial_bytes,
        balloon: Some(BalloonPart { ballooned_bytes: 0, driver: Driver::Ready }),
        hard_bytes: Some(0),
        ..SizeParts::default()
    };
    let plan = Plan {
        mechanism: Mechanism::Balloon,
        reason: String::new(),
        requested_bytes: Vec::new(),
        ballooned_bytes: HUGE_BYTES,
        hard_bytes: HUGE_BYTES,
    };
    let mut resize = Resize::default();
    assert!(resize.apply(&mut cx, &parts, &plan).is_err());
    assert_eq!(cx.record.size_bytes, Some(initial_bytes - HUGE_BYTES));
    assert_eq!(resize.take_goal(), SharedGoal::New);
    assert_eq!(resize.take_goal(), SharedGoal::Same);
    qemu.join().expect("QEMU");
}
