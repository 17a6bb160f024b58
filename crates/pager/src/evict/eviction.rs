//! Frames under eviction: read, saved or found in a block or slot, committed and punched, in this
//! order.

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use ebb_digest::Digest;
use ebb_ledger::Content;
use ebb_store::{Page, PageBuffer};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::evict::evicted::{Evicted, runs};
use crate::evict::spare::Buffers;
use crate::evict::{Evictor, Piece, ProtectedFrame};
use crate::residency::judge::Judge;
use crate::residency::place::{ContentPlace, Found};

/// Number of frames that are read and looked at together: a processor's own cache holds as many.
const CACHED_FRAMES: usize = 64;

/// The frames that one call evicts.
pub(crate) struct Eviction<'c> {
    evictor: &'c Evictor,
    judge: &'c dyn Judge,
    pub(crate) evicted: Evicted,
    no_room: Option<io::Error>,
    /// `None`: nothing was evicted yet.
    buffers: Option<Buffers>,
}

impl<'c> Eviction<'c> {
    pub(crate) fn new(evictor: &'c Evictor, judge: &'c dyn Judge) -> Eviction<'c> {
        Eviction { evictor, judge, evicted: Evicted::default(), no_room: None, buffers: None }
    }

    /// Returns what was evicted.
    ///
    /// # Errors
    /// The store had no room for some.
    pub(crate) fn end(mut self) -> io::Result<Evicted> {
        self.no_room.take().map_or(Ok(self.evicted), Err)
    }

    /// Evicts protected frames to which no request in flight may be writing. If the store only
    /// lacks room, notes that and returns `Ok`.
    pub(crate) fn evict(&mut self, piece: Piece<'_>) -> io::Result<()> {
        match self.evict_piece(piece) {
            Err(error) if is_no_room(&error) => self.no_room = Some(error),
            done => return done,
        }
        Ok(())
    }

    fn evict_piece(&mut self, piece: Piece<'_>) -> io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        let Eviction { evictor, judge, evicted, buffers, .. } = self;
        let Buffers { held, saved } = buffers.get_or_insert_with(|| evictor.spare.take());
        let pages = held.at_least(piece.len());
        let mut places = match evictor.unwritten(&piece, pages, *judge) {
            Ok(places) => places,
            Err(error) => {
                evictor.open_all(piece);
                return Err(error);
            }
        };
        evictor.note_use(&piece, *judge);
        let result = evictor.save(&piece, pages, &mut places, saved);
        evictor.finish(piece, places, pages, evicted).and(result)
    }
}

impl Drop for Eviction<'_> {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            self.evictor.spare.put(buffers);
        }
    }
}

