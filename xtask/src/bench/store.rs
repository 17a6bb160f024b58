//! Saving and loading pages, against the bare calls beneath: in turn, with the same file system and
//! the same sizes.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebb_store::{CLUSTER_SLOTS, Compressed, Page, PageBuffer, Protection, Store, SwapFile};
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use rustix::fs::OFlags;

use super::front;
use super::report::Report;
use super::rounds::{Rounds, percentile_us, us};
use super::row::Row;
use super::session::Session;

const PAGE_BYTES: u64 = 4096;
const BATCH_BYTES: u64 = CLUSTER_SLOTS * PAGE_BYTES;
/// Goal: batches move at least this part of what the bare calls move, if nothing is encrypted.
const BATCH_LIMIT: f64 = 0.8;
/// Bytes that do not compress, in each page that compresses.
const NOISE_BYTES: [usize; 3] = [100, 1000, 1700];

/// Runs the benchmark in the target directory, on the disk of the project.
///
/// # Errors
/// A file operation fails.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("store");
    let size =
        if quick { Size { batches: 64, rounds: 5 } } else { Size { batches: 256, rounds: 11 } };
    report.note(format!(
        "Batches of {CLUSTER_SLOTS} pages, one after the other, {} MiB a round, into slots that \
         were used before; direct I/O on both sides where the file system takes it.",
        size.batches
    ));
    let target = vmtest::assets::target_directory();
    for (protection, name) in
        [(Protection::Checksum, "checksummed"), (Protection::Encrypted, "encrypted")]
    {
        on_disk(&mut report, &target, size, protection, name)?;
    }
    match tempfile::tempdir_in("/dev/shm") {
        Ok(run) if ebb_store::is_in_memory(run.path())? => {
            in_memory(&mut report, run.path(), size)?;
            front::measure(&mut report, run.path(), &target, size.rounds)?;
        }
        _ => report.note("Not measured: compressed memory; there is no tmpfs at /dev/shm."),
    }
    Ok(report)
}

#[derive(Clone, Copy)]
struct Size {
    /// Batches of a MiB in a round.
    batches: u64,
    rounds: usize,
}

impl Size {
    fn slots(self) -> u64 {
        self.batches * CLUSTER_SLOTS
    }
}

/// Ebb's figures, and those of the bare calls.
type Sides = [Rounds; 2];

fn on_disk(
    report: &mut Report,
    target: &Path,
    size: Size,
    protection: Protection,
    name: &str,
) -> anyhow::Result<()> {
    let directory = tempfile::tempdir_in(target)?;
    let run = directory.path();
    let store = SwapFile::open(&run.join("swap"), run, size.slots(), protection)?;
    let bare = open_bare(&run.join("bare"))?;
    let pages = noise(CLUSTER_SLOTS as usize);
    let (mut saves, mut loads, mut singles) = <(Sides, Sides, Sides)>::default();
    // The first round makes room on the disk for both.
    for round in 0..=size.rounds {
        let turn = [save_all(&store, &pages, size)?, write_all(&bare, &pages, size)?];
        let read = [load_all(&store, size)?, read_all(&bare, size)?];
        let single = [load_some(&store, size)?, read_some(&bare, size)?];
        if round > 0 {
            push(&mut saves, turn.map(|time| gib_per_second(time, size)));
            push(&mut loads, read.map(|time| gib_per_second(time, size)));
            push(&mut singles, single);
        }
        (0..size.slots()).for_each(|slot| store.release(slot));
    }
    let row = |what: &str, unit, [ebb, other]: &Sides, against| {
        Row::new(format!("{what}, {name}"), unit, ebb).against(against, other)
    };
    let plain = protection == Protection::Checksum;
    for (what, sides, against) in
        [("save_batch", &saves, "pwrite of 1 MiB"), ("load_batch", &loads, "pread of 1 MiB")]
    {
        let row = row(what, "GiB/s", sides, against);
        report.row(if plain { row.at_least(BATCH_LIMIT) } else { row });
    }
    report.row(row("load, median", "us", &singles, "pread of 4 KiB"));
    Ok(())
}

