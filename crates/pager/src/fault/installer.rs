//! Giving frames their content: journey 2 of ARCHITECTURE.md.

pub mod freed;
pub mod restore;
pub mod shared;
pub(crate) mod whole;
pub mod zeros;

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn, HUGE_BYTES};

use crate::fault::installer::whole::Failed;
use crate::fault::read_ahead::ReadAhead;
use crate::fault::room::LimitRoom;
use crate::fault::sentry::Sentry;
use crate::fault::sharer::Sharer;
use crate::folios::{FolioMap, Grain};
use crate::frames::Frames;
use crate::frames::words::EMPTY;
use crate::frames::words::Served;
use crate::residency::Residency;
use crate::support::counters::add;

/// Gives the frames of one VM their content.
pub struct Installer {
    frames: Arc<Frames>,
    folios: Arc<FolioMap>,
    residency: Arc<Residency>,
    room: Arc<LimitRoom>,
    sharer: RwLock<Option<Arc<dyn Sharer>>>,
    /// What is told of touches of unplugged memory.
    sentry: RwLock<Option<Arc<dyn Sentry>>>,
}

impl Installer {
    /// Makes an installer without a sharer and a sentry.
    pub(crate) fn new(
        frames: &Arc<Frames>,
        folios: &Arc<FolioMap>,
        residency: &Arc<Residency>,
        room: &Arc<LimitRoom>,
    ) -> Installer {
        Installer {
            frames: Arc::clone(frames),
            folios: Arc::clone(folios),
            residency: Arc::clone(residency),
            room: Arc::clone(room),
            sharer: RwLock::default(),
            sentry: RwLock::default(),
        }
    }

    /// Has `sentry` told of touches of unplugged memory from now on.
    pub(crate) fn set_sentry(&self, sentry: Arc<dyn Sentry>) {
        *self.sentry.write().unwrap_or_else(PoisonError::into_inner) = Some(sentry);
    }

    /// Gives a missing frame its content: alone, or with its huge frame.
    pub(crate) fn install(&self, gfn: Gfn, content: Content) -> io::Result<Served> {
        self.install_ahead(gfn, content, &mut ReadAhead::timid())
    }

    /// As [`Installer::install`], and also for frames behind it that need no read.
    pub(crate) fn install_ahead(
        &self,
        gfn: Gfn,
        content: Content,
        ahead: &mut ReadAhead,
    ) -> io::Result<Served> {
        if let Content::Empty { .. } = content
            && let Some(served) = self.install_shared(gfn)?
        {
            return Ok(served);
        }
        let zero = matches!(content, Content::Resident | Content::Empty { fill: 0, .. });
        let is_huge = || {
            self.folios.grain_of(gfn.huge()) == Grain::Huge
                && !self.frames.ledger().is_split(gfn.huge())
        };
        // A huge frame that cannot be broken up could never be evicted, once a part of it came by
        // itself.
        let in_parts = || self.folios.can_break_up(gfn.huge()) && self.room.is_short_of(HUGE_BYTES);
        if matches!(content, Content::Empty { fill: 0, .. }) && self.frames.devices().is_whole() {
            // Devices would reach the rest of it, too.
            let is_there = self.fill_whole(gfn.huge(), Failed::Punch)?;
            return Ok(if is_there { Served::Done } else { Served::Busy });
        }
        let whole = zero && is_huge() && !in_parts();
        match content {
            _ if whole => self.install_huge(gfn, content),
            Content::Resident | EMPTY => self.install_zeros(gfn, ahead),
            Content::Unplugged | Content::Watch { .. } | Content::Clean { .. } => {
                self.install_zero(gfn, content, || {})
            }
            Content::Empty { fill, .. } => self.install_frame(gfn, content, fill),
            Content::Saved { .. } | Content::OnDisk { .. } => self.install_backed(gfn),
        }
    }

    /// Gives a huge frame that reads as zero its memory, if all of it is still `content`.
    pub(crate) fn install_huge(&self, gfn: Gfn, content: Content) -> io::Result<Served> {
        let words = FrameRange::huge(gfn.huge());
        let Some(held) = self.frames.lock_words(words) else { return Ok(Served::Busy) };
        let frames = self.frames.part_in_ram(gfn);
        if held.contents().any(|(_, now)| now != content) {
            self.frames.after(held.abandon(), words);
            return Ok(Served::Busy);
        }
        let is_ours = content != Content::Resident;
        if !is_ours {
            self.frames.devices().lost(frames);
        }
        let map = || if is_ours { self.frames.devices().map(frames) } else { Ok(()) };
        if let Err(error) = self.frames.ram().populate(frames).and_then(|()| map()) {
            self.frames.after(held.abandon(), words);
            return Err(error);
        }
        self.frames.counters().returned(held.contents());
        self.frames.after(held.unlock(Content::Resident), words);
        self.frames.wake(frames).map(Served::done)
    }

    /// Gives a frame whose every byte is `fill` its memory, if it is still `content`.
    fn install_frame(&self, gfn: Gfn, content: Content, fill: u8) -> io::Result<Served> {
        if self.frames.split(gfn.huge()).is_err() {
            return Ok(Served::Busy);
        }
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return Ok(Served::Busy) };
        let frame = FrameRange::new(gfn, 1);
        if held.content() != content {
            self.frames.after(held.abandon(), frame);
            return Ok(Served::Busy);
        }
        // Devices come before the guest, which may hand the frame to one at once.
        let filled = self.frames.fill(gfn, fill);
        if let Err(error) = filled.and_then(|()| self.frames.devices().map(frame)) {
            self.frames.after(held.abandon(), frame);
            return Err(error);
        }
        self.frames.counters().returned([(frame, content)].into_iter());
        let _ = held.unlock(Content::Resident);
        self.frames.wake(frame).map(Served::done)
    }

    /// Brings one frame back from the store or a disk.
    pub(crate) fn install_backed(&self, gfn: Gfn) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return Ok(Served::Busy) };
        let content = held.content();
        if !content.is_evicted() {
            self.frames.after(held.abandon(), frame);
            return Ok(Served::Busy);
        }
        if let Err(error) = self.residency.fill_backed(gfn, content) {
            self.frames.after(held.abandon(), frame);
            return Err(error);
        }
        // A device may have asked for it, so this says nothing of what the guest misses.
        add(&self.frames.counters().refilled_frames, 1);
        let _ = self.residency.arrive(gfn, held);
        self.frames.wake(frame).map(Served::done)
    }

    /// Fills a hole that reads as zero, and whose word stays as it is. Calls `first` once it is
    /// certain that the frame is still `content`.
    ///
    /// This happens under the word's lock: a frame that another thread has given memory meanwhile
    /// may have been written and saved since, and these zeros would win over the saved content.
    pub(crate) fn install_zero(
        &self,
        gfn: Gfn,
        content: Content,
        first: impl FnOnce(),
    ) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Some(held) = self.frames.lock_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        let served = match held.contents().all(|(_, now)| now == content) {
            true => {
                first();
                self.frames.devices().lost(frame);
                self.frames.fill(gfn, 0).map(Served::done)
            }
            false => Ok(Served::Busy),
        };
        self.frames.after(held.abandon(), words);
        if let Ok(Served::Done) = served {
            self.frames.wake(frame)?;
        }
        served
    }

    /// Serves a touch of an unplugged frame.
    pub(crate) fn serve_unplugged(&self, gfn: Gfn, write: bool) -> io::Result<Served> {
        let sentry = self.sentry.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.install_zero(gfn, Content::Unplugged, || {
            if let Some(sentry) = sentry {
                sentry.touched(gfn, write);
            }
        })
    }
}
