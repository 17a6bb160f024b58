//! The memory map: where each frame's `struct page` lies.
//!
//! Linux maps one array of `struct page` at a virtual address (vmemmap). Which physical memory
//! backs it is known only from the page tables, for each section of 128 MiB. [`Memmap`] is the
//! result of that walk, with neighbours merged. It is a hint for scans: before anything is done to
//! one frame, its page tables are walked again.

use std::hash::{DefaultHasher, Hasher};

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use crate::memory::in_ram;
use crate::page::PAGE_BYTES;
use crate::{GuestMemory, Note, PageTables, Untrusted, Walk};

/// Flags of a usable section in `section_mem_map`: present, has a memory map, online.
const SECTION_USABLE: u64 = 0b111;
/// Low bits of `section_mem_map` that are flags. The map itself is frame aligned.
const SECTION_FLAGS: u64 = 0xfff;
/// Accepted log2 of a section's bytes. x86-64 has 27; the rest is room for other builds.
const SECTION_BITS: std::ops::RangeInclusive<u64> = 24..=32;

/// Frames whose metadata lies in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first frame.
    pub first: Gfn,
    /// Where the first frame's `struct page` is. The others follow it.
    pub metadata: Gpa,
    /// Number of frames.
    pub frames: u64,
}

/// Where the kernel keeps its table of sections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sections {
    /// Address of `struct mem_section *roots[]`.
    roots_va: u64,
    roots: u64,
    /// Bytes of one `struct mem_section`.
    bytes: u64,
    map_offset: u64,
    /// Log2 of a section's bytes.
    bits: u64,
}

/// The memory map of one kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Memmap {
    tables: PageTables,
    sections: Sections,
    base_va: u64,
    /// Sorted by frame.
    runs: Vec<Run>,
    ram: Vec<(Gpa, u64)>,
    fingerprint: u64,
}

impl Memmap {
    /// Finds the memory map.
    pub fn new(
        mem: &dyn GuestMemory,
        note: &Note,
        tables: PageTables,
    ) -> Result<Memmap, Untrusted> {
        let sections = Sections::new(note)?;
        let ram = mem.segments();
        let mut usable = Vec::new();
        let fingerprint =
            sections.each(mem, &tables, &ram, |frames, map| usable.push((frames, map)));
        let base_va = usable.first().map(|&(_, map)| map).ok_or(Untrusted::NoMemmap)?;
        // Without vmemmap every section has a map of its own, and a list's pointer does not tell
        // its frame.
        if usable.iter().any(|&(_, map)| map != base_va) {
            return Err(Untrusted::NoMemmap);
        }
        let mut memmap = Memmap { tables, sections, base_va, runs: Vec::new(), ram, fingerprint };
        memmap.runs = memmap.find_runs(mem, usable.iter().map(|&(frames, _)| frames));
        match memmap.runs.is_empty() {
            true => Err(Untrusted::NoMemmap),
            false => Ok(memmap),
        }
    }

    /// Whether sections were added, removed or changed since this was built.
    pub fn changed(&self, mem: &dyn GuestMemory) -> bool {
        mem.segments() != self.ram
            || self.sections.each(mem, &self.tables, &self.ram, |_, _| ()) != self.fingerprint
    }

    /// The runs, sorted by frame. No two share metadata.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Number of frames whose metadata is known.
    pub fn frames(&self) -> u64 {
        self.runs.iter().map(|run| run.frames).sum()
    }

    /// Where the frame's `struct page` was when this was built.
    pub fn metadata_gpa(&self, gfn: Gfn) -> Option<Gpa> {
        let after = self.runs.partition_point(|run| run.first <= gfn);
        let run = self.runs.get(after.checked_sub(1)?)?;
        let index = gfn.0 - run.first.0;
        (index < run.frames).then(|| Gpa(run.metadata.0 + index * PAGE_BYTES))
    }

    /// Whether the frame's metadata is known.
    pub fn covers(&self, gfn: Gfn) -> bool {
        self.metadata_gpa(gfn).is_some()
    }

    /// Whether all of `frames` is RAM, in one segment.
    pub fn in_ram(&self, frames: FrameRange) -> bool {
        in_ram(&self.ram, frames)
    }

    pub(crate) fn tables(&self) -> &PageTables {
        &self.tables
    }

