//! What is on record, what is left of it later, and what faults and deaths do to it.

use std::io;
use std::sync::Arc;

use ebb_api::{
    ErrorCode, FaultSpread, HISTORY_LONG_STEP_S, HISTORY_S, History, MemoryParts, TopVm,
};
use redb::StorageBackend;

use super::tell::Points;
use super::*;
use crate::host::events::Asker;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;

const DAY: u64 = 24 * 3600;
const BEGIN: u64 = 1_795_874_400;

/// A moment with a VM that has had so many faults.
fn moment(second: u64, faults: u64) -> Top {
    let run = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
    testing::publish(&daemon, "web", testing::status(), None);
    let mut top = top::now(&daemon).unwrap();
    top.vms[0].faults_per_s = Some(faults);
    Top { at_unix_ms: second * 1000, ..top }
}

fn at(top: &Top, second: u64) -> Top {
    Top { at_unix_ms: second * 1000, ..top.clone() }
}

fn seconds(all: &[Top]) -> Vec<u64> {
    all.iter().map(|top| top.at_unix_ms / 1000).collect()
}

/// What a store has from a second to another one.
fn read(store: &Store, from: u64, to: u64) -> Result<Vec<Top>, StoreError> {
    let mut all = Vec::new();
    store.read()?.each(from, to, |top| {
        all.push(top);
        ControlFlow::Continue(())
    })?;
    Ok(all)
}

/// The moments that a client on this host is told.
fn told(keeper: &HistoryKeeper, query: &HistoryQuery) -> Answer<Vec<Top>> {
    let json = tell(keeper, query, keeper.readers().admit(Asker::Host)?)?;
    let History { step_s, points } = serde_json::from_slice(&json).unwrap();
    assert_eq!(step_s, query.step_s());
    Ok(points)
}

/// A file in memory, of which each write and each change of its length is a step.
#[derive(Clone, Default, Debug)]
struct Image(Arc<Mutex<Steps>>);

#[derive(Default, Debug)]
struct Steps {
    bytes: Vec<u8>,
    count: u64,
    /// After so many steps there is no room any more. 0: there always is.
    room: u64,
    /// What was in the file after some steps.
    kept: Vec<Vec<u8>>,
    keeps: bool,
}

impl Image {
    fn step(&self, change: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        let mut steps = self.0.lock().unwrap();
        steps.count += 1;
        if steps.room > 0 && steps.count > steps.room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        change(&mut steps.bytes);
        if steps.keeps {
            let image = steps.bytes.clone();
            steps.kept.push(image);
        }
        Ok(())
    }

    fn of(bytes: Vec<u8>) -> Image {
        Image(Arc::new(Mutex::new(Steps { bytes, ..Steps::default() })))
    }
}

impl StorageBackend for Image {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let steps = self.0.lock().unwrap();
        let part = steps.bytes.get(offset as usize..offset as usize + len);
        part.map(<[u8]>::to_vec).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.step(|bytes| bytes.resize(len as usize, 0))
    }

    fn sync_data(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.step(|bytes| bytes[offset as usize..][..data.len()].copy_from_slice(data))
    }
}

fn store(image: &Image) -> Store {
    Store::on(image.clone(), u64::MAX).unwrap()
}

#[test]
fn a_day_is_whole_and_older_days_have_a_moment_each_five_minutes() {
    let (image, top) = (Image::default(), moment(BEGIN, 7));
    let mut store = store(&image);
    let all: Vec<u64> = (BEGIN..BEGIN + 2 * DAY).step_by(60).collect();
    all.iter().for_each(|second| store.add(&at(&top, *second)).unwrap());
    let last = *all.last().unwrap();
    let found = seconds(&read(&store, 0, u64::MAX).unwrap());
    let (old, new): (Vec<u64>, Vec<u64>) =
        found.into_iter().partition(|second| *second < last - HISTORY_S);
    assert_eq!(new, all[all.len() - new.len()..]);
    assert_eq!(new.len() as u64, HISTORY_S / 60 + 1);
    assert!(old.windows(2).all(|pair| pair[1] - pair[0] == HISTORY_LONG_STEP_S), "{old:?}");
    assert_eq!(old.first(), Some(&BEGIN));
    // A part of it.
    assert_eq!(seconds(&read(&store, last - 60, last).unwrap()), [last - 60, last]);
    assert!(read(&store, last + 1, u64::MAX).unwrap().is_empty());
    assert!(read(&store, 5, 4).unwrap().is_empty());
}

