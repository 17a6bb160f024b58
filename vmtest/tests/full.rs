//! Full file systems: nobody dies of them, nothing is lost, and everything goes on once there is
//! room.

use std::path::Path;
use std::sync::Arc;

use ebb_ledger::{Content, Ledger, LedgerError, SplitError, Tables};
use ebb_store::{
    Compressed, NoRoom, Page, Protection, Quota, SharedRoom, Store, StoreError, SwapFile,
};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use vmtest::{Guest, Host, SmallFs, Vm, until};

const MIB: u64 = 1 << 20;
const HUGE_FRAMES: u64 = 64;
const END: Gfn = Gfn(HUGE_FRAMES * 512);

/// A store into a hole of a mapped file raises SIGBUS if there is no room, which ends the process.
#[test]
fn a_ledger_says_that_it_has_no_room() {
    let fs = SmallFs::tmpfs(1 << 20);
    let path = fs.path().join("ledger");
    let ledger = Ledger::create(&path, END, Tables::WhenSplit).unwrap();
    ledger.split(HugeFrame(0)).unwrap();
    let fill = fs.fill();
    assert!(matches!(ledger.split(HugeFrame(1)), Err(SplitError::NoRoom(_))));
    // Existing entries are unchanged, and whole huge frames still work.
    let saved = Content::Saved { slot: 7 };
    let _ = ledger.lock_frame(Gfn(3)).unwrap().unlock(saved);
    let _ = ledger.lock(FrameRange::huge(HugeFrame(1))).unwrap().unlock(saved);
    drop(ledger);
    let mut ledger = Ledger::open(&path, END).unwrap();
    ledger.recover(|_, _| panic!("nothing was locked"));
    assert_eq!((ledger.content(Gfn(3)), ledger.content(Gfn(512))), (saved, saved));
    assert!(matches!(ledger.split(HugeFrame(1)), Err(SplitError::NoRoom(_))));
    std::fs::remove_file(fill).unwrap();
    ledger.split(HugeFrame(1)).unwrap();
    assert_eq!(ledger.content(Gfn(1023)), saved);
}

#[test]
fn a_new_ledger_has_the_room_that_it_may_need_or_is_none() {
    let fs = SmallFs::tmpfs(1 << 20);
    let path = fs.path().join("ledger");
    let ledger = Ledger::create(&path, END, Tables::AtOnce).unwrap();
    fs.fill();
    (0..HUGE_FRAMES).for_each(|huge| assert!(!ledger.split(HugeFrame(huge)).unwrap()));
    let other = Ledger::create(&fs.path().join("other"), END, Tables::WhenSplit);
    assert!(matches!(other, Err(LedgerError::NoRoom(_))));
    let larger = Ledger::create(&path, Gfn(END.0 * 8), Tables::AtOnce);
    assert!(matches!(larger, Err(LedgerError::NoRoom(_))));
}

