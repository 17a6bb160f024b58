//! Small files that are scattered over a guest's memory.

use crate::vm::Vm;

/// Files of 48 KiB in a guest's memory, each beside a hole of that size.
pub struct ScatteredFiles<'v> {
    vm: &'v Vm,
    checksum: String,
}

impl ScatteredFiles<'_> {
    /// Has the guest make so many of them.
    pub fn make(vm: &Vm, files: u32) -> ScatteredFiles<'_> {
        vm.guest(&format!(
            "sh busybox mkdir /tmp/keep /tmp/go; i=0; while [ $i -lt {files} ]; do \
             for at in keep go; do busybox head -c 49152 /dev/urandom >/tmp/$at/$i; done; \
             i=$((i+1)); done; busybox rm -r /tmp/go"
        ));
        ScatteredFiles { vm, checksum: checksum(vm) }
    }

    /// Fails the test unless the files have the content with which they were made.
    pub fn check(&self) {
        assert_eq!(checksum(self.vm), self.checksum);
    }
}

fn checksum(vm: &Vm) -> String {
    vm.guest("sh cd /tmp/keep && busybox cat * | busybox md5sum")
}
