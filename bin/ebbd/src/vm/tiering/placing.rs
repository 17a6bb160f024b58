//! Keeps a VM's pages on the NUMA nodes of its tiers, the hottest on the first node. A thread of
//! its own does so, and the worker tells it how hot the pages are. `docs/tiers.md`.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_pager::{Grain, Pager};
use ebb_tier::mover::{BATCH_PAGES, workers};
use ebb_tier::{
    Kind, Ladder, Mover, Node, Outcome, Pace, Pages, Place, Plan, Rules, Tier, TierError,
    carry_out, plan,
};
use ebb_units::{Bytes, FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use super::order::{Huge, Known, NOWHERE, Places, order, place_of};

/// A plan moves at most what its rate allows in this time.
const PLAN: Duration = Duration::from_secs(60);
/// Frames whose nodes are asked for at once. After each such part, the thread looks whether it is
/// to end.
const ASKED_FRAMES: u64 = 16 << 10;
/// Smallest rate, in bytes a second. With less, a thread that is to end would take minutes to end
/// its batches.
const RATE_MIN: u64 = 16 << 20;
/// Pages are placed again between two monitorings once the guest has touched new memory of more
/// than one in this many of the first node's share.
const GROWTH_PART: u64 = 32;
/// The switch of the kernel's own way to move pages, which goes by other rules.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";

/// The worker's side of one VM's placing thread.
pub struct Placing {
    jobs: Option<Sender<Job>>,
    /// The next job. It waits here until the thread has nothing to do.
    next: Option<Known>,
    /// The thread; `None`: it could not be started.
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    /// The numbers of the fastest node and the slowest.
    ends: [u32; 2],
    fast_bytes: u64,
    /// Resident memory when the pages were last placed, plus all that was refilled by then, in
    /// bytes. `None`: nothing is known of their heat.
    placed_bytes: Option<u64>,
    /// The count of rounds that the schedule was last told.
    told_rounds: u64,
}

enum Job {
    /// Place by what is known now.
    Known(Known),
    /// Place by what was known before. Memory that came since counts as the coldest.
    Again,
}

#[derive(Default)]
struct Shared {
    is_ended: AtomicBool,
    is_busy: AtomicBool,
    figures: Mutex<Figures>,
}

/// What the thread has done.
#[derive(Clone, Default, Debug)]
pub struct Figures {
    /// Memory of the VM on each node when its pages were last placed, in bytes, fastest node first.
    pub held_bytes: Vec<u64>,
    /// Bytes moved so far, in both directions.
    pub moved_bytes: u64,
    /// Monitorings by which the pages were placed.
    rounds: u64,
    /// Frames that found no room on their node the last time.
    no_room_frames: u64,
    /// Why the pages are not placed.
    pub failed: Option<String>,
}

impl Placing {
    /// Starts placing for a ladder with nodes; `None`: it has none. `rate`: the most bytes to move
    /// a second; 0: any number. If the thread cannot be started, the figures say why.
    pub fn start(ladder: &Ladder, pager: &Arc<Pager>, rate: u64) -> Option<Placing> {
        let nodes: Vec<(u32, u64)> = { ladder.rungs().iter() }
            .filter_map(|rung| match rung.kind {
                Kind::Node(number) => Some((number, rung.bytes)),
                _ => None,
            })
            .collect();
        let [&(fastest, fast_bytes), &(slowest, _)] = [nodes.first()?, nodes.last()?];
        let (shared, (jobs, taken)) = (Arc::<Shared>::default(), channel());
        let thread = Placer::new(&nodes, pager, rate, &shared).and_then(|placer| {
            let thread = std::thread::Builder::new().name("ebb-placer".into());
            let pager = Arc::clone(pager);
            thread.spawn(move || {
                pager.catch(|| placer.run(&taken));
            })
        });
        if let Err(error) = &thread {
            shared.figures().failed = Some(format!("the thread that does so: {error}"));
        }
        Some(Placing {
            jobs: Some(jobs),
            next: None,
            thread: thread.ok(),
            shared,
            ends: [fastest, slowest],
            fast_bytes,
            placed_bytes: None,
            told_rounds: 0,
        })
    }

    /// Returns the numbers of the fastest node and the slowest.
    pub fn ends(&self) -> [u32; 2] {
        self.ends
    }

    /// Returns the figures as of the last time.
    pub fn figures(&self) -> Figures {
        self.shared.figures().clone()
    }

    /// Drops the heat of the old kernel, because another one may run.
    pub fn on_reset(&mut self) {
        (self.next, self.placed_bytes) = (None, None);
    }

    /// Has the pages placed by `known`, once the thread has nothing to do.
    pub fn place_next(&mut self, known: Known) {
        self.next = Some(known);
    }

    /// Whether pages were placed by a monitoring since this was last asked.
    pub fn has_news(&mut self) -> bool {
        let rounds = self.figures().rounds;
        std::mem::replace(&mut self.told_rounds, rounds) != rounds
    }

    /// Gives the thread its next job, if it has none. The first node may hold more than its share
    /// by what the guest has touched since the last job: memory that became resident or was
    /// refilled.
    pub fn keep(&mut self, resident_bytes: u64, came_bytes: u64) {
        let touched_bytes = resident_bytes.saturating_add(came_bytes);
        let room_bytes = self.fast_bytes / GROWTH_PART;
        let has_grown = self.placed_bytes.is_some_and(|placed_bytes| {
            resident_bytes > self.fast_bytes && touched_bytes > placed_bytes + room_bytes
        });
        // The guest may touch again what it gave up.
        self.placed_bytes = self.placed_bytes.map(|placed_bytes| placed_bytes.min(touched_bytes));
        if self.next.is_none() && !has_grown || self.shared.is_busy.swap(true, Acquire) {
            return;
        }
        let job = self.next.take().map_or(Job::Again, Job::Known);
        self.placed_bytes = Some(touched_bytes);
        // A thread that has ended places nothing.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for Placing {
    fn drop(&mut self) {
        self.shared.is_ended.store(true, Release);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn figures(&self) -> std::sync::MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that `rate`, in bytes a second, is enough; 0: any amount.
///
/// # Errors
/// The rate is too little; the error says what to do.
pub fn check_rate(rate: Bytes) -> Result<(), String> {
    if rate.0 > 0 && rate.0 < RATE_MIN {
        return Err(format!(
            "--move-rate {rate} is too little: give {} or more, or 0 for no limit",
            Bytes(RATE_MIN)
        ));
    }
    Ok(())
}

/// Returns what the operator should know of it.
pub fn warnings(placing: &Placing) -> Vec<String> {
    let mut all = Vec::new();
    let figures = placing.figures();
    if placing.thread.as_ref().is_some_and(JoinHandle::is_finished) {
        all.push("its pages are not placed by heat: the thread that does so has ended".into());
    }
    if let Some(why) = figures.failed {
        all.push(format!("its pages are not placed by heat: {why}"));
    }
    if figures.no_room_frames > 0 {
        all.push(format!(
            "a NUMA node is full: {} that should be there found no room; others use it, too",
            Bytes(figures.no_room_frames * FRAME_BYTES)
        ));
    }
    if std::fs::read_to_string(BALANCING).is_ok_and(|text| text.trim() != "0") {
        all.push(format!(
            "the kernel's NUMA balancing moves its pages by other rules: echo 0 >{BALANCING}"
        ));
    }
    all
}

struct Placer {
    nodes: Vec<Node>,
    /// The frames that each node may hold.
    capacity_frames: Vec<u64>,
    pages: Arc<Pages>,
    pager: Arc<Pager>,
    /// Whether the memory is in huge pages: then plans move huge frames.
    is_huge: bool,
    shared: Arc<Shared>,
    /// What the last monitoring found.
    known: Known,
    /// The frames that one plan may move.
    budget_frames: u64,
}

impl Placer {
    fn new(
        nodes: &[(u32, u64)],
        pager: &Arc<Pager>,
        rate: u64,
        shared: &Arc<Shared>,
    ) -> io::Result<Placer> {
        let pace = if rate > 0 { Pace::new(rate) } else { Pace::unlimited() };
        let mover = Mover::new(workers(), BATCH_PAGES, pace);
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

    fn run(mut self, jobs: &Receiver<Job>) {
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
        self.note_held(&places);
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
            self.note_held(&self.places()?);
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
            Some(NOWHERE) | None => Place::Nowhere,
            Some(tier) => Place::Tier(tier),
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
            let kind = node.map(Kind::Node);
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

    fn note_held(&self, places: &Places) {
        let mut held = vec![0; self.nodes.len()];
        for place in places.iter().flat_map(|(_, places)| places) {
            held.get_mut(usize::from(*place)).into_iter().for_each(|held| *held += FRAME_BYTES);
        }
        self.shared.figures().held_bytes = held;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_none_or_enough() {
        assert_eq!((check_rate(Bytes(0)), check_rate(Bytes(RATE_MIN))), (Ok(()), Ok(())));
        let said = check_rate(Bytes(1 << 20)).unwrap_err();
        assert!(said.contains("--move-rate 1 MiB is too little: give 16 MiB or more"), "{said}");
    }

    const FAST: u64 = 64 << 20;
    const ROOM: u64 = FAST / GROWTH_PART;

    /// Makes a placing whose thread this test plays.
    fn placing() -> (Placing, Receiver<Job>) {
        let (jobs, taken) = channel();
        let placing = Placing {
            jobs: Some(jobs),
            next: None,
            thread: None,
            shared: Arc::default(),
            ends: [0, 1],
            fast_bytes: FAST,
            placed_bytes: None,
            told_rounds: 0,
        };
        (placing, taken)
    }

    fn end_job(placing: &Placing) {
        assert!(placing.shared.is_busy.swap(false, Release), "it has a job");
    }

    #[test]
    fn what_a_monitoring_found_waits_for_the_thread() {
        let (mut placing, jobs) = placing();
        for kernel_degree in [1, 2, 3] {
            placing.next = Some(Known { kernel_degree, ..Known::default() });
            placing.keep(FAST, 0);
        }
        let Ok(Job::Known(first)) = jobs.try_recv() else { panic!("the first at once") };
        assert!(jobs.try_recv().is_err(), "it is busy");
        end_job(&placing);
        placing.keep(FAST, 0);
        // What came between is out of date.
        let Ok(Job::Known(last)) = jobs.try_recv() else { panic!("the last") };
        assert_eq!((first.kernel_degree, last.kernel_degree), (1, 3));
        end_job(&placing);
        placing.keep(FAST, 0);
        assert!(jobs.try_recv().is_err(), "nothing is new");
    }

    #[test]
    fn what_is_touched_anew_is_placed_between_monitorings() {
        let (mut placing, jobs) = placing();
        placing.keep(4 * FAST, 0);
        assert!(jobs.try_recv().is_err(), "nothing is known of its heat");
        placing.next = Some(Known::default());
        placing.keep(FAST / 2, 0);
        assert!(matches!(jobs.try_recv(), Ok(Job::Known(_))));
        end_job(&placing);
        placing.keep(FAST, 0);
        assert!(jobs.try_recv().is_err(), "all has room on the first node");
        placing.keep(FAST + 4096, 0);
        assert!(matches!(jobs.try_recv(), Ok(Job::Again)));
        placing.keep(2 * FAST, 0);
        assert!(jobs.try_recv().is_err(), "it is busy");
        end_job(&placing);
        placing.keep(FAST + 4096, ROOM);
        assert!(jobs.try_recv().is_err(), "less than the room for that");
        // The guest gave up memory, and what it has again is new.
        placing.keep(FAST + 4096 - ROOM, 0);
        placing.keep(FAST + 4096, 1);
        assert!(matches!(jobs.try_recv(), Ok(Job::Again)));
        end_job(&placing);
        placing.on_reset();
        placing.keep(4 * FAST, 0);
        assert!(jobs.try_recv().is_err(), "another kernel's memory");
    }
}
