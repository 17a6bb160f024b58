//! Tests of memory that a process is made to forget.

use super::*;

#[test]
fn private_memory_is_not_forgotten() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let mappings = victim.process().mappings().unwrap();
    let private = mappings.iter().filter(|vma| vma.writable && !vma.shared_write);
    for vma in private {
        let words = format!("forget {} {} {}", victim.pid(), vma.start.0, vma.bytes);
        let output = helper_for(words).output().unwrap();
        assert!(said(&output).contains("Ok(())"), "{output:?}");
    }
    victim.ends_well();
}

/// Ranges that are left stay as they are, for the next call.
#[test]
fn a_thread_is_stopped_once_to_forget_what_can_wait() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let first = process.mappings().unwrap()[0].start;
    // Each range takes a look at the mappings.
    let ranges = vec![HvaRange { start: first, bytes: 4096 }; 100_000];
    let bytes = forget_once(&target, &ranges).unwrap();
    assert!(bytes > 0 && bytes < 4096 * ranges.len() as u64, "{bytes}");
    assert_eq!(forget_once(&target, &ranges[..1]).unwrap(), 4096);
    victim.ends_well();
}

#[test]
fn large_ranges_go_in_pieces() {
    let range = HvaRange { start: Hva(4096), bytes: 2 * FORGET_BYTES + 8192 };
    let starts: Vec<u64> = pieces(range, FORGET_BYTES).map(|piece| piece.start.0).collect();
    assert_eq!(starts, [4096, 4096 + FORGET_BYTES, 4096 + 2 * FORGET_BYTES]);
    assert_eq!(pieces(range, FORGET_BYTES).map(|piece| piece.bytes).sum::<u64>(), range.bytes);
    assert_eq!(pieces(range, FORGET_BYTES).last().unwrap().bytes, 8192);
}
