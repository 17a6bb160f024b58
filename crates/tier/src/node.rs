//! The memory of one NUMA node as a tier.

use std::io;
use std::sync::Arc;

use ebb_pager::Pager;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, HUGE_BYTES, Hva};
use ebb_vm::Ram;
use rustix::io::Errno;

use crate::ladder::TierKind;
use crate::mover::{self, Mover};
use crate::tier::{Outcome, Tier, TierError};

/// The pages of one VM, as mapped by one process. The kernel finds them by that process's number
/// and addresses. They stay mapped wherever else they are mapped.
pub struct Pages {
    process: Arc<Process>,
    mapped: Mapped,
    mover: Mover,
}

enum Mapped {
    /// As the VMM has them mapped.
    Vmm(Arc<Ram>),
    /// As this process has them mapped, from the first question about them on.
    Here(Arc<Pager>),
}

impl Pages {
    /// The pages as the VMM, `process`, has them mapped. A page that it has not mapped is
    /// [`Outcome::Nothing`], even if the RAM file has memory for it.
    pub fn of_vmm(process: Arc<Process>, ram: Arc<Ram>, mover: Mover) -> Pages {
        Pages { process, mapped: Mapped::Vmm(ram), mover }
    }

    /// All resident pages, by this process's own mapping.
    ///
    /// # Errors
    /// From opening `/proc/self`.
    pub fn of_pager(pager: Arc<Pager>, mover: Mover) -> io::Result<Pages> {
        Ok(Pages { process: Arc::new(Process::own()?), mapped: Mapped::Here(pager), mover })
    }

    /// The node of each frame of a range; `None`: it holds no page, or somebody is working on it.
    /// The pages stay mapped in this process from then on, until [`Pages::unmap`].
    ///
    /// # Errors
    /// [`TierError`].
    pub fn nodes(&self, frames: FrameRange) -> Result<Vec<Option<u32>>, TierError> {
        if let Mapped::Here(pager) = &self.mapped {
            for part in frames.by_huge() {
                // What cannot be mapped now is left for the next time.
                if let Err(error) = pager.folios().map_here(part.start.huge()) {
                    tracing::debug!("mapping {part:?}: {error}");
                }
            }
        }
        let statuses = self.ask(&frames.frames().collect::<Vec<Gfn>>())?;
        Ok(statuses.into_iter().map(|status| u32::try_from(status).ok()).collect())
    }

    /// Removes the pages from this process's page table, until they are asked for again.
    pub fn unmap(&self) {
        if let Mapped::Here(pager) = &self.mapped
            && let Err(error) = pager.ram().unmap()
        {
            tracing::debug!("taking pages out of the page table: {error}");
        }
    }

    fn ask(&self, frames: &[Gfn]) -> Result<Vec<i32>, TierError> {
        let (places, addresses) = self.addresses(frames);
        let found = mover::locate(&self.process, &addresses).map_err(TierError::Asking)?;
        // A frame that is no RAM holds no page.
        let mut statuses = vec![-Errno::FAULT.raw_os_error(); frames.len()];
        put(&mut statuses, places, found);
        Ok(statuses)
    }

    /// Brings frames to a node. Each frame stands for a page of `page_bytes`.
    fn bring(&self, frames: &[Gfn], page_bytes: u64, node: u32) -> Result<Vec<Outcome>, TierError> {
        let (places, addresses) = self.addresses(frames);
        let moved = self.mover.run(&self.process, &addresses, page_bytes, node)?;
        let mut outcomes = vec![Outcome::Nothing; frames.len()];
        put(&mut outcomes, places, moved);
        Ok(outcomes)
    }

    /// The frames that are RAM: their index in `frames`, and their address.
    fn addresses(&self, frames: &[Gfn]) -> (Vec<usize>, Vec<Hva>) {
        let address = |gfn: Gfn| match &self.mapped {
            Mapped::Vmm(ram) => Some(ram.hva_range(FrameRange::new(gfn, 1))?.start),
            Mapped::Here(pager) => pager.ram().here(gfn),
        };
        let each = frames.iter().enumerate();
        each.filter_map(|(at, gfn)| Some((at, address(*gfn)?))).unzip()
    }
}

fn put<T: Copy>(all: &mut [T], places: Vec<usize>, values: Vec<T>) {
    for (at, value) in places.into_iter().zip(values) {
        all.get_mut(at).into_iter().for_each(|to| *to = value);
    }
}

/// A NUMA node, as a tier for the pages of one VM.
pub struct Node {
    number: u32,
    pages: Arc<Pages>,
    is_huge: bool,
}

impl Node {
    /// The node `number`.
    pub fn new(number: u32, pages: Arc<Pages>) -> Node {
        Node { number, pages, is_huge: false }
    }

    /// The node `number`, for memory in transparent huge pages. A frame brings all of its huge
    /// frame from itself on, in huge pages or in small ones.
    pub fn huge(number: u32, pages: Arc<Pages>) -> Node {
        Node { number, pages, is_huge: true }
    }

    fn bring_huge(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
        // If it is a huge page, one address brings all of it.
        let mut outcomes = self.pages.bring(frames, HUGE_BYTES, self.number)?;
        // If that page stayed, the rest of its huge frame would too.
        let others = |gfn: Gfn, first: Outcome| match first.stays() {
            true => gfn.0..gfn.0,
            false => gfn.0 + 1..FrameRange::huge(gfn.huge()).end().0,
        };
        let each = || frames.iter().zip(&outcomes).map(|(gfn, first)| others(*gfn, *first));
        let all: Vec<Gfn> = each().flatten().map(Gfn).collect();
        let counts: Vec<usize> = each().map(Iterator::count).collect();
        let mut brought = self.pages.bring(&all, FRAME_BYTES, self.number)?.into_iter();
        for (outcome, count) in outcomes.iter_mut().zip(counts) {
            *outcome = brought.by_ref().take(count).fold(*outcome, together);
        }
        Ok(outcomes)
    }
}

/// The outcome of two pages together: if one stayed, that of the one that stayed.
fn together(one: Outcome, other: Outcome) -> Outcome {
    let worse = one.max(other);
    if worse.stays() { worse } else { one.min(other) }
}

impl Tier for Node {
    fn kind(&self) -> TierKind {
        TierKind::Node(self.number)
    }

    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
        match self.is_huge {
            true => self.bring_huge(frames),
            false => self.pages.bring(frames, FRAME_BYTES, self.number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_that_stays_counts_for_its_huge_frame() {
        use Outcome::{InUse, Moved, NoRoom, Nothing, There};
        for (pages, all) in [
            (&[Nothing, There, Moved][..], Moved),
            (&[Nothing, There], There),
            (&[Nothing, Nothing], Nothing),
            (&[Moved, InUse, There], InUse),
            (&[InUse, NoRoom, Moved], NoRoom),
        ] {
            assert_eq!(pages.iter().copied().reduce(together), Some(all), "{pages:?}");
        }
    }
}
