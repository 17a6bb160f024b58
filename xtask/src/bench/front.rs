//! Compressed memory in front of the swap file, against the swap file alone: pages a second, in
//! turn, both encrypted on disk.

use std::path::Path;
use std::time::Instant;

use anyhow::ensure;
use ebb_store::{CLUSTER_SLOTS, Compressed, Page, PageBuffer, Protection, Store, SwapFile};

use super::report::Report;
use super::rounds::{Rounds, percentile_us};
use super::row::Row;
use super::store::noise;

const BATCHES: usize = 32;
const BATCH_PAGES: usize = CLUSTER_SLOTS as usize;
const PAGES: u64 = (BATCHES * BATCH_PAGES) as u64;
/// Kinds of pages, and how many bytes of each do not compress: in noise, all of them.
const KINDS: [(&str, usize); 2] = [("pages that lz4 makes a quarter", 1000), ("noise", 4096)];
const POOL_BYTES: u64 = 64 << 20;

/// Adds its rows. `run` is in memory, `disk` is not.
///
/// # Errors
/// A file operation fails.
pub fn measure(report: &mut Report, run: &Path, disk: &Path, rounds: usize) -> anyhow::Result<()> {
    for (kind, noise_bytes) in KINDS {
        let [front_run, alone_run, on_disk] =
            [tempfile::tempdir_in(run)?, tempfile::tempdir_in(run)?, tempfile::tempdir_in(disk)?];
        let swap = |name: &str, run: &Path| {
            SwapFile::open(&on_disk.path().join(name), run, PAGES, Protection::Encrypted)
        };
        let front = swap("front", front_run.path())?;
        let front = Compressed::open(front_run.path(), POOL_BYTES, front)?;
        let alone = swap("alone", alone_run.path())?;
        let pages = soft(noise_bytes);
        let mut figures = [[(); 3]; 2].map(|side| side.map(|()| Rounds::default()));
        let mut moved = Rounds::default();
        // The first round makes room on the disk for both.
        for round in 0..=rounds {
            let stores: [&dyn Store; 2] = [&front, &alone];
            for (store, figures) in stores.into_iter().zip(&mut figures) {
                let taken = turn(store, &pages)?;
                if round > 0 {
                    figures.iter_mut().zip(taken).for_each(|(rounds, taken)| rounds.push(taken));
                }
            }
            if noise_bytes < 4096 {
                moved.push(write_back(&front, &pages)?);
            }
        }
        let [ebb, other] = &figures;
        for (at, (what, unit)) in
            [("save_batch", "pages/s"), ("load_batch", "pages/s"), ("load, median", "us")]
                .into_iter()
                .enumerate()
        {
            let what = format!("{what}, compressed memory in front, {kind}");
            report.row(Row::new(what, unit, &ebb[at]).against("swap file alone", &other[at]));
        }
        if noise_bytes < 4096 {
            let what = format!("written back, {kind}");
            report.row(Row::new(what, "pages/s", &moved).against("its save_batch", &other[0]));
        }
    }
    Ok(())
}

/// Returns pages saved a second, pages loaded a second, and the median of single loads in
/// microseconds.
fn turn(store: &dyn Store, pages: &PageBuffer) -> anyhow::Result<[f64; 3]> {
    let (slots, saved) = save(store, pages)?;
    let mut buffer = PageBuffer::new(BATCH_PAGES);
    let start = Instant::now();
    for run in slots.chunk_by(|a, b| a + 1 == *b) {
        for part in run.chunks(BATCH_PAGES) {
            let to = buffer.pages_mut().get_mut(..part.len()).unwrap_or_default();
            let loaded = store.load_batch(part[0], to)?;
            ensure!(loaded.count() == part.len() as u64, "{} of {}", loaded.count(), part.len());
        }
    }
    let loaded = PAGES as f64 / start.elapsed().as_secs_f64();
    let mut times = Vec::new();
    let mut page: Page = [0; 4096];
    for step in 0..1000 {
        let slot = slots[step * 7919 % slots.len()];
        let start = Instant::now();
        store.load(slot, &mut page)?;
        times.push(start.elapsed());
    }
    slots.iter().for_each(|&slot| store.release(slot));
    Ok([saved, loaded, percentile_us(&mut times, 50)])
}

fn save(store: &dyn Store, pages: &PageBuffer) -> anyhow::Result<(Vec<u64>, f64)> {
    let mut slots = Vec::with_capacity(PAGES as usize);
    let start = Instant::now();
    for _ in 0..BATCHES {
        slots.extend(store.save_batch(pages.pages()).slots.into_iter().flatten());
    }
    let rate = PAGES as f64 / start.elapsed().as_secs_f64();
    ensure!(slots.len() as u64 == PAGES, "only {} pages were saved", slots.len());
    Ok((slots, rate))
}

/// Moves all compressed pages to the disk, as the pager does. Returns pages a second.
fn write_back(store: &dyn Store, pages: &PageBuffer) -> anyhow::Result<f64> {
    let (_, _) = save(store, pages)?;
    store.limit_memory(0)?;
    let (mut buffer, mut on_disk) = (PageBuffer::new(4 * BATCH_PAGES), Vec::new());
    let start = Instant::now();
    loop {
        let slots = store.surplus();
        if slots.is_empty() {
            break;
        }
        for (slot, page) in slots.iter().zip(buffer.pages_mut()) {
            store.load(*slot, page)?;
        }
        let batch = store.save_to_disk(buffer.pages().get(..slots.len()).unwrap_or_default());
        slots.iter().for_each(|&slot| store.release(slot));
        on_disk.extend(batch.slots.into_iter().flatten());
    }
    let rate = on_disk.len() as f64 / start.elapsed().as_secs_f64();
    ensure!(on_disk.len() as u64 == PAGES, "only {} pages were moved", on_disk.len());
    on_disk.iter().for_each(|&slot| store.release(slot));
    store.limit_memory(POOL_BYTES)?;
    Ok(rate)
}

/// Makes pages that each have `noise_bytes` bytes that do not compress.
fn soft(noise_bytes: usize) -> PageBuffer {
    let mut pages = noise(BATCH_PAGES);
    for page in pages.pages_mut() {
        page.iter_mut().skip(noise_bytes).zip((0..64).cycle()).for_each(|(to, at)| *to = at);
    }
    pages
}
