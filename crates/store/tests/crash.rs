//! A daemon that dies at any write. It leaves behind the medium as it was then, with whole pages
//! written or torn, and the run directory, whose mapped files keep every store that was made.
//! Every slot that the ledger names must then read as it was saved. A slot that the ledger does
//! not name may contain anything. If it is claimed all the same, it must read as something once
//! saved there or as damaged, and never as another slot's bytes.

mod common;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::{fs, io};

use common::{Faulty, mixed, noise, run_directory};
use ebb_store::{Compressed, Medium, Page, Protection, Store, StoreError, SwapFile};
use proptest::prelude::*;

const SLOTS: u64 = 300;

/// A medium whose daemon dies at one of the writes, after some of its bytes.
#[derive(Clone)]
struct Mortal<'a> {
    medium: Faulty,
    writes_left: &'a AtomicUsize,
    torn_bytes: usize,
}

impl Medium for Mortal<'_> {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.medium.read_at(offset, bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        let left = self.writes_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        if left.is_err() {
            self.medium.write_at(offset, &bytes[..self.torn_bytes.min(bytes.len())])?;
            // Unwind without a panic's message: the death is part of the test.
            std::panic::resume_unwind(Box::new("the daemon dies"));
        }
        self.medium.write_at(offset, bytes)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.medium.discard(offset, bytes)
    }

    fn is_direct(&self) -> bool {
        true
    }
}

#[derive(Clone, Debug)]
enum Step {
    Save(usize),
    Release(usize),
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1..60usize).prop_map(Step::Save),
        3 => any::<usize>().prop_map(Step::Release),
        1 => Just(Step::Trim),
    ]
}

/// What outlives the daemon, and the number of pages made so far.
#[derive(Default)]
struct World {
    ledger: BTreeMap<u64, Page>,
    number: u64,
}

impl World {
    fn work(&mut self, store: &dyn Store, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Save(count) => {
                    let pages: Vec<Page> =
                        (0..*count as u64).map(|at| noise(self.number + at)).collect();
                    self.number += pages.len() as u64;
                    let batch = store.save_batch(&pages);
                    let stored = batch.slots.into_iter().zip(pages);
                    self.ledger.extend(stored.filter_map(|(slot, page)| Some((slot?, page))));
                }
                Step::Release(which) => {
                    let slots = self.ledger.len().max(1);
                    if let Some(&slot) = self.ledger.keys().nth(which % slots) {
                        self.ledger.remove(&slot);
                        store.release(slot);
                    }
                }
                Step::Trim => store.trim().unwrap(),
            }
        }
    }
}

fn survives(protection: Protection, lives: &[(Vec<Step>, usize, usize)]) {
    let (dir, medium) = (tempfile::tempdir().unwrap(), Faulty::new(SLOTS as usize * 4096));
    let mut world = World::default();
    for (steps, writes, torn_bytes) in lives {
        let writes_left = AtomicUsize::new(*writes);
        let mortal =
            Mortal { medium: medium.clone(), writes_left: &writes_left, torn_bytes: *torn_bytes };
        let store = SwapFile::over(mortal, dir.path(), SLOTS, protection).unwrap();
        world.ledger.keys().for_each(|slot| store.claim(*slot).unwrap());
        let died = catch_unwind(AssertUnwindSafe(|| world.work(&store, steps)));
        drop((store, died));
        look(&medium, dir.path(), protection, &world.ledger);
    }
}

/// Reads everything as the next daemon would.
fn look(medium: &Faulty, run: &Path, protection: Protection, ledger: &BTreeMap<u64, Page>) {
    let store = SwapFile::over(medium.copy(), run, SLOTS, protection).unwrap();
    ledger.keys().for_each(|slot| store.claim(*slot).unwrap());
    let mut page = [0; 4096];
    for (slot, expected) in ledger {
        store.load(*slot, &mut page).unwrap();
        assert!(page == *expected, "slot {slot}");
    }
    let live: Vec<&Page> = ledger.values().collect();
    for slot in (0..SLOTS).filter(|slot| !ledger.contains_key(slot)) {
        match store.claim(slot).and_then(|()| store.load(slot, &mut page)) {
            Ok(()) => assert!(!live.contains(&&page), "slot {slot} has another one's bytes"),
            Err(StoreError::Damaged { .. } | StoreError::NotInUse { .. }) => {}
            Err(error) => panic!("slot {slot}: {error}"),
        }
    }
}

