//! Nodes, zones and the free lists of the buddy allocator.

use ebb_units::{Gfn, Gpa};
use thiserror::Error;

use crate::page::PAGE_BYTES;
use crate::{GuestMemory, Memmap, Note, PageLayout, PageTables, Untrusted};

const NODES_MAX: u64 = 1024;
/// Most zones of a node: DMA, DMA32, Normal, Movable, Device.
const ZONES_MAX: u64 = 5;
/// Bound on migrate types: a kernel has 7 at most (6 in stock ones).
const MIGRATE_TYPES_MAX: u64 = 8;
/// Most words from `spanned_pages` to `zone.name`, in all kernels known.
const NAME_WITHIN_WORDS: u64 = 8;
const STAT_MAX: u64 = 64;

/// Which addresses a zone is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ZoneKind {
    /// Ordinary memory.
    Normal,
    /// Memory that holds only movable pages.
    Movable,
    /// Memory below 4 GiB.
    Dma32,
    /// Memory below 16 MiB, or of an unknown kind: never reclaimed from.
    Dma,
}

/// One populated zone of one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zone {
    /// The node's index.
    pub node: u32,
    /// Which addresses the zone is for.
    pub kind: ZoneKind,
    va: u64,
    pub(crate) gpa: Gpa,
}

/// All populated zones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Zones {
    zones: Vec<Zone>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) fields: Fields,
}

/// One `struct pglist_data`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Node {
    pub(crate) index: u32,
    pub(crate) va: u64,
    /// Where the kernel's image has its address. `None`: it lies in the image itself.
    pointer_va: Option<u64>,
}

/// Byte offsets and sizes inside `struct zone`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fields {
    pub(crate) zone_bytes: u64,
    pub(crate) spanned: u64,
    /// Offset of `vm_stat[NR_FREE_PAGES]`.
    pub(crate) free_pages: u64,
    pub(crate) free_area: u64,
    pub(crate) free_area_bytes: u64,
    pub(crate) free_list: u64,
    pub(crate) migrate_types: u64,
}

/// An end of a free list. The kernel allocates blocks from the head, so those at the tail stay free
/// the longest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Recently freed, next to be used.
    Head,
    /// Least likely to be used soon.
    Tail,
}

/// Why a walk along a free list stopped early. On a running guest, each reason may only mean that
/// the list changed during the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ListFault {
    /// A link is not resident.
    #[error("a free list's link is not in the guest's memory")]
    Unreadable,
    /// A link does not lead to a frame's metadata.
    #[error("a free list leads out of the memory map")]
    Wild,
    /// The frame is not the first of a free block of the list's order.
    #[error("a free list holds a frame that is no free block of its order")]
    NotFree,
    /// The list has more blocks than the guest.
    #[error("a free list does not end")]
    Endless,
}

impl Zones {
    /// Finds the populated zones.
    pub fn new(
        mem: &dyn GuestMemory,
        note: &Note,
        tables: &PageTables,
    ) -> Result<Zones, Untrusted> {
        let fields = Fields::new(note)?;
        let mut zones = Vec::new();
        let nodes = nodes(mem, note, tables)?;
        for node in &nodes {
            fields.node(mem, note, tables, node, &mut zones)?;
        }
        zones.sort_by_key(|zone| (zone.kind, zone.node));
        match zones.is_empty() {
            true => Err(Untrusted::NoZones),
            false => Ok(Zones { zones, nodes, fields }),
        }
    }

    /// Whether the kernel's image, as these tables map it, leads to the same nodes as when they
    /// were found. Nodes that came later do not matter.
    pub(crate) fn are_in_place(&self, mem: &dyn GuestMemory, tables: &PageTables) -> bool {
        let leads_there =
            |node: &Node| node.pointer_va.is_none_or(|va| tables.word(mem, va) == Some(node.va));
        self.nodes.iter().all(leads_there)
    }

    /// The zones, in the order in which to reclaim from them.
    pub fn iter(&self) -> impl Iterator<Item = &Zone> {
        self.zones.iter()
    }

    /// Lists of each order: one for each migrate type of the kernel.
    pub fn migrate_types(&self) -> u8 {
        self.fields.migrate_types as u8
    }

