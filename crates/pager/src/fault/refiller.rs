//! Refilling frames whose content is in the store or on a disk.

pub mod at_once;
pub mod read_back;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ebb_ledger::{Content, LockedFrame};
use ebb_store::{Page, PageBuffer};
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::fault::read_ahead::ReadAhead;
use crate::fault::room::LimitRoom;
use crate::frames::Frames;
use crate::frames::words::Served;
use crate::residency::Residency;
use crate::residency::dead::Verdict;
use crate::support::counters::add;

/// Refills the frames of one VM.
pub struct Refiller {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
    installer: Arc<Installer>,
    room: Arc<LimitRoom>,
    /// The read-ahead of the store, and that of the disk.
    ahead: (Mutex<ReadAhead>, Mutex<ReadAhead>),
}

/// Most blocks between two frames' blocks that are read with them rather than skipped.
const GAP_MAX: usize = 16;
/// Number of pages that are read and filled at once: the guest goes on behind them while the next
/// are read.
pub(crate) const PART_PAGES: usize = 128;

/// What is read: pages from `base` on, because of the page `asked`, an index from the base.
#[derive(Clone, Copy)]
pub(crate) struct Reading {
    base: Content,
    asked: usize,
}

/// A frame that comes back, and the index of its page from the base.
pub(crate) struct Back<'l> {
    gfn: Gfn,
    word: LockedFrame<'l>,
    page: usize,
}

/// Returns the content `pages` pages behind another.
fn behind(content: Content, pages: i64) -> Content {
    match content {
        Content::Saved { slot } => Content::Saved { slot: slot.wrapping_add_signed(pages) },
        Content::OnDisk { block } => Content::OnDisk { block: block.wrapping_add_signed(pages) },
        other => other,
    }
}

impl Refiller {
    /// Makes a refiller that has seen no reads yet.
    pub(crate) fn new(
        frames: &Arc<Frames>,
        residency: &Arc<Residency>,
        installer: &Arc<Installer>,
        room: &Arc<LimitRoom>,
    ) -> Refiller {
        Refiller {
            frames: Arc::clone(frames),
            residency: Arc::clone(residency),
            installer: Arc::clone(installer),
            room: Arc::clone(room),
            ahead: (Mutex::new(ReadAhead::around()), Mutex::default()),
        }
    }

    /// Refills a frame, and with it the frames whose content lies behind or around its own.
    pub(crate) fn refill_ahead(&self, gfn: Gfn, buffer: &mut PageBuffer) -> io::Result<Served> {
        let Ok(word) = self.frames.ledger().lock_frame(gfn) else { return Ok(Served::Busy) };
        let content = word.content();
        let (ahead, at) = match content {
            Content::Saved { slot } => (&self.ahead.0, slot),
            Content::OnDisk { block } => (&self.ahead.1, block),
            _ => {
                self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
                return Ok(Served::Busy);
            }
        };
        let verdict = self.residency.verdict(gfn);
        if verdict == Verdict::Dead {
            add(&self.frames.counters().false_reads_avoided, 1);
            let wanted = self.residency.become_empty(gfn, word);
            self.frames.after(wanted, FrameRange::new(gfn, 1));
            return Ok(if self.installer.install_freed(gfn)? {
                Served::Done
            } else {
                Served::Busy
            });
        }
        let lock = || ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let mut window = lock().window(at);
        if let Content::Saved { .. } = content {
            // This bound is never less than the pages that lie before the one asked for.
            window.pages = window.pages.min(self.residency.store().most_at_once());
        }
        let share = self.room.coming().share(window.pages, || self.room.room());
        window.pages = share.frames();
        window.before = window.before.min(window.pages - 1);
        let asked = window.before;
        let reading = Reading { base: behind(content, -(asked as i64)), asked };
        let mut back = vec![Back { gfn, word, page: asked }];
        self.neighbours(reading, window.pages, &mut back);
        let behind = back.last().map_or(0, |back| back.page - asked);
        lock().read(at, at + 1 + behind as u64, back.len() as u64 - 1);
        let comeback = self.residency.count_refill(gfn, || self.room.is_at_limit());
        self.residency.count_hits(window.hits, comeback);
        add(&self.frames.counters().false_reads, u64::from(verdict == Verdict::Unproven));
        add(&self.frames.counters().ahead_frames, back.len() as u64 - 1);
        let (mut first, mut rest) = (None, back);
        while let Some(front) = rest.first() {
            let border = (front.page / PART_PAGES + 1) * PART_PAGES;
            let later = rest.split_off(rest.partition_point(|back| back.page < border));
            let part = std::mem::replace(&mut rest, later);
            let result = self.refill_part(reading, part, buffer.pages_mut());
            let failed = result.is_err();
            // Nothing behind the first part was asked for, so only the first result counts.
            first.get_or_insert(result);
            if failed {
                // The next read may take as long to fail.
                self.leave_evicted(std::mem::take(&mut rest));
            }
        }
        first.unwrap_or(Ok(())).map(|()| Served::Done)
    }

