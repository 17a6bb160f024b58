//! What eviction has the VMM do.

use std::io;

use ebb_pager::Pager;
use ebb_reclaim::limit::windows::Vmm;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::HugeFrame;

use crate::helpers::injector;
use crate::system::small_pages;

/// A VMM whose page table is emptied by injected calls.
pub struct Forgetful<'a>(pub &'a Process);

impl Vmm for Forgetful<'_> {
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<u64> {
        injector::forget_once(self.0, ranges)
    }

    fn break_up(&self, pager: &Pager, windows: &[HugeFrame]) -> io::Result<()> {
        small_pages::break_up(self.0, pager, windows)
    }
}
