//! A VM inside the test process, for tests of controllers.

use std::sync::Arc;

use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::Uffd;
use ebb_units::{Gpa, HUGE_BYTES};
use ebb_vm::Region;
use ebb_vm::ram::{Backing, Ram};
use tempfile::TempDir;

use super::{ContextParts, VmContext};
use crate::model::record::Record;
use crate::serve::disks::Disks;
use crate::serve::growth::Growth;
use crate::vm::make_pager;

/// Makes a VM with a few huge frames of RAM, an unknown guest and no control socket, and its
/// directory. `None`: this host does not let the tests be a VMM.
pub fn context() -> Option<(VmContext, TempDir)> {
    let uffd = Uffd::new().ok().filter(|uffd| make_pager::shake_hands(uffd).is_ok());
    let Some(uffd) = uffd else {
        eprintln!("SKIPPED: no userfaultfd");
        return None;
    };
    let home = tempfile::tempdir().expect("a directory");
    let text = include_str!("../../../../../fuzz/corpus/vm_json/whole");
    let mut record: Record = serde_json::from_str(text).expect("a record");
    record.swap = home.path().join("swap");
    record.qmp = home.path().join("qmp.sock");
    let bytes = 8 * HUGE_BYTES;
    let file = RamFile::create("machine", bytes).expect("memory");
    let mapping = Mapping::new(&file, 0, bytes).expect("a mapping");
    let region = Region { gpa: Gpa(0), bytes, hva: mapping.address(), file: 0, offset: 0 };
    let ram = Ram::new(vec![region], vec![Backing { file, mapping }]).expect("one region");
    let ledger = make_pager::new_ledger(&ram, &record, home.path()).expect("a ledger");
    let disks = Disks::none().expect("no disks");
    let (pager, restored) =
        make_pager::pager(ram, ledger, uffd, &disks.shared, &record, home.path()).expect("a pager");
    let (context, _) = VmContext::new(ContextParts {
        process: Process::own().expect("this process"),
        pager: Arc::new(pager),
        restored,
        qmp: None,
        record,
        directory: home.path(),
        disks,
        growth: Growth::none(),
    });
    Some((context, home))
}
