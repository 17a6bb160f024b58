//! The placer: a thread that plans which pages go to which node, and has them moved.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ebb_pager::{Grain, Pager};
use ebb_tier::mover::{BATCH_PAGES, workers};
use ebb_tier::{
    Mover, Node, Outcome, PagePlace, Pages, Plan, RateLimiter, Rules, Tier, TierError, TierKind,
    carry_out, plan,
};
use ebb_units::{Bytes, FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use super::exchange::{Job, PlacerState};
use crate::vm::tiering::order::{Huge, Known, NOWHERE, Places, order, place_of};

/// A plan moves at most what its rate allows in this time.
const PLAN: Duration = Duration::from_secs(60);
/// Frames whose nodes are asked for at once. After each such part, the thread looks whether it is
/// to end.
const ASKED_FRAMES: u64 = 16 << 10;

pub(super) struct Placer {
    nodes: Vec<Node>,
    /// The frames that each node may hold.
    capacity_frames: Vec<u64>,
    pages: Arc<Pages>,
    pager: Arc<Pager>,
    /// Whether the memory is in huge pages: then plans move huge frames.
    is_huge: bool,
    shared: Arc<PlacerState>,
    /// What the last monitoring found.
    known: Known,
    /// The frames that one plan may move.
    budget_frames: u64,
}

impl Placer {
    pub(super) fn new(
        nodes: &[(u32, u64)],
        pager: &Arc<Pager>,
        rate: u64,
        shared: &Arc<PlacerState>,
    ) -> io::Result<Placer> {
        let limiter = if rate > 0 { RateLimiter::new(rate) } else { RateLimiter::unlimited() };
        let mover = Mover::new(workers(), BATCH_PAGES, limiter);
        let pages = Arc::new(Pages::of_pager(Arc::clone(pager), mover)?);
        let is_huge = pager.folios().grain() == Grain::Huge;
        let node = if is_huge { Node::huge } else { Node::new };
        Ok(Placer {
            nodes: nodes.iter().map(|(number, _)| node(*number, Arc::clone(&pages))).collect(),
            capacity_frames: nodes.iter().map(|(_, bytes)| bytes / FRAME_BYTES).collect(),
            pages,
            pager: Arc::clone(pager),
            is_huge,
            shared: Arc::clone(shared),
            known: Known::default(),
            budget_frames: match rate {
                0 => u64::MAX,
                _ => rate.saturating_mul(PLAN.as_secs()) / FRAME_BYTES,
            },
        })
    }

    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        for job in jobs {
            let is_new = matches!(job, Job::Known(_));
            if let Job::Known(known) = job {
                self.known = known;
            }
            let result = self.place();
            // A page table entry of this process's would make the next punch more expensive, and
            // its own share of the host's memory look like the VM's.
            self.pages.unmap();
            let mut figures = self.shared.figures();
            figures.rounds += u64::from(is_new);
            let failed = result.err().map(|error| error.to_string());
            if let Some(why) = &failed
                && figures.failed != failed
            {
                tracing::warn!("placing pages: {why}");
            }
            figures.failed = failed;
            drop(figures);
            self.shared.is_busy.store(false, Release);
        }
    }

    fn place(&self) -> Result<(), TierError> {
        self.shared.figures().no_room_frames = 0;
        let places = self.places()?;
        self.note_places(&places);
        let plan = self.plan(&places);
        let bytes = plan.frames() * self.unit_frames() * FRAME_BYTES;
        tracing::debug!("{} to be moved between nodes", Bytes(bytes));
        let tiers: Vec<&dyn Tier> = self.nodes.iter().map(|node| node as &dyn Tier).collect();
        let unit_frames = self.unit_frames();
        // A batch for each of the mover's threads.
        let batch = (workers() * BATCH_PAGES).div_ceil(unit_frames as usize);
        for steps in plan.steps.chunks(batch) {
            if self.shared.is_ended.load(Relaxed) {
                return Ok(());
            }
            let done = carry_out(&tiers, steps, batch)?;
            let moved = done.up.of(Outcome::Moved) + done.down.of(Outcome::Moved);
            self.shared.figures().moved_bytes += moved * unit_frames * FRAME_BYTES;
            let no_room = done.up.of(Outcome::NoRoom) + done.down.of(Outcome::NoRoom);
            self.shared.figures().no_room_frames = no_room * unit_frames;
            if no_room > 0 {
                // The kernel looks for memory on a full node for a long time.
                break;
            }
        }
        if !plan.steps.is_empty() {
            self.note_places(&self.places()?);
        }
        Ok(())
    }

    /// Returns the frames of the unit of a plan.
    fn unit_frames(&self) -> u64 {
        if self.is_huge { FRAMES_PER_HUGE } else { 1 }
    }

    fn plan(&self, places: &Places) -> Plan {
        let unit = self.unit_frames();
        let rules = Rules {
            capacity_frames: self.capacity_frames.iter().map(|frames| frames / unit).collect(),
            margin_degrees: self.known.margin_degrees.saturating_mul(unit as u32),
            // A few hot pages are enough to move a huge frame for which no other must make room.
            free_degrees: self.known.margin_degrees,
            budget_frames: self.budget_frames / unit,
        };
        let place = |place: Option<u8>| match place {
            Some(NOWHERE) | None => PagePlace::Nowhere,
            Some(tier) => PagePlace::Tier(tier),
        };
        let frames = order(places, &self.known);
        if !self.is_huge {
            return plan::plan(&frames, |gfn| place(place_of(places, gfn)), &rules);
        }
        let huge = Huge::new(frames, places);
        plan::plan(huge.order(), |gfn| place(huge.place_of(gfn)), &rules)
    }

    fn places(&self) -> Result<Places, TierError> {
        let number = |node: Option<u32>| {
            let kind = node.map(TierKind::Node);
            let at = self.nodes.iter().position(|node| kind == Some(node.kind()));
            at.and_then(|at| u8::try_from(at).ok()).unwrap_or(NOWHERE)
        };
        let mut all = Places::new();
        for frames in self.pager.ram().regions().map(|region| region.frames()) {
            let mut places = Vec::with_capacity(usize::try_from(frames.count).unwrap_or(0));
            for start in (0..frames.count).step_by(ASKED_FRAMES as usize) {
                if self.shared.is_ended.load(Relaxed) {
                    return Ok(Places::new());
                }
                let count = ASKED_FRAMES.min(frames.count - start);
                let part = FrameRange::new(Gfn(frames.start.0 + start), count);
                places.extend(self.pages.nodes(part)?.into_iter().map(number));
            }
            all.push((frames, places));
        }
        Ok(all)
    }

    fn note_places(&self, places: &Places) {
        let mut held = vec![0; self.nodes.len()];
        for place in places.iter().flat_map(|(_, places)| places) {
            held.get_mut(usize::from(*place)).into_iter().for_each(|held| *held += FRAME_BYTES);
        }
        self.shared.figures().held_bytes = held;
    }
}