#[test]
fn there_is_a_bound_and_the_latest_stays() {
    let (top, most) = (moment(BEGIN, 7), 20_000);
    let mut store = Store::on(Image::default(), most).unwrap();
    for number in 0..300 {
        store.add(&at(&top, BEGIN + number * 15)).unwrap();
    }
    let found = seconds(&read(&store, 0, u64::MAX).unwrap());
    assert_eq!(found.last(), Some(&(BEGIN + 299 * 15)));
    let bytes = |second: &u64| {
        let text = serde_json::to_vec(&at(&top, *second)).unwrap();
        lz4_flex::block::compress_prepend_size(&text).len() as u64
    };
    let all = found.iter().map(bytes).sum::<u64>();
    assert!(found.len() > 5 && all <= most, "{} take {all}", found.len());
}

#[test]
fn a_process_that_dies_at_any_write_loses_nothing_that_it_has_added() {
    let (image, top) = (Image::default(), moment(BEGIN, 7));
    let mut store = store(&image);
    let mut added = Vec::new();
    image.0.lock().unwrap().keeps = true;
    for number in 0..6 {
        let second = BEGIN + number * 100;
        store.add(&at(&top, second)).unwrap();
        added.push((second, image.0.lock().unwrap().kept.len()));
    }
    let kept = std::mem::take(&mut image.0.lock().unwrap().kept);
    assert!(kept.len() > 12, "{}", kept.len());
    for (number, bytes) in kept.into_iter().enumerate() {
        let done = added.iter().filter(|(_, after)| *after <= number + 1);
        let done: Vec<u64> = done.map(|(second, _)| *second).collect();
        let mut again = Store::on(Image::of(bytes), u64::MAX).unwrap();
        let found = seconds(&read(&again, 0, u64::MAX).unwrap());
        assert!(found.starts_with(&done) && found.len() <= done.len() + 1, "{number}: {found:?}");
        again.add(&at(&top, BEGIN + DAY / 2)).unwrap();
    }
}

#[test]
fn without_room_nothing_is_written_and_nothing_that_was_is_lost() {
    let top = moment(BEGIN, 7);
    let mut count = 0;
    for room in (1..60).step_by(4) {
        let image = Image::default();
        image.0.lock().unwrap().room = room;
        let mut added = Vec::new();
        if let Ok(mut store) = Store::on(image.clone(), u64::MAX) {
            for second in (BEGIN..).step_by(15).take(6) {
                match store.add(&at(&top, second)) {
                    Ok(()) => added.push(second),
                    Err(_) => break,
                }
            }
        }
        image.0.lock().unwrap().room = 0;
        count += usize::from(added.len() < 6);
        let found = Store::on(image, u64::MAX).and_then(|store| read(&store, 0, u64::MAX));
        match found {
            Ok(found) => assert!(seconds(&found).starts_with(&added), "{room}"),
            Err(error) => assert!(added.is_empty(), "{room}: {error}"),
        }
    }
    assert!(count > 3, "{count}");
}

#[test]
fn several_moments_become_one() {
    let (mut first, mut second) = (moment(BEGIN, 10), moment(BEGIN + 15, 20));
    first.vms[0].waits = true;
    first.vms[0].name = "gone".parse().unwrap();
    let mut both = first.clone();
    both.vms.push(TopVm { misses_memory: true, ..second.vms[0].clone() });
    second.vms[0].faults_per_s = None;
    second.vms[0].parts = Some(MemoryParts { empty_bytes: 5, ..MemoryParts::default() });
    let merged = merge([first, both, second.clone()]).unwrap();
    assert_eq!(merged.at_unix_ms, second.at_unix_ms);
    let [gone, web] = &merged.vms[..] else { panic!("{merged:?}") };
    assert_eq!((gone.name.as_str(), gone.waits, gone.faults_per_s), ("gone", true, Some(10)));
    assert_eq!((web.misses_memory, web.faults_per_s), (true, Some(20)));
    assert_eq!(web.parts, second.vms[0].parts);
    assert_eq!(merge([]), None);
}

