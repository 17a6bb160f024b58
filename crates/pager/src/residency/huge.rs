//! Huge frames of a guest whose allocator the host shares. They are punched once the host has
//! reclaimed them in that allocator, and get memory as a whole when the guest touches one again.

use std::collections::HashSet;
use std::io;

use ebb_ledger::{Content, Locked};
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::residency::Residency;
use crate::support::counters::{add, subtract};

/// What the ledger says of a huge frame while the host works on it: hard, so that nobody may use it
/// until it is known whether the guest may have it back.
const TAKEN: Content = Content::Empty { fill: 0, hard: true };

/// A locked huge frame, which no other thread works on.
#[must_use]
pub struct LockedHuge<'p> {
    residency: &'p Residency,
    words: Locked<'p>,
    huge: HugeFrame,
}

impl LockedHuge<'_> {
    /// The number of the huge frame.
    pub fn huge(&self) -> HugeFrame {
        self.huge
    }

    /// Its frames.
    pub fn frames(&self) -> FrameRange {
        FrameRange::huge(self.huge)
    }

    /// Where the content of its frames is.
    pub fn contents(&self) -> impl Iterator<Item = Content> {
        self.words.contents().map(|(_, content)| content)
    }

    /// Where the content is, run by run.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (FrameRange, Content)> {
        self.words.contents()
    }

    /// Records that all of it has its memory, and devices reach it. It stays locked. After this the
    /// guest may go on: if this process ends, the next one takes no frame for empty.
    pub(crate) fn note_resident(&self) {
        self.words.set(Content::Resident);
    }

    /// Unlocks the huge frame; all of it has this content from now on. Returns whether a touch was
    /// marked meanwhile.
    pub(crate) fn unlock(self, content: Content) -> bool {
        self.words.unlock(content)
    }

    /// Whether all of it is empty on record.
    pub fn is_empty(&self) -> bool {
        self.contents().all(|content| matches!(content, Content::Empty { .. }))
    }

    /// Whether all of it is empty and hard.
    pub fn is_hard(&self) -> bool {
        self.contents().all(|content| matches!(content, Content::Empty { hard: true, .. }))
    }

    /// Unlocks the huge frame, unchanged.
    pub fn abandon(self) {
        let frames = self.frames();
        self.residency.frames.after(self.words.abandon(), frames);
    }

    /// Records that the huge frame is about to be punched; the guest's allocator says that it is
    /// the host's. Drops evicted content of its frames.
    ///
    /// # Errors
    /// `Some` of itself, unchanged on record, if a device uses a part of it, or a part is neither
    /// resident nor empty. `None`: another thread has locked a part of it.
    pub fn record(self) -> Result<Self, Option<Self>> {
        let all = self.drop_evicted().ok_or(None)?;
        let frames = all.frames();
        let plain = |content| matches!(content, Content::Resident | Content::Empty { .. });
        let is_free = all.contents().all(plain) && !all.residency.frames.pins().has_any(frames);
        // What is empty is unmapped already.
        if !is_free || !(all.is_empty() || all.residency.frames.devices().unmap(frames)) {
            return Err(Some(all));
        }
        let resident = { all.words.contents() }.filter(|(_, c)| *c == Content::Resident);
        let frames: u64 = resident.map(|(frames, _)| frames.count).sum();
        add(&all.residency.frames.counters().empty_frames, frames);
        all.words.set(TAKEN);
        all.residency.drop_slots(all.frames());
        Ok(all)
    }

    /// Records that the guest has unplugged the huge frame: from then on a touch is a violation.
    /// `false`: another thread has locked or changed a part of it meanwhile.
    ///
    /// # Errors
    /// `ResourceBusy`: a device uses a part of it, and it stays what it is.
    pub(crate) fn unplug(self) -> io::Result<bool> {
        let Some(all) = self.drop_evicted() else { return Ok(false) };
        let (residency, frames) = (all.residency, all.frames());
        let plain = |content| matches!(content, Content::Resident | Content::Empty { .. });
        if !all.contents().all(|content| plain(content) || content == Content::Unplugged) {
            all.abandon();
            return Ok(false);
        }
        if residency.frames.pins().has_any(frames) || !residency.frames.devices().unmap(frames) {
            all.abandon();
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let empty = all.words.contents().filter(|(_, c)| matches!(c, Content::Empty { .. }));
        subtract(
            &residency.frames.counters().empty_frames,
            empty.map(|(frames, _)| frames.count).sum(),
        );
        residency.drop_slots(frames);
        let wanted = all.words.unlock(Content::Unplugged);
        residency.frames.after(wanted, frames);
        Ok(true)
    }

    /// Gives all `Unplugged` frames of it the content `plugged`.
    pub(crate) fn plug(self, plugged: Content) {
        let (residency, frames) = (self.residency, self.frames());
        let is_unplugged = |content| content == Content::Unplugged;
        if let Content::Empty { .. } = plugged {
            let unplugged = self.words.contents().filter(|(_, content)| is_unplugged(*content));
            add(
                &residency.frames.counters().empty_frames,
                unplugged.map(|(frames, _)| frames.count).sum(),
            );
        }
        let each = self.contents().map(|held| if is_unplugged(held) { plugged } else { held });
        let each: Vec<Content> = each.collect();
        let wanted = self.words.unlock_each(&each);
        residency.frames.after(wanted, frames);
    }

    /// Drops the evicted content of its frames, which nobody will ask for. `None`: it could not be
    /// locked again.
    fn drop_evicted(self) -> Option<Self> {
        if !self.contents().any(Content::is_evicted) {
            return Some(self);
        }
        let (residency, huge, frames) = (self.residency, self.huge, self.frames());
        self.abandon();
        for gfn in frames.frames() {
            residency.drop_content(gfn);
        }
        residency.lock_huge(huge)
    }

    /// Unlocks the huge frame as empty. `hard`: the guest may not have it before it is returned.
    pub fn settle(self, hard: bool) {
        let frames = self.frames();
        let content = |held| match held {
            Content::Empty { fill, .. } => Content::Empty { fill, hard },
            other => other,
        };
        let alike = self.is_empty();
        // A part that has come back against the rules stays.
        let wanted = match alike {
            true => self.words.unlock(Content::Empty { fill: 0, hard }),
            false => {
                let contents: Vec<Content> = self.contents().map(content).collect();
                self.words.unlock_each(&contents)
            }
        };
        self.residency.frames.after(wanted, frames);
    }
}

