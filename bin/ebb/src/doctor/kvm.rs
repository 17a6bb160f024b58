//! Does a stock kernel boot on `/dev/kvm`?

use ebb_sys::kvm::{self, Verdict};

use super::finding::Finding;

const CHECK: &str = "/dev/kvm";
const COST: &str = "ebb run uses QEMU's TCG: guests run several times slower";

pub fn check() -> Finding {
    let mend =
        "use a host, or a VM with nested virtualization, whose processor gives VT-x or AMD-V";
    match kvm::probe() {
        Verdict::Hardware => Finding::ok(CHECK, "guests run on the processor"),
        Verdict::Software => {
            let found = "emulates kernel mode in software: stock kernels do not get through boot";
            Finding::degraded(CHECK, found, COST, mend)
        }
        Verdict::Unusable(why) => Finding::degraded(CHECK, why, COST, mend),
    }
}
