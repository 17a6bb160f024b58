//! What a store reports when its medium fails or lies.

mod common;

use common::{Fault, Faulty, noise};
use ebb_store::{Page, PageBuffer, Protection, Store, StoreError, SwapFile};

const BOTH: [Protection; 2] = [Protection::Encrypted, Protection::Checksum];

fn with_store(protection: Protection, test: impl Fn(&Faulty, &SwapFile<Faulty>)) {
    let dir = tempfile::tempdir().unwrap();
    let medium = Faulty::new(512 * 4096);
    test(&medium, &SwapFile::over(medium.clone(), dir.path(), 512, protection).unwrap());
}

fn pages(count: u64) -> PageBuffer {
    let mut buffer = PageBuffer::new(count as usize);
    buffer.pages_mut().iter_mut().zip(0..).for_each(|(page, number)| *page = noise(number));
    buffer
}

#[test]
fn pages_not_known_to_be_stored_are_reported_so() {
    // Faults of the next writes, and how many of 300 pages are stored then.
    let cases = [
        (vec![Fault::Error], 0),
        (vec![Fault::Torn(10 * 4096)], 0),
        (vec![Fault::Short(10 * 4096 + 100), Fault::Error], 10),
        (vec![Fault::Short(4095)], 0),
        (vec![Fault::Short(0)], 0),
        (vec![Fault::None, Fault::Error], 256),
        (vec![Fault::Short(4096), Fault::Short(8192)], 300),
    ];
    for protection in BOTH {
        for (faults, stored) in &cases {
            with_store(protection, |medium, store| {
                medium.state().faults.clone_from(faults);
                let batch = store.save_batch(pages(300).pages());
                let known = batch.slots.iter().flatten().count();
                assert_eq!(known, *stored, "{faults:?}");
                assert_eq!(batch.error.is_some(), known < 300);
                assert_eq!(store.usage().disk_slots_used, known as u64);
                for (slot, number) in batch.slots.iter().flatten().zip(0..) {
                    let mut page = [0; 4096];
                    store.load(*slot, &mut page).unwrap();
                    assert!(page == noise(number));
                }
            });
        }
    }
}

#[test]
fn a_full_store_takes_what_fits() {
    with_store(Protection::Encrypted, |_, store| {
        let batch = store.save_batch(pages(600).pages());
        assert!(matches!(batch.error, Some(StoreError::Full)));
        assert_eq!(batch.runs().collect::<Vec<_>>(), [(0, 0, 512)]);
        store.release(7);
        assert_eq!(store.save(&noise(1)).unwrap(), 7);
    });
}

#[test]
fn damage_is_found_and_touches_nothing_else() {
    for protection in BOTH {
        with_store(protection, |medium, store| {
            let batch = store.save_batch(pages(20).pages());
            assert!(batch.error.is_none());
            medium.state().bytes[5 * 4096 + 1234] ^= 4;
            // A misdirected write: the right bytes for the wrong slot.
            medium.state().bytes.copy_within(8 * 4096..9 * 4096, 9 * 4096);
            let mut page: Page = [1; 4096];
            for slot in [5, 9] {
                let result = store.load(slot, &mut page);
                assert!(matches!(result, Err(StoreError::Damaged { slot: s }) if s == slot));
                assert_eq!(page, [1; 4096]);
            }
            let mut buffer = PageBuffer::new(20);
            let loaded = store.load_batch(0, buffer.pages_mut()).unwrap();
            for (index, page) in buffer.pages().iter().enumerate() {
                assert_eq!(loaded.has(index), ![5, 9].contains(&index));
                assert!(!loaded.has(index) || *page == noise(index as u64));
            }
            let mut indices = Vec::new();
            let mut ready = |index: usize, page: &Page| {
                assert_eq!(*page, noise(index as u64));
                indices.push(index);
            };
            store.load_some(0, buffer.pages_mut(), &[9, 4, 5, 19, 20], &mut ready).unwrap();
            assert_eq!(indices, [4, 19]);
        });
    }
}

#[test]
fn a_lost_write_is_found() {
    for protection in BOTH {
        with_store(protection, |medium, store| {
            let slot = store.save(&noise(1)).unwrap();
            let before = medium.copy();
            store.release(slot);
            // Slots after it are taken before it is taken again, so all slots are taken.
            let batch = store.save_batch(pages(512).pages());
            let again = batch.slots.iter().position(|s| *s == Some(slot)).unwrap();
            let old = before.state().bytes[..4096].to_vec();
            medium.state().bytes[slot as usize * 4096..][..4096].copy_from_slice(&old);
            let result = store.load(slot, &mut [0; 4096]);
            assert!(matches!(result, Err(StoreError::Damaged { .. })), "page {again}");
        });
    }
}

#[test]
fn a_medium_that_cannot_be_read_says_so() {
    with_store(Protection::Encrypted, |medium, store| {
        let slot = store.save(&noise(1)).unwrap();
        medium.state().blind = true;
        assert!(matches!(store.load(slot, &mut [0; 4096]), Err(StoreError::Medium(_))));
        assert!(store.load_batch(slot, PageBuffer::new(4).pages_mut()).is_err());
        let mut none = |_: usize, _: &Page| panic!("it cannot be read");
        assert!(store.load_some(slot, PageBuffer::new(4).pages_mut(), &[0], &mut none).is_err());
        medium.state().blind = false;
        medium.state().bytes.truncate(100);
        assert!(matches!(store.load(slot, &mut [0; 4096]), Err(StoreError::Medium(_))));
    });
}
