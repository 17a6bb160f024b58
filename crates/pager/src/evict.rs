//! Emptying frames that are in use.
//!
//! The order is the only safe one: protect, ask what is in flight, save or prove, check
//! that nobody wrote, punch. *In flight*: a request of the VMM that has pinned a page before
//! it was protected writes past the protection (`docs/decisions/0031-*`).

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use ebb_digest::Digest;
use ebb_ledger::{Content, LockedFrame, SplitError};
use ebb_store::{Page, PageBuffer, StoreError};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::counters::{add, subtract};
use crate::pager::{Grain, Pager};
use crate::unmapped::is_unmapped;

/// Held together, so that what is in flight is asked for many at once. A guest that writes
/// one of them waits no longer than it takes to save all: in one batch, but for what goes whole.
const BATCH_FRAMES: usize = 512;
/// Slots that frames keep, given up at once for other VMs: 32 MiB.
const FOR_OTHERS: usize = 8192;
/// Slots that others keep are asked for so often, where a store has no room for a batch.
const ROOM_ATTEMPTS: usize = 4;

/// What an eviction did, in frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Their content is in the store now.
    pub saved: u64,
    /// A block of the guest's disk equals them: nothing was written.
    pub on_disk: u64,
    /// They hold what they held when they came from the store, where that still is: nothing was
    /// written.
    pub clean: u64,
    /// Each a single byte again and again, or free in the guest: nothing is kept.
    pub empty: u64,
    /// They were written to meanwhile; they stay.
    pub abandoned: u64,
    /// A request may be writing to them; they stay.
    pub in_flight: u64,
}

impl Evicted {
    /// The frames that the host has got.
    pub fn frames(&self) -> u64 {
        self.saved + self.on_disk + self.clean + self.empty
    }

    /// Together with another's.
    pub fn add(&mut self, other: Evicted) {
        self.saved += other.saved;
        self.on_disk += other.on_disk;
        self.clean += other.clean;
        self.empty += other.empty;
        self.abandoned += other.abandoned;
        self.in_flight += other.in_flight;
    }

    fn count(&mut self, content: Content, is_kept: bool) {
        match content {
            _ if is_kept => self.clean += 1,
            Content::Saved { .. } => self.saved += 1,
            Content::OnDisk { .. } => self.on_disk += 1,
            _ => self.empty += 1,
        }
    }
}

/// What is known of frames that are about to go.
pub trait Judge {
    /// The guest has freed it: nobody will ask for what it holds. Asked while
    /// the frame is protected.
    fn is_dead(&self, gfn: Gfn) -> bool;

    /// Which of these no device writes to by a request that began before they were
    /// protected. Asked while they are, and before they are read; `false` where it is not
    /// known.
    fn settled(&self, frames: &[Gfn]) -> Vec<bool>;

    /// Which of these are page cache or anonymous memory in use, by the word of the
    /// kernel that the pager believes ([`Pager::believe`]). Asked while they are protected.
    fn in_use(&self, frames: &[Gfn]) -> Vec<bool>;
}

/// Nothing is known of them, but that no device of the VMM pins any.
pub struct NothingKnown;

impl Judge for NothingKnown {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

/// A frame held and protected.
struct Held<'l> {
    gfn: Gfn,
    word: LockedFrame<'l>,
}

/// Where the content of a frame will be once it is punched.
#[derive(Clone, Copy)]
struct Place {
    content: Content,
    /// Of what is saved.
    digest: Digest,
    /// In the slot that the frame keeps.
    is_kept: bool,
}

impl Place {
    /// Of what has no digest, or needs none.
    fn of(content: Content) -> Place {
        Place { content, digest: [0; 2], is_kept: false }
    }
}

/// Or the digest of what has none yet.
type Found = Result<Place, Digest>;

impl Held<'_> {
    fn frame(&self) -> FrameRange {
        FrameRange::new(self.gfn, 1)
    }
}

