//! Stores against a plain map, over restarts and failing writes.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{Fault, Faulty, mixed, noise, run_directory};
use ebb_store::{Compressed, Page, PageBuffer, Protection, Store, StoreError, SwapFile};
use proptest::prelude::*;

const SLOTS: u64 = 600;
/// First slot in memory.
const FRONT: u64 = 1 << 47;
/// First slot that several frames share.
const FILLED: u64 = FRONT | 1 << 46;

#[derive(Clone, Debug)]
enum Step {
    Save(u64),
    SaveBatch(u64, usize),
    Load(usize),
    LoadBatch(usize, usize, bool),
    Release(usize),
    Trim,
    WriteBack,
    LimitMemory(u64),
    Reopen,
    Fail(Vec<Fault>),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Error),
        (0..400_000usize).prop_map(Fault::Short),
        (0..400_000usize).prop_map(Fault::Torn),
        Just(Fault::None),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<u64>().prop_map(Step::Save),
        3 => (any::<u64>(), 0..100usize).prop_map(|(seed, count)| Step::SaveBatch(seed, count)),
        3 => any::<usize>().prop_map(Step::Load),
        2 => (any::<usize>(), 0..80usize, any::<bool>())
            .prop_map(|(which, count, aligned)| Step::LoadBatch(which, count, aligned)),
        4 => any::<usize>().prop_map(Step::Release),
        1 => Just(Step::Trim),
        2 => Just(Step::WriteBack),
        1 => (0..9u64).prop_map(Step::LimitMemory),
        1 => Just(Step::Reopen),
        1 => prop::collection::vec(fault(), 1..4).prop_map(Step::Fail),
    ]
}

/// The used slots with the content of a frame each, as in a ledger.
#[derive(Default)]
struct Model {
    frames: Vec<(u64, Page)>,
}

impl Model {
    fn pick(&self, which: usize) -> Option<&(u64, Page)> {
        self.frames.get(which % self.frames.len().max(1))
    }

    fn on_disk(&self) -> u64 {
        self.frames.iter().filter(|(slot, _)| *slot < FRONT).count() as u64
    }

    fn by_slot(&self) -> BTreeMap<u64, &Page> {
        self.frames.iter().map(|(slot, page)| (*slot, page)).collect()
    }
}

fn load_batch(store: &dyn Store, model: &Model, first: u64, count: usize, aligned: bool) {
    let (mut buffer, mut vector) = (PageBuffer::new(count), vec![0u8; count * 4096 + 1]);
    let (skewed, _) = vector[1..].as_chunks_mut();
    let pages = if aligned { buffer.pages_mut() } else { skewed };
    let loaded = store.load_batch(first, pages).unwrap();
    let expected = model.by_slot();
    for (index, page) in pages.iter().enumerate() {
        let there = expected.get(&(first + index as u64)).filter(|_| first < FILLED || index == 0);
        assert_eq!(loaded.has(index), there.is_some(), "slot {}", first + index as u64);
        assert!(there.is_none_or(|&there| there == page));
    }
    // Every third of them, the last one first.
    let which: Vec<usize> = (0..count).rev().step_by(3).collect();
    let (mut indices, wanted) = (Vec::new(), which.iter().filter(|at| loaded.has(**at)).copied());
    let wanted: Vec<usize> = wanted.collect();
    let loaded = store.load_some(first, pages, &which, &mut |index, page| {
        assert!(expected.get(&(first + index as u64)).is_some_and(|there| *there == page));
        indices.push(index);
    });
    loaded.unwrap();
    assert_eq!(indices, wanted);
}

