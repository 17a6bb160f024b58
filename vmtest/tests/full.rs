//! File systems without room: nobody dies of it, nothing is lost, and room makes it good.

use ebb_ledger::{Content, Ledger, LedgerError, SplitError, Tables};
use ebb_store::{Compressed, Page, Protection, Store, StoreError, SwapFile};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use vmtest::SmallFs;

const HUGE_FRAMES: u64 = 64;
const END: Gfn = Gfn(HUGE_FRAMES * 512);

/// A store into a hole of a mapped file ends the process by SIGBUS where there is no room.
#[test]
fn a_ledger_says_that_it_has_no_room() {
    let fs = SmallFs::tmpfs(1 << 20);
    let path = fs.path().join("ledger");
    let ledger = Ledger::create(&path, END, Tables::WhenSplit).unwrap();
    ledger.split(HugeFrame(0)).unwrap();
    let fill = fs.fill();
    assert!(matches!(ledger.split(HugeFrame(1)), Err(SplitError::NoRoom(_))));
    // What was there is as it was, and whole huge frames go on.
    let saved = Content::Saved { slot: 7 };
    let _ = ledger.lock_frame(Gfn(3)).unwrap().unlock(saved);
    let _ = ledger.lock(FrameRange::huge(HugeFrame(1))).unwrap().unlock(saved);
    drop(ledger);
    let mut ledger = Ledger::open(&path, END).unwrap();
    ledger.recover(|_, _| panic!("nothing was held"));
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
    // A table for 1 MiB fits, one for what has 512 KiB of words does not.
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
    // Who takes it up needs no room, whatever it may have more.
    let store = compressed(4 << 30).unwrap();
    first.iter().for_each(|&slot| store.claim(slot).unwrap());
    check(&store);
    std::fs::remove_file(fill).unwrap();
    store.save(&page(9999)).unwrap();
}
