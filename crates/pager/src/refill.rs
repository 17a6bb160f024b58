//! Bringing frames back whose content is in the store or on a disk.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_ledger::{Content, LockedFrame};
use ebb_store::{Page, PageBuffer};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::counters::{add, subtract};
use crate::dead::Verdict;
use crate::give_back::{ATTEMPTS, SOON_ATTEMPTS};
use crate::install::Served;
use crate::pager::Pager;
use crate::unmapped::is_unmapped;

/// Blocks between two frames' that are read with them rather than skipped.
const GAP_MAX: usize = 16;
/// Read and filled at once: behind these the guest goes on while the next are read.
pub(crate) const PART_PAGES: usize = 128;
/// A VM at its limit waits so long for room, then goes beyond it.
const ROOM_WAITS: u32 = 400;
const ROOM_WAIT: Duration = Duration::from_micros(250);

/// What is read: from the page at `base` on, for the sake of the one `asked` behind it.
#[derive(Clone, Copy)]
struct Reading {
    base: Content,
    asked: usize,
}

/// A frame that comes back, and which page it is behind the base.
struct Back<'l> {
    gfn: Gfn,
    word: LockedFrame<'l>,
    page: usize,
}

impl Pager {
    /// Has whoever evicts catch up first, unless that one waits for the VMM.
    pub(crate) fn wait_for_room(&self) {
        for _ in 0..ROOM_WAITS {
            // Who holds the VMM up would wait for itself.
            if self.evictor_waits.load(Relaxed) || !self.is_over_limit() {
                return;
            }
            std::thread::sleep(ROOM_WAIT);
        }
    }

    /// For so many frames there is room while faults do not wait: as far above the high mark as that is
    /// above the other one.
    fn room(&self) -> u64 {
        let (tell, wait) = self.marks();
        if wait == u64::MAX {
            return u64::MAX;
        }
        let most = wait.saturating_add(wait.saturating_sub(tell));
        // Who cannot tell does not wait, either.
        self.taken_bytes().map_or(u64::MAX, |taken| most.saturating_sub(taken) / FRAME_BYTES)
    }

    /// Brings a frame back, and with it those whose content lies behind its own, or around.
    pub(crate) fn refill_ahead(&self, gfn: Gfn, buffer: &mut PageBuffer) -> io::Result<Served> {
        let Ok(word) = self.ledger.lock_frame(gfn) else { return Ok(Served::Busy) };
        let content = word.content();
        let (ahead, at) = match content {
            Content::Saved { slot } => (&self.ahead.0, slot),
            Content::OnDisk { block } => (&self.ahead.1, block),
            _ => {
                self.after(word.abandon(), FrameRange::new(gfn, 1));
                return Ok(Served::Busy);
            }
        };
        let verdict = self.verdict(gfn);
        if verdict == Verdict::Dead {
            add(&self.counters.false_reads_avoided, 1);
            let wanted = self.become_empty(gfn, word);
            self.after(wanted, FrameRange::new(gfn, 1));
            return Ok(if self.install_freed(gfn)? { Served::Done } else { Served::Busy });
        }
        let lock = || ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let mut window = lock().window(at);
        if let Content::Saved { .. } = content {
            // Never less than what lies before it.
            window.pages = window.pages.min(self.store.most_at_once());
        }
        let share = self.coming.share(window.pages, || self.room());
        window.pages = share.frames();
        window.before = window.before.min(window.pages - 1);
        add(&self.counters.ahead_hit_frames, window.hits);
        let asked = window.before;
        let reading = Reading { base: behind(content, -(asked as i64)), asked };
        let mut back = vec![Back { gfn, word, page: asked }];
        self.neighbours(reading, window.pages, &mut back);
        let behind = back.last().map_or(0, |back| back.page - asked);
        lock().read(at, at + 1 + behind as u64, back.len() as u64 - 1);
        add(&self.counters.refilled_frames, 1);
        add(&self.counters.false_reads, u64::from(verdict == Verdict::Unproven));
        add(&self.counters.ahead_frames, back.len() as u64 - 1);
        let (mut first, mut rest) = (None, back);
        while let Some(front) = rest.first() {
            let border = (front.page / PART_PAGES + 1) * PART_PAGES;
            let later = rest.split_off(rest.partition_point(|back| back.page < border));
            let part = std::mem::replace(&mut rest, later);
            let result = self.refill_part(reading, part, buffer.pages_mut());
            // What lies behind the first part was not asked for.
            first.get_or_insert(result);
        }
        first.unwrap_or(Ok(())).map(|()| Served::Done)
    }

