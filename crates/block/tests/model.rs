//! Random requests against a model in memory: aligned or not, in any pieces, with direct I/O or
//! through the page cache, side by side or one by one.

mod driver;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use driver::*;
use ebb_block::{Nobody, Observer};
use proptest::prelude::*;
use testkit::disk::{DISCARD, FLUSH, FREE, OK, WRITE_ZEROES};
use testkit::virtqueue::Piece;

const SECTORS: u64 = 8 * 40;
const SECTOR: u64 = 512;

#[derive(Clone, Debug)]
enum Action {
    /// First sector, number of sectors, place in memory, and where that is cut.
    Write(u64, u64, u64, u64),
    Read(u64, u64, u64, u64),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Flush,
}

/// Runs of sectors, half of them on the borders of blocks.
fn sectors() -> impl Strategy<Value = (u64, u64)> {
    let aligned = (0..SECTORS / 8, 1..6u64).prop_map(|(start, count)| (start * 8, count * 8));
    let any = (0..SECTORS, 1..40u64);
    prop_oneof![aligned, any].prop_map(|(start, count)| (start, count.min(SECTORS - start)))
}

fn place() -> impl Strategy<Value = u64> {
    prop_oneof![(0..64u64).prop_map(|page| page * 4096), 0..0x4_0000u64].prop_map(|at| FREE + at)
}

fn action() -> impl Strategy<Value = Action> {
    let data = || (sectors(), place(), prop_oneof![Just(0), 1..9000u64]);
    prop_oneof![
        4 => data().prop_map(|((s, n), at, cut)| Action::Write(s, n, at, cut)),
        4 => data().prop_map(|((s, n), at, cut)| Action::Read(s, n, at, cut)),
        1 => (sectors(), any::<bool>()).prop_map(|((s, n), unmap)| Action::Zero(s, n, unmap)),
        1 => sectors().prop_map(|(s, n)| Action::Discard(s, n)),
        1 => Just(Action::Flush),
    ]
}

/// Memory in one piece, or cut in two with a gap between them.
fn pieces(at: u64, bytes: u64, cut: u64) -> Vec<Piece> {
    match cut {
        1.. if cut < bytes => {
            vec![(at, cut as u32), (at + cut + 4096, (bytes - cut) as u32)]
        }
        _ => vec![(at, bytes as u32)],
    }
}

fn bytes_of(sector: u64, count: u64) -> std::ops::Range<usize> {
    (sector * SECTOR) as usize..((sector + count) * SECTOR) as usize
}

fn run(driver: &mut Driver, model: &mut [u8], step: u8, action: &Action) {
    match *action {
        Action::Write(sector, count, at, cut) => {
            let pieces = pieces(at, count * SECTOR, cut);
            let mut sent = Vec::new();
            for (n, &(gpa, bytes)) in (1u8..).zip(&pieces) {
                let content: Vec<u8> =
                    (0..bytes).map(|i| step.wrapping_mul(31) ^ n ^ (i / 256) as u8).collect();
                driver.put(gpa, &content);
                sent.extend(content);
            }
            assert_eq!(driver.write(sector, &pieces), OK);
            model[bytes_of(sector, count)].copy_from_slice(&sent);
        }
        Action::Read(sector, count, at, cut) => {
            let pieces = pieces(at, count * SECTOR, cut);
            assert_eq!(driver.read(sector, &pieces), OK);
            let read = pieces.iter().flat_map(|&(gpa, bytes)| driver.get(gpa, bytes as usize));
            assert!(read.eq(model[bytes_of(sector, count)].iter().copied()));
        }
        Action::Zero(sector, count, unmap) => {
            assert_eq!(driver.range(WRITE_ZEROES, sector, count as u32, unmap.into()), OK);
            model[bytes_of(sector, count)].fill(0);
        }
        Action::Discard(sector, count) => {
            assert_eq!(driver.range(DISCARD, sector, count as u32, 0), OK);
            // In a file, whole blocks become a hole.
            let whole = sector.next_multiple_of(8)..(sector + count) / 8 * 8;
            if !whole.is_empty() {
                model[bytes_of(whole.start, whole.end - whole.start)].fill(0);
            }
        }
        Action::Flush => assert_eq!(driver.request(FLUSH, 0, &[], &[]), OK),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn a_disk_is_its_model(
        actions in prop::collection::vec(action(), 1..60),
        direct: bool,
        use_ring: bool,
        watched: bool,
        writethrough: bool,
    ) {
        let (file, image) = image(SECTORS * SECTOR, false, direct);
        let observer: Arc<dyn Observer> =
            if watched { Arc::new(Watcher::default()) } else { Arc::new(Nobody) };
        let mut driver = Driver::new(image, observer, use_ring);
        driver.solo.set_config(32, &[u8::from(!writethrough)]);
        let mut model = vec![0; (SECTORS * SECTOR) as usize];
        for (step, action) in (0u8..).zip(&actions) {
            run(&mut driver, &mut model, step, action);
        }
        let mut content = vec![1; model.len()];
        file.as_file().read_exact_at(&mut content, 0).unwrap();
        prop_assert!(content == model);
    }
}