/// Faults that took so long, with no quantiles: whoever puts moments together makes them anew.
fn faults(counts: &[u64]) -> Option<FaultSpread> {
    Some(FaultSpread { counts: counts.to_vec(), p50: None, p99: None })
}

#[test]
fn few_long_faults_are_left_of_many_moments() {
    let (mut top, mut store) = (moment(BEGIN, 7), store(&Image::default()));
    // The last 20 of these become one. 40 of their 2000 faults took a millisecond and more.
    for number in 0..=20 {
        let counts: &[u64] = if number == 7 { &[60, 0, 0, 0, 0, 0, 40] } else { &[100] };
        top.vms[0].fault_ns = faults(counts);
        store.add(&at(&top, BEGIN + 15 * number)).unwrap();
    }
    store.add(&at(&top, BEGIN + DAY + 600)).unwrap();
    let found = read(&store, 0, BEGIN + DAY).unwrap();
    assert_eq!(seconds(&found), [BEGIN, BEGIN + 300]);
    let times = found[1].vms[0].fault_ns.clone().unwrap();
    assert_eq!(times.counts, [1960, 0, 0, 0, 0, 0, 40]);
    assert!(times.p50.is_some_and(|ns| ns < 1024), "{times:?}");
    assert!(times.p99.is_some_and(|ns| (1 << 20..=1 << 22).contains(&ns)), "{times:?}");
}

#[test]
fn times_of_faults_that_are_not_known_change_no_others() {
    let merged = |all: [Option<FaultSpread>; 3]| {
        let moments = all.map(|fault_ns| {
            let mut top = moment(BEGIN, 7);
            top.vms[0].fault_ns = fault_ns;
            top
        });
        merge(moments).unwrap().vms[0].fault_ns.clone().map(|times| times.counts)
    };
    assert_eq!(merged([None, faults(&[1, 2]), None]), Some(vec![1, 2]));
    assert_eq!(merged([faults(&[]), faults(&[0, 0, 5]), faults(&[7])]), Some(vec![7, 0, 5]));
    assert_eq!(merged([faults(&[]), None, None]), Some(vec![]));
    assert_eq!(merged([None, None, None]), None);
    // Groups of another release, and more faults than there can be.
    assert_eq!(merged([faults(&[1; 15]), None, faults(&[3])]), Some(vec![3]));
    let most = faults(&[u64::MAX; 14]);
    assert_eq!(merged([most.clone(), most, None]), Some(vec![u64::MAX; 14]));
}

#[test]
fn a_history_that_cannot_be_written_comes_back() {
    let run = tempfile::tempdir().unwrap();
    let directory = run.path().join("logs");
    let keeper = HistoryKeeper::new(&directory);
    let query = HistoryQuery { vm: None, from: BEGIN, to: BEGIN + 900, step: None };
    assert_eq!(told(&keeper, &query).unwrap(), []);
    // Something else is in its place.
    std::fs::write(&directory, "").unwrap();
    let top = moment(BEGIN, 7);
    assert!(keeper.add(&top).unwrap_err().contains("history.redb"));
    assert_eq!(told(&keeper, &query).unwrap(), []);
    std::fs::remove_file(&directory).unwrap();
    keeper.add(&top).unwrap();
    assert_eq!(seconds(&told(&keeper, &query).unwrap()), [BEGIN]);
    // Another daemon has it.
    let other = HistoryKeeper::new(&directory);
    assert!(other.add(&top).is_err());
    let refused = told(&other, &query).unwrap_err().to_string();
    assert!(refused.starts_with("there is no history: "), "{refused}");
    // The next daemon.
    drop(keeper);
    let again = HistoryKeeper::new(&directory);
    assert_eq!(seconds(&told(&again, &query).unwrap()), [BEGIN]);
    again.add(&at(&top, BEGIN + 15)).unwrap();
    assert_eq!(seconds(&told(&again, &query).unwrap()), [BEGIN, BEGIN + 15]);
}

