//! Does a stock kernel boot on `/dev/kvm`?

use std::path::Path;

use ebb_sys::kvm::{self, Verdict};

use super::finding::Finding;

const CHECK: &str = "/dev/kvm";
const COST: &str = "ebb run uses QEMU's TCG: guests run several times slower";

pub fn check(as_root: bool) -> Finding {
    let mend =
        "use a host, or a VM with nested virtualization, whose processor gives VT-x or AMD-V";
    match kvm::probe() {
        Verdict::Hardware => Finding::ok(CHECK, "guests run on the processor"),
        Verdict::Software => {
            let found = "emulates kernel mode in software: stock kernels do not get through boot";
            Finding::degraded(CHECK, found, COST, mend)
        }
        // The daemon is root and may well be able to use it.
        Verdict::Unusable(why) if !as_root && Path::new(CHECK).exists() => {
            Finding::unknown(CHECK, why)
        }
        Verdict::Unusable(why) => Finding::degraded(CHECK, why, COST, mend),
    }
}
