//! A made-up guest: the least that a Linux kernel's memory must contain to be trusted.
//!
//! 64 MiB of RAM, laid out as a kernel of 6.1 would, and free to be broken anywhere:
//!
//! ```text
//! 1 MiB    page tables        4 MiB    struct pages (1 MiB)
//! 2 MiB    kernel image       6 MiB    sections, node with its zones, note
//! 8 MiB    ordinary frames ...
//! ```

pub mod broken;

use ebb_inspect::Snapshot;
use ebb_units::{FRAME_BYTES, Gfn, Gpa};

use crate::vprobe::Registration;

/// Size of the guest's RAM, which begins at address 0.
pub const RAM_BYTES: u64 = 64 << 20;
/// Size of the guest's RAM in frames.
pub const FRAMES: u64 = RAM_BYTES / FRAME_BYTES;
/// Size of a `struct page`.
pub const PAGE_BYTES: u64 = 64;

/// Virtual address of the kernel's image.
pub const IMAGE_VA: u64 = 0xffff_ffff_8100_0000;
/// Guest-physical address of the kernel's image.
pub const IMAGE: Gpa = Gpa(2 << 20);
/// Virtual address of the direct mapping of all RAM.
pub const DIRECT_VA: u64 = 0xffff_8880_0000_0000;
/// Virtual address of the struct pages.
pub const VMEMMAP_VA: u64 = 0xffff_ea00_0000_0000;
/// Guest-physical address of the top page table.
pub const ROOT: Gpa = Gpa(IMAGE.0 + 0x1_0000);
const NODE_DATA: u64 = 0x2_0000;
const NAMES: u64 = 0x2_1000;
const LLFREE_HEADERS: u64 = 0x2_2000;
const TABLES: u64 = 1 << 20;
/// Guest-physical address of the struct pages.
pub const MEMMAP: Gpa = Gpa(4 << 20);
const ROOTS: u64 = 6 << 20;
/// Guest-physical address of the memory sections.
pub const SECTIONS: Gpa = Gpa(ROOTS + 0x1000);
/// Guest-physical address of the node, which begins with its zones.
pub const NODE: Gpa = Gpa(ROOTS + 0x1_0000);
/// Guest-physical address of the VMCOREINFO note.
pub const NOTE: Gpa = Gpa(7 << 20);
/// First of the frames that nothing uses.
pub const FIRST_SPARE: Gfn = Gfn(2048);

/// Size of a zone's structure.
pub const ZONE_BYTES: u64 = 1536;
/// Names of the zones.
pub const ZONES: [&str; 3] = ["DMA", "DMA32", "Normal"];
const SPANNED: u64 = 144;
const FREE_AREA: u64 = 256;
const FREE_AREA_BYTES: u64 = 88;
const VM_STAT: u64 = 1344;
const NR_ZONES: u64 = 171_552;
/// Lists of free blocks that each order has.
pub const MIGRATE_TYPES: u64 = 5;

const LRU: u64 = 8;
const MAPCOUNT: u64 = 48;
const PRIVATE: u64 = 40;
const BUDDY: u64 = -129i32 as u32 as u64;
const PRESENT: u64 = 0b11;
const LEAF: u64 = 1 << 7;

/// What the made-up kernel registers, with the record at `at`: its struct pages, which the helpers
/// of V-Probe's paper read.
pub fn registration(at: Gpa) -> Registration {
    let end = MEMMAP.0 + FRAMES * PAGE_BYTES;
    Registration {
        virtual_address: DIRECT_VA + at.0,
        ranges: vec![[MEMMAP.0, end, 0, FRAMES]],
        ..Registration::default()
    }
}

/// A made-up guest.
pub struct Forge {
    /// The guest's memory.
    pub mem: Snapshot,
    /// Levels of the guest's page tables.
    pub levels: u32,
    free_frames: u64,
    tables: u64,
}

impl Forge {
    /// Makes a valid guest, with 4 or 5 levels of page tables, and all frames in use.
    pub fn new(levels: u32) -> Forge {
        let mut mem = Snapshot::new();
        mem.add(Gpa(0), vec![0; (RAM_BYTES / 8) as usize]);
        let mut forge = Forge { mem, levels, free_frames: 0, tables: TABLES };
        forge.map(IMAGE_VA, IMAGE, 1);
        for offset in (0..RAM_BYTES).step_by(2 << 20) {
            forge.map(DIRECT_VA + offset, Gpa(offset), 1);
        }
        for offset in (0..FRAMES * PAGE_BYTES).step_by(4096) {
            forge.map(VMEMMAP_VA + offset, Gpa(MEMMAP.0 + offset), 0);
        }
        for gfn in 0..FRAMES {
            forge.set_page(Gfn(gfn), MAPCOUNT, 0xffff_ffff);
        }
        forge.sections();
        forge.zones();
        forge.note(&forge.note_text());
        forge
    }