    /// The guest's own count of its free frames (NR_FREE_PAGES of all zones).
    ///
    /// It lags by what each CPU has not added yet (up to 125 frames a CPU and zone). Pages on
    /// per-CPU lists do not count as free.
    pub fn free_frames(&self, mem: &dyn GuestMemory) -> Option<u64> {
        let frames = |zone: &Zone| mem.word(zone.gpa.checked_add(self.fields.free_pages)?);
        // A negative count is a CPU's debt, and counts as 0.
        let counted = |zone| frames(zone).map(|frames| (frames as i64).max(0) as u64);
        self.zones.iter().map(counted).try_fold(0u64, |sum, frames| sum.checked_add(frames?))
    }

    /// Walks the list of free blocks of `order` and `migrate_type` from one end.
    pub fn free_list<'a>(
        &self,
        sight: Sight<'a>,
        zone: &Zone,
        order: u8,
        migrate_type: u8,
        end: End,
    ) -> FreeList<'a> {
        let fields = &self.fields;
        let list = fields.free_area
            + fields.free_area_bytes * u64::from(order)
            + fields.free_list
            + LIST_BYTES * u64::from(migrate_type);
        let link = if end == End::Tail { LIST_PREV } else { 0 };
        let known = order <= sight.layout.max_order() && migrate_type < self.migrate_types();
        let first = match known {
            true => zone.gpa.checked_add(list + link).and_then(|gpa| sight.mem.word(gpa)),
            false => None,
        };
        FreeList {
            sight,
            order,
            end,
            end_va: zone.va.wrapping_add(list),
            at: first.ok_or(ListFault::Unreadable).map(Some),
            left: sight.memmap.frames() >> order.min(63),
        }
    }
}

/// Size of `struct list_head`: next, prev.
const LIST_BYTES: u64 = 16;
const LIST_PREV: u64 = 8;

/// What a walk along a free list reads.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// The guest's RAM.
    pub mem: &'a dyn GuestMemory,
    /// Where the metadata is.
    pub memmap: &'a Memmap,
    /// How to read the metadata.
    pub layout: &'a PageLayout,
}

/// Iterator over the first frames of the blocks on one free list, from one end. It ends at the
/// list's end or at the first fault.
pub struct FreeList<'a> {
    sight: Sight<'a>,
    order: u8,
    end: End,
    /// Address of the list's own head, where a walk ends.
    end_va: u64,
    /// Address of the next block's `lru`.
    at: Result<Option<u64>, ListFault>,
    left: u64,
}

impl FreeList<'_> {
    /// Why the walk stopped, unless at the list's end.
    pub fn fault(&self) -> Option<ListFault> {
        self.at.err()
    }

    fn step(&mut self, lru_va: u64) -> Result<Option<(Gfn, u64)>, ListFault> {
        if lru_va == self.end_va {
            return Ok(None);
        }
        self.left = self.left.checked_sub(1).ok_or(ListFault::Endless)?;
        let Sight { mem, memmap, layout } = self.sight;
        let gfn = memmap.gfn_at(lru_va.wrapping_sub(layout.lru_offset())).ok_or(ListFault::Wild)?;
        let page = memmap.metadata_gpa(gfn).ok_or(ListFault::Wild)?;
        let words = mem.words(page, (PAGE_BYTES / 8) as usize);
        let page = words.and_then(<[_]>::first_chunk).ok_or(ListFault::Unreadable)?;
        if layout.free_order(page) != Some(self.order) {
            return Err(ListFault::NotFree);
        }
        if !memmap.is_block(gfn, self.order) {
            return Err(ListFault::Wild);
        }
        Ok(Some((gfn, layout.link(page, self.end == End::Tail))))
    }
}

impl Iterator for FreeList<'_> {
    type Item = Gfn;

    fn next(&mut self) -> Option<Gfn> {
        let lru_va = self.at.ok().flatten()?;
        match self.step(lru_va) {
            Ok(step) => {
                self.at = Ok(step.map(|(_, next)| next));
                step.map(|(gfn, _)| gfn)
            }
            Err(fault) => {
                self.at = Err(fault);
                None
            }
        }
    }
}

