//! Speed of this host's tiers, measured by the code that uses them, and the weights of reads and
//! writes that follow from it. See `docs/tiering.md`.

use std::fs::{self, DirBuilder};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{Calibration, TierSpeed};
use ebb_heat::Weights;
use ebb_store::{Compressed, PageBuffer, Protection, Store, SwapFile};
use ebb_sys::process::Process;
use ebb_tier::host::NodeMemory;
use ebb_tier::{Mover, TierKind};
use ebb_units::{FRAME_BYTES, Hva};

use crate::model::api_error::{Answer, failed, not_allowed, unsaved};
use crate::support::state_file;

const FILE: &str = "calibration.json";
/// Pages to write: more than processors cache.
const PAGES: usize = 8192;
/// Pages to write at once, as an eviction does.
const BATCH_PAGES: usize = 512;
/// Pages to read, one by one. Reading stops early once the time is over.
const READS: usize = 2048;
const TIME: Duration = Duration::from_secs(2);
/// Pages on each NUMA node, if there are several: far more than its processors cache.
const NODE_PAGES: usize = 65536;
/// A node counts as equally fast if it is slower by less than 1 part in this many: two measurements
/// of the same node differ by as much.
const NOISE_PART: u64 = 10;
/// Largest weights in a ratio. That of reads is below 3, so that one window with reads alone makes
/// no page hot, and as in the paper (1:3, 2:3).
const READ_WEIGHT_MAX: u64 = 2;
const WRITE_WEIGHT_MAX: u64 = 16;
/// The golden ratio in 64 bits: its multiples are in no apparent order.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// The last measurement, for all VMs. It is on record in the run directory.
pub struct Calibrated {
    path: PathBuf,
    /// Number of pages to write and read.
    pages: usize,
    /// Number of pages to write and read on each node.
    node_pages: usize,
    measuring: Mutex<()>,
}

impl Calibrated {
    /// Opens the measurement that an earlier daemon left.
    ///
    /// # Errors
    /// The file exists and cannot be read or parsed.
    pub fn open(run_dir: &Path) -> io::Result<Arc<Calibrated>> {
        Calibrated::with(run_dir, PAGES, NODE_PAGES)
    }

    fn with(run_dir: &Path, pages: usize, node_pages: usize) -> io::Result<Arc<Calibrated>> {
        let path = run_dir.join(FILE);
        let last: Option<Calibration> = state_file::load_own(&path)?;
        if let Some(last) = &last {
            Weights::new(last.read_weight, last.write_weight).map_err(io::Error::other)?;
        }
        Ok(Arc::new(Calibrated { path, pages, node_pages, measuring: Mutex::default() }))
    }

    /// For a process that only reads what another one measures.
    pub fn at(run_dir: &Path) -> Arc<Calibrated> {
        let (path, pages, node_pages) = (run_dir.join(FILE), PAGES, NODE_PAGES);
        Arc::new(Calibrated { path, pages, node_pages, measuring: Mutex::default() })
    }

    /// The last measurement, by any process.
    pub fn last(&self) -> Option<Calibration> {
        state_file::load(&self.path).unwrap_or_else(|error| {
            tracing::warn!("{}: {error}", self.path.display());
            None
        })
    }

    /// Weights of reads and writes: equal if nothing was measured.
    pub fn weights(&self) -> Weights {
        let last = self.last();
        let weights = last.and_then(|last| Weights::new(last.read_weight, last.write_weight).ok());
        weights.unwrap_or(Weights::EVEN)
    }

    /// Weights for a VM whose pages are on nodes, from the fastest and the slowest of them.
    pub fn node_weights(&self, [fastest, slowest]: [u32; 2]) -> Weights {
        let Some(last) = self.last() else { return Weights::EVEN };
        let speed = |number| {
            let name = TierKind::Node(number).to_string();
            last.tiers.iter().find(|tier| tier.tier == name)
        };
        let (Some(fast), Some(slow)) = (speed(fastest), speed(slowest)) else {
            return Weights::EVEN;
        };
        let (read, write) = node_weights(fast, slow);
        Weights::new(read, write).unwrap_or(Weights::EVEN)
    }

