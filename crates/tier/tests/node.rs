//! The node tier on this host, which may have only one node: what is there stays there.
//! `vmtest/tests/tier.rs` has two nodes.

use std::sync::Arc;

use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_tier::{Mover, Node, Outcome, Pages, RateLimiter, Tier, TierError, TierKind, host};
use ebb_units::{Gfn, Gpa};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region};

const BYTES: u64 = 1 << 20;

/// RAM that this process has mapped, with every second page resident.
fn ram() -> (Arc<Ram>, Mapping) {
    let file = RamFile::create("node", BYTES).unwrap();
    let vmm = Mapping::new(&file, 0, BYTES).unwrap();
    // A kernel without huge pages need not be told.
    let _ = vmm.use_huge_pages(false);
    for page in (0..BYTES / 4096).step_by(2) {
        vmm.populate(page * 4096, 4096).unwrap();
    }
    let mapping = Mapping::new(&file, 0, BYTES).unwrap();
    let region = Region { gpa: Gpa(0), bytes: BYTES, hva: vmm.address(), file: 0, offset: 0 };
    (Arc::new(Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap()), vmm)
}

fn node(number: u32, process: &Arc<Process>, ram: &Arc<Ram>) -> Node {
    let mover = Mover::new(3, 16, RateLimiter::unlimited());
    let pages = Pages::of_vmm(Arc::clone(process), Arc::clone(ram), mover);
    Node::new(number, Arc::new(pages))
}

#[test]
fn pages_of_the_only_node_are_there_and_holes_are_not() {
    let [first] = host::nodes().unwrap()[..] else {
        eprintln!("SKIPPED: this host has more than one node");
        return;
    };
    let (ram, _vmm) = ram();
    let process = Arc::new(Process::open(std::process::id() as i32).unwrap());
    let tier = node(first.number, &process, &ram);
    assert_eq!(tier.kind(), TierKind::Node(first.number));
    let frames: Vec<Gfn> = (0..BYTES / 4096).rev().map(Gfn).collect();
    let outcomes = tier.bring(&frames).unwrap();
    for (gfn, outcome) in frames.iter().zip(&outcomes) {
        let expected = [Outcome::There, Outcome::Nothing][(gfn.0 % 2) as usize];
        assert_eq!(*outcome, expected, "{gfn:?}");
    }
    assert_eq!(ram.resident_bytes().unwrap(), BYTES / 2);
    assert_eq!(tier.bring(&[Gfn(1 << 40)]).unwrap(), [Outcome::Nothing]);
    assert!(tier.bring(&[]).unwrap().is_empty());
    let refused = node(1000, &process, &ram).bring(&frames);
    assert!(matches!(refused, Err(TierError::NoNode { node: 1000, .. })), "{refused:?}");
}

#[test]
fn a_vm_that_has_ended_is_named() {
    let (ram, _vmm) = ram();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let process = Arc::new(Process::open(child.id() as i32).unwrap());
    child.wait().unwrap();
    let ended = node(0, &process, &ram).bring(&[Gfn(0)]);
    assert!(matches!(ended, Err(TierError::VmEnded)), "{ended:?}");
}