#[test]
fn room_is_left_to_others() {
    let run = tempfile::tempdir().unwrap();
    let least_free_bytes = u64::MAX;
    let (path, store, readers) = (run.path().join(FILE), Mutex::default(), Readers::default());
    let keeper = HistoryKeeper { path, least_free_bytes, store, readers };
    let refused = keeper.add(&moment(BEGIN, 7)).unwrap_err();
    assert!(refused.contains(" left, and must keep "), "{refused}");
    let query = HistoryQuery { vm: None, from: BEGIN, to: BEGIN, step: None };
    assert_eq!(told(&keeper, &query).unwrap(), []);
    assert_eq!(std::fs::read_dir(run.path()).unwrap().count(), 0, "nothing is made");
}

#[test]
fn a_file_that_makes_no_sense_is_put_aside() {
    let run = tempfile::tempdir().unwrap();
    let (path, top) = (run.path().join(FILE), moment(BEGIN, 7));
    for bytes in [&b"no history"[..], &[0; 5000], &[b'x'; 100_000]] {
        std::fs::write(&path, bytes).unwrap();
        let keeper = HistoryKeeper::new(run.path());
        keeper.add(&top).unwrap();
        assert_eq!(std::fs::read(path.with_extension("redb.bad")).unwrap(), bytes);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn clients_are_told_what_they_ask_for() {
    let run = tempfile::tempdir().unwrap();
    let (keeper, top) = (HistoryKeeper::new(run.path()), moment(BEGIN, 7));
    for number in 0..8 {
        keeper.add(&at(&top, BEGIN + 15 * number)).unwrap();
    }
    let told = |vm: Option<&str>, step| {
        let vm = vm.map(|name| name.parse().unwrap());
        told(&keeper, &HistoryQuery { vm, from: BEGIN, to: BEGIN + 200, step })
    };
    assert_eq!(told(None, None).unwrap().len(), 8);
    let steps = told(Some("web"), Some(60)).unwrap();
    assert_eq!(seconds(&steps), [BEGIN + 45, BEGIN + 105]);
    assert_eq!(steps[0].vms.len(), 1);
    assert!(told(Some("nobody"), None).unwrap().iter().all(|top| top.vms.is_empty()));
    let query = HistoryQuery { vm: None, from: 0, to: DAY, step: None };
    let refused = super::tests::told(&keeper, &query).unwrap_err().to_string();
    assert!(refused.contains("give a step of"), "{refused}");
}

#[test]
fn all_of_history_is_one_point() {
    let run = tempfile::tempdir().unwrap();
    let (keeper, top) = (HistoryKeeper::new(run.path()), moment(BEGIN, 7));
    for number in 0..50 {
        let mut top = at(&top, BEGIN + 15 * number);
        top.vms[0].faults_per_s = Some(number);
        keeper.add(&top).unwrap();
    }
    let query = HistoryQuery { vm: None, from: 0, to: u64::MAX, step: Some(u64::MAX) };
    let points = told(&keeper, &query).unwrap();
    assert_eq!(seconds(&points), [BEGIN + 15 * 49]);
    assert_eq!(points[0].vms[0].faults_per_s, Some(24));
}

#[test]
fn an_answer_is_bounded_in_points_and_in_bytes() {
    let query = |vm: Option<&str>| {
        let vm = vm.map(|name| name.parse().unwrap());
        HistoryQuery { vm, from: BEGIN, to: BEGIN, step: None }
    };
    let top = moment(BEGIN, 7);
    let mut all = (0..).map(|number| at(&top, BEGIN + 15 * number));
    for (query, most) in [(query(None), 100), (query(Some("web")), 1000)] {
        let mut points = Points::new(&query, usize::MAX);
        // Breaks off, although there is always another moment.
        assert!(all.any(|top| points.add(top).is_break()));
        let history: History = serde_json::from_slice(&points.json().unwrap()).unwrap();
        assert_eq!(history.points.len(), most);
    }
    let query = query(None);
    let mut points = Points::new(&query, 5000);
    assert!(all.any(|top| points.add(top).is_break()));
    let refused = points.json().unwrap_err().to_string();
    assert!(refused.contains("ask for one VM"), "{refused}");
    // A step with another VM in each moment.
    let query = HistoryQuery { to: u64::MAX, step: Some(u64::MAX), ..query };
    let mut points = Points::new(&query, usize::MAX);
    let others = (0..).map(|number| {
        let mut top = at(&top, BEGIN + number);
        top.vms[0].name = format!("vm{number}").parse().unwrap();
        top
    });
    assert!(others.into_iter().any(|top| points.add(top).is_break()));
    assert!(points.json().is_err());
}

#[test]
fn one_history_is_read_at_a_time_and_what_is_written_does_not_wait() {
    let run = tempfile::tempdir().unwrap();
    let (keeper, top) = (HistoryKeeper::new(run.path()), moment(BEGIN, 7));
    keeper.add(&top).unwrap();
    let query = HistoryQuery { vm: None, from: BEGIN, to: BEGIN + 900, step: None };
    let leave = keeper.readers().admit(Asker::Afar).unwrap();
    let mut count = 0;
    let each = |_| {
        let refused = keeper.readers().admit(Asker::Host).err().unwrap();
        assert_eq!(refused.code(), ErrorCode::Unavailable);
        let second = BEGIN + 15 * (count + 1);
        // Neither waits for this reading, nor is read by it.
        keeper.add(&at(&top, second)).unwrap();
        count += 1;
        ControlFlow::Continue(())
    };
    keeper.each(&query, each).unwrap();
    assert_eq!(count, 1);
    drop(leave);
    assert_eq!(seconds(&told(&keeper, &query).unwrap()), [BEGIN, BEGIN + 15]);
}

#[test]
fn other_machines_have_so_many_answers_on_their_way() {
    let run = tempfile::tempdir().unwrap();
    let keeper = HistoryKeeper::new(run.path());
    let query = HistoryQuery { vm: None, from: 0, to: 0, step: None };
    let mut unsent = Vec::new();
    let refused = loop {
        match keeper.readers().admit(Asker::Afar) {
            Ok(leave) => unsent.push(tell(&keeper, &query, leave).unwrap()),
            Err(refused) => break refused,
        }
    };
    assert_eq!((unsent.len(), refused.code()), (3, ErrorCode::Unavailable));
    assert_eq!(told(&keeper, &query).unwrap(), [], "this host is told");
    unsent.pop();
    assert!(keeper.readers().admit(Asker::Afar).is_ok());
}

#[test]
fn history_goes_on_after_the_clock_was_ahead() {
    let (top, mut store) = (moment(BEGIN, 7), Store::on(Image::default(), 20_000).unwrap());
    let mut add = |from: u64, step, count| {
        let all: Vec<u64> = (from..).step_by(step).take(count).collect();
        all.iter().for_each(|second| store.add(&at(&top, *second)).unwrap());
        (all, seconds(&read(&store, 0, u64::MAX).unwrap()))
    };
    add(BEGIN + DAY, 15, 300);
    let (all, found) = add(BEGIN, 15, 60);
    assert!(found.len() > 5 && all.ends_with(&found), "{found:?}");
}

#[test]
fn a_clock_that_was_ahead_leaves_no_more_moments_for_longer() {
    let (top, mut store) = (moment(BEGIN, 7), store(&Image::default()));
    // More than are removed at once.
    let ahead = (BEGIN + DAY..).step_by(300).take(600);
    let (now, later) = ((BEGIN..).step_by(15).take(60), BEGIN + 2 * DAY);
    for second in ahead.chain(now).chain([later]) {
        store.add(&at(&top, second)).unwrap();
    }
    let found = seconds(&read(&store, 0, later - 1).unwrap());
    assert_eq!(found, [BEGIN, BEGIN + 300, BEGIN + 600]);
}