/// Frames of one huge frame, in order.
type Piece<'l> = Vec<Held<'l>>;

impl Pager {
    /// Empties those of `frames`, which are in order, that are resident. With
    /// huge pages only whole huge frames go: punching a part of a large folio
    /// may zero it in place, which the guest would read as zeros.
    ///
    /// The pager must watch all of RAM ([`Pager::watch_all`]).
    ///
    /// # Errors
    /// From the store or the system calls. Frames not evicted stay resident. A store without
    /// room keeps nothing from going that needs none.
    pub fn evict(&self, frames: &[Gfn], judge: &dyn Judge) -> io::Result<Evicted> {
        let mut evicted = Evicted::default();
        let (mut batch, mut count, mut no_room) = (Vec::new(), 0, Ok(()));
        for frames in frames.chunk_by(|a, b| a.huge() == b.huge()) {
            match self.hold(frames) {
                Ok(piece) => {
                    count += piece.as_ref().map_or(0, Vec::len);
                    batch.extend(piece);
                }
                Err(error) => {
                    self.open_all(batch.into_iter().flatten());
                    return Err(error);
                }
            }
            if count >= BATCH_FRAMES {
                count = 0;
                self.evict_batch(std::mem::take(&mut batch), judge, &mut evicted, &mut no_room)?;
            }
        }
        self.evict_batch(batch, judge, &mut evicted, &mut no_room)?;
        no_room.map(|()| evicted)
    }

    /// Gives back the space of what was saved and is not needed any more, and where others are
    /// short of it some of what frames keep. From the thread that evicts.
    ///
    /// # Errors
    /// From the store; nothing is lost.
    pub fn trim_store(&self) -> io::Result<()> {
        if self.store.is_room_wanted() {
            self.give_up_kept(FOR_OTHERS);
        }
        Ok(self.store.trim()?)
    }

