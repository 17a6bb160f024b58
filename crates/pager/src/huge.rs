//! Huge frames of a guest whose allocator the host shares: emptied once the host has
//! taken them there, and given memory as a whole when the guest touches one again.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ebb_ledger::{Content, Locked};
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::counters::{add, subtract};
use crate::install::Served;
use crate::pager::Pager;

/// While the host works on a huge frame it is nobody's: so it is on record until it is
/// known whether the guest may have it back.
const TAKEN: Content = Content::Empty { fill: 0, hard: true };

/// What the guest may have of a huge frame that was emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The allocator has nothing to do with it: an emptied frame like any other.
    Apart,
    /// All of it, at the first touch.
    Soft,
    /// Nothing, before it was returned: a touch is against the rules.
    Hard,
}

/// The host's side of the guest's allocator. Called on the fault path, as the holder of
/// the huge frame's words: no waiting, no allocation.
pub trait Sharer: Send + Sync {
    /// What it is; may change until its words are held.
    fn sharing(&self, huge: HugeFrame) -> Sharing;
    /// A soft one was touched. All of it has memory now, which devices may use, and whoever
    /// touched it still waits. It took `took` to get there.
    fn installed(&self, huge: HugeFrame, took: Duration);
    /// A hard one was touched. It is about to have memory for all that, or the guest
    /// would wait for ever.
    fn violated(&self, huge: HugeFrame);
}

/// A huge frame that nobody else works on.
#[must_use]
pub struct HeldHuge<'p> {
    pager: &'p Pager,
    words: Locked<'p>,
    huge: HugeFrame,
}

impl Pager {
    /// From now on `sharer` is asked about frames that were emptied, and told of those that
    /// came back.
    pub fn share(&self, sharer: Option<Arc<dyn Sharer>>) {
        *self.sharer.write().unwrap_or_else(PoisonError::into_inner) = sharer;
    }

    fn sharer(&self) -> Option<Arc<dyn Sharer>> {
        self.sharer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Holds a huge frame. `None`: a part of it is no RAM, or somebody works on it.
    pub fn hold_huge(&self, huge: HugeFrame) -> Option<HeldHuge<'_>> {
        let frames = FrameRange::huge(huge);
        self.ram.range(frames)?;
        match self.ledger.lock(frames) {
            Ok(words) => Some(HeldHuge { pager: self, words, huge }),
            Err(busy) => {
                self.after(busy.wanted, frames);
                None
            }
        }
    }

