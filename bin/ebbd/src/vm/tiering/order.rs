//! A VM's pages in the order in which they are placed on nodes.

use ebb_heat::Sorted;
use ebb_tier::Heat;
use ebb_units::{FrameRange, Gfn};

/// The place of a frame that is on no node of the ladder, or non-resident.
pub const NOWHERE: u8 = u8::MAX;
/// The mark of a frame that is on a node and belongs to the kernel.
const KERNEL: u8 = u8::MAX - 1;

/// The node of each frame, by its number on the ladder.
pub type Places = Vec<(FrameRange, Vec<u8>)>;

/// What the order is made from.
#[derive(Default)]
pub struct Known {
    /// What a monitoring found.
    pub sorted: Option<Sorted>,
    /// The kernel's own frames, if their use was not seen.
    pub kernel: Vec<FrameRange>,
    /// The degree of the kernel's frames.
    pub kernel_degree: u32,
    /// By how many degrees a page must be hotter to take another page's place.
    pub margin_degrees: u32,
}

/// Returns the node of a frame.
pub fn place_of(places: &Places, gfn: Gfn) -> Option<u8> {
    let (frames, places) = places.iter().find(|(frames, _)| frames.contains(gfn))?;
    places.get(usize::try_from(gfn.0 - frames.start.0).ok()?).copied()
}

/// Returns the pages that are on a node, coldest first. A page of which nothing is known is as cold
/// as an unused one, unless it is the kernel's.
pub fn order(places: &Places, known: &Known) -> Vec<Heat> {
    let sorted = || known.sorted.iter().flat_map(Sorted::coldest_first);
    let mut left = places.clone();
    for (gfn, _) in sorted() {
        mark(&mut left, gfn, NOWHERE);
    }
    let kernel = known.kernel.iter().flat_map(|frames| frames.frames());
    kernel.for_each(|gfn| mark(&mut left, gfn, KERNEL));
    let of = |wanted: fn(u8) -> bool, degree: u32| {
        let ranges = left.iter().flat_map(|(frames, places)| frames.frames().zip(places));
        let those = ranges.filter(move |(_, place)| wanted(**place));
        those.map(move |(gfn, _)| Heat { gfn, degree })
    };
    let kernel_degree = known.kernel_degree;
    let used = || {
        let heats = sorted()
            .map(|(gfn, degree)| Heat { gfn, degree: u32::try_from(degree).unwrap_or(u32::MAX) });
        heats.filter(|heat| place_of(places, heat.gfn).is_some_and(|place| place != NOWHERE))
    };
    let is_cooler = |heat: &Heat| heat.degree < kernel_degree;
    let all = places.iter().flat_map(|(_, places)| places);
    let mut order = Vec::with_capacity(all.filter(|place| **place != NOWHERE).count());
    let coldest_first = of(|place| place != NOWHERE && place != KERNEL, 0)
        .chain(used().filter(is_cooler))
        .chain(of(|place| place == KERNEL, kernel_degree))
        .chain(used().filter(|heat| !is_cooler(heat)));
    order.extend(coldest_first);
    order
}

/// Marks a frame that is on a node, so that it does not count among the others.
fn mark(left: &mut Places, gfn: Gfn, mark: u8) {
    let found = left.iter_mut().find(|(frames, _)| frames.contains(gfn));
    let place = found
        .and_then(|(frames, places)| places.get_mut(usize::try_from(gfn.0 - frames.start.0).ok()?));
    place.into_iter().filter(|place| **place != NOWHERE).for_each(|place| *place = mark);
}

/// Huge frames with pages on nodes, each named by the first of these pages.
pub struct Huge {
    order: Vec<Heat>,
    /// The node of each huge frame, in order of frames.
    places: Vec<(Gfn, u8)>,
}

