//! The zones of a kernel that allocates its frames by LLFree.
//!
//! The note has one line for each zone, `LLFREE_ZONE_<node>_<zone>=<hex>`, with the guest-physical
//! address of the zone's header (`docs/llfree.md`). Such a kernel flags no page as buddy, so page
//! metadata marks no frame as free.
//!
//! Memory outlives a boot. While a kernel without a random base boots again, the last boot's note
//! and headers may be whole, at the addresses that this boot will use as well. So the kernel has
//! the headers' addresses in its image, too, in the order of the note. Each boot clears that part
//! of the image (`.bss`) before its page tables map the memory map, and sets it again when the
//! kernel has written its note.

use ebb_units::Gpa;

use crate::{GuestMemory, Note, PageTables, Untrusted};

const PREFIX: &str = "LLFREE_ZONE_";
/// Most zones to read, over all nodes. A note has no room for many more.
const ZONES_MAX: usize = 64;

/// The array of the headers' addresses in the kernel's image.
const HEADERS: &str = "llfree_headers";

/// A zone's header, as the note announces it. None of it is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LlfreeZone {
    /// The NUMA node.
    pub node: u32,
    /// Linux's number of the zone.
    pub zone: u32,
    /// Address of the header.
    pub header: Gpa,
}

/// The zones that a note announces, in its order. A kernel with the buddy allocator announces none.
fn zones(note: &Note) -> Vec<LlfreeZone> {
    note.lines().filter_map(zone).take(ZONES_MAX).collect()
}

/// The zones of one kernel, and where its image has their headers' addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Announced {
    zones: Vec<LlfreeZone>,
    /// `None`: the kernel's patches are older than that.
    headers_va: Option<u64>,
}

impl Announced {
    /// Returns what a note announces: no zone if its kernel has the buddy allocator.
    pub fn by(note: &Note) -> Announced {
        Announced { zones: zones(note), headers_va: note.symbol(HEADERS).ok() }
    }

    /// Checks that the kernel tells its boots apart.
    ///
    /// # Errors
    /// [`Untrusted::OldLlfree`].
    pub fn check(&self) -> Result<(), Untrusted> {
        self.headers_va.map(drop).ok_or(Untrusted::OldLlfree)
    }

    pub fn zones(&self) -> &[LlfreeZone] {
        &self.zones
    }

    /// Whether the image, as these tables map it, has the same headers as the note, or is not said
    /// to have any.
    pub fn agrees(&self, mem: &dyn GuestMemory, tables: &PageTables) -> bool {
        let Some(first) = self.headers_va else { return true };
        let addresses = (0u64..).map(|index| first.checked_add(8 * index));
        self.zones
            .iter()
            .zip(addresses)
            .all(|(zone, va)| va.and_then(|va| tables.word(mem, va)) == Some(zone.header.0))
    }
}

fn zone(line: &str) -> Option<LlfreeZone> {
    let (name, value) = line.strip_prefix(PREFIX)?.split_once('=')?;
    let (node, zone) = name.split_once('_')?;
    let header = u64::from_str_radix(value.strip_prefix("0x").unwrap_or(value), 16).ok()?;
    Some(LlfreeZone { node: node.parse().ok()?, zone: zone.parse().ok()?, header: Gpa(header) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(lines: &str) -> Vec<LlfreeZone> {
        let text = format!("OSRELEASE=6.1.0\n{lines}");
        zones(&Note::parse(Gpa(0), text.into()).expect("a note"))
    }

    #[test]
    fn finds_each_zone() {
        let found = announced(
            "SIZE(page)=64\nLLFREE_ZONES=2\nLLFREE_ZONE_0_1=7ff00000\nPAGESIZE=4096\n\
             LLFREE_ZONE_1_2=0x23ff0000\n",
        );
        let zone = |node, zone, header| LlfreeZone { node, zone, header: Gpa(header) };
        assert_eq!(found, [zone(0, 1, 0x7ff0_0000), zone(1, 2, 0x23ff_0000)]);
    }

    #[test]
    fn zones_without_their_place_in_the_image_are_refused() {
        let by = |lines: &str| {
            let text = format!("OSRELEASE=6.1.0\n{lines}");
            Announced::by(&Note::parse(Gpa(0), text.into()).expect("a note"))
        };
        assert!(by("SIZE(page)=64\n").zones().is_empty());
        let zone = "LLFREE_ZONE_0_1=1000\n";
        assert_eq!(by(zone).check(), Err(Untrusted::OldLlfree));
        let both = by(&format!("{zone}SYMBOL(llfree_headers)=ffffffff81000000\n"));
        assert_eq!((both.check(), both.zones().len()), (Ok(()), 1));
    }

    #[test]
    fn malformed_announcements_are_ignored() {
        for line in [
            "LLFREE_ZONE_=1",
            "LLFREE_ZONE_0=1",
            "LLFREE_ZONE_0_0",
            "LLFREE_ZONE_0_0=",
            "LLFREE_ZONE_0_0=zz",
            "LLFREE_ZONE_-1_0=1",
            "LLFREE_ZONE_0_0_0=1",
            "LLFREE_ZONE_0_0=10000000000000000",
            " LLFREE_ZONE_0_0=1",
        ] {
            assert_eq!(announced(line), [], "{line}");
        }
    }

    #[test]
    fn a_note_of_nothing_else_is_cut() {
        let many: String = (0..200).map(|n| format!("LLFREE_ZONE_{n}_0={n:x}000\n")).collect();
        assert_eq!(announced(&many).len(), ZONES_MAX);
    }
}
