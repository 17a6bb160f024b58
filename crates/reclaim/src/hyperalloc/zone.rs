//! One zone of the guest, as its header was when it was opened. Nothing that the guest writes to
//! the header later is believed: only areas and trees are read again.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_llfree::layout::{
    AREA_ALLOCATED, AREA_EVICTED, AREA_FRAMES, AREA_FREE_MASK, AREA_INVERTED, AREA_ROWS,
    HEADER_HARD, HEADER_PURGE_ASKED, HEADER_PURGE_DONE, HEADER_WORDS, ZONE_ALIGN_FRAMES,
};
use ebb_llfree::{Header, Host, Layout, LayoutError};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa, HugeFrame};
use ebb_vm::Ram;

use super::states::States;

/// First frame above Linux's DMA zone, which is for devices of the last century and not worth
/// sharing.
const DMA_ZONE_END: u64 = 4096;

/// Why a zone cannot be worked on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadZone {
    /// Its header, or a size in it, is not valid.
    #[error("its allocator's header at {at:#x}: {why}")]
    Header {
        /// Guest-physical address of the header.
        at: u64,
        /// What is wrong with it.
        why: LayoutError,
    },
    /// A part of its state is not wholly in the guest's memory.
    #[error("its allocator has state at {0:#x}, which is not in its memory")]
    Outside(u64),
    /// Two parts of its state overlap, or two zones do.
    #[error("its allocator's parts overlap at {0:#x}")]
    Overlap(u64),
    /// A zone has frames that the guest does not have.
    #[error("a zone ends at frame {0}, beyond the guest's memory")]
    End(u64),
}

/// A run of guest-physical bytes.
pub(crate) type Extent = (Gpa, u64);

/// A zone.
pub(crate) struct Zone {
    at: Gpa,
    header: Header,
    areas: usize,
    /// R of each huge frame.
    pub states: States,
}

impl Zone {
    /// Reads and checks a zone's header, whose frame must be resident. `None`: the zone is too
    /// small to matter.
    ///
    /// # Errors
    /// [`BadZone`].
    pub fn open(ram: &Ram, at: Gpa) -> Result<Option<Zone>, BadZone> {
        let words = ram.words(at, HEADER_WORDS).filter(|_| at.0.is_multiple_of(64));
        let words = words.ok_or(BadZone::Outside(at.0))?;
        let header = Header::read(words).map_err(|why| BadZone::Header { at: at.0, why })?;
        let end = header.base_frame + header.frames;
        if end <= DMA_ZONE_END {
            return Ok(None);
        }
        if end > ram.end().0 {
            return Err(BadZone::End(end));
        }
        let areas = header.frames.div_ceil(AREA_FRAMES) as usize;
        let zone = Zone { at, header, areas, states: States::new(areas) };
        let mut extents = zone.extents()?;
        let inside = |&(at, bytes): &Extent| {
            ram.place(at).is_some_and(|place| place.left_bytes >= bytes.next_multiple_of(64))
        };
        if let Some((at, _)) = extents.iter().find(|extent| !inside(extent)) {
            return Err(BadZone::Outside(at.0));
        }
        extents.sort_unstable();
        match extents.windows(2).find(|pair| pair[0].0.0 + pair[0].1 > pair[1].0.0) {
            Some(pair) => Err(BadZone::Overlap(pair[1].0.0)),
            None => Ok(Some(zone)),
        }
    }

    /// Where its state lies: header, bits, areas, trees, slots.
    pub fn extents(&self) -> Result<[Extent; 5], BadZone> {
        let Header { frames, cores, bits, areas, trees, slots, .. } = self.header;
        let layout = Layout::new(frames, cores)
            .map_err(|why| BadZone::Header { at: self.at.0, why })?
            .counts();
        let extents = [
            (self.at, HEADER_WORDS as u64 * 8),
            (Gpa(bits), layout.rows as u64 * 8),
            (Gpa(areas), layout.areas as u64 * 2),
            (Gpa(trees), layout.trees as u64 * 4),
            (Gpa(slots), layout.slot_words as u64 * 8),
        ];
        match extents.iter().find(|(at, bytes)| at.checked_add(*bytes).is_none()) {
            Some((at, _)) => Err(BadZone::Outside(at.0)),
            None => Ok(extents),
        }
    }