    /// Makes a guest with free blocks of order 10 and 9 and a few small ones, on their lists.
    pub fn with_free_blocks(levels: u32) -> Forge {
        let mut forge = Forge::new(levels);
        let large: Vec<Gfn> = (4..12).map(|index| Gfn(index * 1024)).collect();
        forge.free_list(2, 10, 1, &large);
        forge.free_list(1, 10, 0, &[Gfn(12 * 1024)]);
        forge.free_list(2, 9, 1, &[Gfn(13 * 1024), Gfn(14 * 1024), Gfn(15 * 1024)]);
        forge.free_list(0, 3, 1, &[Gfn(2048), Gfn(2064)]);
        forge
    }

    /// Makes `heads` free blocks of `order` and links them, first to last, as a list.
    pub fn free_list(&mut self, zone: u64, order: u64, kind: u64, heads: &[Gfn]) {
        let list = NODE.0 + zone * ZONE_BYTES + FREE_AREA + order * FREE_AREA_BYTES + kind * 16;
        let link = |gfn: &Gfn| VMEMMAP_VA + gfn.0 * PAGE_BYTES + LRU;
        let ring: Vec<u64> =
            std::iter::once(DIRECT_VA + list).chain(heads.iter().map(link)).collect();
        let place = |index: usize| match index {
            0 => Gpa(list),
            _ => self.page(heads[index - 1], LRU),
        };
        for index in 0..ring.len() {
            let (next, previous) =
                ((index + 1) % ring.len(), (index + ring.len() - 1) % ring.len());
            self.mem.set(place(index), ring[next]);
            self.mem.set(Gpa(place(index).0 + 8), ring[previous]);
        }
        for &head in heads {
            self.set_page(head, MAPCOUNT, BUDDY);
            self.set_page(head, PRIVATE, order);
            self.free_frames += 1 << order;
        }
        self.set_zone(0, VM_STAT, self.free_frames);
    }

    /// Returns the note's text, that of a 6.1 kernel.
    pub fn note_text(&self) -> String {
        let levels = self.levels - 4;
        let phys_base = IMAGE.0 as i64 - (IMAGE_VA - 0xffff_ffff_8000_0000) as i64;
        format!(
            "OSRELEASE=6.1.0-forged\nBUILD-ID=00\nPAGESIZE=4096\n\
             SYMBOL(swapper_pg_dir)={:x}\nSYMBOL(_stext)={IMAGE_VA:x}\n\
             SYMBOL(mem_section)={:x}\nLENGTH(mem_section)=2048\nSIZE(mem_section)=16\n\
             OFFSET(mem_section.section_mem_map)=0\nNUMBER(SECTION_SIZE_BITS)=27\n\
             SIZE(page)=64\nSIZE(zone)={ZONE_BYTES}\nSIZE(free_area)={FREE_AREA_BYTES}\n\
             OFFSET(page.flags)=0\nOFFSET(page.mapping)=24\nOFFSET(page.lru)={LRU}\n\
             OFFSET(page._mapcount)={MAPCOUNT}\nOFFSET(page.private)={PRIVATE}\n\
             OFFSET(page.compound_head)=8\nOFFSET(page.compound_dtor)=16\n\
             OFFSET(page.compound_order)=17\n\
             OFFSET(pglist_data.node_zones)=0\nOFFSET(pglist_data.nr_zones)={NR_ZONES}\n\
             OFFSET(zone.free_area)={FREE_AREA}\nOFFSET(zone.vm_stat)={VM_STAT}\n\
             OFFSET(zone.spanned_pages)={SPANNED}\nOFFSET(free_area.free_list)=0\n\
             LENGTH(zone.free_area)=11\nLENGTH(free_area.free_list)={MIGRATE_TYPES}\n\
             NUMBER(NR_FREE_PAGES)=0\nNUMBER(PG_slab)=9\nNUMBER(PG_head_mask)=65536\n\
             NUMBER(PG_lru)=4\nNUMBER(PG_swapbacked)=19\nNUMBER(PG_private)=13\n\
             OFFSET(page._refcount)=52\n\
             NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-129\nNUMBER(HUGETLB_PAGE_DTOR)=2\n\
             NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-257\nNUMBER(phys_base)={phys_base}\n\
             NUMBER(pgtable_l5_enabled)={levels}\nSYMBOL(node_data)={:x}\n\
             LENGTH(node_data)=1024\nNUMBER(sme_mask)=0\n",
            IMAGE_VA + (ROOT.0 - IMAGE.0),
            DIRECT_VA + ROOTS,
            IMAGE_VA + NODE_DATA,
        )
    }