fn push(sides: &mut Sides, figures: [f64; 2]) {
    sides.iter_mut().zip(figures).for_each(|(rounds, figure)| rounds.push(figure));
}

/// Opens a file as the store opens its own.
fn open_bare(path: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    match options.custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Ok(file) => Ok(file),
        Err(_) => Ok(options.custom_flags(0).open(path)?),
    }
}

fn save_all(store: &impl Store, pages: &PageBuffer, size: Size) -> anyhow::Result<Duration> {
    let start = Instant::now();
    for _ in 0..size.batches {
        let batch = store.save_batch(pages.pages());
        ensure!(batch.runs().count() == 1, "not one run: {:?}", batch.error);
    }
    Ok(start.elapsed())
}

fn write_all(file: &File, pages: &PageBuffer, size: Size) -> anyhow::Result<Duration> {
    let start = Instant::now();
    for batch in 0..size.batches {
        file.write_all_at(pages.pages().as_flattened(), batch * BATCH_BYTES)?;
    }
    Ok(start.elapsed())
}

fn load_all(store: &impl Store, size: Size) -> anyhow::Result<Duration> {
    let mut buffer = PageBuffer::new(CLUSTER_SLOTS as usize);
    let start = Instant::now();
    for batch in 0..size.batches {
        let loaded = store.load_batch(batch * CLUSTER_SLOTS, buffer.pages_mut())?;
        ensure!(loaded.count() == CLUSTER_SLOTS, "only {} pages were loaded", loaded.count());
    }
    Ok(start.elapsed())
}

fn read_all(file: &File, size: Size) -> anyhow::Result<Duration> {
    let mut buffer = PageBuffer::new(CLUSTER_SLOTS as usize);
    let start = Instant::now();
    for batch in 0..size.batches {
        let bytes = buffer.pages_mut().as_flattened_mut();
        file.read_exact_at(bytes, batch * BATCH_BYTES)?;
    }
    Ok(start.elapsed())
}

/// Returns scattered slots, the same on both sides.
fn places(size: Size) -> impl Iterator<Item = u64> {
    (0..1000u64).map(move |step| step * 7919 % size.slots())
}

fn load_some(store: &impl Store, size: Size) -> anyhow::Result<f64> {
    let mut buffer = PageBuffer::new(1);
    let page = buffer.pages_mut().first_mut().context("no page")?;
    let mut times = Vec::new();
    for slot in places(size) {
        let start = Instant::now();
        store.load(slot, page)?;
        times.push(start.elapsed());
    }
    Ok(percentile_us(&mut times, 50))
}

fn read_some(file: &File, size: Size) -> anyhow::Result<f64> {
    let mut buffer = PageBuffer::new(1);
    let page = buffer.pages_mut().first_mut().context("no page")?;
    let mut times = Vec::new();
    for slot in places(size) {
        let start = Instant::now();
        file.read_exact_at(page, slot * PAGE_BYTES)?;
        times.push(start.elapsed());
    }
    Ok(percentile_us(&mut times, 50))
}

fn gib_per_second(time: Duration, size: Size) -> f64 {
    (size.batches * BATCH_BYTES) as f64 / (1u64 << 30) as f64 / time.as_secs_f64()
}