impl Residency {
    /// Locks a huge frame. `None`: a part of it is no RAM, or another thread works on it.
    pub fn lock_huge(&self, huge: HugeFrame) -> Option<LockedHuge<'_>> {
        let frames = FrameRange::huge(huge);
        self.frames.ram().range(frames)?;
        match self.frames.ledger().lock(frames) {
            Ok(words) => Some(LockedHuge { residency: self, words, huge }),
            Err(busy) => {
                self.frames.after(busy.wanted, frames);
                None
            }
        }
    }

    /// Returns the memory of recorded huge frames to the host; consecutive neighbours are punched
    /// in one call.
    ///
    /// # Errors
    /// As fallocate(2). What was not punched keeps its memory, which wins over its word.
    pub fn empty_huge<'h>(&self, held: impl Iterator<Item = &'h LockedHuge<'h>>) -> io::Result<()> {
        add(&self.frames.counters().worker_batches, 1);
        let recorded = held.inspect(|huge| debug_assert!(huge.is_hard(), "{:?}", huge.frames()));
        self.frames.punch_runs(recorded.map(LockedHuge::frames)).map(drop)
    }

    /// After a restart, before [`crate::Returner::settle`] and any fault: makes those frames
    /// resident on record that a dead daemon had locked, if they are empty on record and all of
    /// their memory is there. Those that are resident on record may have been unmapped for devices
    /// already, and are mapped again.
    ///
    /// Their memory is not punched now, though the guest's allocator may call it the host's: the
    /// guest may have been reset since, and its next kernel uses memory that is there without a
    /// fault. A hugetlb file does not tell what is there: a hole of it reads as zeros just as well.
    ///
    /// # Errors
    /// As lseek(2) and ioctl_userfaultfd(2), and as [`crate::IoMapping::map`].
    pub fn settle_locked(&self, frames: FrameRange, content: Content) -> io::Result<()> {
        if content == Content::Resident {
            let mut parts = self.frames.ram().parts(frames);
            return parts.try_for_each(|part| self.frames.devices().map(part));
        }
        let is_empty = matches!(content, Content::Empty { fill: 0, .. });
        if !is_empty
            || self.frames.ram().range(frames).is_none()
            || !self.frames.ram().is_full(frames)?
        {
            return Ok(());
        }
        let Some(held) = self.frames.lock_words(frames) else { return Ok(()) };
        if let Err(error) = self.frames.devices().map(frames) {
            self.frames.after(held.abandon(), frames);
            return Err(error);
        }
        let open = self.frames.unprotect_if_watched(frames);
        subtract(&self.frames.counters().empty_frames, frames.count);
        let wanted = held.unlock(Content::Resident);
        self.frames.after(wanted, frames);
        open
    }

    /// Has devices reach every huge frame that is resident as a whole. A process may have died after
    /// it had unmapped one and before it recorded that, and the next one in its recovery: the ledger
    /// does not show it any more.
    ///
    /// # Errors
    /// As [`crate::IoMapping::map`].
    pub fn map_resident(&self) -> io::Result<()> {
        let elsewhere = self.frames.ledger().runs();
        let elsewhere: HashSet<HugeFrame> =
            elsewhere.map(|(frames, _)| frames.start.huge()).collect();
        let ram = self.frames.ram();
        ram.parts(FrameRange::new(Gfn(0), ram.end().0))
            .flat_map(FrameRange::by_huge)
            .filter(|frames| !elsewhere.contains(&frames.start.huge()))
            .try_for_each(|frames| self.frames.devices().map(frames))
    }

    /// Makes all hard huge frames soft: nobody shares an allocator with this guest any more.
    pub fn soften_all(&self) {
        let hard = |content| matches!(content, Content::Empty { hard: true, .. });
        let runs: Vec<FrameRange> = { self.frames.ledger().runs() }
            .filter(|(_, c)| hard(*c))
            .map(|(frames, _)| frames)
            .collect();
        for huge in runs.iter().map(|frames| frames.start.huge()) {
            if let Some(held) = self.lock_huge(huge) {
                held.settle(false);
            }
        }
    }

    fn drop_content(&self, gfn: Gfn) {
        if self.frames.ledger().content(gfn).is_evicted()
            && let Ok(held) = self.frames.ledger().lock_frame(gfn)
        {
            let wanted = match held.content().is_evicted() {
                true => self.become_empty(gfn, held),
                false => held.abandon(),
            };
            self.frames.after(wanted, FrameRange::new(gfn, 1));
        }
    }
}
