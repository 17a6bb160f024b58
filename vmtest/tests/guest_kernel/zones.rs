//! The zones of a guest, as its kernel tells them once it has found them consistent.

use std::collections::HashMap;

use vmtest::Vm;

const CONSISTENCY: &str = "/sys/kernel/debug/llfree";

/// What a zone says of itself: the word before each number; `zone` is its node.
pub type Zone = HashMap<String, u64>;

/// All zones, once the kernel has found them consistent.
pub fn zones(vm: &Vm) -> Vec<Zone> {
    let text = vm.guest(&format!("cat {CONSISTENCY}"));
    assert!(text.trim_end().ends_with("\nOK"), "{text}");
    text.lines().filter(|line| line.starts_with("zone ")).map(zone).collect()
}

/// Parses `zone 0 DMA32: header 1ff80000 base 0 frames 131040 free 9 ... blocks 17 11 ...`.
fn zone(line: &str) -> Zone {
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.windows(2).filter_map(|pair| match pair {
        ["header", number] => Some(("header", u64::from_str_radix(number, 16).ok()?)),
        [name, number] if name.parse::<u64>().is_err() => Some((*name, number.parse().ok()?)),
        _ => None,
    });
    pairs.map(|(name, number)| (name.to_owned(), number)).collect()
}

pub fn sum(zones: &[Zone], name: &str) -> u64 {
    zones.iter().map(|zone| zone[name]).sum()
}
