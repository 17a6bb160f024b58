//! Overwritten compressed memory: whatever the file says, each load ends, and new pages come back
//! as they were saved.

use ebb_store::{Compressed, Protection, Store, SwapFile};

use crate::overwritten::{Ramdisk, overwrite, page};

const SLOTS: u64 = 128;
const PAGES: u64 = 40;
const LIMIT_BYTES: u64 = 1 << 20;

/// Runs one input: what is overwritten.
pub fn run(data: &[u8]) {
    let run = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let disk = Ramdisk::new(SLOTS as usize * 4096);
    let open = || {
        let behind = SwapFile::over(&disk, run.path(), SLOTS, Protection::Checksum)?;
        Compressed::open(run.path(), LIMIT_BYTES, behind)
    };
    let store = open().expect("a store");
    let slots: Vec<u64> =
        (0..PAGES).map(|seed| store.save(&page(seed)).expect("room for it")).collect();
    drop(store);
    overwrite(&run.path().join("compressed"), data);
    let Ok(store) = open() else { return };
    let mut found = [0; 4096];
    for &slot in &slots {
        let _ = store.claim(slot).and_then(|()| store.load(slot, &mut found));
    }
    let _ = store.surplus();
    let _ = store.trim();
    if let Ok(slot) = store.save(&page(PAGES)) {
        store.load(slot, &mut found).expect("it was just saved");
        assert_eq!(found, page(PAGES));
    }
}