    /// Refills the frames of one part. The frame asked for goes on before the others are there.
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
            self.leave_evicted(part);
            return Err(error);
        }
        self.copy_back(first, pages, &mut part);
        for Back { gfn, word, .. } in part {
            let wanted = self.residency.arrive(gfn, word);
            self.frames.after(wanted, FrameRange::new(gfn, 1));
        }
        Ok(())
    }

    /// Fills the frame asked for, which goes on with this page. On failure no touch of it is woken
    /// here: the caller that gets the error wakes them all at once.
    fn fill_asked(&self, Back { gfn, word, .. }: Back<'_>, page: &Page) -> io::Result<()> {
        let frame = FrameRange::new(gfn, 1);
        // Devices come before the guest, which may hand the frame to one at once.
        let copied = self.frames.copy_page(gfn, page);
        if let Err(error) = copied.and_then(|()| self.frames.devices().map(frame)) {
            let _ = word.abandon();
            return Err(error);
        }
        let _ = self.residency.arrive(gfn, word);
        self.frames.after(true, frame);
        Ok(())
    }

    /// Leaves these frames evicted; a touch that waits for one is woken, and asks again.
    fn leave_evicted(&self, part: Vec<Back<'_>>) {
        for Back { gfn, word, .. } in part {
            self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        }
    }

    /// Locks the frames whose content is among the `pages` from the base on, and adds them to
    /// `back`.
    fn neighbours<'l>(&'l self, reading: Reading, pages: usize, back: &mut Vec<Back<'l>>) {
        let mut last = reading.asked;
        for page in (0..reading.asked).chain(reading.asked + 1..pages) {
            let wanted = behind(reading.base, page as i64);
            let owner = match wanted {
                Content::Saved { slot } => self.residency.owners().get(slot),
                Content::OnDisk { block } => self.residency.disk_backed().first_on(block),
                _ => return,
            };
            // Memory that the VMM has unplugged has no place to be filled
            // (`Returner::release_file`).
            let owner = owner.filter(|gfn| self.frames.ram().region_of(*gfn).is_some());
            let held =
                owner.and_then(|gfn| Some((gfn, self.frames.ledger().lock_frame(gfn).ok()?)));
            match held {
                Some((gfn, word)) if word.content() == wanted => {
                    last = last.max(page);
                    back.push(Back { gfn, word, page });
                }
                Some((gfn, word)) => self.frames.after(word.abandon(), FrameRange::new(gfn, 1)),
                None => {}
            }
            if page > last + GAP_MAX {
                break;
            }
        }
        back.sort_unstable_by_key(|back| back.page);
        self.leave_dead(reading.asked, back);
    }

    /// Drops neighbours whose content is dead.
    fn leave_dead<'l>(&'l self, asked: usize, back: &mut Vec<Back<'l>>) {
        let verdicts = self.residency.verdicts();
        let is_dead = |back: &mut Back<'_>| back.page != asked && verdicts.is_dead(back.gfn);
        for Back { gfn, word, .. } in back.extract_if(.., is_dead) {
            let wanted = self.residency.become_empty(gfn, word);
            self.frames.after(wanted, FrameRange::new(gfn, 1));
        }
    }

    /// Fills the frames, adjacent ones in one call. `first` is the index of the first of `pages`.
    /// Frames that cannot be filled stay evicted.
    fn copy_back<'l>(&'l self, first: usize, pages: &[Page], part: &mut Vec<Back<'l>>) {
        // The VMM may map one region and not its neighbour.
        let region =
            |back: &Back<'_>| self.frames.ram().region_of(back.gfn).map(|region| region.gpa);
        let follows = |a: &Back<'_>, b: &Back<'_>| {
            let is_next = a.gfn.0 + 1 == b.gfn.0 && a.page + 1 == b.page;
            is_next && region(a) == region(b)
        };
        let mut failed = Vec::new();
        for run in part.chunk_by(follows) {
            let frames = FrameRange::new(run[0].gfn, run.len() as u64);
            let at = run[0].page - first;
            let bytes = pages[at..at + run.len()].as_flattened();
            // Devices come before the guest, which may hand the frame to one at once.
            let copied = self.frames.copy_run(frames, bytes);
            if copied.and_then(|()| self.frames.devices().map(frames)).is_err() {
                failed.push(run[0].page..run[0].page + run.len());
            }
        }
        let (lost, kept): (Vec<_>, Vec<_>) =
            part.drain(..).partition(|back| failed.iter().any(|run| run.contains(&back.page)));
        *part = kept;
        self.leave_evicted(lost);
    }
}