    /// The frames of an extent.
    pub fn frames_of((at, bytes): Extent) -> FrameRange {
        let first = at.gfn();
        FrameRange::new(first, (at.0 + bytes).div_ceil(FRAME_BYTES) - first.0)
    }

    /// Leaves what this zone has at and above `first` to the zone above it. A zone begins at a
    /// multiple of 1024 frames, so it may begin a little before its own first frame. Frames that
    /// are in both zones are free in neither.
    ///
    /// # Errors
    /// The zones overlap by more than that.
    pub fn end_before(&mut self, first: Gfn) -> Result<(), BadZone> {
        let span = self.span();
        if span.end() <= first {
            return Ok(());
        }
        if first <= span.start || span.end().0 - first.0 >= ZONE_ALIGN_FRAMES {
            return Err(BadZone::Overlap(first.gpa().0));
        }
        self.areas = ((first.0 - span.start.0) / AREA_FRAMES) as usize;
        Ok(())
    }

    /// Its frames, holes included.
    pub fn span(&self) -> FrameRange {
        FrameRange::new(Gfn(self.header.base_frame), self.header.frames)
    }

    /// Its number of huge frames.
    pub fn areas(&self) -> usize {
        self.areas
    }

    /// The huge frame of an area.
    pub fn huge(&self, index: usize) -> HugeFrame {
        HugeFrame(self.header.base_frame / FRAMES_PER_HUGE + index as u64)
    }

    /// The area of a huge frame.
    pub fn index(&self, huge: HugeFrame) -> Option<usize> {
        let index = huge.0.checked_sub(self.header.base_frame / FRAMES_PER_HUGE)?;
        usize::try_from(index).ok().filter(|&index| index < self.areas)
    }

