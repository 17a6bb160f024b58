//! Where RAM is in the guest. A machine puts some of it below 4 GiB, and the rest from there on.
//! How much is below depends on the machine type and its version. No option need tell it, so each
//! of the few ways is tried: only with the right one does the kernel's note agree with its page
//! tables.

use ebb_units::Gpa;

const GIB: u64 = 1 << 30;
/// Where RAM goes on above the devices.
const ABOVE: u64 = 4 * GIB;
/// Most RAM below 4 GiB: of `q35` and `microvm`, of `pc`, and of both for RAM that just fits there.
const BELOW: [u64; 4] = [2 * GIB, 3 * GIB, 3 * GIB + GIB / 2, 2 * GIB + 3 * GIB / 4];

/// A part of RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    /// Where it is in the guest.
    pub(crate) start: Gpa,
    pub(crate) bytes: u64,
    /// Its offset among all RAM.
    pub(crate) offset: u64,
}

/// The ways in which a machine may place this much RAM. `told` is what the machine's option says.
pub(crate) fn ways(bytes: u64, told: Option<u64>) -> Vec<Vec<Segment>> {
    let below = told.into_iter().chain(BELOW).filter(|below| (1..bytes).contains(below));
    let mut ways: Vec<Vec<Segment>> = Vec::new();
    if bytes <= ABOVE {
        ways.push(vec![Segment { start: Gpa(0), bytes, offset: 0 }]);
    }
    for below in below {
        let low = Segment { start: Gpa(0), bytes: below, offset: 0 };
        let high = Segment { start: Gpa(ABOVE), bytes: bytes - below, offset: below };
        ways.push(vec![low, high]);
    }
    ways
}

/// Where this offset of RAM is in the guest.
pub(crate) fn gpa_of(segments: &[Segment], offset: u64) -> Option<Gpa> {
    segments.iter().find_map(|segment| {
        let into = offset.checked_sub(segment.offset)?;
        (into < segment.bytes).then_some(Gpa(segment.start.0 + into))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ram_has_one_place_and_large_ram_one_for_each_machine() {
        assert_eq!(ways(GIB, None), [[Segment { start: Gpa(0), bytes: GIB, offset: 0 }]]);
        let all = ways(8 * GIB, Some(GIB));
        assert_eq!(
            all.iter().map(|way| way[0].bytes / 1024 / 1024).collect::<Vec<_>>(),
            [1024, 2048, 3072, 3584, 2816]
        );
        assert!(all.iter().all(|way| way.iter().map(|part| part.bytes).sum::<u64>() == 8 * GIB));
    }

    #[test]
    fn offsets_are_found_on_both_sides_of_the_gap() {
        let way = &ways(8 * GIB, None)[0];
        assert_eq!(gpa_of(way, GIB), Some(Gpa(GIB)));
        assert_eq!(gpa_of(way, 2 * GIB), Some(Gpa(4 * GIB)));
        assert_eq!(gpa_of(way, 8 * GIB), None);
    }
}