fn page(number: u64) -> Page {
    let mut page = [0; 4096];
    let words = page.as_chunks_mut::<8>().0.iter_mut().zip(1..);
    words.for_each(|(word, at): (_, u64)| {
        *word = (number + 1).wrapping_mul(at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    });
    page
}

#[test]
fn a_store_whose_records_have_no_room_takes_what_fits_and_keeps_it() {
    const SLOTS: u64 = 4096;
    let (run, disk) = (SmallFs::tmpfs(256 << 10), tempfile::tempdir().unwrap());
    let swap = disk.path().join("swap");
    let open = || SwapFile::open(&swap, run.path(), SLOTS, Protection::Encrypted).unwrap();
    let compressed = |bytes| Compressed::open(run.path(), bytes, open());
    // A table for 1 MiB fits; one with 512 KiB of words does not.
    let store = compressed(1 << 20).unwrap();
    let first: Vec<u64> = (0..300).map(|number| store.save(&page(number)).unwrap()).collect();
    let fill = run.fill();
    let refused = (300..4096).find_map(|number| store.save(&page(number)).err());
    assert!(matches!(refused, Some(StoreError::RunDirectory(_))), "{refused:?}");
    let check = |store: &dyn Store| {
        for (&slot, number) in first.iter().zip(0..) {
            let mut found = [0; 4096];
            store.load(slot, &mut found).unwrap();
            assert!(found == page(number), "page {number}");
        }
    };
    check(&store);
    drop(store);
    // Recovering it needs no room, however much more memory it may use.
    let store = compressed(4 << 30).unwrap();
    first.iter().for_each(|&slot| store.claim(slot).unwrap());
    check(&store);
    std::fs::remove_file(fill).unwrap();
    store.save(&page(9999)).unwrap();
}

/// Three files share the room, like those of three VMs.
#[test]
fn swap_files_keep_to_their_quota_and_leave_the_floor() {
    const SLOTS: u64 = 8192;
    let (disk, runs) = (SmallFs::ext4(32 * MIB), [(); 3].map(|()| tempfile::tempdir().unwrap()));
    let open = |room: &Arc<SharedRoom>, number: usize| {
        let path = disk.path().join(number.to_string());
        let file = SwapFile::open(&path, runs[number].path(), SLOTS, Protection::Encrypted);
        file.unwrap().within(room)
    };
    // Saves pages until no more fit. Returns the slot of each.
    let fill = |store: &dyn Store| {
        let mut slots = Vec::new();
        loop {
            let pages: Vec<Page> = (0..100).map(|at| page(slots.len() as u64 + at)).collect();
            let batch = store.save_batch(&pages);
            slots.extend(batch.slots.iter().flatten());
            if let Some(error) = batch.error {
                return (slots, error);
            }
        }
    };
    let check = |store: &dyn Store, slots: &[u64]| {
        for (&slot, number) in slots.iter().zip(0..) {
            let mut found = [0; 4096];
            store.load(slot, &mut found).unwrap();
            assert!(found == page(number), "page {number}");
        }
    };
    let quota =
        Quota { all_bytes: Some(7 * MIB), each_bytes: Some(4 * MIB), floor_bytes: Some(8 * MIB) };
    let room = SharedRoom::new(quota);
    let (one, two) = (open(&room, 0), open(&room, 1));
    let (slots, why) = fill(&one);
    assert!(matches!(why, StoreError::NoRoom(NoRoom::Each)), "{why}");
    assert!((900..=1024).contains(&slots.len()), "{}", slots.len());
    let (others, why) = fill(&two);
    assert!(matches!(why, StoreError::NoRoom(NoRoom::All)), "{why}");
    assert!((600..=768).contains(&others.len()), "{}", others.len());
    // A slot that is released and not trimmed keeps its space, whatever others do.
    one.release(slots[5]);
    assert_eq!(one.save(&page(5)).unwrap(), slots[5]);
    assert!(one.save(&page(5)).is_err());
    check(&one, &slots);
    // Once trimmed, the space is available to all.
    slots.iter().for_each(|&slot| one.release(slot));
    one.trim().unwrap();
    assert!(two.save(&page(1)).is_ok());
    check(&two, &others);
    // No swap file goes below the floor.
    let third = open(&SharedRoom::new(Quota { floor_bytes: Some(8 * MIB), ..Quota::default() }), 2);
    let (slots, why) = fill(&third);
    assert!(matches!(why, StoreError::NoRoom(NoRoom::Floor)), "{why}");
    let left = free_bytes(disk.path());
    assert!((8 * MIB - 64 * 1024..9 * MIB).contains(&left), "{left}");
    check(&third, &slots);
    // Counts are given back when the files are closed.
    drop((one, two, third));
    assert_eq!(room.taken_bytes(), 0);
}

fn free_bytes(path: &Path) -> u64 {
    let space = rustix::fs::statvfs(path).expect("it is mounted");
    space.f_bavail * space.f_frsize
}

fn limit(vm: &Vm, mib: u64) {
    vm.ebb(&format!("limit {mib}M")).ok();
    until("the limit to hold", || (vm.host_bytes() <= mib * MIB).then_some(()));
}

#[test]
fn a_full_run_directory_costs_no_byte_and_no_daemon() {
    let (run, swap) = (SmallFs::tmpfs(24 * MIB), tempfile::tempdir().unwrap());
    let host = Host::at(run.path());
    host.set("EBB_SWAP_DIR", swap.path());
    let vm = host.run(Guest::debian("6.1-cloud").memory("400M").backing("small"));
    vm.guest("fill a 150M");
    let daemon = host.daemon();
    limit(&vm, 200);
    let fill = run.fill();
    // New memory needs words in the ledger, old memory needs seals, and the console needs its log.
    vm.guest("fill b 100M");
    vm.guest("sh busybox seq 1 5000 >/dev/console");
    let needs_room = "the run directory needs room";
    let stuck = || vm.status().limit.stuck.filter(|why| why.contains(needs_room));
    until("the run directory to be named", stuck);
    // This also holds while the daemon tries again, which is every few seconds.
    for _ in 0..200 {
        let status = vm.status();
        let holds = status.resident_bytes <= 200 * MIB;
        assert!(holds || status.limit.stuck.is_some(), "{status:?}");
    }
    let warned = vm.status().warnings.iter().any(|why| why.contains("the run directory"));
    assert!(warned, "{:?}", vm.status().warnings);
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    assert_eq!(host.daemon(), daemon, "{}", host.log());
    // The next daemon needs no room to recover the VM.
    host.kill9();
    host.start();
    assert_eq!(host.list().len(), 1, "{}", host.log());
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    std::fs::remove_file(fill).unwrap();
    until("the limit to hold again", || (vm.host_bytes() <= 200 * MIB).then_some(()));
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    until("nothing to be in the way", || vm.status().limit.stuck.is_none().then_some(()));
}

/// Settings that were confirmed also hold for the next daemon, and detaching a VM needs no room.
#[test]
fn a_full_run_directory_keeps_no_setting_from_its_record() {
    let (run, swap) = (SmallFs::tmpfs(24 * MIB), tempfile::tempdir().unwrap());
    let host = Host::at(run.path());
    host.set("EBB_SWAP_DIR", swap.path());
    let vm = host.run(Guest::debian("6.1-cloud").memory("400M").backing("small"));
    vm.guest("fill a 150M");
    host.ebb("pool 1G").ok();
    limit(&vm, 200);
    run.fill();
    let again = || {
        host.kill9();
        host.start();
        let pool = host.ebb("pool").ok();
        let status = vm.status();
        (status.limit.bytes, status.auto.on, pool.lines().next().unwrap_or_default().to_owned())
    };
    vm.ebb("limit 190M").ok();
    vm.ebb("auto on").ok();
    host.ebb("pool 900M").ok();
    let (limit, auto, pool) = again();
    assert_eq!((limit, auto), (Some(190 * MIB), true));
    assert!(pool.contains("900 MiB"), "{pool}");
    vm.ebb("auto off").ok();
    vm.ebb("limit off").ok();
    host.ebb("pool off").ok();
    let (limit, auto, pool) = again();
    assert_eq!((limit, auto), (None, false));
    assert!(pool.contains("there is no pool"), "{pool}");
    vm.detach();
    assert!(host.list().is_empty());
    let left = std::fs::read_dir(host.run_directory().join("vms").join(vm.name()));
    let left = left.into_iter().flatten().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(".json")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(vm.guest("check a"), "0");
}

/// A guest at its limit waits for room in the swap directory, and for nothing else.
#[test]
fn a_guest_waits_for_room_in_the_swap_directory() {
    let swap = SmallFs::ext4(400 * MIB);
    let host = Host::new();
    host.set("EBB_SWAP_DIR", swap.path());
    host.set("EBB_SWAP_KEEP_FREE", "8M");
    let vm = host.run(Guest::debian("6.1-cloud").memory("500M").backing("small"));
    // The guest's kernel complains when it waits for long.
    vm.forgive();
    vm.guest("fill a 150M");
    let ballast = std::fs::File::create(swap.path().join("ballast")).unwrap();
    let left = free_bytes(swap.path()) - 60 * MIB;
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, left).unwrap();
    // An open file keeps its blocks.
    drop(ballast);
    limit(&vm, 200);
    vm.leave("fill b 200M");
    let waits = || {
        until("the guest to wait", || {
            Some(vm.status().limit).filter(|limit| limit.waits && limit.waiting_touches > 0)
        })
    };
    let status = waits();
    let stuck = status.stuck.unwrap_or_default();
    assert!(stuck.contains("--swap-keep-free") && stuck.contains("the guest waits"), "{stuck}");
    assert!(stuck.contains(&format!("ebb limit {} off", vm.name())), "{stuck}");
    until("the log to say so", || host.log().contains("the guest waits").then_some(()));
    let list = || host.ebb("list").ok();
    until("the list to say so", || list().contains("the guest waits").then_some(()));
    // This is refused before QEMU is asked, which may not answer.
    let why = vm.ebb("resize 450M").refused();
    assert!(why.contains("waits for room") && why.contains(&stuck), "{why}");
    let check = || {
        // The slack is for what came before it was known that there is no room. Each daemon finds
        // that out anew.
        assert!(vm.host_bytes() <= 220 * MIB, "{}", vm.host_bytes());
        assert!(free_bytes(swap.path()) >= 8 * MIB - 64 * 1024);
    };
    check();
    // The next daemon lets it wait, too.
    host.kill9();
    host.start();
    waits();
    check();
    std::fs::remove_file(swap.path().join("ballast")).unwrap();
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    until("the limit to hold", || (vm.host_bytes() <= 200 * MIB).then_some(()));
    until("the guest to wait no more", || (!vm.status().limit.waits).then_some(()));
}