    /// Where the frame's `struct page` is now, by the guest's page tables.
    pub fn walk(&self, mem: &dyn GuestMemory, gfn: Gfn) -> Option<Gpa> {
        self.tables.translate(mem, self.page_va(gfn)?)
    }

    /// The frame whose `struct page` begins at `va`. `None` if none begins there.
    pub(crate) fn gfn_at(&self, va: u64) -> Option<Gfn> {
        let offset = va.wrapping_sub(self.base_va);
        let gfn = Gfn(offset / PAGE_BYTES);
        offset.is_multiple_of(PAGE_BYTES).then_some(gfn)
    }

    /// The virtual address of frame 0's `struct page`, whether mapped or not.
    pub(crate) fn base_va(&self) -> u64 {
        self.base_va
    }

    pub(crate) fn page_va(&self, gfn: Gfn) -> Option<u64> {
        self.base_va.checked_add(gfn.0.checked_mul(PAGE_BYTES)?)
    }

    fn find_runs(
        &self,
        mem: &dyn GuestMemory,
        usable: impl Iterator<Item = FrameRange>,
    ) -> Vec<Run> {
        let mut runs = Vec::new();
        for frames in usable {
            self.pieces(mem, frames, &mut runs);
        }
        drop_shared(&mut runs);
        merge(&mut runs);
        runs
    }

    /// Appends one run for each leaf of the page tables that maps metadata of `frames`.
    fn pieces(&self, mem: &dyn GuestMemory, frames: FrameRange, runs: &mut Vec<Run>) {
        let mut at = frames.start;
        while at < frames.end() {
            let Some(va) = self.page_va(at) else { return };
            let left = frames.end().0 - at.0;
            let (walk, bytes) = match self.tables.walk(mem, va) {
                Walk::Mapped { gpa, bytes } => (Some(gpa), bytes),
                Walk::Absent { bytes } => (None, bytes),
            };
            let count = (bytes / PAGE_BYTES).clamp(1, left);
            if let Some(metadata) = walk.filter(|&gpa| self.ram_at(gpa, count * PAGE_BYTES)) {
                runs.push(Run { first: at, metadata, frames: count });
            }
            at = Gfn(at.0 + count);
        }
    }

    fn ram_at(&self, gpa: Gpa, bytes: u64) -> bool {
        self.ram.iter().any(|&(base, size)| {
            gpa.0.checked_sub(base.0).is_some_and(|offset| offset.saturating_add(bytes) <= size)
        })
    }
}

impl Sections {
    fn new(note: &Note) -> Result<Sections, Untrusted> {
        let bits = note.number("SECTION_SIZE_BITS")?;
        if !SECTION_BITS.contains(&bits) {
            return Err(Untrusted::Absurd { what: "SECTION_SIZE_BITS", value: bits });
        }
        let bytes = note.size("mem_section")?;
        if bytes > FRAME_BYTES || !bytes.is_multiple_of(8) {
            return Err(Untrusted::Absurd { what: "mem_section", value: bytes });
        }
        let map_offset = note.offset("mem_section.section_mem_map")?;
        if map_offset >= bytes || !map_offset.is_multiple_of(8) {
            return Err(Untrusted::Absurd {
                what: "mem_section.section_mem_map",
                value: map_offset,
            });
        }
        let roots = note.length("mem_section")?;
        Ok(Sections { roots_va: note.symbol("mem_section")?, roots, bytes, map_offset, bits })
    }

    /// Visits RAM section by section, with `(frames, map)` of each section that has a usable map.
    /// Returns a fingerprint of all sections.
    fn each(
        &self,
        mem: &dyn GuestMemory,
        tables: &PageTables,
        ram: &[(Gpa, u64)],
        mut visit: impl FnMut(FrameRange, u64),
    ) -> u64 {
        let frames_each = 1 << (self.bits - 12);
        let mut hasher = DefaultHasher::new();
        for &(base, bytes) in ram {
            let (mut at, end) = (base.gfn().0, base.gfn().0 + bytes / FRAME_BYTES);
            while at < end {
                let stop = end.min((at / frames_each + 1) * frames_each);
                let map = self.map(mem, tables, at / frames_each).unwrap_or(0);
                hasher.write_u64(map);
                if map & SECTION_USABLE == SECTION_USABLE {
                    visit(FrameRange::new(Gfn(at), stop - at), map & !SECTION_FLAGS);
                }
                at = stop;
            }
        }
        hasher.finish()
    }