    /// Holds and protects frames of one huge frame: those that are resident,
    /// or with huge pages all or none.
    fn hold(&self, frames: &[Gfn]) -> io::Result<Option<Piece<'_>>> {
        let Some(huge) = frames.first().map(|gfn| gfn.huge()) else { return Ok(None) };
        match self.split(huge) {
            Ok(()) => {}
            Err(SplitError::Busy) => return Ok(None),
            Err(SplitError::NoRoom(error)) => return Err(StoreError::RunDirectory(error).into()),
        }
        let mut piece = Vec::with_capacity(frames.len());
        // What was chosen may be gone since.
        for &gfn in frames.iter().filter(|gfn| self.is_in_no_doubt(**gfn)) {
            let Ok(word) = self.ledger.lock_frame(gfn) else { continue };
            if word.content() != Content::Resident || self.pins.has(gfn) {
                self.after(word.abandon(), FrameRange::new(gfn, 1));
                continue;
            }
            piece.push(Held { gfn, word });
        }
        if let Err(error) = self.leave_large(&mut piece) {
            self.open_all(piece);
            return Err(error);
        }
        if piece.is_empty() {
            return Ok(None);
        }
        let protected =
            runs(&piece, |held| held.gfn).try_for_each(|(frames, _)| self.protect(frames));
        match protected {
            Ok(()) => Ok(Some(piece)),
            Err(error) => {
                self.open_all(piece);
                // What the VMM has mapped nowhere stays.
                if is_unmapped(&error) { Ok(None) } else { Err(error) }
            }
        }
    }

    /// Lets go of those that cannot go one by one, unless all of their huge frame is there to go.
    fn leave_large(&self, piece: &mut Piece<'_>) -> io::Result<()> {
        let gfns: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        if self.grain == Grain::Frame {
            self.split_folios(&gfns)?;
        }
        let goes_whole = |gfn| self.goes_whole([gfn]);
        let Some(large) = gfns.into_iter().find(|gfn| goes_whole(*gfn)) else { return Ok(()) };
        let all = piece.len() as u64 == FRAMES_PER_HUGE;
        if !all || (self.grain == Grain::Frame && !self.holds_whole_folios(large)) {
            let each = piece.drain(..);
            let (large, small): (Piece<'_>, _) = each.partition(|held| goes_whole(held.gfn));
            *piece = small;
            self.open_all(large);
        }
        Ok(())
    }

    /// Lets go of frames that stay in memory.
    fn open_all<'l>(&self, held: impl IntoIterator<Item = Held<'l>>) {
        for held in held {
            let frame = held.frame();
            self.report("unprotect", self.unprotect(frame));
            // A commit may have said something else.
            let wanted = held.word.unlock(Content::Resident);
            self.after(wanted, frame);
        }
    }

    /// Goes on where there is only no room, and notes that.
    fn evict_batch(
        &self,
        batch: Vec<Piece<'_>>,
        judge: &dyn Judge,
        evicted: &mut Evicted,
        no_room: &mut io::Result<()>,
    ) -> io::Result<()> {
        let frames: Vec<Gfn> = batch.iter().flatten().map(|held| held.gfn).collect();
        let mut settled = judge.settled(&frames).into_iter();
        let (mut result, mut small) = (Ok(()), Vec::new());
        for piece in batch {
            let (quiet, in_flight): (Piece<'_>, Piece<'_>) =
                piece.into_iter().partition(|_| settled.next() == Some(true));
            evicted.in_flight += in_flight.len() as u64;
            // Of what goes whole no part goes, where another is in flight.
            let each = quiet.iter().chain(&in_flight).map(|held| held.gfn);
            let all_or_none = !in_flight.is_empty() && self.goes_whole(each);
            self.open_all(in_flight);
            match result {
                Ok(()) if !all_or_none => {
                    match self.goes_whole(quiet.iter().map(|held| held.gfn)) {
                        true => result = self.evict_or_note(quiet, judge, evicted, no_room),
                        false => small.extend(quiet),
                    }
                }
                _ => self.open_all(quiet),
            }
        }
        // Saved at once: a device, or the guest, waits for one write to a slow disk, not for many.
        if result.is_err() {
            self.open_all(small);
            return result;
        }
        self.evict_or_note(small, judge, evicted, no_room)
    }

    fn evict_or_note(
        &self,
        piece: Piece<'_>,
        judge: &dyn Judge,
        evicted: &mut Evicted,
        no_room: &mut io::Result<()>,
    ) -> io::Result<()> {
        match self.evict_piece(piece, judge, evicted) {
            Err(error) if is_no_room(&error) => *no_room = Err(error),
            done => return done,
        }
        Ok(())
    }

    fn evict_piece(
        &self,
        piece: Piece<'_>,
        judge: &dyn Judge,
        evicted: &mut Evicted,
    ) -> io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        let mut pages = PageBuffer::new(piece.len());
        let frames: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let read = runs(&piece, |held| held.gfn).try_for_each(|(frames, at)| {
            let to = &mut pages.pages_mut()[at..at + frames.count as usize];
            self.ram.read(frames, to.as_flattened_mut())
        });
        if let Err(error) = read {
            self.open_all(piece);
            return Err(error);
        }
        self.note_use(&piece, judge);
        let (places, result) = self.elsewhere(&piece, pages.pages(), judge);
        let (mut gone, mut stay) = (Vec::with_capacity(piece.len()), Vec::new());
        for (mut held, place) in piece.into_iter().zip(places) {
            match place {
                Ok(place) if held.word.commit(place.content) => gone.push((held, place)),
                place => {
                    evicted.abandoned += u64::from(place.is_ok());
                    place.into_iter().for_each(|place| self.undo(held.gfn, place));
                    stay.push(held);
                }
            }
        }
        let goes_whole = self.goes_whole(gone.iter().map(|(held, _)| held.gfn));
        if goes_whole && !stay.is_empty() {
            self.take_back(gone);
            self.open_all(stay);
            return result;
        }
        self.open_all(stay);
        let page_of = |gfn| frames.binary_search(&gfn).ok().and_then(|at| pages.pages().get(at));
        self.punch_gone(gone, page_of, evicted).and(result)
    }

    /// Notes what the frames are, for when they are wanted back.
    fn note_use(&self, piece: &[Held<'_>], judge: &dyn Judge) {
        let frames: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let mut in_use = judge.in_use(&frames).into_iter();
        frames.iter().for_each(|&gfn| self.dead.went(gfn, in_use.next() == Some(true)));
    }

    /// Where the content of each frame will be once it is punched, as far as it could be saved, and
    /// why not all was.
    fn elsewhere(
        &self,
        piece: &[Held<'_>],
        pages: &[Page],
        judge: &dyn Judge,
    ) -> (Vec<Found>, io::Result<()>) {
        let each = piece.iter().zip(pages);
        let mut found: Vec<Found> =
            each.map(|(held, page)| self.unwritten(held.gfn, page, judge)).collect();
        let mut result = Ok(());
        for _ in 0..ROOM_ATTEMPTS {
            result = self.save(piece, pages, &mut found);
            // Who has a slot without need makes room for who needs one.
            match &result {
                Err(error) if is_no_room(error) && self.give_up_kept(piece.len()) > 0 => {}
                _ => break,
            }
        }
        (found, result)
    }

    /// Saves what has no place yet.
    fn save(&self, piece: &[Held<'_>], pages: &[Page], found: &mut [Found]) -> io::Result<()> {
        let rest: Vec<(usize, Digest)> =
            found.iter().enumerate().filter_map(|(at, found)| Some((at, found.err()?))).collect();
        if rest.is_empty() {
            return Ok(());
        }
        self.leave_free_slots(rest.len());
        let mut to_save = PageBuffer::new(rest.len());
        to_save.pages_mut().iter_mut().zip(&rest).for_each(|(to, (at, _))| *to = pages[*at]);
        let batch = self.store.save_batch(to_save.pages());
        for ((at, digest), slot) in rest.into_iter().zip(batch.slots) {
            let Some(slot) = slot else { continue };
            self.owners.set(slot, piece[at].gfn);
            found[at] = Ok(Place { digest, ..Place::of(Content::Saved { slot }) });
        }
        batch.error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Where its content is without being written anywhere. What a slot holds that the frame keeps,
    /// and that is something else, nobody needs any more: no word names it.
    fn unwritten(&self, gfn: Gfn, page: &Page, judge: &dyn Judge) -> Found {
        let empty = |fill| Place::of(Content::Empty { fill, hard: false });
        let fill = filled_with(page).or_else(|| judge.is_dead(gfn).then_some(0));
        if let Some(fill) = fill {
            self.drop_slot(gfn);
            return Ok(empty(fill));
        }
        // Once: for the frame's slot, for the disks, and for when it comes back.
        let digest = self.digest_key.digest(page);
        if let Some(slot) = self.kept.slot_with(gfn, &digest) {
            return Ok(Place { content: Content::Saved { slot }, digest, is_kept: true });
        }
        self.drop_slot(gfn);
        let block = self.resting.rest(gfn, || self.disk.find(&digest)).ok_or(digest)?;
        if !self.note_rest(gfn, block, page) {
            self.resting.leave(gfn, block);
            return Err(digest);
        }
        Ok(Place::of(Content::OnDisk { block }))
    }

    /// Nothing will rest there after all. A slot that the frame kept it keeps.
    fn undo(&self, gfn: Gfn, place: Place) {
        match place.content {
            Content::Saved { slot } if !place.is_kept => self.store.release(slot),
            Content::OnDisk { block } => self.resting.leave(gfn, block),
            _ => {}
        }
    }

    fn take_back(&self, gone: Vec<(Held<'_>, Place)>) {
        for (held, place) in gone {
            let gfn = held.gfn;
            self.open_all([held]);
            self.undo(gfn, place);
        }
    }

    fn punch_gone<'p>(
        &self,
        mut gone: Vec<(Held<'_>, Place)>,
        page_of: impl Fn(Gfn) -> Option<&'p Page>,
        evicted: &mut Evicted,
    ) -> io::Result<()> {
        let mut punched = 0;
        let result = runs(&gone, |(held, _)| held.gfn).try_for_each(|(frames, _)| {
            if !self.devices.unmap(frames) {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            self.ram.punch(frames)?;
            if !self.ram.is_hole(frames)? {
                self.put_back(frames, &page_of)?;
                return Err(io::Error::other("the kernel keeps a large folio's part as zeros"));
            }
            punched += frames.count as usize;
            Ok(())
        });
        // Not punched is as good as before: the page in the file wins.
        self.take_back(gone.split_off(punched));
        for (held, place) in gone {
            let frame = held.frame();
            self.note_gone(held.gfn, place);
            evicted.count(place.content, place.is_kept);
            let wanted = held.word.unlock(place.content);
            self.after(wanted, frame);
        }
        result
    }

    /// Held frames were punched, and some have become zeros that stay in memory: they lie in a
    /// large folio after all. What they held is put back, and all of them stay.
    fn put_back<'p>(
        &self,
        frames: FrameRange,
        page_of: &impl Fn(Gfn) -> Option<&'p Page>,
    ) -> io::Result<()> {
        tracing::error!("{frames:?}: a part of a large folio was punched; its content is put back");
        for gfn in frames.frames() {
            let words = self.ram.words(gfn.gpa(), (FRAME_BYTES / 8) as usize);
            let (Some(words), Some(page)) = (words, page_of(gfn)) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            for (word, bytes) in words.iter().zip(page.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
        }
        Ok(())
    }

    /// As the holder of its word, which says so from now on.
    fn note_gone(&self, gfn: Gfn, place: Place) {
        let counters = &self.counters;
        match place.content {
            Content::Saved { .. } if place.is_kept => {
                self.kept.went(gfn);
                subtract(&counters.clean_frames, 1);
            }
            Content::Saved { slot } => self.kept.note(gfn, slot, place.digest),
            _ => {}
        }
        add(
            match place.content {
                Content::Saved { .. } => &counters.saved_frames,
                Content::OnDisk { .. } => &counters.on_disk_frames,
                _ => &counters.emptied_frames,
            },
            1,
        );
    }
}

fn is_no_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Runs of consecutive frames, each with the index of its first.
fn runs<T>(items: &[T], gfn: impl Fn(&T) -> Gfn) -> impl Iterator<Item = (FrameRange, usize)> {
    let mut at = 0;
    let gfns: Vec<Gfn> = items.iter().map(gfn).collect();
    std::iter::from_fn(move || {
        let first = *gfns.get(at)?;
        let start = at;
        while gfns.get(at).is_some_and(|gfn| gfn.0 == first.0 + (at - start) as u64) {
            at += 1;
        }
        Some((FrameRange::new(first, (at - start) as u64), start))
    })
}

/// The byte that the page consists of, if it is a single one.
fn filled_with(page: &Page) -> Option<u8> {
    let (words, _) = page.as_chunks::<8>();
    let first = page[0];
    words.iter().all(|word| *word == [first; 8]).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_in_a_row_make_one_run() {
        let frames = [3, 4, 5, 7, 9, 10].map(Gfn);
        let found: Vec<_> = runs(&frames, |gfn| *gfn).collect();
        let run = |first, count| FrameRange::new(Gfn(first), count);
        assert_eq!(found, [(run(3, 3), 0), (run(7, 1), 3), (run(9, 2), 4)]);
    }

    #[test]
    fn only_a_page_of_one_byte_is_filled() {
        let mut page = [0xaa; FRAME_BYTES as usize];
        assert_eq!(filled_with(&page), Some(0xaa));
        page[FRAME_BYTES as usize - 1] = 0;
        assert_eq!(filled_with(&page), None);
    }
}
