//! Keeps a VM's pages on the NUMA nodes of its tiers, the hottest on the first node. A thread of
//! its own does so, and the worker tells it how hot the pages are. `docs/tiers.md`.

mod exchange;
mod placer;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use ebb_pager::Pager;
use ebb_tier::{Ladder, TierKind};
use ebb_units::{Bytes, FRAME_BYTES};

use self::exchange::{Job, PlacerState};
use self::placer::Placer;
use super::order::Known;

pub use self::exchange::PlacementFigures;

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
    pub(super) next: Option<Known>,
    /// The thread; `None`: it could not be started.
    thread: Option<JoinHandle<()>>,
    shared: Arc<PlacerState>,
    /// The numbers of the fastest node and the slowest.
    ends: [u32; 2],
    fast_bytes: u64,
    /// Resident memory when the pages were last placed, plus all that was refilled by then, in
    /// bytes. `None`: nothing is known of their heat.
    placed_bytes: Option<u64>,
    /// The count of rounds that the schedule knows.
    told_rounds: u64,
}

impl Placing {
    /// Starts placing for a ladder with nodes; `None`: it has none. `rate`: the most bytes to move
    /// a second; 0: any number. If the thread cannot be started, the figures say why.
    pub fn start(ladder: &Ladder, pager: &Arc<Pager>, rate: u64) -> Option<Placing> {
        let nodes: Vec<(u32, u64)> = { ladder.rungs().iter() }
            .filter_map(|rung| match rung.kind {
                TierKind::Node(number) => Some((number, rung.bytes)),
                _ => None,
            })
            .collect();
        let [&(fastest, fast_bytes), &(slowest, _)] = [nodes.first()?, nodes.last()?];
        let (shared, (jobs, taken)) = (Arc::<PlacerState>::default(), channel());
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
    pub fn figures(&self) -> PlacementFigures {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

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