fn apply(store: &dyn Store, model: &mut Model, step: &Step) {
    match *step {
        Step::Save(seed) => match store.save(&mixed(seed)) {
            Ok(slot) => model.frames.push((slot, mixed(seed))),
            Err(StoreError::Full) => assert_eq!(model.on_disk(), SLOTS),
            Err(error) => assert!(matches!(error, StoreError::Medium(_)), "{error}"),
        },
        Step::SaveBatch(seed, count) => {
            let pages: Vec<Page> = (0..count as u64).map(|n| mixed(seed ^ n)).collect();
            let batch = store.save_batch(&pages);
            assert_eq!(batch.slots.len(), count);
            assert_eq!(batch.error.is_none(), batch.slots.iter().all(Option::is_some));
            let saved = batch.slots.iter().zip(pages);
            model.frames.extend(saved.filter_map(|(slot, page)| Some(((*slot)?, page))));
        }
        Step::Load(which) => {
            if let Some((slot, expected)) = model.pick(which) {
                let mut page = [0; 4096];
                store.load(*slot, &mut page).unwrap();
                assert_eq!(&page, expected);
            }
        }
        Step::LoadBatch(which, count, aligned) => {
            let first = model.pick(which).map_or(0, |(slot, _)| *slot);
            load_batch(store, model, first, count, aligned);
        }
        Step::Release(which) => {
            if let Some(&(slot, _)) = model.pick(which) {
                store.release(slot);
                model.frames.swap_remove(which % model.frames.len());
                let mut page = [0; 4096];
                let result = store.load(slot, &mut page);
                assert!(slot >= FILLED || matches!(result, Err(StoreError::NotInUse { .. })));
            }
        }
        Step::Trim => store.trim().unwrap(),
        Step::WriteBack => write_back(store, model),
        Step::LimitMemory(chunks) => store.limit_memory(chunks << 16).unwrap(),
        Step::Reopen | Step::Fail(_) => {}
    }
}

/// Moves pages as the pager does: from slots in memory to slots on disk.
fn write_back(store: &dyn Store, model: &mut Model) {
    let slots = store.surplus();
    let mut pages = vec![[0; 4096]; slots.len()];
    for (page, slot) in pages.iter_mut().zip(&slots) {
        store.load(*slot, page).unwrap();
    }
    let batch = store.save_to_disk(&pages);
    assert_eq!(batch.error.is_none(), batch.slots.iter().all(Option::is_some));
    for (old, new) in slots.into_iter().zip(batch.slots) {
        let frame = model.frames.iter_mut().find(|(slot, _)| *slot == old).expect("it is in use");
        if let Some(new) = new {
            assert!(new < FRONT);
            frame.0 = new;
            store.release(old);
        }
    }
}

fn check(store: &dyn Store, model: &Model) {
    let own = model.by_slot().keys().filter(|slot| **slot < FILLED).count();
    let frames = model.frames.iter().filter(|(slot, _)| *slot < FILLED).count();
    assert_eq!(own, frames, "a slot was given twice");
    for (slot, expected) in &model.frames {
        let mut page = [0; 4096];
        store.load(*slot, &mut page).unwrap();
        assert!(&page == expected, "slot {slot}");
    }
}

fn run<S: Store>(medium: &Faulty, open: impl Fn() -> S, steps: &[Step]) {
    let (mut store, mut model) = (open(), Model::default());
    let mut before = store.usage();
    for step in steps {
        match step {
            Step::Reopen => {
                drop(store);
                store = open();
                for (slot, _) in &model.frames {
                    store.claim(*slot).unwrap();
                    assert!(*slot >= FILLED || store.claim(*slot).is_err());
                }
            }
            Step::Fail(faults) => medium.state().faults.clone_from(faults),
            step => apply(&store, &mut model, step),
        }
        let usage = store.usage();
        let pages = usage.disk_slots_used + usage.compressed_pages + usage.filled_pages;
        assert_eq!(pages, model.frames.len() as u64);
        assert_eq!(usage.disk_slots_used, model.on_disk());
        // More than a limit that was lowered, but never more than before.
        let most = usage.memory_limit_bytes.max(before.memory_bytes);
        assert!(usage.memory_bytes <= most);
        before = usage;
    }
    check(&store, &model);
}

fn swap_file(protection: Protection, steps: &[Step]) {
    let (dir, medium) = (tempfile::tempdir().unwrap(), Faulty::new(SLOTS as usize * 4096));
    let open = || SwapFile::over(medium.clone(), dir.path(), SLOTS, protection).unwrap();
    run(&medium, open, steps);
}

