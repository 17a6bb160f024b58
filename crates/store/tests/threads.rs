//! A store under several threads that evict, serve faults and trim.

mod common;

use common::{Faulty, mixed, run_directory};
use ebb_store::{Compressed, Page, PageBuffer, Protection, Store, StoreError, SwapFile};

const THREADS: u64 = 3;
const ROUNDS: u64 = 150;

/// Saves, reads ahead, loads and releases pages that no other thread has.
fn work(store: &impl Store, me: u64) {
    let mut ahead = PageBuffer::new(8);
    for round in 0..ROUNDS {
        let number = |at: u64| ((round * THREADS + me) * 16 + at) * 5 + at % 5;
        let pages: Vec<Page> = (0..16).map(|at| mixed(number(at))).collect();
        let batch = store.save_batch(&pages);
        assert!(matches!(batch.error, None | Some(StoreError::Full)));
        for (slot, page) in batch.slots.iter().zip(&pages) {
            let Some(slot) = *slot else { continue };
            let loaded = store.load_batch(slot, ahead.pages_mut()).unwrap();
            assert!(loaded.has(0) && ahead.pages()[0] == *page);
            let mut back = [0; 4096];
            store.load(slot, &mut back).unwrap();
            assert!(back == *page);
            store.release(slot);
        }
        if round % 16 == me {
            store.trim().unwrap();
        }
    }
}

#[test]
fn threads_never_see_each_others_pages() {
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let medium = Faulty::new(40 * 4096);
    let behind = SwapFile::over(medium, dir.path(), 40, Protection::Checksum).unwrap();
    let store = Compressed::open(dir.path(), 4 << 16, behind).unwrap();
    std::thread::scope(|scope| {
        for me in 0..THREADS {
            let store = &store;
            scope.spawn(move || work(store, me));
        }
    });
    store.trim().unwrap();
    let usage = store.usage();
    let left = [usage.disk_slots_used, usage.memory_bytes, usage.compressed_pages];
    assert_eq!(left, [0, 0, 0]);
    assert_eq!(usage.filled_pages, 0);
}
