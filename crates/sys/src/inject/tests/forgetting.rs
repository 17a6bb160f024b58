//! Tests of memory that a process is made to forget.

use rustix::process::Pid;

use super::*;
use crate::inject::victim::SHARED_BYTES;
use crate::pagemap::Pagemap;
use crate::remote_ring::{self, RemoteRing};

const LONG: Duration = Duration::from_secs(60);

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

/// The victim's page table, as its own kernel thread empties it.
#[test]
fn a_ring_forgets_without_stopping_a_thread() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let (copy, params) = match ring(&target) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            eprintln!("SKIPPED: this host forbids io_uring: {error}");
            return;
        }
        made => made.unwrap(),
    };
    let has_ring =
        || process.descriptors().unwrap().iter().any(|(_, link)| link == remote_ring::LINK);
    assert!(!has_ring(), "it is closed there");
    let mut remote = RemoteRing::new(copy, &params).unwrap();
    let mappings = process.mappings().unwrap();
    let memory = mappings.iter().find(|vma| vma.shared_write && vma.bytes == SHARED_BYTES);
    let memory = memory.map(|vma| HvaRange { start: vma.start, bytes: vma.bytes }).unwrap();
    let pagemap = Pagemap::open(&process).unwrap();
    let mapped = || {
        let mut is_mapped = false;
        pagemap.mapped(memory, |_| is_mapped = true).unwrap();
        is_mapped
    };
    for round in 0..100 {
        let words = format!("populate {} {} {}", victim.pid(), memory.start.0, memory.bytes);
        if round % 50 == 0 {
            assert!(said(&helper_for(words).output().unwrap()).contains("Ok(())"));
            assert!(mapped());
        }
        let bytes = remote.forget(&process, &[memory; 40], Instant::now() + LONG).unwrap();
        assert_eq!(bytes, 40 * memory.bytes);
        assert!(!mapped());
    }
    // Private memory would lose its content.
    let private = mappings.iter().filter(|vma| vma.writable && !vma.shared_write);
    let private: Vec<HvaRange> =
        private.map(|vma| HvaRange { start: vma.start, bytes: vma.bytes }).collect();
    remote.forget(&process, &private, Instant::now() + LONG).unwrap();
    // One piece, however late it is.
    assert_eq!(remote.forget(&process, &[memory; 2], Instant::now()).unwrap(), memory.bytes);
    drop(remote);
    victim.ends_well();
}

/// Whoever stands still answers nobody, and nobody waits for ever.
#[test]
fn a_ring_of_a_stopped_process_is_given_up() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let Ok((copy, params)) = ring(&target) else { return };
    let mut remote = RemoteRing::new(copy, &params).unwrap();
    let memory = HvaRange { start: Hva(4096), bytes: 4096 };
    let mappings = process.mappings().unwrap();
    let shared = mappings.iter().find(|vma| vma.shared_write && vma.inode != 0).unwrap();
    let memory = HvaRange { start: shared.start, ..memory };
    kill_process(Pid::from_raw(victim.pid()).unwrap(), Signal::STOP).unwrap();
    let outcome = remote.forget(&process, &[memory], Instant::now() + LONG);
    kill_process(Pid::from_raw(victim.pid()).unwrap(), Signal::CONT).unwrap();
    // The kernel thread may have done it before it stopped, too.
    if let Err(error) = outcome {
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let again = remote.forget(&process, &[memory], Instant::now() + LONG);
        assert!(again.is_err(), "nobody knows what it still does");
    }
    drop(remote);
    victim.ends_well();
}

/// Another file in its place could be cut off while it is mapped here.
#[test]
fn only_a_ring_counts_as_one() {
    let file = tempfile::tempfile().unwrap();
    let params: RingParams = "00".repeat(120).parse().unwrap();
    let error = RemoteRing::new(file.into(), &params).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}