    /// Returns the lines by which a kernel announces zones of LLFree with these headers. It does
    /// not have them in its image yet: [`Forge::boot_llfree`].
    pub fn llfree_text(&self, headers: &[Gpa]) -> String {
        let zones = { headers.iter().enumerate() }
            .map(|(zone, header)| format!("LLFREE_ZONE_0_{zone}={:x}\n", header.0));
        let place = IMAGE_VA + LLFREE_HEADERS;
        format!("{}SYMBOL(llfree_headers)={place:x}\n", zones.collect::<String>())
    }

    /// Has the kernel's image say where the headers are, as a kernel does that has booted.
    pub fn boot_llfree(&self, headers: &[Gpa]) {
        for (index, header) in (0..).zip(headers) {
            self.mem.set(Gpa(IMAGE.0 + LLFREE_HEADERS + 8 * index), header.0);
        }
    }

    /// Has the kernel's image say that its only node is at `va`.
    pub fn set_node(&self, va: u64) {
        self.mem.set(Gpa(IMAGE.0 + NODE_DATA), va);
    }

    /// Writes a note with this text into memory.
    pub fn note(&self, text: &str) {
        self.note_at(NOTE, text.as_bytes());
    }

    /// Writes a note with this text to `at`.
    pub fn note_at(&self, at: Gpa, text: &[u8]) {
        let mut bytes = Vec::new();
        bytes.extend(11u32.to_le_bytes());
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(b"VMCOREINFO\0\0");
        bytes.extend(text);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            self.mem.set(Gpa(at.0 + 8 * index as u64), word);
        }
    }

    /// Maps one leaf: 4 KiB at level 0, 2 MiB at level 1.
    pub fn map(&mut self, va: u64, to: Gpa, leaf_level: u32) {
        let mut table = ROOT.0;
        for level in (leaf_level + 1..self.levels).rev() {
            let entry = Gpa(table + 8 * (va >> (12 + 9 * level) & 511));
            table = match ebb_inspect::GuestMemory::word(&self.mem, entry) {
                Some(word) if word != 0 => word & !0xfff,
                _ => {
                    let new = self.tables;
                    self.tables += 0x1000;
                    assert!(self.tables <= IMAGE.0);
                    self.mem.set(entry, new | PRESENT);
                    new
                }
            };
        }
        let entry = Gpa(table + 8 * (va >> (12 + 9 * leaf_level) & 511));
        let leaf = if leaf_level == 0 { 0 } else { LEAF };
        self.mem.set(entry, to.0 | PRESENT | leaf);
    }

    /// Returns the address of a word of a frame's `struct page`.
    pub fn page(&self, gfn: Gfn, offset: u64) -> Gpa {
        Gpa(MEMMAP.0 + gfn.0 * PAGE_BYTES + offset)
    }

    /// Sets a word of a frame's `struct page`.
    pub fn set_page(&self, gfn: Gfn, offset: u64, value: u64) {
        self.mem.set(self.page(gfn, offset), value);
    }

    /// Sets a word of a zone's structure.
    pub fn set_zone(&self, zone: u64, offset: u64, value: u64) {
        self.mem.set(Gpa(NODE.0 + zone * ZONE_BYTES + offset), value);
    }

    /// Returns the number of frames in free blocks.
    pub fn free_frames(&self) -> u64 {
        self.free_frames
    }

    fn sections(&self) {
        self.mem.set(Gpa(ROOTS), DIRECT_VA + SECTIONS.0);
        self.mem.set(SECTIONS, VMEMMAP_VA | 0b1111);
    }

    fn zones(&self) {
        self.set_node(DIRECT_VA + NODE.0);
        self.mem.set(Gpa(NODE.0 + NR_ZONES), ZONES.len() as u64);
        for (zone, name) in (0..).zip(ZONES) {
            let mut bytes = [0; 8];
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            self.mem.set(Gpa(IMAGE.0 + NAMES + 16 * zone), u64::from_le_bytes(bytes));
            self.set_zone(zone, SPANNED, FRAMES);
            self.set_zone(zone, SPANNED + 16, IMAGE_VA + NAMES + 16 * zone);
            for list in 0..11 * MIGRATE_TYPES {
                let (order, kind) = (list / MIGRATE_TYPES, list % MIGRATE_TYPES);
                let head = zone * ZONE_BYTES + FREE_AREA + order * FREE_AREA_BYTES + kind * 16;
                self.mem.set(Gpa(NODE.0 + head), DIRECT_VA + NODE.0 + head);
                self.mem.set(Gpa(NODE.0 + head + 8), DIRECT_VA + NODE.0 + head);
            }
        }
    }
}