    /// Gives the memory of recorded huge frames to the host, neighbours that follow each
    /// other in one call.
    ///
    /// # Errors
    /// As fallocate(2). What was not punched keeps its memory, which wins over its word.
    pub fn empty_huge<'h>(&self, held: impl Iterator<Item = &'h HeldHuge<'h>>) -> io::Result<()> {
        self.punch_runs(held.map(HeldHuge::frames)).map(drop)
    }

    /// After a restart, before [`Pager::settle`] and any fault: frames that a dead daemon held are
    /// memory like any other again, if they were empty on record and all of their memory is there.
    ///
    /// It is not emptied now, though the guest's allocator may call it the host's: the guest may
    /// have been reset since, and its next kernel uses memory that is there without a fault.
    /// A hugetlb file does not tell what is there: a hole of it reads as zeros just as well.
    ///
    /// # Errors
    /// As lseek(2) and ioctl_userfaultfd(2).
    pub fn settle_held(&self, frames: FrameRange, content: Content) -> io::Result<()> {
        let is_empty = matches!(content, Content::Empty { fill: 0, .. });
        if !is_empty || self.ram.range(frames).is_none() || !self.ram.is_full(frames)? {
            return Ok(());
        }
        let Some(held) = self.hold_words(frames) else { return Ok(()) };
        let open = self.unprotect_if_watched(frames);
        subtract(&self.counters.emptied_frames, frames.count);
        self.devices.map(frames);
        let wanted = held.unlock(Content::Resident);
        self.after(wanted, frames);
        open
    }

    /// Nothing is hard any more: nobody shares an allocator with this guest.
    pub fn soften_all(&self) {
        let hard = |content| matches!(content, Content::Empty { hard: true, .. });
        let runs: Vec<FrameRange> =
            { self.ledger.runs() }.filter(|(_, c)| hard(*c)).map(|(frames, _)| frames).collect();
        for huge in runs.iter().map(|frames| frames.start.huge()) {
            if let Some(held) = self.hold_huge(huge) {
                held.settle(false);
            }
        }
    }

    /// Gives memory to what is empty of a huge frame.
    ///
    /// # Errors
    /// As [`Pager::give_back_all`].
    pub fn fill_huge(&self, huge: HugeFrame) -> io::Result<()> {
        let frames = FrameRange::huge(huge);
        let empty: Vec<Gfn> = { frames.frames() }
            .filter(|&gfn| matches!(self.ledger.content(gfn), Content::Empty { .. }))
            .collect();
        for gfn in empty {
            let fill = |content| match content {
                content @ Content::Empty { .. } => self.install(gfn, content),
                _ => Ok(Served::Done),
            };
            self.again(|| fill(self.ledger.content(gfn)))?;
        }
        Ok(())
    }

    /// Serves a touch of an emptied frame, if the guest's allocator has to do with it.
    pub(crate) fn install_shared(&self, gfn: Gfn) -> io::Result<Option<Served>> {
        let huge = gfn.huge();
        let Some(sharer) = self.sharer() else { return Ok(None) };
        if sharer.sharing(huge) == Sharing::Apart {
            return Ok(None);
        }
        let began = Instant::now();
        let Some(held) = self.hold_huge(huge) else { return Ok(Some(Served::Busy)) };
        // It may have come back, or been taken for good, since it was asked about.
        let sharing = sharer.sharing(huge);
        if sharing == Sharing::Apart || !held.is_empty() {
            let gone = sharing != Sharing::Apart;
            held.let_go();
            // Of what is partly there, each frame is one like any other.
            return Ok(if gone { None } else { Some(Served::Busy) });
        }
        let frames = held.frames();
        if let Err(error) = self.fill_unseen(frames) {
            held.let_go();
            return Err(error);
        }
        self.count_returned(held.words.contents());
        match sharing {
            Sharing::Hard => sharer.violated(huge),
            // Memory first: who sees the guest's word changed does not touch any more.
            _ => sharer.installed(huge, began.elapsed()),
        }
        // Before the unlock: after it whoever evicts may protect the frames anew.
        let open = if self.devices.any() { self.unprotect(frames) } else { Ok(()) };
        // Whoever asked meanwhile is woken with the rest.
        let _ = held.words.unlock(Content::Resident);
        open.and(self.wake(frames)).map(|()| Some(Served::Done))
    }

    /// Gives all of a held huge frame memory, and maps it for devices. Other vCPUs that got a
    /// part of it, and found E, touch it too, and would go on as soon as their own page is
    /// there: before devices may use it, and before the rest is there.
    fn fill_unseen(&self, frames: FrameRange) -> io::Result<()> {
        if !self.devices.any() {
            // A touch of what is not there yet faults, and waits.
            return self.ram.populate(frames);
        }
        // The touch is a write. Also with huge pages: the host may have none just now.
        self.protect(frames)?;
        let filled = self.ram.populate(frames);
        match filled {
            Ok(()) => self.devices.map(frames),
            Err(_) => self.unprotect(frames)?,
        }
        filled
    }
}

