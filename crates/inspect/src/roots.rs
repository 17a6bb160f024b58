//! The roots of the processes' page tables.
//!
//! x86-64 kernels keep all of them on one list (`pgd_list`), linked by their `struct page`, to
//! bring changes of the kernel's mappings into each. No note tells where that list begins. But two
//! things together identify a frame on it. Its links lead to a `struct page` or into the kernel's
//! image, and its content maps the kernel as the kernel's own root does.

use ebb_units::{Gfn, Gpa};

use crate::page::PageWords;
use crate::{Guest, GuestMemory, PageKind, PageTables};

/// Start of the addresses at which x86-64 kernels map their own image and its data, with or without
/// KASLR.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
/// Index of the entry that maps the image, in a root of 4 or 5 levels.
const IMAGE_ENTRY: u64 = 511;
const PRESENT: u64 = 1;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Divisor of the known frames that gives the most roots to return, unless [`ROOTS_LEAST`] is more.
const ROOTS_PART: u64 = 256;
/// Most roots to return for a small RAM.
const ROOTS_LEAST: u64 = 1024;

impl Guest {
    /// Returns the roots of the processes' page tables, in order. They are a hint, because
    /// processes come and go. Looks at all page metadata once. With page-table isolation these are
    /// the kernel's halves of the pairs, which map all that a process has.
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
                    // Metadata inside a free block is stale, and so are its links.
                    continue;
                }
                if let Some(order) = self.layout().free_order(page) {
                    free_until = gfn.0 + (1 << order);
                } else if roots.len() < most
                    && self.is_listed(page)
                    && own.is_some()
                    && image(gfn.gpa()) == own
                    && self.is_kernel_of(mem, PageTables { root: gfn.gpa(), ..*self.tables() })
                {
                    roots.push(gfn);
                }
            }
        });
        roots
    }

    /// Whether this metadata may be a root's: a page table, or a page of unknown use, with links of
    /// such a list.
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

    /// The metadata frame of `gfn`, if `gfn` is a page table now. Goes by the guest's page tables
    /// as they are now.
    pub fn table_metadata(&self, mem: &dyn GuestMemory, gfn: Gfn) -> Option<Gfn> {
        let page = self.memmap().walk(mem, gfn)?;
        let kind = self.layout().decode(&mem.page(page)?, None);
        (kind == PageKind::Table).then_some(page.gfn())
    }
}