fn is_no_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Evictor {
    /// Reads the frames' content, and finds where it will be once they are punched, without a
    /// write; a digest stands for content that must be saved.
    fn unwritten(
        &self,
        piece: &[ProtectedFrame<'_>],
        pages: &mut [Page],
        judge: &dyn Judge,
    ) -> io::Result<Vec<Found>> {
        let (all, mut found) = (piece, Vec::with_capacity(piece.len()));
        for (piece, pages) in piece.chunks(CACHED_FRAMES).zip(pages.chunks_mut(CACHED_FRAMES)) {
            let read = self.runs(piece, |held| held.gfn).try_for_each(|(frames, at)| {
                let to = &mut pages[at..at + frames.count as usize];
                self.frames.ram().read(frames, to.as_flattened_mut())
            });
            if let Err(error) = read {
                self.undo_all(all, found);
                return Err(error);
            }
            let each = piece.iter().zip(&*pages);
            found.extend(each.map(|(held, page)| self.residency.unwritten(held.gfn, page, judge)));
        }
        Ok(found)
    }

    /// Returns runs of consecutive frames in one region, each with the index of its first item.
    pub(super) fn runs<T>(
        &self,
        items: &[T],
        gfn: impl Fn(&T) -> Gfn,
    ) -> impl Iterator<Item = (FrameRange, usize)> {
        runs(items, gfn).flat_map(|(run, at)| {
            let index = move |part: &FrameRange| at + (part.start.0 - run.start.0) as usize;
            self.frames.in_regions(run).map(move |part| (part, index(&part)))
        })
    }

    /// Undoes the places that were found for the first frames of a piece, which stay.
    fn undo_all(&self, piece: &[ProtectedFrame<'_>], found: Vec<Found>) {
        for (held, place) in piece.iter().zip(found) {
            place.into_iter().for_each(|place| self.residency.undo(held.gfn, place));
        }
    }

    /// Commits and punches the frames whose content is saved or need not be. Frames that were
    /// touched meanwhile stay.
    fn finish(
        &self,
        piece: Piece<'_>,
        places: Vec<Found>,
        pages: &[Page],
        evicted: &mut Evicted,
    ) -> io::Result<()> {
        debug_assert_eq!(piece.len(), places.len(), "each frame has a place or a digest");
        let frames: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let (mut committed, mut stay) = (Vec::with_capacity(piece.len()), Vec::new());
        for (mut held, place) in piece.into_iter().zip(places) {
            debug_assert_eq!(held.word.content(), Content::Resident, "{:?}", held.gfn);
            match place {
                Ok(place) if held.word.commit(place.content) => committed.push((held, place)),
                place => {
                    evicted.abandoned += u64::from(place.is_ok());
                    place.into_iter().for_each(|place| self.residency.undo(held.gfn, place));
                    stay.push(held);
                }
            }
        }
        let goes_whole = self.folios.goes_whole(committed.iter().map(|(held, _)| held.gfn));
        if goes_whole && !stay.is_empty() {
            self.undo_commits(committed);
            self.open_all(stay);
            return Ok(());
        }
        self.open_all(stay);
        let page_of = |gfn| frames.binary_search(&gfn).ok().and_then(|at| pages.get(at));
        self.punch_committed(committed, page_of, evicted)
    }

    /// Saves the pages that have no place yet.
    fn save(
        &self,
        piece: &[ProtectedFrame<'_>],
        pages: &[Page],
        found: &mut [Found],
        to_save: &mut PageBuffer,
    ) -> io::Result<()> {
        let rest: Vec<(usize, Digest)> =
            found.iter().enumerate().filter_map(|(at, found)| Some((at, found.err()?))).collect();
        if rest.is_empty() {
            return Ok(());
        }
        let to_save = match rest.len() == pages.len() {
            true => pages,
            false => {
                let some = to_save.at_least(rest.len());
                some.iter_mut().zip(&rest).for_each(|(to, (at, _))| *to = pages[*at]);
                some
            }
        };
        let batch = self.with_room(to_save, |pages| self.residency.store().save_batch(pages));
        for ((at, digest), slot) in rest.into_iter().zip(batch.slots) {
            let Some(slot) = slot else { continue };
            self.residency.owners().set(slot, piece[at].gfn);
            found[at] = Ok(ContentPlace { digest, ..ContentPlace::of(Content::Saved { slot }) });
        }
        batch.error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Notes which frames are in use, for the time when they are touched again.
    fn note_use(&self, piece: &[ProtectedFrame<'_>], judge: &dyn Judge) {
        let frames: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let mut in_use = judge.in_use(&frames).into_iter();
        frames.iter().for_each(|&gfn| self.residency.dead().went(gfn, in_use.next() == Some(true)));
    }

    fn undo_commits(&self, committed: Vec<(ProtectedFrame<'_>, ContentPlace)>) {
        for (held, place) in committed {
            let gfn = held.gfn;
            // A block's pair goes before the unlock: the next eviction may note the same pair. A slot
            // goes after it, as in `Residency::leave`.
            if let Content::OnDisk { .. } = place.content {
                self.residency.undo(gfn, place);
                self.open_all([held]);
            } else {
                self.open_all([held]);
                self.residency.undo(gfn, place);
            }
        }
    }

    fn punch_committed<'p>(
        &self,
        mut committed: Vec<(ProtectedFrame<'_>, ContentPlace)>,
        page_of: impl Fn(Gfn) -> Option<&'p Page>,
        evicted: &mut Evicted,
    ) -> io::Result<()> {
        let is_on_record = |(held, place): &(ProtectedFrame<'_>, ContentPlace)| {
            held.word.content() == place.content
        };
        debug_assert!(committed.iter().all(is_on_record), "the word comes before the punch");
        let mut punched = 0;
        let result = self.runs(&committed, |(held, _)| held.gfn).try_for_each(|(frames, _)| {
            if !self.frames.devices().unmap(frames) {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            self.frames.punch(frames)?;
            if !self.frames.ram().is_hole(frames)? {
                self.put_back(frames, &page_of)?;
                return Err(io::Error::other("the kernel keeps a large folio's part as zeros"));
            }
            punched += frames.count as usize;
            Ok(())
        });
        // What was not punched is as before: the page in the file wins.
        self.undo_commits(committed.split_off(punched));
        for (held, place) in committed {
            let frame = held.frame();
            self.residency.note_evicted(held.gfn, place);
            evicted.count(place.content, place.is_kept);
            let wanted = held.word.unlock(place.content);
            self.frames.after(wanted, frame);
        }
        result
    }

    /// Puts back the content of locked frames that were punched, of which some became zeros that
    /// stay in memory: they lie in a large folio after all. All of them stay.
    fn put_back<'p>(
        &self,
        frames: FrameRange,
        page_of: &impl Fn(Gfn) -> Option<&'p Page>,
    ) -> io::Result<()> {
        tracing::error!("{frames:?}: a part of a large folio was punched; its content is put back");
        for gfn in frames.frames() {
            let words = self.frames.ram().words(gfn.gpa(), (FRAME_BYTES / 8) as usize);
            let (Some(words), Some(page)) = (words, page_of(gfn)) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            for (word, bytes) in words.iter().zip(page.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
        }
        Ok(())
    }
}
