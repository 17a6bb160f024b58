//! The roots of the processes' page tables.
//!
//! x86-64 kernels keep all of them on one list (`pgd_list`), by the links of their
//! `struct page`, to bring changes of the kernel's mappings into each. Where that list begins
//! no note tells. But a frame that is on it is known by two things together: its links lead
//! from one `struct page` to another or into the kernel's image, and what it holds maps the
//! kernel as the kernel's own root does.

use ebb_units::{Gfn, Gpa};

use crate::page::PageWords;
use crate::{Guest, GuestMemory, PageKind};

/// Where x86-64 kernels map their own image and its data, moved or not.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
/// The entry that maps it, in a root of 4 or 5 levels.
const IMAGE_ENTRY: u64 = 511;
const PRESENT: u64 = 1;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Processes beyond these are not looked at: a part of RAM, but not less than this.
const ROOTS_PART: u64 = 256;
const ROOTS_LEAST: u64 = 1024;

impl Guest {
    /// The roots of processes' page tables, in order; a hint, as they come and go. Looks at
    /// all page metadata once. With page-table isolation these are the kernel's halves of the
    /// pairs, which map all that a process has.
    pub fn roots(&self, mem: &dyn GuestMemory) -> Vec<Gfn> {
        let image = |root: Gpa| {
            let entry = mem.word(Gpa(root.0 + 8 * IMAGE_ENTRY))?;
            (entry & PRESENT != 0).then_some(entry & ADDRESS)
        };
        let own = image(self.tables().root);
        let most = ROOTS_LEAST.max(self.memmap().frames() / ROOTS_PART) as usize;
        let (mut roots, mut free_until) = (Vec::new(), 0);
        self.memmap().windows(mem, |first, window| {
            let Ok(pages) = window else { return };
            for (gfn, page) in (first..).map(Gfn).zip(pages) {
                if gfn.0 < free_until {
                    // The metadata inside of a free block is from before, links too.
                    continue;
                }
                if let Some(order) = self.layout().free_order(page) {
                    free_until = gfn.0 + (1 << order);
                } else if roots.len() < most
                    && self.is_listed(page)
                    && own.is_some()
                    && image(gfn.gpa()) == own
                    && self.maps_kernel(mem, gfn.gpa().0)
                {
                    roots.push(gfn);
                }
            }
        });
        roots
    }

    /// Whether the frame's metadata may be that of a root: a page without a use that is
    /// known, or a page table, on a list of such.
    fn is_listed(&self, page: &PageWords) -> bool {
        let is_link = |va: u64| {
            let of_a_page = va.checked_sub(self.layout().lru_offset());
            va >= IMAGE
                || of_a_page
                    .and_then(|va| self.memmap().gfn_at(va))
                    .is_some_and(|gfn| self.memmap().covers(gfn))
        };
        [false, true].into_iter().all(|previous| is_link(self.layout().link(page, previous)))
            && matches!(self.layout().decode(page, None), PageKind::Other | PageKind::Table)
    }

    /// Whether a frame is a page table by its metadata as it is now, and which frame of
    /// metadata says so; by the guest's page tables as they are now.
    pub fn table_metadata(&self, mem: &dyn GuestMemory, gfn: Gfn) -> Option<Gfn> {
        let page = self.memmap().walk(mem, gfn)?;
        let kind = self.layout().decode(&mem.page(page)?, None);
        (kind == PageKind::Table).then_some(page.gfn())
    }
}