impl Huge {
    /// Groups pages that are on nodes. The degree of a huge frame is the sum of its pages' degrees.
    pub fn new(mut pages: Vec<Heat>, places: &Places) -> Huge {
        pages.sort_unstable_by_key(|heat| heat.gfn);
        let mut huge = Huge { order: Vec::new(), places: Vec::new() };
        for pages in pages.chunk_by(|one, next| one.gfn.huge() == next.gfn.huge()) {
            let gfn = pages[0].gfn;
            let degree = pages.iter().fold(0, |sum: u32, page| sum.saturating_add(page.degree));
            huge.order.push(Heat { gfn, degree });
            huge.places.push((gfn, most(pages, places)));
        }
        huge.order.sort_by_key(|heat| heat.degree);
        huge
    }

    /// Returns the huge frames, coldest first.
    pub fn order(&self) -> &[Heat] {
        &self.order
    }

    /// Returns the node that most of the huge frame's pages are on.
    pub fn place_of(&self, gfn: Gfn) -> Option<u8> {
        let at = self.places.binary_search_by_key(&gfn, |(gfn, _)| *gfn).ok()?;
        self.places.get(at).map(|(_, place)| *place)
    }
}

fn most(pages: &[Heat], places: &Places) -> u8 {
    let mut counts = [0_u32; 1 << u8::BITS];
    for place in pages.iter().filter_map(|page| place_of(places, page.gfn)) {
        counts[usize::from(place)] += 1;
    }
    (0..=u8::MAX).zip(counts).max_by_key(|(_, count)| *count).map_or(NOWHERE, |(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_heat::{Access, Levels, Observer, Weights};

    #[test]
    fn what_is_not_known_is_the_coldest_and_what_is_nowhere_does_not_count() {
        let ranges = [FrameRange::new(Gfn(0), 4), FrameRange::new(Gfn(8), 2)];
        let places = vec![(ranges[0], vec![0, NOWHERE, 1, 0]), (ranges[1], vec![1, NOWHERE])];
        let mut levels = Levels::new(&ranges, 0);
        for used in [&[0, 1, 8][..], &[0, 9], &[8, 0]] {
            levels.next_window();
            for &gfn in used {
                levels.saw(FrameRange::new(Gfn(gfn), 1), Access::Read);
            }
        }
        let sorted = Sorted::new(&levels, Weights::EVEN);
        let ordered = |sorted, kernel: &[u64]| -> Vec<(u64, u32)> {
            let kernel = kernel.iter().map(|gfn| FrameRange::new(Gfn(*gfn), 1)).collect();
            let known = Known { sorted, kernel, kernel_degree: 3, margin_degrees: 1 };
            let order = order(&places, &known);
            order.into_iter().map(|heat| (heat.gfn.0, heat.degree)).collect()
        };
        assert_eq!(ordered(None, &[]), [(0, 0), (2, 0), (3, 0), (8, 0)]);
        // Includes a kernel page that a program uses, too, and one that is on no node.
        let order = ordered(Some(sorted), &[3, 8, 1]);
        assert_eq!(order, [(2, 0), (8, 2), (3, 3), (0, 3)]);
        assert_eq!(place_of(&places, Gfn(8)), Some(1));
        assert_eq!(place_of(&places, Gfn(4)), None);
    }

    #[test]
    fn a_huge_frame_is_as_hot_as_all_of_its_pages() {
        let frames = FrameRange::new(Gfn(0), 1600);
        let mut on = vec![0; 1600];
        on[..3].fill(NOWHERE);
        on[512..900].fill(1);
        on[1024..1536].fill(NOWHERE);
        on[1599] = 1;
        let places = vec![(frames, on)];
        let degree = |gfn: Gfn| if gfn.0 < 512 { 2 } else { 0 };
        let there = frames.frames().filter(|gfn| place_of(&places, *gfn) != Some(NOWHERE));
        let huge = Huge::new(there.map(|gfn| Heat { gfn, degree: degree(gfn) }).collect(), &places);
        let order: Vec<(u64, u32)> = huge.order().iter().map(|h| (h.gfn.0, h.degree)).collect();
        assert_eq!(order, [(512, 0), (1536, 0), (3, 1018)]);
        let place = |gfn| huge.place_of(Gfn(gfn));
        assert_eq!([3, 512, 1536, 1024, 0].map(place), [Some(0), Some(1), Some(0), None, None]);
    }
}
