//! Overwritten seals of a swap file's slots: no slot gives a page that was not saved there.

use ebb_store::{Protection, Store, SwapFile};

use crate::overwritten::{Ramdisk, overwrite, page};

const SLOTS: u64 = 128;
const PAGES: u64 = 70;

/// Runs one input: the kind of protection, then what is overwritten.
pub fn run(data: &[u8]) {
    let Some((kind, changes)) = data.split_first() else { return };
    let kind = if kind & 1 == 1 { Protection::Encrypted } else { Protection::Checksum };
    let run = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let disk = Ramdisk::new(SLOTS as usize * 4096);
    let store = SwapFile::over(&disk, run.path(), SLOTS, kind).expect("a swap file");
    let slots: Vec<u64> =
        (0..PAGES).map(|seed| store.save(&page(seed)).expect("room for it")).collect();
    drop(store);
    overwrite(&run.path().join("swap.seals"), changes);
    let Ok(store) = SwapFile::over(&disk, run.path(), SLOTS, kind) else { return };
    for (seed, &slot) in (0..).zip(&slots) {
        let mut found = [0; 4096];
        if store.claim(slot).and_then(|()| store.load(slot, &mut found)).is_ok() {
            assert_eq!(found, page(seed), "slot {slot}");
        }
    }
    let mut batch = vec![[0; 4096]; 64];
    let _ = store.load_batch(0, &mut batch);
    let _ = store.save(&page(PAGES));
}
