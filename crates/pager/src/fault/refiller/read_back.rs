//! Reading content that comes back: the page asked for goes on before its neighbours are there.

use std::io;

use ebb_ledger::Content;
use ebb_store::Page;

use crate::fault::refiller::Back;
use crate::fault::refiller::Refiller;

impl Refiller {
    /// Reads the pages from `from` on, of which `first` is the index of the first, and fills the
    /// frame `asked` for. Other frames whose page cannot be read stay evicted.
    pub(crate) fn read_back<'l>(
        &'l self,
        (from, first): (Content, usize),
        pages: &mut [Page],
        asked: Option<Back<'l>>,
        part: &mut Vec<Back<'l>>,
    ) -> io::Result<()> {
        let (asked, good) = match from {
            Content::OnDisk { block } => self.read_blocks((block, first), pages, asked, part),
            Content::Saved { slot } => self.read_slots((slot, first), pages, asked, part),
            _ => (asked, Err(io::ErrorKind::InvalidInput.into())),
        };
        if let Some(Back { word, .. }) = asked {
            // No wake: as in `fill_asked`.
            let _ = word.abandon();
        }
        let good = good?;
        let (kept, lost) = part.drain(..).partition(|back| good.contains(&(back.page - first)));
        *part = kept;
        self.leave_evicted(lost);
        Ok(())
    }

    /// Returns the indices of the pages that were read, and the frame asked for if it is not
    /// filled.
    fn read_slots<'l>(
        &'l self,
        (slot, first): (u64, usize),
        pages: &mut [Page],
        mut asked: Option<Back<'l>>,
        part: &[Back<'l>],
    ) -> (Option<Back<'l>>, io::Result<Vec<usize>>) {
        let at = asked.as_ref().map(|back| back.page - first);
        let others = part.iter().map(|back| back.page - first);
        let which: Vec<usize> = at.into_iter().chain(others).collect();
        let (mut good, mut filled) = (Vec::with_capacity(which.len()), Ok(()));
        let loaded = self.residency.store().load_some(slot, pages, &which, &mut |index, page| {
            good.push(index);
            if at == Some(index)
                && let Some(back) = asked.take()
            {
                filled = self.fill_asked(back, page);
            }
        });
        if loaded.is_ok()
            && let (Some(back), Some(at)) = (asked.take(), at)
        {
            // Loads it alone, which says why it failed.
            match self.residency.store().load(slot + at as u64, &mut pages[at]) {
                Ok(()) => filled = self.fill_asked(back, &pages[at]),
                Err(error) => return (Some(back), Err(error.into())),
            }
        }
        let result = loaded.map_err(io::Error::from).and(filled).map(|()| good);
        (asked, result)
    }

    /// As [`Refiller::read_slots`], of blocks: only pages that equal what the frames held count as
    /// read.
    fn read_blocks<'l>(
        &'l self,
        (block, first): (u64, usize),
        pages: &mut [Page],
        asked: Option<Back<'l>>,
        part: &[Back<'l>],
    ) -> (Option<Back<'l>>, io::Result<Vec<usize>>) {
        let check = |gfn, at: usize, pages: &[Page]| {
            self.residency.check_block(gfn, block + at as u64, &pages[at])
        };
        let mut read = self.residency.disk().read(block, pages);
        let is_whole = read.is_ok();
        if let Some(back) = asked {
            let (gfn, at) = (back.gfn, back.page - first);
            if !is_whole && pages.len() > 1 {
                // The frame asked for must not fail because of a block beside its own.
                read = self.residency.disk().read(block + at as u64, &mut pages[at..=at]);
            }
            if let Err(error) = read.and_then(|()| check(gfn, at, pages)) {
                return (Some(back), Err(error));
            }
            read = self.fill_asked(back, &pages[at]);
        }
        let others = part.iter().map(|back| (back.gfn, back.page - first));
        let good = others.filter(|(gfn, at)| is_whole && check(*gfn, *at, pages).is_ok());
        (None, read.map(|()| good.map(|(_, at)| at).collect()))
    }
}
