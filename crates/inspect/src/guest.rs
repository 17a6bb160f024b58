//! A guest whose kernel passed the gate.

use ebb_units::{FRAME_BYTES, Gpa};

use crate::llfree::Announced;
use crate::paging::GPA_END;
use crate::victims::victims;
use crate::vmcoreinfo::find_notes;
use crate::zones::Sight;
use crate::{
    BuddyBlock, ChosenBlocks, FrameCounts, GuestMemory, LlfreeZone, Look, Memmap, Note, PageLayout,
    PageTables, Request, Untrusted, Zones,
};

/// Address at which x86-64 kernels map their own image, before KASLR moves it further.
const IMAGE_BASE: u64 = 0xffff_ffff_8000_0000;
/// Most tries of the gate, because the guest runs while it is scanned.
const GATE_TRIES: u32 = 5;
/// Divisor of the known frames that gives the gate's tolerance, unless [`GATE_FRAMES`] is more.
const GATE_PART: u64 = 64;
/// Least tolerance of the gate, in frames: 4 MiB. The guest's counter lags by up to 125 frames for
/// every CPU and zone, and frames come and go during the scan.
const GATE_FRAMES: u64 = 1024;

/// A known kernel in a guest's memory, and where its structures are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guest {
    note: Note,
    tables: PageTables,
    text: Text,
    layout: PageLayout,
    memmap: Memmap,
    zones: Zones,
    llfree: Announced,
}

/// Where `_stext` is, known in two ways that must agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Text {
    va: u64,
    gpa: Gpa,
}

impl Guest {
    /// Finds the kernel that passes the gate: its page tables agree with its note, a vCPU runs it,
    /// and the free frames found agree with its own count.
    ///
    /// `roots` are the vCPUs' CR3 registers. After a reset or a kexec, RAM still holds the old
    /// kernel, whole and consistent, and only the roots tell that it no longer runs. If `roots` is
    /// empty, this check is skipped: that is for a copy of RAM whose roots are not known.
    ///
    /// Looks at every populated frame of the RAM once.
    pub fn inspect(mem: &dyn GuestMemory, roots: &[u64]) -> Result<Guest, Untrusted> {
        let passes = |guest: Guest| {
            let runs = |guest: &Guest| guest.runs_on(mem, roots) && guest.image_agrees(mem);
            if !roots.is_empty() && !runs(&guest) {
                return Err(Untrusted::NotRunning);
            }
            guest.gate(mem).map(|()| guest)
        };
        let mut reason = Untrusted::NoNote;
        for note in find_notes(mem) {
            match Guest::from_note(mem, note).and_then(passes) {
                Ok(guest) => return Ok(guest),
                Err(why) => reason = reason.or(why),
            }
        }
        Err(reason)
    }

    /// Returns the kernel that wrote `note`, if its page tables agree with it. Before anything is
    /// done by it, the caller must check that it runs ([`Guest::runs_on`], and then
    /// [`Guest::image_agrees`]) and passes [`Guest::gate`].
    pub fn from_note(mem: &dyn GuestMemory, note: Note) -> Result<Guest, Untrusted> {
        if note.number("sme_mask").is_ok_and(|mask| mask != 0) {
            return Err(Untrusted::Encrypted);
        }
        let (tables, text) = kernel(&note)?;
        if tables.translate(mem, text.va) != Some(text.gpa) {
            return Err(Untrusted::Text);
        }
        let layout = PageLayout::new(&note)?;
        let memmap = Memmap::new(mem, &note, tables)?;
        let zones = Zones::new(mem, &note, &tables)?;
        let llfree = Announced::by(&note);
        Ok(Guest { note, tables, text, layout, memmap, zones, llfree })
    }

    /// Checks that the free frames found agree with the kernel's own count. A kernel that shares
    /// its allocator passes if it tells its boots apart.
    ///
    /// Reads all metadata that is resident. [`Guest::needed_frames`] tells which frames must be
    /// resident.
    pub fn gate(&self, mem: &dyn GuestMemory) -> Result<(), Untrusted> {
        match self.llfree().is_empty() {
            true => self.compare_counts(mem),
            false => self.llfree.check(),
        }
    }