impl Fields {
    fn new(note: &Note) -> Result<Fields, Untrusted> {
        let stat = note.number("NR_FREE_PAGES")?;
        if stat >= STAT_MAX {
            return Err(Untrusted::Absurd { what: "NR_FREE_PAGES", value: stat });
        }
        let migrate_types = note.length("free_area.free_list")?;
        if migrate_types > MIGRATE_TYPES_MAX {
            return Err(Untrusted::Absurd { what: "free_area.free_list", value: migrate_types });
        }
        Ok(Fields {
            zone_bytes: note.size("zone")?,
            spanned: note.offset("zone.spanned_pages")?,
            free_pages: note.offset("zone.vm_stat")? + 8 * stat,
            free_area: note.offset("zone.free_area")?,
            free_area_bytes: note.size("free_area")?,
            free_list: note.offset("free_area.free_list")?,
            migrate_types,
        })
    }

    fn node(
        &self,
        mem: &dyn GuestMemory,
        note: &Note,
        tables: &PageTables,
        node: &Node,
        zones: &mut Vec<Zone>,
    ) -> Result<(), Untrusted> {
        let count = tables.word(mem, node.va.wrapping_add(note.offset("pglist_data.nr_zones")?));
        // The count is an int: the next field shares its word.
        let count = count.map_or(0, |word| (word as u32).into());
        if count > ZONES_MAX {
            return Err(Untrusted::Absurd { what: "pglist_data.nr_zones", value: count });
        }
        let first = node.va.wrapping_add(note.offset("pglist_data.node_zones")?);
        for index in 0..count {
            let va = first.wrapping_add(index * self.zone_bytes);
            let spanned = tables.word(mem, va.wrapping_add(self.spanned)).unwrap_or(0);
            let Some(gpa) = tables.translate(mem, va).filter(|_| spanned > 0) else { continue };
            zones.push(Zone { node: node.index, kind: self.kind(mem, tables, va), va, gpa });
        }
        Ok(())
    }

    /// The kind by the zone's name. The note does not give the name's place, so it is the first
    /// pointer to a known name behind `spanned_pages`.
    fn kind(&self, mem: &dyn GuestMemory, tables: &PageTables, va: u64) -> ZoneKind {
        let named = (1..=NAME_WITHIN_WORDS).find_map(|index| {
            let pointer = tables.word(mem, va.wrapping_add(self.spanned + 8 * index))?;
            name_at(mem, tables, pointer)
        });
        named.unwrap_or(ZoneKind::Dma)
    }
}

/// The zone kind that the string at `va` names.
fn name_at(mem: &dyn GuestMemory, tables: &PageTables, va: u64) -> Option<ZoneKind> {
    let mut name = [0u8; 16];
    for (index, part) in name.chunks_exact_mut(8).enumerate() {
        // A string may begin anywhere in a word.
        let from = va.checked_add(8 * index as u64)?;
        part.copy_from_slice(&unaligned(mem, tables, from)?.to_le_bytes());
    }
    let length = name.iter().position(|&byte| byte == 0)?;
    match &name[..length] {
        b"Normal" => Some(ZoneKind::Normal),
        b"Movable" => Some(ZoneKind::Movable),
        b"DMA32" => Some(ZoneKind::Dma32),
        b"DMA" | b"Device" => Some(ZoneKind::Dma),
        _ => None,
    }
}

fn unaligned(mem: &dyn GuestMemory, tables: &PageTables, va: u64) -> Option<u64> {
    let shift = va % 8 * 8;
    let low = tables.word(mem, va - va % 8)? >> shift;
    match shift {
        0 => Some(low),
        _ => Some(low | tables.word(mem, (va - va % 8).checked_add(8)?)? << (64 - shift)),
    }
}

/// Finds each node's `struct pglist_data`.
fn nodes(mem: &dyn GuestMemory, note: &Note, tables: &PageTables) -> Result<Vec<Node>, Untrusted> {
    // Kernels without NUMA name their one node.
    if let Ok(va) = note.symbol("contig_page_data") {
        return Ok(vec![Node { index: 0, va, pointer_va: None }]);
    }
    let (table, length) = (note.symbol("node_data")?, note.length("node_data")?);
    if length > NODES_MAX {
        return Err(Untrusted::Absurd { what: "node_data", value: length });
    }
    let node = |index: u64| {
        let pointer_va = table.checked_add(8 * index)?;
        let va = tables.word(mem, pointer_va)?;
        Some(Node { index: index as u32, va, pointer_va: Some(pointer_va) })
    };
    Ok((0..length).filter_map(node).filter(|node| node.va != 0).collect())
}