impl HeldHuge<'_> {
    /// Which.
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

    /// All of it is empty on record.
    pub fn is_empty(&self) -> bool {
        self.contents().all(|content| matches!(content, Content::Empty { .. }))
    }

    /// All of it is empty, and hard.
    pub fn is_hard(&self) -> bool {
        self.contents().all(|content| matches!(content, Content::Empty { hard: true, .. }))
    }

    /// Lets it go as it is.
    pub fn let_go(self) {
        let frames = self.frames();
        self.pager.after(self.words.abandon(), frames);
    }

    /// Writes down that it is about to be emptied; it is the host's by the guest's
    /// allocator. What a part of it had elsewhere is dropped.
    ///
    /// # Errors
    /// Its own self, unchanged on record, when a device uses a part of it, or somebody else
    /// has something to do with it.
    pub fn record(self) -> Result<Self, Option<Self>> {
        let all = self.drop_elsewhere().ok_or(None)?;
        let frames = all.frames();
        let plain = |content| matches!(content, Content::Resident | Content::Empty { .. });
        let is_free = all.contents().all(plain) && !all.pager.pins.has_any(frames);
        // What is empty was unmapped then.
        if !is_free || !(all.is_empty() || all.pager.devices.unmap(frames)) {
            return Err(Some(all));
        }
        let resident = { all.words.contents() }.filter(|(_, c)| *c == Content::Resident);
        let frames: u64 = resident.map(|(frames, _)| frames.count).sum();
        add(&all.pager.counters.emptied_frames, frames);
        all.words.set(TAKEN);
        all.pager.drop_slots(all.frames());
        Ok(all)
    }

    /// Writes down that the guest has unplugged it: from then on it is guarded. `false`: it
    /// could not be held to the end.
    ///
    /// # Errors
    /// `ResourceBusy`: a device uses a part of it, and it stays what it is.
    pub(crate) fn guard(self) -> io::Result<bool> {
        let Some(all) = self.drop_elsewhere() else { return Ok(false) };
        let (pager, frames) = (all.pager, all.frames());
        let plain = |content| matches!(content, Content::Resident | Content::Empty { .. });
        if !all.contents().all(|content| plain(content) || content == Content::Guarded) {
            all.let_go();
            return Ok(false);
        }
        if pager.pins.has_any(frames) || !pager.devices.unmap(frames) {
            all.let_go();
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let empty = all.words.contents().filter(|(_, c)| matches!(c, Content::Empty { .. }));
        subtract(&pager.counters.emptied_frames, empty.map(|(frames, _)| frames.count).sum());
        pager.drop_slots(frames);
        let wanted = all.words.unlock(Content::Guarded);
        pager.after(wanted, frames);
        Ok(true)
    }

    /// What is guarded of it is `plugged` from now on.
    pub(crate) fn plug(self, plugged: Content) {
        let (pager, frames) = (self.pager, self.frames());
        let is_guarded = |content| content == Content::Guarded;
        if let Content::Empty { .. } = plugged {
            let guarded = self.words.contents().filter(|(_, content)| is_guarded(*content));
            add(&pager.counters.emptied_frames, guarded.map(|(frames, _)| frames.count).sum());
        }
        let each = self.contents().map(|held| if is_guarded(held) { plugged } else { held });
        let each: Vec<Content> = each.collect();
        let wanted = self.words.unlock_each(&each);
        pager.after(wanted, frames);
    }

    /// What it holds elsewhere nobody will ask for. `None`: it could not be held again.
    fn drop_elsewhere(self) -> Option<Self> {
        if !self.contents().any(Content::is_elsewhere) {
            return Some(self);
        }
        let (pager, huge, frames) = (self.pager, self.huge, self.frames());
        self.let_go();
        for gfn in frames.frames() {
            pager.drop_content(gfn);
        }
        pager.hold_huge(huge)
    }

    /// It is empty from now on; `hard`: the guest is not to have it before it was returned.
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
        self.pager.after(wanted, frames);
    }
}

impl Pager {
    fn drop_content(&self, gfn: Gfn) {
        if self.ledger.content(gfn).is_elsewhere()
            && let Ok(held) = self.ledger.lock_frame(gfn)
        {
            let wanted = match held.content().is_elsewhere() {
                true => self.become_empty(gfn, held),
                false => held.abandon(),
            };
            self.after(wanted, FrameRange::new(gfn, 1));
        }
    }
}
