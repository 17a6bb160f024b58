//! Bringing frames back whose content is in the store or on a disk.

pub mod at_once;
pub mod read_back;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ebb_ledger::{Content, LockedFrame};
use ebb_store::{Page, PageBuffer};
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::fault::read_ahead::ReadAhead;
use crate::fault::room::Room;
use crate::frames::Frames;
use crate::frames::words::Served;
use crate::residency::Residency;
use crate::residency::dead::Verdict;
use crate::support::counters::add;

/// Of one VM.
pub struct Refiller {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
    installer: Arc<Installer>,
    room: Arc<Room>,
    /// Of the store, and of the disk.
    ahead: (Mutex<ReadAhead>, Mutex<ReadAhead>),
}

/// Blocks between two frames' that are read with them rather than skipped.
const GAP_MAX: usize = 16;
/// Read and filled at once: behind these the guest goes on while the next are read.
pub(crate) const PART_PAGES: usize = 128;

/// What is read: from the page at `base` on, for the sake of the one `asked` behind it.
#[derive(Clone, Copy)]
pub(crate) struct Reading {
    base: Content,
    asked: usize,
}

/// A frame that comes back, and which page it is behind the base.
pub(crate) struct Back<'l> {
    gfn: Gfn,
    word: LockedFrame<'l>,
    page: usize,
}

/// The content so many pages behind another.
fn behind(content: Content, pages: i64) -> Content {
    match content {
        Content::Saved { slot } => Content::Saved { slot: slot.wrapping_add_signed(pages) },
        Content::OnDisk { block } => Content::OnDisk { block: block.wrapping_add_signed(pages) },
        other => other,
    }
}

impl Refiller {
    /// Nobody has read yet.
    pub(crate) fn new(
        frames: &Arc<Frames>,
        residency: &Arc<Residency>,
        installer: &Arc<Installer>,
        room: &Arc<Room>,
    ) -> Refiller {
        Refiller {
            frames: Arc::clone(frames),
            residency: Arc::clone(residency),
            installer: Arc::clone(installer),
            room: Arc::clone(room),
            ahead: (Mutex::new(ReadAhead::around()), Mutex::default()),
        }
    }

    /// Brings a frame back, and with it those whose content lies behind its own, or around.
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
            // Never less than what lies before it.
            window.pages = window.pages.min(self.residency.store().most_at_once());
        }
        let share = self.room.coming().share(window.pages, || self.room.room());
        window.pages = share.frames();
        window.before = window.before.min(window.pages - 1);
        add(&self.frames.counters().ahead_hit_frames, window.hits);
        let asked = window.before;
        let reading = Reading { base: behind(content, -(asked as i64)), asked };
        let mut back = vec![Back { gfn, word, page: asked }];
        self.neighbours(reading, window.pages, &mut back);
        let behind = back.last().map_or(0, |back| back.page - asked);
        lock().read(at, at + 1 + behind as u64, back.len() as u64 - 1);
        add(&self.frames.counters().refilled_frames, 1);
        add(&self.frames.counters().false_reads, u64::from(verdict == Verdict::Unproven));
        add(&self.frames.counters().ahead_frames, back.len() as u64 - 1);
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
            let wanted = self.residency.arrive(gfn, word);
            self.frames.after(wanted, FrameRange::new(gfn, 1));
        }
        Ok(())
    }

    /// The frame asked for goes on with this page. On failure whoever wants it is woken by who is
    /// told of that, all of them at once.
    fn fill_asked(&self, Back { gfn, word, .. }: Back<'_>, page: &Page) -> io::Result<()> {
        let frame = FrameRange::new(gfn, 1);
        if let Err(error) = self.frames.copy_page(gfn, page) {
            let _ = word.abandon();
            return Err(error);
        }
        // Devices before the guest: it may hand the frame to one at once.
        self.frames.devices().map(frame);
        let _ = self.residency.arrive(gfn, word);
        self.frames.after(true, frame);
        Ok(())
    }

    /// They stay where they are; whoever waits for one asks again.
    fn stay_away(&self, part: Vec<Back<'_>>) {
        for Back { gfn, word, .. } in part {
            self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        }
    }

    /// Takes the frames whose content is among the `pages` from the base on.
    fn neighbours<'l>(&'l self, reading: Reading, pages: usize, back: &mut Vec<Back<'l>>) {
        let mut last = reading.asked;
        for page in (0..reading.asked).chain(reading.asked + 1..pages) {
            let wanted = behind(reading.base, page as i64);
            let owner = match wanted {
                Content::Saved { slot } => self.residency.owners().get(slot),
                Content::OnDisk { block } => self.residency.resting().first_on(block),
                _ => return,
            };
            // What the VMM has unplugged has no place to be filled (`Returner::let_go`).
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

    /// Lets go of neighbours that nobody needs any more.
    fn leave_dead<'l>(&'l self, asked: usize, back: &mut Vec<Back<'l>>) {
        let verdicts = self.residency.verdicts();
        let is_dead =
            |back: &mut Back<'_>| back.page != asked && verdicts.of(back.gfn) == Verdict::Dead;
        for Back { gfn, word, .. } in back.extract_if(.., is_dead) {
            let wanted = self.residency.become_empty(gfn, word);
            self.frames.after(wanted, FrameRange::new(gfn, 1));
        }
    }

    /// Fills the frames, neighbours in one call, from pages of which that is the `first`. Those
    /// that cannot be filled stay where they are.
    fn copy_back<'l>(&'l self, first: usize, pages: &[Page], part: &mut Vec<Back<'l>>) {
        // One region may be mapped where its neighbour is not.
        let region =
            |back: &Back<'_>| self.frames.ram().region_of(back.gfn).map(|region| region.gpa);
        let follows = |a: &Back<'_>, b: &Back<'_>| {
            let is_next = a.gfn.0 + 1 == b.gfn.0 && a.page + 1 == b.page;
            is_next && region(a) == region(b)
        };
        let mut away = Vec::new();
        for run in part.chunk_by(follows) {
            let frames = FrameRange::new(run[0].gfn, run.len() as u64);
            let at = run[0].page - first;
            let bytes = pages[at..at + run.len()].as_flattened();
            match self.frames.copy_run(frames, bytes) {
                // Devices before the guest: it may hand the frame to one at once.
                Ok(()) => self.frames.devices().map(frames),
                Err(_) => away.push(run[0].page..run[0].page + run.len()),
            }
        }
        let (lost, kept): (Vec<_>, Vec<_>) =
            part.drain(..).partition(|back| away.iter().any(|run| run.contains(&back.page)));
        *part = kept;
        self.stay_away(lost);
    }
}