    /// Brings frames back, the first of them from the first page. The one asked for goes on before
    /// the others are there.
    fn refill_part<'l>(
        &'l self,
        reading: Reading,
        mut part: Vec<Back<'l>>,
        pages: &mut [Page],
    ) -> io::Result<()> {
        let (Some(first), Some(last)) = (part.first(), part.last()) else { return Ok(()) };
        let (first, count) = (first.page, last.page - first.page + 1);
        let pages = pages.get_mut(..count).ok_or(io::ErrorKind::InvalidInput)?;
        let asked = part.iter().position(|back| back.page == reading.asked);
        let asked = asked.map(|at| part.remove(at));
        let from = behind(reading.base, first as i64);
        if let Err(error) = self.read_back((from, first), pages, asked, &mut part) {
            self.stay_away(part);
            return Err(error);
        }
        self.copy_back(first, pages, &mut part);
        for Back { gfn, word, .. } in part {
            let wanted = self.arrive(gfn, word);
            self.after(wanted, FrameRange::new(gfn, 1));
        }
        Ok(())
    }

    /// The frame asked for goes on with this page. On failure whoever wants it is woken by who is
    /// told of that, all of them at once.
    fn fill_asked(&self, Back { gfn, word, .. }: Back<'_>, page: &Page) -> io::Result<()> {
        let frame = FrameRange::new(gfn, 1);
        if let Err(error) = self.copy_page(gfn, page) {
            let _ = word.abandon();
            return Err(error);
        }
        // Devices before the guest: it may hand the frame to one at once.
        self.devices.map(frame);
        let _ = self.arrive(gfn, word);
        self.after(true, frame);
        Ok(())
    }

    /// They stay where they are; whoever waits for one asks again.
    fn stay_away(&self, part: Vec<Back<'_>>) {
        for Back { gfn, word, .. } in part {
            self.after(word.abandon(), FrameRange::new(gfn, 1));
        }
    }

    /// Takes the frames whose content is among the `pages` from the base on.
    fn neighbours<'l>(&'l self, reading: Reading, pages: usize, back: &mut Vec<Back<'l>>) {
        let mut last = reading.asked;
        for page in (0..reading.asked).chain(reading.asked + 1..pages) {
            let wanted = behind(reading.base, page as i64);
            let owner = match wanted {
                Content::Saved { slot } => self.owners.get(slot),
                Content::OnDisk { block } => self.resting.first_on(block),
                _ => return,
            };
            // What the VMM has unplugged has no place to be filled (`Pager::let_go`).
            let owner = owner.filter(|gfn| self.ram.region_of(*gfn).is_some());
            let held = owner.and_then(|gfn| Some((gfn, self.ledger.lock_frame(gfn).ok()?)));
            match held {
                Some((gfn, word)) if word.content() == wanted => {
                    if self.verdict(gfn) == Verdict::Dead {
                        let asked = self.become_empty(gfn, word);
                        self.after(asked, FrameRange::new(gfn, 1));
                        continue;
                    }
                    last = last.max(page);
                    back.push(Back { gfn, word, page });
                }
                Some((gfn, word)) => self.after(word.abandon(), FrameRange::new(gfn, 1)),
                None => {}
            }
            if page > last + GAP_MAX {
                break;
            }
        }
        back.sort_unstable_by_key(|back| back.page);
    }

    /// Reads the pages `from` there on, of which that is the `first`, and fills the frame `asked`
    /// for. Others whose page cannot be had stay where they are.
    fn read_back<'l>(
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
            // As in `fill_asked`.
            let _ = word.abandon();
        }
        let good = good?;
        let (kept, lost) = part.drain(..).partition(|back| good.contains(&(back.page - first)));
        *part = kept;
        self.stay_away(lost);
        Ok(())
    }

    /// Which pages are there, and the frame asked for as long as it is not filled.
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
        let loaded = self.store.load_some(slot, pages, &which, &mut |index, page| {
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
            // Says why.
            match self.store.load(slot + at as u64, &mut pages[at]) {
                Ok(()) => filled = self.fill_asked(back, &pages[at]),
                Err(error) => return (Some(back), Err(error.into())),
            }
        }
        let result = loaded.map_err(io::Error::from).and(filled).map(|()| good);
        (asked, result)
    }

    /// The same of blocks: pages are there that are what the frames held.
    fn read_blocks<'l>(
        &'l self,
        (block, first): (u64, usize),
        pages: &mut [Page],
        asked: Option<Back<'l>>,
        part: &[Back<'l>],
    ) -> (Option<Back<'l>>, io::Result<Vec<usize>>) {
        let check =
            |gfn, at: usize, pages: &[Page]| self.check_rest(gfn, block + at as u64, &pages[at]);
        let mut read = self.disk.read(block, pages);
        let is_whole = read.is_ok();
        if let Some(back) = asked {
            let (gfn, at) = (back.gfn, back.page - first);
            if !is_whole && pages.len() > 1 {
                // It does not go without for one beside it.
                read = self.disk.read(block + at as u64, &mut pages[at..=at]);
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

    /// Fills the frames, neighbours in one call, from pages of which that is the `first`. Those
    /// that cannot be filled stay where they are.
    fn copy_back<'l>(&'l self, first: usize, pages: &[Page], part: &mut Vec<Back<'l>>) {
        // One region may be mapped where its neighbour is not.
        let region = |back: &Back<'_>| self.ram.region_of(back.gfn).map(|region| region.gpa);
        let follows = |a: &Back<'_>, b: &Back<'_>| {
            let is_next = a.gfn.0 + 1 == b.gfn.0 && a.page + 1 == b.page;
            is_next && region(a) == region(b)
        };
        let mut away = Vec::new();
        for run in part.chunk_by(follows) {
            let frames = FrameRange::new(run[0].gfn, run.len() as u64);
            let at = run[0].page - first;
            let bytes = pages[at..at + run.len()].as_flattened();
            match self.copy_run(frames, bytes) {
                // Devices before the guest: it may hand the frame to one at once.
                Ok(()) => self.devices.map(frames),
                Err(_) => away.push(run[0].page..run[0].page + run.len()),
            }
        }
        let (lost, kept): (Vec<_>, Vec<_>) =
            part.drain(..).partition(|back| away.iter().any(|run| run.contains(&back.page)));
        *part = kept;
        self.stay_away(lost);
    }

    /// Fills frames in a row, that nobody asked for: not where the VMM has them mapped nowhere.
    fn copy_run(&self, frames: FrameRange, bytes: &[u8]) -> io::Result<()> {
        let mut pages = frames.frames().zip(bytes.chunks(FRAME_BYTES as usize));
        match self.uffd.copy_run(self.hva(frames)?.start, bytes) {
            Ok(done) if done == frames.bytes() => Ok(()),
            Err(error) if is_unmapped(&error) && frames.count == 1 => Err(error),
            // The VMM has parted its mapping here: no call goes beyond that.
            Err(error) if is_unmapped(&error) => {
                pages.try_for_each(|(gfn, page)| self.copy_run(FrameRange::new(gfn, 1), page))
            }
            // Some are there already: a daemon died between the copy and the word.
            _ => pages.try_for_each(|(gfn, page)| self.copy_page(gfn, page)),
        }
    }

    /// The frame's page is there: its word says so, and it keeps the slot where the content was, if
    /// that can be. Whether somebody asked for it meanwhile.
    pub(crate) fn arrive(&self, gfn: Gfn, word: LockedFrame<'_>) -> bool {
        match word.content() {
            Content::Saved { slot } if self.keep_slot(gfn, slot) => {
                subtract(&self.counters.saved_frames, 1);
                word.unlock(Content::Resident)
            }
            _ => self.leave(gfn, word, Content::Resident),
        }
    }

    /// The frame's content is not where it was any more, and that place is free. Whether somebody
    /// asked for it meanwhile.
    ///
    /// The pair of block and frame goes before the unlock: after it, the frame may
    /// come to rest on the very same block again, and that pair must stay. The slot
    /// goes after it: no word may name a slot that another page is put into.
    pub(crate) fn leave(&self, gfn: Gfn, word: LockedFrame<'_>, next: Content) -> bool {
        let content = word.content();
        if let Content::OnDisk { block } = content {
            self.resting.leave(gfn, block);
            subtract(&self.counters.on_disk_frames, 1);
        }
        debug_assert!(self.kept.slot(gfn).is_none(), "{gfn:?}, {content:?}: a slot is lost");
        self.kept.clear(gfn);
        let wanted = word.unlock(next);
        if let Content::Saved { slot } = content {
            self.store.release(slot);
            subtract(&self.counters.saved_frames, 1);
        }
        wanted
    }

    /// Brings back what rests on blocks of a disk that are about to change. Nothing
    /// must find these blocks any more: see [`crate::Disk::find`].
    ///
    /// # Errors
    /// A frame cannot be brought back: the blocks must not be written.
    pub fn vacate(&self, blocks: Range<u64>) -> io::Result<()> {
        self.vacate_for(ATTEMPTS, blocks)
    }

    /// The same for a device that asks again for as long as it takes, as [`Pager::pin_soon`].
    ///
    /// # Errors
    /// `TimedOut`: somebody holds a frame now. Any other: as [`Pager::vacate`].
    pub fn vacate_soon(&self, blocks: Range<u64>) -> io::Result<()> {
        self.vacate_for(SOON_ATTEMPTS, blocks)
    }

    fn vacate_for(&self, attempts: usize, blocks: Range<u64>) -> io::Result<()> {
        for (block, gfn) in self.resting.on(blocks) {
            // The pair goes only once the block was read.
            self.again_for(attempts, || match self.resting.has(gfn, block) {
                true if self.drop_if_dead(gfn) => Ok(Served::Done),
                // The VMM has unplugged it: nobody reads it any more.
                true if self.ram.region_of(gfn).is_none() => Ok(Served::Done),
                true => match self.install_backed(gfn) {
                    // Unplugged just now.
                    Err(_) if self.ram.region_of(gfn).is_none() => Ok(Served::Done),
                    done => done,
                },
                false => Ok(Served::Done),
            })?;
        }
        Ok(())
    }
}

/// The content so many pages behind another.
fn behind(content: Content, pages: i64) -> Content {
    match content {
        Content::Saved { slot } => Content::Saved { slot: slot.wrapping_add_signed(pages) },
        Content::OnDisk { block } => Content::OnDisk { block: block.wrapping_add_signed(pages) },
        other => other,
    }
}