fn compressed(run_dir: &Path, limit_bytes: u64, steps: &[Step]) {
    let medium = Faulty::new(SLOTS as usize * 4096);
    let open = || {
        let behind = SwapFile::over(medium.clone(), run_dir, SLOTS, Protection::Checksum);
        Compressed::open(run_dir, limit_bytes, behind.unwrap()).unwrap()
    };
    run(&medium, open, steps);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn an_encrypted_swap_file_is_a_map(steps in prop::collection::vec(step(), 1..80)) {
        swap_file(Protection::Encrypted, &steps);
    }

    #[test]
    fn a_checksummed_swap_file_is_a_map(steps in prop::collection::vec(step(), 1..80)) {
        swap_file(Protection::Checksum, &steps);
    }

    #[test]
    fn a_compressed_store_is_a_map(
        chunks in 0..9u64,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        match run_directory() {
            Some(dir) => compressed(dir.path(), chunks << 16, &steps),
            None => eprintln!("SKIPPED: no tmpfs at /dev/shm"),
        }
    }
}

fn swap(dir: &Path, slots: u64) -> SwapFile {
    SwapFile::open(&dir.join("swap"), dir, slots, Protection::Encrypted).unwrap()
}

#[test]
fn a_real_file_is_for_root_alone_and_for_one() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let store = swap(dir.path(), 300);
    let pages: Vec<Page> = (0..300).map(noise).collect();
    let batch = store.save_batch(&pages);
    assert_eq!(batch.runs().collect::<Vec<_>>(), [(0, 0, 300)]);
    assert!(matches!(store.save(&pages[0]), Err(StoreError::Full)));
    for name in ["swap", "swap.key", "swap.seals"] {
        let mode = dir.path().join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let second = SwapFile::open(&dir.path().join("swap"), dir.path(), 300, Protection::Encrypted);
    assert!(matches!(second, Err(StoreError::Unusable(_))));
    let blocks = || dir.path().join("swap").metadata().unwrap().blocks();
    let before = blocks();
    (0..100).for_each(|slot| store.release(slot));
    store.trim().unwrap();
    assert!(blocks() < before);
    let model = Model { frames: (100..300).map(|n| (n, noise(n))).collect() };
    check(&store, &model);
    load_batch(&store, &model, 90, 200, true);
    load_batch(&store, &model, 90, 200, false);
}

#[test]
fn a_file_that_is_not_where_it_was_opened_is_removed() {
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let (path, elsewhere) = (dir.path().join("swap"), dir.path().join("elsewhere"));
    let store = swap(dir.path(), 300);
    assert!(!store.is_removed());
    std::fs::rename(&path, &elsewhere).unwrap();
    assert!(store.is_removed());
    std::fs::write(&path, "another").unwrap();
    assert!(store.is_removed());
    std::fs::rename(&elsewhere, &path).unwrap();
    assert!(!store.is_removed());
    let front = Compressed::open(dir.path(), 1 << 20, store).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(front.is_removed());
}

/// Of a file that has pages, nothing but the file or a copy is opened again, and nothing is made.
#[test]
fn only_the_file_itself_or_a_copy_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, kept) = (dir.path().join("swap"), dir.path().join("kept"));
    let store = swap(dir.path(), 300);
    let slots: Vec<u64> = (0..20).map(|seed| store.save(&noise(seed)).unwrap()).collect();
    drop(store);
    let again =
        |slots: &[u64]| SwapFile::open_again(&path, dir.path(), 300, Protection::Encrypted, slots);
    let gone = |slots: &[u64]| match again(slots) {
        Err(StoreError::Gone(why)) => why,
        other => panic!("{:?}", other.err()),
    };
    let has_pages = |slots: &[u64]| {
        let store = again(slots).unwrap();
        for (seed, slot) in slots.iter().enumerate() {
            let mut page = [0; 4096];
            store.claim(*slot).unwrap();
            store.load(*slot, &mut page).unwrap();
            assert_eq!(page, noise(seed as u64));
        }
    };
    has_pages(&slots);
    std::fs::rename(&path, &kept).unwrap();
    assert!(gone(&slots).contains("there is no"));
    assert!(!path.exists());
    for other in [vec![], vec![7; 300 * 4096], vec![0; 300 * 4096], vec![7; 100]] {
        std::fs::write(&path, &other).unwrap();
        assert!(gone(&slots).contains("is another file"));
        assert_eq!(std::fs::read(&path).unwrap(), other);
        std::fs::remove_file(&path).unwrap();
    }
    std::fs::copy(&kept, &path).unwrap();
    has_pages(&slots);
    // A part of a copy is damaged: the rest is worth having.
    let copy = dir.path().join("copy");
    std::fs::copy(&kept, &copy).unwrap();
    std::fs::rename(&copy, &path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 4096], slots[0] * 4096).unwrap();
    assert!(gone(&slots[..1]).contains("is another file"));
    assert!(again(&slots[..2]).is_ok());
    std::fs::rename(&kept, &path).unwrap();
    has_pages(&slots);
    std::fs::remove_file(dir.path().join("swap.key")).unwrap();
    assert!(matches!(again(&slots), Err(StoreError::Unusable(why)) if why.contains("are lost")));
    assert!(dir.path().join("swap.seals").exists());
}