    /// Measures, and records the result.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn measure(&self, run_dir: &Path, swap_dir: &Path) -> Answer<Calibration> {
        // One measurement at a time: two would measure each other. Workers use the last one
        // meanwhile.
        let _alone = self.measuring.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = measure(run_dir, swap_dir, self.pages)?;
        // Addressable tiers come first.
        found.tiers.splice(1..1, nodes(self.node_pages));
        state_file::save(&self.path, &found).map_err(unsaved("the calibration's record"))?;
        Ok(found)
    }
}

/// A directory for the keys of what is written, and the file itself. Both are removed when this is
/// dropped.
struct Place {
    directory: PathBuf,
    file: PathBuf,
}

impl Place {
    fn new(run_dir: &Path, swap_dir: &Path) -> io::Result<Place> {
        let directory = run_dir.join("calibrate");
        let file = swap_dir.join(format!("calibrate.{}.swap", std::process::id()));
        // A measurement that was killed may have left this.
        let _ = fs::remove_dir_all(&directory);
        DirBuilder::new().mode(0o700).create(&directory)?;
        Ok(Place { directory, file })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for removed in [fs::remove_file(&self.file), fs::remove_dir_all(&self.directory)] {
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!("{}: {error}", self.file.display());
                }
                _ => {}
            }
        }
    }
}

fn measure(run_dir: &Path, swap_dir: &Path, count: usize) -> Answer<Calibration> {
    let place = Place::new(run_dir, swap_dir).map_err(failed("a place to measure"))?;
    let mut pages = PageBuffer::new(count);
    fill(pages.pages_mut());
    let mut tiers = vec![memory("dram", pages.pages_mut())];
    let slots = count as u64;
    let open = || SwapFile::open(&place.file, &place.directory, slots, Protection::Encrypted);
    let unusable =
        |error| not_allowed(format!("{} cannot be measured: {error}", swap_dir.display()));
    if ebb_store::is_in_memory(run_dir).map_err(failed("the run directory"))? {
        let disk = open().map_err(unusable)?;
        let store =
            Compressed::open(&place.directory, slots * FRAME_BYTES, disk).map_err(unusable)?;
        tiers.push(stored("compressed", &store, pages.pages())?);
    }
    let disk = open().map_err(unusable)?;
    let file = stored("file", &disk, pages.pages())?;
    let (read_weight, write_weight) = weights(&tiers[0], &file);
    tiers.push(file);
    Ok(Calibration { tiers, read_weight, write_weight })
}

/// Fills half of each page with numbers in no order, the rest with zeros: it compresses to half.
fn fill(pages: &mut [ebb_store::Page]) {
    let mut number = MIX;
    for page in pages {
        let (words, _) = page.as_chunks_mut::<8>();
        let half = words.len() / 2;
        for word in &mut words[..half] {
            number = (number ^ number >> 29).wrapping_mul(MIX);
            *word = number.to_ne_bytes();
        }
    }
}

/// Indices of pages in no order. Another `first` gives others.
fn order(count: usize, first: usize) -> impl Iterator<Item = usize> {
    let indices = first as u64..(first + READS) as u64;
    indices.map(move |index| (index.wrapping_mul(MIX) >> 33) as usize % count.max(1))
}

/// Measures each node, if there are several. Leaves out nodes without room.
fn nodes(pages: usize) -> Vec<TierSpeed> {
    let nodes = ebb_tier::host::nodes().unwrap_or_default();
    if nodes.len() < 2 {
        return Vec::new();
    }
    let speed = |node: NodeMemory| match on_node(node.number, pages) {
        Ok(speed) => Some(speed),
        Err(error) => {
            tracing::warn!("node{} cannot be measured: {error}", node.number);
            None
        }
    };
    nodes.into_iter().filter_map(speed).collect()
}