    /// The `section_mem_map` of section `index`.
    fn map(&self, mem: &dyn GuestMemory, tables: &PageTables, index: u64) -> Option<u64> {
        let per_root = FRAME_BYTES / self.bytes;
        let (root, inner) = (index / per_root, index % per_root);
        if root >= self.roots {
            return None;
        }
        let root_va = tables.word(mem, self.roots_va.checked_add(8 * root)?)?;
        tables.word(mem, root_va.checked_add(inner * self.bytes + self.map_offset)?)
    }
}

/// Drops metadata that several frames share. A kernel that frees the map of its hugetlb pages (HVO)
/// has such metadata, and so has a lying guest. Protecting it would protect other frames than
/// meant.
fn drop_shared(runs: &mut Vec<Run>) {
    runs.sort_unstable_by_key(|run| run.metadata);
    let end = |run: &Run| run.metadata.0 + run.frames * PAGE_BYTES;
    let mut shared = vec![false; runs.len()];
    let mut furthest = 0;
    for index in 1..runs.len() {
        if runs[index].metadata.0 < end(&runs[furthest]) {
            shared[index] = true;
            shared[furthest] = true;
        }
        if end(&runs[index]) > end(&runs[furthest]) {
            furthest = index;
        }
    }
    let mut shared = shared.into_iter();
    runs.retain(|_| !shared.next().unwrap_or(true));
}

fn merge(runs: &mut Vec<Run>) {
    runs.sort_unstable_by_key(|run| run.first);
    runs.dedup_by(|next, run| {
        let follows = run.first.0 + run.frames == next.first.0
            && run.metadata.0 + run.frames * PAGE_BYTES == next.metadata.0;
        if follows {
            run.frames += next.frames;
        }
        follows
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(first: u64, metadata: u64, frames: u64) -> Run {
        Run { first: Gfn(first), metadata: Gpa(metadata), frames }
    }

    fn tidy(mut runs: Vec<Run>) -> Vec<Run> {
        drop_shared(&mut runs);
        merge(&mut runs);
        runs
    }

    #[test]
    fn neighbours_become_one_run() {
        let runs = vec![run(0, 0x10_0000, 64), run(64, 0x10_1000, 64), run(128, 0x20_0000, 64)];
        assert_eq!(tidy(runs), [run(0, 0x10_0000, 128), run(128, 0x20_0000, 64)]);
        // Adjacent by address but not by frame.
        let apart = vec![run(0, 0x10_0000, 64), run(128, 0x10_1000, 64)];
        assert_eq!(tidy(apart.clone()), apart);
    }

    #[test]
    fn shared_metadata_is_dropped_on_both_sides() {
        let kept = run(0, 0x10_0000, 64);
        assert_eq!(tidy(vec![kept, run(64, 0x30_0000, 64), run(128, 0x30_0000, 64)]), [kept]);
        assert_eq!(tidy(vec![kept, run(64, 0x30_0000, 32768), run(40000, 0x31_0000, 64)]), [kept]);
        assert_eq!(tidy(vec![kept, run(64, 0x10_1000, 64)]), [run(0, 0x10_0000, 128)]);
    }

    proptest! {
        /// What remains never overlaps. What overlapped nothing remains.
        #[test]
        fn no_two_runs_share_metadata(pieces in prop::collection::vec((0u64..64, 1u64..8), 0..40)) {
            let runs: Vec<Run> = (0..)
                .zip(&pieces)
                .map(|(index, &(at, frames))| run(1000 * index, at * PAGE_BYTES, frames))
                .collect();
            let overlap = |a: &Run, b: &Run| {
                let end = |run: &Run| run.metadata.0 + run.frames * PAGE_BYTES;
                a != b && a.metadata.0 < end(b) && b.metadata.0 < end(a)
            };
            let alone: Vec<Run> =
                runs.iter().filter(|a| !runs.iter().any(|b| overlap(a, b))).copied().collect();
            prop_assert_eq!(tidy(runs), alone);
        }
    }
}