#[test]
fn nothing_can_be_read_without_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let store = swap(dir.path(), 8);
    let slot = store.save(&[0x5a; 4096]).unwrap();
    drop(store);
    let bytes = std::fs::read(dir.path().join("swap")).unwrap();
    assert!(!bytes.windows(16).any(|window| window == [0x5a; 16]));
    std::fs::remove_file(dir.path().join("swap.key")).unwrap();
    let store = swap(dir.path(), 8);
    assert!(matches!(store.claim(slot), Err(StoreError::NotInUse { .. })));
    drop(store);
    ebb_store::remove(dir.path()).unwrap();
    ebb_store::remove(dir.path()).unwrap();
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 1);
}

#[test]
fn a_swap_file_of_another_size_or_protection_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(swap(dir.path(), 8));
    for (slots, protection) in [(8, Protection::Checksum), (9000, Protection::Encrypted)] {
        let opened = SwapFile::open(&dir.path().join("swap"), dir.path(), slots, protection);
        assert!(matches!(opened, Err(StoreError::Unusable(_))));
    }
}

#[test]
fn pages_that_shrink_stay_in_memory_up_to_a_limit() {
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let open = |limit| Compressed::open(dir.path(), limit, swap(dir.path(), 64)).unwrap();
    let store = open(1 << 20);
    let pages: Vec<Page> = (0..50).map(mixed).collect();
    let slots: Vec<u64> = store.save_batch(&pages).slots.into_iter().flatten().collect();
    let usage = store.usage();
    // Of every five: one filled, three that compress, one of noise.
    let counts = [usage.filled_pages, usage.compressed_pages, usage.disk_slots_used];
    assert_eq!(counts, [10, 30, 10]);
    assert_eq!((slots.len(), usage.memory_bytes), (50, 3 << 16));
    drop(store);
    // There is no room for new pages, and the old ones are still there.
    let store = open(0);
    slots.iter().for_each(|slot| store.claim(*slot).unwrap());
    let full: Vec<u64> = (0..40).filter_map(|n| store.save(&mixed(5 * n + 3)).ok()).collect();
    assert!(full.iter().any(|slot| *slot < FRONT));
    let model = Model { frames: slots.iter().copied().zip(pages).collect() };
    check(&store, &model);
    slots.iter().chain(&full).for_each(|slot| store.release(*slot));
    store.trim().unwrap();
    let usage = store.usage();
    assert_eq!((usage.memory_bytes, usage.compressed_pages, usage.filled_pages), (0, 0, 0));
}