fn lives() -> impl Strategy<Value = Vec<(Vec<Step>, usize, usize)>> {
    let life = (prop::collection::vec(step(), 1..12), 0..12usize, 0..100_000usize);
    prop::collection::vec(life, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn an_encrypted_swap_file_survives(lives in lives()) {
        survives(Protection::Encrypted, &lives);
    }

    #[test]
    fn a_checksummed_swap_file_survives(lives in lives()) {
        survives(Protection::Checksum, &lives);
    }
}

/// A step of a compressed store. Its memory outlives the daemon as a whole. A page that is moved
/// from there to the disk is in both until the ledger says which one counts.
#[derive(Clone, Debug)]
enum FrontStep {
    Disk(Step),
    WriteBack,
}

fn front_step() -> impl Strategy<Value = FrontStep> {
    prop_oneof![3 => step().prop_map(FrontStep::Disk), 2 => Just(FrontStep::WriteBack)]
}

fn write_back(store: &dyn Store, ledger: &mut Vec<(u64, Page)>) {
    let slots = store.surplus();
    let mut pages = vec![[0; 4096]; slots.len()];
    for (slot, page) in slots.iter().zip(&mut pages) {
        store.load(*slot, page).unwrap();
    }
    for (old, new) in slots.into_iter().zip(store.save_to_disk(&pages).slots) {
        if let (Some(new), Some(frame)) = (new, ledger.iter_mut().find(|(slot, _)| *slot == old)) {
            frame.0 = new;
            store.release(old);
        }
    }
}

fn work_in_front(
    store: &dyn Store,
    steps: &[FrontStep],
    number: &mut u64,
    ledger: &mut Vec<(u64, Page)>,
) {
    for step in steps {
        match step {
            FrontStep::Disk(Step::Save(count)) => {
                let pages: Vec<Page> = (0..*count as u64).map(|at| mixed(*number + at)).collect();
                *number += pages.len() as u64;
                let stored = store.save_batch(&pages).slots.into_iter().zip(pages);
                ledger.extend(stored.filter_map(|(slot, page)| Some((slot?, page))));
            }
            FrontStep::Disk(Step::Release(which)) if !ledger.is_empty() => {
                let (slot, _) = ledger.swap_remove(which % ledger.len());
                store.release(slot);
            }
            FrontStep::Disk(Step::Release(_)) => {}
            FrontStep::Disk(Step::Trim) => store.trim().unwrap(),
            FrontStep::WriteBack => write_back(store, ledger),
        }
    }
}

fn front_lives() -> impl Strategy<Value = Vec<(Vec<FrontStep>, usize, usize)>> {
    let life = (prop::collection::vec(front_step(), 1..16), 0..8usize, 0..100_000usize);
    prop::collection::vec(life, 1..4)
}

fn survives_in_front(run: &Path, limit_bytes: u64, lives: &[(Vec<FrontStep>, usize, usize)]) {
    let medium = Faulty::new(SLOTS as usize * 4096);
    let (mut ledger, mut number) = (Vec::new(), 0);
    for (steps, writes, torn_bytes) in lives {
        let writes_left = AtomicUsize::new(*writes);
        let mortal =
            Mortal { medium: medium.clone(), writes_left: &writes_left, torn_bytes: *torn_bytes };
        let behind = SwapFile::over(mortal, run, SLOTS, Protection::Encrypted).unwrap();
        let store = Compressed::open(run, limit_bytes, behind).unwrap();
        ledger.iter().for_each(|(slot, _)| store.claim(*slot).unwrap());
        let died = catch_unwind(AssertUnwindSafe(|| {
            work_in_front(&store, steps, &mut number, &mut ledger);
        }));
        drop((store, died));
        let behind = SwapFile::over(medium.copy(), run, SLOTS, Protection::Encrypted).unwrap();
        let store = Compressed::open(run, limit_bytes, behind).unwrap();
        for (slot, expected) in &ledger {
            let mut page = [0; 4096];
            store.claim(*slot).unwrap();
            store.load(*slot, &mut page).unwrap();
            assert!(page == *expected, "slot {slot:x}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_compressed_store_survives(chunks in 1..9u64, lives in front_lives()) {
        match run_directory() {
            Some(dir) => survives_in_front(dir.path(), chunks << 16, &lives),
            None => eprintln!("SKIPPED: no tmpfs at /dev/shm"),
        }
    }
}

/// If a nonce were used twice for a key, equal pages would be equal on disk.
#[test]
fn no_nonce_is_used_twice_over_deaths() {
    let (dir, medium) = (tempfile::tempdir().unwrap(), Faulty::new(SLOTS as usize * 4096));
    let mut seen = std::collections::BTreeSet::new();
    for life in 0..20 {
        let writes_left = AtomicUsize::new(0);
        let mortal = Mortal { medium: medium.clone(), writes_left: &writes_left, torn_bytes: 4096 };
        let store = SwapFile::over(mortal, dir.path(), SLOTS, Protection::Encrypted).unwrap();
        let died = catch_unwind(AssertUnwindSafe(|| store.save(&[7; 4096])));
        assert!(died.is_err());
        assert!(seen.insert(medium.state().bytes[..4096].to_vec()), "life {life}");
    }
}

/// Seals and key are made one after the other. A death in between, or the loss of one file, makes
/// both void.
#[test]
fn a_key_is_never_used_with_other_seals() {
    let (dir, medium) = (tempfile::tempdir().unwrap(), Faulty::new(SLOTS as usize * 4096));
    let open = || SwapFile::over(medium.clone(), dir.path(), SLOTS, Protection::Encrypted).unwrap();
    let key = || fs::read(dir.path().join("swap.key")).unwrap();
    drop(open());
    let first = key();
    drop(open());
    assert_eq!(key(), first);
    for lost in ["swap.seals", "swap.key"] {
        fs::remove_file(dir.path().join(lost)).unwrap();
        drop(open());
        assert_ne!(key(), first, "without {lost}");
    }
    // Seals that are not complete.
    let second = key();
    let seals = dir.path().join("swap.seals");
    let length = seals.metadata().unwrap().len();
    fs::write(&seals, []).unwrap();
    fs::File::options().write(true).open(&seals).unwrap().set_len(length).unwrap();
    drop(open());
    assert_ne!(key(), second);
}
