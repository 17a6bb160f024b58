//! What eviction has the VMM do.

use std::io;

use ebb_pager::Pager;
use ebb_reclaim::limit::windows::Vmm;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::HugeFrame;

use crate::system::small_pages;
use crate::vm::context::forgetting::Forgetting;

/// A VMM, and how its page table is emptied.
pub struct Forgetful<'a>(pub &'a Process, pub &'a Forgetting);

impl Vmm for Forgetful<'_> {
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<u64> {
        self.1.once(self.0, ranges)
    }

    fn break_up(&self, pager: &Pager, windows: &[HugeFrame]) -> io::Result<()> {
        small_pages::break_up(self.0, pager, windows)
    }
}