/// The oldest pages go to the disk, until some room is free.
#[test]
fn the_oldest_make_room() {
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let store = Compressed::open(dir.path(), 1 << 20, swap(dir.path(), 900)).unwrap();
    let page = |number: u64| mixed(number * 5 + 2);
    assert!(store.surplus().is_empty());
    let slots = |from: u64, to: u64| -> Vec<u64> {
        let pages: Vec<Page> = (from..to).map(page).collect();
        store.save_batch(&pages).slots.into_iter().flatten().collect()
    };
    // Objects of 1280 bytes, 51 in each of 16 chunks.
    let all = slots(0, 16 * 51);
    assert!(all.iter().all(|slot| *slot >= FRONT));
    assert_eq!(store.usage().memory_bytes, 1 << 20);
    // Without room, new pages go to the disk at once.
    let next = slots(900, 901)[0];
    assert!(next < FRONT);
    let mut model = Model { frames: all.iter().copied().zip((0..).map(page)).collect() };
    model.frames.push((next, page(900)));
    assert_eq!(store.surplus(), all[..2 * 51]);
    write_back(&store, &mut model);
    assert!(store.surplus().is_empty());
    assert_eq!(store.usage().memory_bytes, 14 << 16);
    // Pages that were released and saved again are not old.
    let hot: Vec<u64> = model.frames[102..153].iter().map(|(slot, _)| *slot).collect();
    hot.iter().for_each(|slot| store.release(*slot));
    let again = slots(102, 153);
    model.frames[102..153].iter_mut().zip(&again).for_each(|(frame, slot)| frame.0 = *slot);
    store.limit_memory(8 << 16).unwrap();
    while !store.surplus().is_empty() {
        write_back(&store, &mut model);
    }
    assert_eq!(store.usage().memory_bytes, 7 << 16);
    assert!(model.frames[102..153].iter().all(|(slot, _)| *slot >= FRONT));
    // All memory becomes free once the limit is 0.
    store.limit_memory(0).unwrap();
    while !store.surplus().is_empty() {
        write_back(&store, &mut model);
    }
    assert_eq!(store.usage().memory_bytes, 0);
    check(&store, &model);
}

/// A store that is only prepared has no file, and keeps nothing in memory, until it gets memory.
#[test]
fn memory_may_come_later() {
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let store = Compressed::prepare(dir.path(), 1 << 20, swap(dir.path(), 64)).unwrap();
    let pages: Vec<Page> = (0..20).map(mixed).collect();
    let save = || -> Vec<u64> { store.save_batch(&pages).slots.into_iter().flatten().collect() };
    let mut slots = save();
    store.limit_memory(0).unwrap();
    assert!(slots.len() == 20 && slots.iter().all(|slot| *slot < FRONT));
    assert!(!ebb_store::has_compressed(dir.path()).unwrap());
    let before = store.usage();
    assert_eq!((before.memory_slots, before.memory_limit_bytes), (16 << 8, 0));
    assert!(store.load(FRONT, &mut [0; 4096]).is_err() && store.claim(FRONT).is_err());
    store.limit_memory(1 << 30).unwrap();
    assert!(ebb_store::has_compressed(dir.path()).unwrap());
    slots.extend(save());
    let usage = store.usage();
    assert_eq!((usage.memory_slots, usage.memory_limit_bytes), (16 << 8, 1 << 20));
    assert_eq!([usage.filled_pages, usage.compressed_pages], [4, 12]);
    let twice = pages.iter().chain(&pages).copied();
    check(&store, &Model { frames: slots.into_iter().zip(twice).collect() });
}

#[test]
fn damage_in_memory_is_found() {
    use std::os::unix::fs::FileExt;
    let Some(dir) = run_directory() else { return eprintln!("SKIPPED: no tmpfs at /dev/shm") };
    let store = Compressed::open(dir.path(), 1 << 20, swap(dir.path(), 8)).unwrap();
    let slot = store.save(&mixed(2)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(dir.path().join("compressed"));
    let (file, mut bytes) = (file.unwrap(), [0; 1200]);
    let start = (4096 + (8 << 22)) as u64;
    file.read_exact_at(&mut bytes, start).unwrap();
    for at in (0..1000).step_by(9) {
        let mut damaged = bytes;
        damaged[at] ^= 0x10;
        file.write_all_at(&damaged, start).unwrap();
        assert!(matches!(store.load(slot, &mut [0; 4096]), Err(StoreError::Damaged { .. })));
    }
    file.write_all_at(&bytes, start).unwrap();
    store.load(slot, &mut [0; 4096]).unwrap();
}

#[test]
fn compressed_memory_is_not_put_on_a_disk() {
    // The build directory is usually not on tmpfs.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if ebb_store::is_in_memory(dir.path()).unwrap() {
        return eprintln!("SKIPPED: all is on tmpfs here");
    }
    let opened = Compressed::open(dir.path(), 1 << 20, swap(dir.path(), 8));
    assert!(matches!(opened, Err(StoreError::Unusable(_))));
    let prepared = Compressed::prepare(dir.path(), 1 << 20, swap(dir.path(), 8));
    assert!(matches!(prepared, Err(StoreError::Unusable(_))));
}