    /// The host's side of its state. Never `None`: the places were checked.
    pub fn host<'r>(&self, ram: &'r Ram) -> Option<Host<'r>> {
        let counts = Layout::new(self.header.frames, self.header.cores).ok()?.counts();
        let areas = ram.quarter_words(Gpa(self.header.areas), counts.areas)?;
        let trees = ram.half_words(Gpa(self.header.trees), counts.trees)?;
        Host::new(areas, trees, self.header.frames).ok()
    }

    /// The word of an area.
    pub fn area(&self, ram: &Ram, index: usize) -> Option<u16> {
        ram.quarter_words(Gpa(self.header.areas), self.areas)?
            .get(index)
            .map(|area| area.load(Acquire))
    }

    /// The word of an area's tree.
    pub fn tree_of(&self, ram: &Ram, index: usize) -> Option<u32> {
        let tree = index / ebb_llfree::layout::TREE_AREAS;
        ram.half_words(Gpa(self.header.trees + tree as u64 * 4), 1)?
            .first()
            .map(|tree| tree.load(Relaxed))
    }

    /// The words of its slots.
    pub fn slots<'r>(&self, ram: &'r Ram) -> &'r [AtomicU64] {
        let counts = Layout::new(self.header.frames, self.header.cores).map(|all| all.counts());
        let words = counts.ok().and_then(|all| ram.words(Gpa(self.header.slots), all.slot_words));
        words.unwrap_or_default()
    }

    /// Whether an area looks as if the host had reclaimed and not returned it: allocated, while its
    /// bits still say "free". Only used to repair what a daemon's death left halfway.
    pub fn looks_reclaimed(&self, ram: &Ram, index: usize) -> bool {
        let Some(area) = self.area(ram, index) else { return false };
        let flip = if area & AREA_INVERTED != 0 { u64::MAX } else { 0 };
        let both = AREA_ALLOCATED | AREA_EVICTED;
        let rows = Gpa(self.header.bits + (index * AREA_ROWS * 8) as u64);
        area & both == both
            && area & AREA_FREE_MASK == 0
            && ram
                .words(rows, AREA_ROWS)
                .is_some_and(|rows| rows.iter().all(|row| row.load(Acquire) ^ flip == 0))
    }

    fn word<'r>(&self, ram: &'r Ram, index: usize) -> Option<&'r AtomicU64> {
        ram.words(self.at, HEADER_WORDS)?.get(index)
    }

    /// Whether the header is unchanged. It is not once another kernel has the memory.
    pub fn is_there(&self, ram: &Ram) -> bool {
        ram.words(self.at, HEADER_WORDS).is_some_and(|words| Header::read(words) == Ok(self.header))
    }

    /// The host's side, if the kernel is still there. After a reset that was not noticed yet, the
    /// words may be another kernel's.
    pub fn host_if_there<'r>(&self, ram: &'r Ram) -> Option<Host<'r>> {
        self.host(ram).filter(|_| self.is_there(ram))
    }

    /// Tells the guest how many of its huge frames the host has, if the kernel is still there.
    pub fn publish_hard(&self, ram: &Ram, huge_frames: u64) {
        if self.is_there(ram)
            && let Some(word) = self.word(ram, HEADER_HARD)
        {
            word.store(huge_frames, Release);
        }
    }

    /// Asks the guest to free `frames` more frames from its caches.
    pub fn ask_purge(&self, ram: &Ram, frames: u64) {
        if self.is_there(ram)
            && let Some(word) = self.word(ram, HEADER_PURGE_ASKED)
        {
            word.fetch_add(frames, Release);
        }
    }

    /// Whether the guest has tried to free all that it was asked for.
    pub fn has_purged(&self, ram: &Ram) -> bool {
        let get = |index| self.word(ram, index).map_or(0, |word| word.load(Acquire));
        get(HEADER_PURGE_DONE) >= get(HEADER_PURGE_ASKED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_llfree::layout::{
        HEADER_AREAS, HEADER_BASE_FRAME, HEADER_BITS, HEADER_FRAMES, HEADER_SLOTS, HEADER_TREES,
        HEADER_VERSION_CORES,
    };
    use ebb_sys::mapping::Mapping;
    use ebb_sys::ram_file::RamFile;
    use ebb_units::Hva;
    use ebb_vm::Region;
    use ebb_vm::ram::Backing;
    use proptest::prelude::*;

    const RAM_BYTES: u64 = 32 << 20;
    const AT: Gpa = Gpa(1 << 20);

    /// RAM of two regions with a gap between.
    fn ram() -> Ram {
        let file = RamFile::create("zone-test", RAM_BYTES).unwrap();
        let mapping = Mapping::new(&file, 0, RAM_BYTES).unwrap();
        let half = RAM_BYTES / 2;
        let region = |gpa, offset| Region {
            gpa: Gpa(gpa),
            bytes: half,
            hva: Hva(1 << 30 | offset),
            file: 0,
            offset,
        };
        let regions = vec![region(0, 0), region(2 * half, half)];
        Ram::new(regions, vec![Backing::new(file, mapping)]).unwrap()
    }

    fn good() -> Header {
        let layout = Layout::new(8192, 2).unwrap();
        Header {
            base_frame: 1024,
            frames: 8192,
            cores: 2,
            bits: AT.0 + layout.bits_bytes,
            areas: AT.0 + layout.areas_bytes,
            trees: AT.0 + layout.trees_bytes,
            slots: AT.0 + layout.slots_bytes,
        }
    }

    fn open_with(change: impl Fn(&[AtomicU64])) -> Result<Option<Zone>, BadZone> {
        let ram = ram();
        let words = ram.words(AT, HEADER_WORDS).unwrap();
        good().write(words).unwrap();
        change(words);
        Zone::open(&ram, AT)
    }

    fn open_word(index: usize, value: u64) -> Result<Option<Zone>, BadZone> {
        open_with(|words| words[index].store(value, Relaxed))
    }

    #[test]
    fn a_good_one_is_opened() {
        let zone = open_with(|_| ()).unwrap().unwrap();
        assert_eq!((zone.areas(), zone.huge(3)), (16, HugeFrame(5)));
        assert_eq!(zone.index(HugeFrame(17)), Some(15));
        assert_eq!((zone.index(HugeFrame(18)), zone.index(HugeFrame(1))), (None, None));
        // Too small to matter.
        assert!(
            open_with(|words| {
                words[HEADER_BASE_FRAME].store(0, Relaxed);
                words[HEADER_FRAMES].store(4096, Relaxed);
            })
            .unwrap()
            .is_none()
        );
    }

    #[test]
    fn impossible_addresses_are_refused() {
        let outside = |index, value| {
            assert!(matches!(open_word(index, value), Err(BadZone::Outside(_))), "{index}");
        };
        // In the gap, at the end, and beyond any sum.
        for value in [RAM_BYTES / 2, RAM_BYTES * 2, u64::MAX - 63] {
            [HEADER_BITS, HEADER_AREAS].into_iter().for_each(|index| outside(index, value));
        }
        outside(HEADER_BITS, RAM_BYTES / 2 - 64);
        let overlap = |index, value| {
            assert!(matches!(open_word(index, value), Err(BadZone::Overlap(_))), "{index}");
        };
        let good = good();
        overlap(HEADER_AREAS, good.trees);
        overlap(HEADER_SLOTS, good.bits + 64);
        overlap(HEADER_BITS, AT.0 + 64);
        overlap(HEADER_TREES, AT.0);
        assert!(matches!(open_word(HEADER_FRAMES, 1 << 37), Err(BadZone::End(_))));
        assert!(matches!(open_word(HEADER_BASE_FRAME, 1 << 38), Err(BadZone::End(_))));
        for (index, value) in [(HEADER_AREAS, good.areas + 2), (HEADER_BASE_FRAME, 512), (0, 0)] {
            assert!(matches!(open_word(index, value), Err(BadZone::Header { .. })), "{index}");
        }
        let ram = ram();
        for at in [AT.0 + 8, RAM_BYTES / 2, !63] {
            assert!(matches!(Zone::open(&ram, Gpa(at)), Err(BadZone::Outside(_))), "{at:#x}");
        }
    }

    #[test]
    fn zones_may_meet_within_a_block_and_no_more() {
        let mut zone = open_with(|_| ()).unwrap().unwrap();
        let end = zone.span().end().0;
        assert_eq!(zone.end_before(Gfn(end)), Ok(()));
        assert_eq!(zone.areas(), 16);
        assert_eq!(zone.end_before(Gfn(end - 600)), Ok(()));
        assert_eq!(zone.areas(), 14);
        assert!(zone.end_before(Gfn(end - 1024)).is_err());
        assert!(zone.end_before(Gfn(1024)).is_err());
    }

    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            (0..RAM_BYTES * 2).prop_map(|at| at & !63),
            (0..64u64).prop_map(|n| AT.0 + n * 64),
            (0..1u64 << 16),
            (0..64u32).prop_map(|bit| 1 << bit),
        ]
    }

    proptest! {
        /// Whatever the header says, the parts of an opened zone lie in RAM and do not overlap.
        #[test]
        fn nothing_outside_is_ever_opened(
            changes in proptest::collection::vec((1..HEADER_WORDS, word()), 0..6),
            cores in 0..5000u64,
        ) {
            let ram = ram();
            let words = ram.words(AT, HEADER_WORDS).unwrap();
            good().write(words).unwrap();
            for (index, value) in changes {
                match index {
                    HEADER_VERSION_CORES => words[index].store(1 | cores << 32, Relaxed),
                    _ => words[index].store(value, Relaxed),
                }
            }
            if let Ok(Some(zone)) = Zone::open(&ram, AT) {
                let mut extents = zone.extents().unwrap();
                extents.sort_unstable();
                for (at, bytes) in extents {
                    prop_assert!(ram.place(at).unwrap().left_bytes >= bytes);
                }
                for pair in extents.windows(2) {
                    prop_assert!(pair[0].0.0 + pair[0].1 <= pair[1].0.0);
                }
                prop_assert!(zone.span().end() <= ram.end());
                prop_assert!(zone.host(&ram).is_some());
                prop_assert!(!zone.slots(&ram).is_empty());
                let last = zone.areas() - 1;
                let _ = (zone.looks_reclaimed(&ram, last), zone.tree_of(&ram, last));
                prop_assert_eq!(zone.index(zone.huge(last)), Some(last));
            }
        }
    }
}