fn on_node(node: u32, count: usize) -> io::Result<TierSpeed> {
    let mut buffer = PageBuffer::new(count);
    // Only pages that were written have memory that can be moved.
    buffer.pages_mut().iter_mut().for_each(|page| page[0] = 1);
    let addresses: Vec<Hva> =
        buffer.pages().iter().map(|page| Hva(page.as_ptr().addr() as u64)).collect();
    let outcomes = Mover::default().run(&Process::own()?, &addresses, FRAME_BYTES, node);
    let outcomes = outcomes.map_err(io::Error::other)?;
    let there = outcomes.into_iter().filter(|outcome| outcome.is_here()).count();
    if there < count / 10 * 9 {
        return Err(io::Error::other(format!("only {there} of {count} pages found room")));
    }
    Ok(memory(&TierKind::Node(node).to_string(), buffer.pages_mut()))
}

/// Speed of memory, page by page.
fn memory(tier: &str, pages: &mut [ebb_store::Page]) -> TierSpeed {
    let mut copy = [0; FRAME_BYTES as usize];
    let (mut reads, mut writes) = (Vec::with_capacity(READS), Vec::with_capacity(READS));
    for index in order(pages.len(), 0) {
        let began = Instant::now();
        copy.copy_from_slice(black_box(&pages[index]));
        reads.push(began.elapsed());
    }
    for index in order(pages.len(), READS) {
        let began = Instant::now();
        pages[index].copy_from_slice(black_box(&copy));
        writes.push(began.elapsed());
    }
    TierSpeed { tier: tier.into(), read_ns: median_ns(reads), write_ns: median_ns(writes) }
}

/// Speed of a store: saves in batches, reads back page by page.
fn stored(tier: &str, store: &dyn Store, pages: &[ebb_store::Page]) -> Answer<TierSpeed> {
    let (mut writes, mut slots) = (Vec::new(), Vec::new());
    for batch in pages.chunks(BATCH_PAGES) {
        let began = Instant::now();
        let saved = store.save_batch(batch);
        writes.push(began.elapsed() / batch.len() as u32);
        if let Some(error) = saved.error {
            return Err(not_allowed(format!("{tier} cannot be measured: {error}")));
        }
        slots.extend(saved.slots.into_iter().flatten());
    }
    let (mut buffer, mut reads, began) = (PageBuffer::new(1), Vec::new(), Instant::now());
    for slot in order(slots.len(), 0).filter_map(|index| slots.get(index)) {
        let began_one = Instant::now();
        let page = &mut buffer.pages_mut()[0];
        store.load(*slot, page).map_err(|error| {
            not_allowed(format!("{tier} cannot be measured: a read failed: {error}"))
        })?;
        reads.push(began_one.elapsed());
        if began.elapsed() > TIME {
            break;
        }
    }
    Ok(TierSpeed { tier: tier.into(), read_ns: median_ns(reads), write_ns: median_ns(writes) })
}

fn median_ns(mut times: Vec<Duration>) -> u64 {
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    u64::try_from(median.as_nanos()).unwrap_or(u64::MAX)
}

/// Weights of reads and writes on the slow tier, by what a use costs more there. A use that reads a
/// page costs the read. A use that writes it also costs another save at the next eviction, which a
/// page that was only read does not need (`docs/decisions/0017-*`).
fn weights(fast: &TierSpeed, slow: &TierSpeed) -> (u32, u32) {
    let read_ns = slow.read_ns.saturating_sub(fast.read_ns).max(1);
    let both_ns = slow.read_ns.saturating_add(slow.write_ns);
    ratio(read_ns, both_ns.saturating_sub(fast.write_ns).max(1))
}

/// Weights by how much slower uses are on the slow node. The cost of moving does not count: a page
/// moves to the fast node only in exchange for another.
fn node_weights(fast: &TierSpeed, slow: &TierSpeed) -> (u32, u32) {
    let read_ns = slow.read_ns.saturating_sub(fast.read_ns);
    let write_ns = slow.write_ns.saturating_sub(fast.write_ns);
    let noise_ns = [fast.read_ns, fast.write_ns].map(|ns| ns.div_ceil(NOISE_PART).max(1));
    if read_ns < noise_ns[0] && write_ns < noise_ns[1] {
        return (1, 1);
    }
    // A difference too small to measure counts as the smallest one that can be: this avoids a
    // division by zero.
    ratio(read_ns.max(noise_ns[0]), write_ns.max(noise_ns[1]))
}