fn in_memory(report: &mut Report, run: &Path, size: Size) -> anyhow::Result<()> {
    let behind = SwapFile::open(&run.join("swap"), run, 1, Protection::Checksum)?;
    let store = Compressed::open(run, 64 << 20, behind)?;
    for noise_bytes in NOISE_BYTES {
        let (mut saves, mut loads) = <(Sides, Sides)>::default();
        let mut pages = noise(CLUSTER_SLOTS as usize);
        for page in pages.pages_mut() {
            page.iter_mut().skip(noise_bytes).zip((0..64).cycle()).for_each(|(to, at)| *to = at);
        }
        let mut length = 0;
        for _ in 0..size.rounds {
            let ebb = compressed(&store, pages.pages())?;
            let bare = lz4(pages.pages(), &mut length)?;
            push(&mut saves, [ebb[0], bare[0]]);
            push(&mut loads, [ebb[1], bare[1]]);
        }
        for (what, sides, against) in
            [("save", &saves, "lz4_flex, table kept"), ("load", &loads, "lz4_flex")]
        {
            let what = format!("{what}, compressed to {length} bytes");
            report.row(Row::new(what, "us", &sides[0]).against(against, &sides[1]));
        }
    }
    filled(report, &store, size)
}

fn filled(report: &mut Report, store: &impl Store, size: Size) -> anyhow::Result<()> {
    let pages = PageBuffer::new(CLUSTER_SLOTS as usize);
    let mut sides = <[Sides; 2]>::default();
    for _ in 0..size.rounds {
        let ebb = compressed(store, pages.pages())?;
        let mut copy = PageBuffer::new(CLUSTER_SLOTS as usize);
        let start = Instant::now();
        for (to, from) in copy.pages_mut().iter_mut().zip(pages.pages()) {
            black_box(to).copy_from_slice(black_box(from));
        }
        let bare = us(start.elapsed()) / CLUSTER_SLOTS as f64;
        sides.iter_mut().zip(ebb).for_each(|(sides, ebb)| push(sides, [ebb, bare]));
    }
    for (what, [ebb, copy]) in ["save, zeros", "load, zeros"].into_iter().zip(&sides) {
        report.row(Row::new(what, "us", ebb).against("memcpy of 4 KiB", copy));
    }
    Ok(())
}

/// Returns a page's time to save and to load, in microseconds.
fn compressed(store: &impl Store, pages: &[Page]) -> anyhow::Result<[f64; 2]> {
    let mut slots = Vec::with_capacity(pages.len());
    let start = Instant::now();
    for page in pages {
        slots.push(store.save(page)?);
    }
    let saved = start.elapsed();
    let mut back = [0; PAGE_BYTES as usize];
    let start = Instant::now();
    for &slot in &slots {
        store.load(slot, black_box(&mut back))?;
    }
    let loaded = start.elapsed();
    slots.iter().for_each(|&slot| store.release(slot));
    Ok([saved, loaded].map(|time| us(time) / pages.len() as f64))
}

/// Returns the same times for the bare library, each page into memory of its own.
fn lz4(pages: &[Page], length: &mut usize) -> anyhow::Result<[f64; 2]> {
    const MOST: usize = get_maximum_output_size(PAGE_BYTES as usize);
    let mut outputs = vec![[0; MOST]; pages.len()];
    let mut lengths = Vec::with_capacity(pages.len());
    let mut table = CompressTable::small();
    let start = Instant::now();
    for (page, output) in pages.iter().zip(&mut outputs) {
        lengths.push(compress_into_with_table(page, output, &mut table)?);
    }
    let saved = start.elapsed();
    *length = lengths.iter().copied().max().unwrap_or(0);
    let mut back = [0; PAGE_BYTES as usize];
    let start = Instant::now();
    for (output, length) in outputs.iter().zip(lengths) {
        decompress_into(output.get(..length).unwrap_or_default(), black_box(&mut back))?;
    }
    Ok([saved, start.elapsed()].map(|time| us(time) / pages.len() as f64))
}

/// Returns pages that do not compress.
pub(super) fn noise(count: usize) -> PageBuffer {
    let (mut pages, mut state) = (PageBuffer::new(count), 0x9e37_79b9_7f4a_7c15u64);
    for byte in pages.pages_mut().as_flattened_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8;
    }
    pages
}
