//! Beginning to share a guest's allocator, and recovering it as a dead daemon left it.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ebb_ledger::Content;
use ebb_llfree::Host;
use ebb_llfree::layout::HEADER_WORDS;
use ebb_pager::{Latency, LockedHuge, Pager};
use ebb_units::{FrameRange, Gpa};

use super::zone::{BadZone, Zone};
use super::{HyperAlloc, State};

/// Tries to lock a huge frame that somebody else has locked. An eviction holds its words for some
/// 10 ms.
const TRIES: u32 = 1000;
/// Pause between two tries.
const PAUSE: Duration = Duration::from_micros(100);

/// Why a guest's allocator is not shared.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// What it announces is not valid.
    #[error(transparent)]
    Zone(#[from] BadZone),
    /// It announces no zone that is worth sharing.
    #[error("its kernel announces no zone of its allocator")]
    NoZone,
    /// Its state cannot be brought into memory.
    #[error("its allocator's state: {0}")]
    Io(#[from] io::Error),
}

impl HyperAlloc {
    /// Shares the allocator whose zones have their headers at these places. The pager must watch
    /// all of RAM ([`ebb_pager::Frames::watch_all`]). From now on the pager asks and tells this
    /// about the guest's touches. What the ledger knows as empty is soft or hard from the start.
    ///
    /// # Errors
    /// [`AttachError`]. Nothing is shared then.
    pub fn attach(pager: &Pager, headers: &[Gpa]) -> Result<Arc<HyperAlloc>, AttachError> {
        let mut pinned = Vec::new();
        let zones = open_all(pager, headers, &mut pinned);
        let zones = match zones {
            Ok(zones) if !zones.is_empty() => zones,
            refused => {
                pinned.iter().for_each(|&frames| pager.devices().unpin(frames));
                return Err(refused.err().unwrap_or(AttachError::NoZone));
            }
        };
        // The header was pinned to be read. The extents of its zone pin it once more.
        headers_of(headers, pager).for_each(|frames| pager.devices().unpin(frames));
        let shared = Arc::new(HyperAlloc {
            ram: Arc::clone(pager.ram()),
            zones,
            installs: Default::default(),
            violations: Default::default(),
            install: Latency::default(),
            on_violation: OnceLock::new(),
            may_be_reset: OnceLock::new(),
        });
        pager.installer().share(Some(Arc::clone(&shared) as _));
        for zone in &shared.zones {
            let Some(host) = zone.host(&shared.ram) else { continue };
            (0..zone.areas()).for_each(|index| shared.recover_area(pager, zone, &host, index));
            zone.publish_hard(&shared.ram, zone.states.count().1);
        }
        Ok(shared)
    }

    /// Ends the sharing. The allocator's state is nobody's any more, and nothing is hard, as when
    /// the guest was reset.
    pub fn forget(&self, pager: &Pager) {
        pager.installer().share(None);
        pager.residency().soften_all();
        for extent in self.zones.iter().flat_map(Zone::extents).flatten() {
            pager.devices().unpin(Zone::frames_of(extent));
        }
    }

    /// Finds what a huge frame was when the daemon before this one died.
    ///
    /// | ledger | in the guest's allocator | becomes |
    /// |---|---|---|
    /// | hard | the host's | H |
    /// | hard | not the host's: the daemon died while returning it | S |
    /// | all empty | the host's: the daemon died before returning it | returned, S |
    /// | all empty | free | S; E is set, if this is another kernel |
    /// | all empty | a part of it is in use | gets memory, I |
    /// | else | the host's: the daemon died before it recorded or punched it | returned, I |
    /// | else | not the host's | I, and what is empty of it gets memory |
    fn recover_area(&self, pager: &Pager, zone: &Zone, host: &Host<'_>, index: usize) {
        let Some(held) = lock(pager, zone, index) else { return };
        let looks_reclaimed = zone.looks_reclaimed(&self.ram, index);
        let is_hard =
            held.contents().any(|content| matches!(content, Content::Empty { hard: true, .. }));
        let state = match (is_hard, held.is_empty()) {
            (true, _) if looks_reclaimed => State::Hard,
            (_, true) => State::Soft,
            _ => State::Installed,
        };
        if looks_reclaimed && state != State::Hard {
            let _ = host.return_area(index);
        }
        // Sets E if it is free. Whoever has one that is not free waits for its memory.
        let in_use = state == State::Soft && host.soft_reclaim(index).is_err();
        let state = if in_use { State::Installed } else { state };
        zone.states.set(index, state);
        match state {
            State::Hard => held.abandon(),
            State::Soft => held.settle(false),
            State::Installed => {
                let partly =
                    held.contents().any(|content| matches!(content, Content::Empty { .. }));
                held.abandon();
                if partly && let Err(error) = pager.installer().fill_huge(zone.huge(index)) {
                    tracing::debug!("{:?}: {error}", zone.huge(index));
                }
                host.install(index);
            }
        }
    }
}

fn lock<'p>(pager: &'p Pager, zone: &Zone, index: usize) -> Option<LockedHuge<'p>> {
    let huge = zone.huge(index);
    pager.ram().range(FrameRange::huge(huge))?;
    (0..TRIES).find_map(|_| {
        pager.residency().lock_huge(huge).or_else(|| {
            std::thread::sleep(PAUSE);
            None
        })
    })
}

fn headers_of<'a>(headers: &'a [Gpa], pager: &'a Pager) -> impl Iterator<Item = FrameRange> + 'a {
    let inside = |frames: &FrameRange| pager.ram().range(*frames).is_some();
    { headers.iter() }.map(|&at| Zone::frames_of((at, HEADER_WORDS as u64 * 8))).filter(inside)
}

/// Opens zones, and pins what is read and written in place from now on.
fn open_all(
    pager: &Pager,
    headers: &[Gpa],
    pinned: &mut Vec<FrameRange>,
) -> Result<Vec<Zone>, AttachError> {
    let mut pin = |frames: FrameRange| {
        pager.devices().pin(frames, false)?;
        pinned.push(frames);
        Ok::<_, io::Error>(())
    };
    headers_of(headers, pager).try_for_each(&mut pin)?;
    let mut zones: Vec<Zone> = Vec::new();
    for &at in headers {
        let Some(zone) = Zone::open(pager.ram(), at)? else { continue };
        zone.extents()?.into_iter().map(Zone::frames_of).try_for_each(&mut pin)?;
        zones.push(zone);
    }
    // Normal zones lie above DMA32.
    zones.sort_by_key(|zone| std::cmp::Reverse(zone.span().start));
    let firsts: Vec<_> = zones.iter().map(|zone| zone.span().start).collect();
    let mut below = zones.iter_mut().skip(1).zip(firsts);
    below.try_for_each(|(zone, above)| zone.end_before(above))?;
    Ok(zones)
}