    /// The kernel's release, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        self.note.release()
    }

    /// The kernel's note.
    pub fn note(&self) -> &Note {
        &self.note
    }

    /// The kernel's own page tables.
    pub fn tables(&self) -> &PageTables {
        &self.tables
    }

    /// How the kernel's `struct page` is read.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Where the frames' metadata is.
    pub fn memmap(&self) -> &Memmap {
        &self.memmap
    }

    /// The populated zones.
    pub fn zones(&self) -> &Zones {
        &self.zones
    }

    /// The zones whose allocator the kernel shares. If there are any, page metadata marks no frame
    /// as free, and the gate checked nothing.
    pub fn llfree(&self) -> &[LlfreeZone] {
        self.llfree.zones()
    }

    /// Whether this kernel's note, page tables and image are still there. This is cheap. `false`
    /// means a reboot. `true` does not mean that the kernel still runs: [`Guest::runs_on`] tells
    /// that.
    pub fn recheck(&self, mem: &dyn GuestMemory) -> bool {
        self.tables.translate(mem, self.text.va) == Some(self.text.gpa)
            && self.note.is_there(mem)
            && self.image_agrees(mem)
    }

    /// Whether a vCPU with one of these CR3 registers runs this kernel or one of its processes. A
    /// vCPU that runs firmware, another kernel or a nested guest does not count. Whether it is the
    /// same boot of the kernel, [`Guest::image_agrees`] tells.
    pub fn runs_on(&self, mem: &dyn GuestMemory, roots: &[u64]) -> bool {
        let tables = |cr3: &u64| PageTables::pair_of_cr3(*cr3, self.tables.levels);
        roots.iter().flat_map(tables).any(|tables| self.is_kernel_of(mem, tables))
    }

    /// Whether the kernel's image leads to the same nodes and allocator as before. A kernel without
    /// a random base boots to the same addresses again. Then its page tables look like the last
    /// boot's, whose note and metadata may still be whole, but its image is new.
    ///
    /// Counts only if it is asked after the CR3 registers were read: the guest may be reset in
    /// between.
    pub fn image_agrees(&self, mem: &dyn GuestMemory) -> bool {
        self.zones.are_in_place(mem, &self.tables) && self.llfree.agrees(mem, &self.tables)
    }

    /// Whether these tables map the kernel as its own do.
    pub(crate) fn is_kernel_of(&self, mem: &dyn GuestMemory, tables: PageTables) -> bool {
        let same = |va| {
            let ours = self.tables.translate(mem, va);
            ours.is_some() && tables.translate(mem, va) == ours
        };
        same(self.text.va) && same(self.memmap.base_va())
    }

    /// Rebuilds the memory map and the zones if memory was plugged or unplugged (virtio-mem).
    /// `Ok(true)` means that it was.
    pub fn refresh(&mut self, mem: &dyn GuestMemory) -> Result<bool, Untrusted> {
        if !self.memmap.changed(mem) {
            return Ok(false);
        }
        self.memmap = Memmap::new(mem, &self.note, self.tables)?;
        self.zones = Zones::new(mem, &self.note, &self.tables)?;
        Ok(true)
    }

    /// Begins a look at the current metadata of blocks.
    pub fn look<'a>(&'a self, mem: &'a dyn GuestMemory) -> Look<'a> {
        let Guest { tables, memmap, layout, .. } = self;
        Look { mem, tables, memmap, layout, leaves: Vec::new() }
    }

    /// The guest's own count of free bytes.
    pub fn free_bytes(&self, mem: &dyn GuestMemory) -> Option<u64> {
        self.zones.free_frames(mem)?.checked_mul(FRAME_BYTES)
    }

    /// Counts every known frame by kind.
    pub fn counts(&self, mem: &dyn GuestMemory) -> FrameCounts {
        self.memmap.count(mem, &self.layout)
    }

    /// Appends to `out` the free blocks to reclaim. They are a hint: the guest may use them at any
    /// time.
    pub fn victims(
        &self,
        mem: &dyn GuestMemory,
        request: Request,
        out: &mut Vec<BuddyBlock>,
    ) -> ChosenBlocks {
        victims(&self.zones, self.sight(mem), request, out)
    }

    /// Returns what a walk along a free list needs.
    pub fn sight<'a>(&'a self, mem: &'a dyn GuestMemory) -> Sight<'a> {
        Sight { mem, memmap: &self.memmap, layout: &self.layout }
    }

    /// Compares the free frames found with the guest's count. The count is read before and after
    /// the scan, and the number found must lie between both, within the tolerance.
    fn compare_counts(&self, mem: &dyn GuestMemory) -> Result<(), Untrusted> {
        let tolerance = GATE_FRAMES.max(self.memmap.frames() / GATE_PART);
        let mut reason = Untrusted::NoZones;
        for _ in 0..GATE_TRIES {
            let before = self.zones.free_frames(mem).ok_or(Untrusted::NoZones)?;
            let found = self.counts(mem).free_frames();
            let after = self.zones.free_frames(mem).ok_or(Untrusted::NoZones)?;
            let low = before.min(after).saturating_sub(tolerance);
            let high = before.max(after).saturating_add(tolerance);
            // A kernel that has begun to count always has free frames.
            if before > 0 && found > 0 && (low..=high).contains(&found) {
                return Ok(());
            }
            reason = Untrusted::Gate { found, counted: after, tolerance };
        }
        Err(reason)
    }
}

/// The kernel's page tables and text, by its note.
fn kernel(note: &Note) -> Result<(PageTables, Text), Untrusted> {
    let phys_base = note.number("phys_base")?;
    let image = |what: &'static str| {
        let value = note.symbol(what)?;
        let gpa = value.wrapping_sub(IMAGE_BASE).wrapping_add(phys_base);
        match value >= IMAGE_BASE && gpa < GPA_END {
            true => Ok((value, Gpa(gpa))),
            false => Err(Untrusted::Absurd { what, value }),
        }
    };
    let levels = match note.number("pgtable_l5_enabled")? {
        0 => 4,
        1 => 5,
        value => return Err(Untrusted::Absurd { what: "pgtable_l5_enabled", value }),
    };
    let (va, gpa) = image("_stext")?;
    let (_, root) = image("swapper_pg_dir")?;
    match root.0.is_multiple_of(FRAME_BYTES) {
        true => Ok((PageTables { root, levels }, Text { va, gpa })),
        false => Err(Untrusted::Absurd { what: "swapper_pg_dir", value: root.0 }),
    }
}
