//! Code of any content as a helper: `kind | words of a page - 1 | seed, 8 bytes | code`. If it is
//! accepted, it gives what a processor gives that executes it, and reads nothing beside the page's
//! metadata.

use ebb_vprobe::{Helper, Kind, PageSize};
use testkit::vprobe::processor;

/// More than one batch of pages.
const PAGES: usize = 65;

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((&[kind, words, ref seed @ ..], code)) = data.split_first_chunk::<10>() else {
        return;
    };
    let kind = if kind & 1 == 1 { Kind::PageFree } else { Kind::PageOrder };
    let size = PageSize::new(8 * (u16::from(words) % 64 + 1)).expect("1 to 64 words");
    let Ok(helper) = Helper::new(kind, code, size) else { return };
    let mut seed = u64::from_le_bytes(*seed);
    let pages: Vec<u64> = (0..PAGES * size.words()).map(|_| next(&mut seed)).collect();
    let mut values = Vec::new();
    helper.evaluate(&pages, &mut values);
    assert_eq!(values.len(), PAGES);
    for (page, value) in pages.chunks(size.words()).zip(values) {
        let bytes: Vec<u8> = page.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The value does not depend on what is undefined.
        for undefined in [seed, !seed] {
            let rax = processor::run(code, &bytes, undefined);
            let expected = match kind {
                Kind::PageFree => u64::from(rax as u8 != 0),
                Kind::PageOrder => rax,
            };
            assert_eq!(value, expected, "{page:x?}");
        }
    }
}

/// Random words, of which many have few bits or all of them.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    match *seed % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << (*seed >> 58),
        _ => *seed,
    }
}