/// The ratio in the smallest numbers.
fn ratio(read_ns: u64, write_ns: u64) -> (u32, u32) {
    let write_for = |read: u64| {
        let wanted = u128::from(write_ns) * u128::from(read);
        let rounded = (wanted + u128::from(read_ns / 2)) / u128::from(read_ns);
        let write = u64::try_from(rounded).unwrap_or(u64::MAX).clamp(1, WRITE_WEIGHT_MAX);
        (wanted.abs_diff(u128::from(write) * u128::from(read_ns)) / u128::from(read), read, write)
    };
    let best = (1..=READ_WEIGHT_MAX).map(write_for).min();
    best.map_or((1, 1), |(_, read, write)| (read as u32, write as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(read_ns: u64, write_ns: u64) -> TierSpeed {
        TierSpeed { tier: String::new(), read_ns, write_ns }
    }

    #[test]
    fn weights_are_the_ratio_in_small_numbers() {
        for (slow, expected) in [
            (speed(100_000, 0), (1, 1)),
            (speed(100_000, 50_000), (2, 3)),
            (speed(100_000, 205_000), (1, 3)),
            (speed(100_000, 33_000), (2, 3)),
            (speed(1, u64::MAX), (1, 16)),
            (speed(0, 0), (1, 1)),
        ] {
            assert_eq!(weights(&speed(0, 0), &slow), expected, "{slow:?}");
        }
        // The cost on the fast tier does not count.
        assert_eq!(weights(&speed(100, 100), &speed(200, 200)), (1, 3));
    }

    #[test]
    fn nodes_weigh_by_how_much_slower_they_are() {
        for (slow, expected) in [
            (speed(109, 209), (1, 1)),
            (speed(200, 500), (1, 3)),
            (speed(200, 350), (2, 3)),
            (speed(300, 200), (2, 1)),
            (speed(90, 1000), (1, 16)),
            (speed(100, 221), (1, 2)),
        ] {
            assert_eq!(node_weights(&speed(100, 200), &slow), expected, "{slow:?}");
        }
    }

    #[test]
    fn what_was_measured_is_kept_and_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let calibrated = Calibrated::with(directory.path(), 600, 600).unwrap();
        assert_eq!((calibrated.last(), calibrated.weights()), (None, Weights::EVEN));
        let found = calibrated.measure(directory.path(), directory.path()).unwrap();
        let names: Vec<&str> = found.tiers.iter().map(|tier| tier.tier.as_str()).collect();
        assert!(names.starts_with(&["dram"]) && names.ends_with(&["file"]), "{names:?}");
        assert!(found.tiers.iter().all(|tier| tier.read_ns > 0 && tier.write_ns > 0), "{found:?}");
        assert_eq!(Calibrated::open(directory.path()).unwrap().last(), Some(found));
        let left = fs::read_dir(directory.path()).unwrap().flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        left.sort_unstable();
        assert_eq!(left, [FILE, "calibration.json.next"]);
        let bad = r#"{"tiers":[],"read_weight":0,"write_weight":1}"#;
        fs::write(directory.path().join(FILE), bad).unwrap();
        assert!(Calibrated::open(directory.path()).is_err_and(|e| e.to_string().contains("reads")));
    }

    #[test]
    fn a_place_that_cannot_be_is_reported_in_a_line() {
        let directory = tempfile::tempdir().unwrap();
        let calibrated = Calibrated::with(directory.path(), 1, 1).unwrap();
        let nowhere = directory.path().join("nowhere");
        let refused = calibrated.measure(directory.path(), &nowhere).unwrap_err().to_string();
        assert!(refused.contains("nowhere cannot be measured"), "{refused}");
        assert_eq!(calibrated.last(), None);
    }
}
