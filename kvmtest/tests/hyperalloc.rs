//! The host reclaims huge frames in the allocator of a guest that allocates all the time.

use std::mem::forget;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use ebb_pager::{Grain, IoMapping, NoDevices, Pager, SoftIommu, Zeros};
use ebb_reclaim::hyperalloc::{How, HyperAlloc, HyperAllocStop, State};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, HUGE_BYTES, HugeFrame};
use kvmtest::sharing::{Language, Sharing, hard_in_header};
use kvmtest::{Daemon, until};
use testkit::require;

/// Number of huge frames to reclaim before a test ends.
const ENOUGH: u64 = 300;

fn attach(guest: &Sharing, grain: Grain, devices: Box<dyn IoMapping>) -> (Daemon, Arc<HyperAlloc>) {
    let mut daemon = Daemon::take_with(&guest.machine, grain, devices);
    daemon.pager.frames().watch_all().unwrap();
    daemon.serve();
    let shared = HyperAlloc::attach(&daemon.pager, &guest.headers()).unwrap();
    (daemon, shared)
}

fn reclaim(daemon: &Daemon, shared: &HyperAlloc, how: How, want: u64) -> u64 {
    let (taken, stop) = shared.reclaim(&daemon.pager, how, want, 0, |_| true);
    assert!(stop.is_none(), "{stop:?}");
    taken.huge_frames
}

/// Checks that everything is the guest's again, by its words and by the pager's.
fn all_is_back(mut guest: Sharing, daemon: Daemon, shared: &HyperAlloc) {
    guest.finish();
    shared.give_back_all(&daemon.pager, Zeros::Fill).unwrap();
    let counts = shared.counts();
    assert_eq!((counts.soft_bytes, counts.hard_bytes), (0, 0));
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    let frames: u64 = guest.zones().iter().map(|(_, region)| region.layout().frames).sum();
    assert_eq!(guest.verify(), frames);
    for (_, region) in guest.zones() {
        assert_eq!(hard_in_header(region), 0);
        let evicted = region
            .parts()
            .areas
            .iter()
            .filter(|area| area.load(Relaxed) & ebb_llfree::layout::AREA_EVICTED != 0);
        assert_eq!(evicted.count(), 0);
    }
}

#[test]
fn freed_memory_is_reclaimed_and_returns_when_touched() {
    require!(kvmtest::available());
    for grain in [Grain::Frame, Grain::Huge] {
        let guest = Sharing::new();
        let (daemon, shared) = attach(&guest, grain, Box::new(NoDevices));
        let all = guest.huge_frames();
        assert_eq!(reclaim(&daemon, &shared, How::Soft, 3), 3);
        assert_eq!(reclaim(&daemon, &shared, How::Soft, u64::MAX), all - 3);
        assert_eq!(reclaim(&daemon, &shared, How::Soft, u64::MAX), 0);
        assert_eq!(shared.counts().soft_bytes, all * HUGE_BYTES);
        let view = daemon.pager.ledger();
        assert_eq!(view.runs().map(|(frames, _)| frames.bytes()).sum::<u64>(), all * HUGE_BYTES);
        guest.verify();
        let mut guest = guest;
        guest.start(Language::C, None);
        until("installs", || (shared.counts().installs > 4).then_some(()));
        guest.finish();
        assert!(shared.install_times().percentile_ns(50).is_some());
        all_is_back(guest, daemon, &shared);
    }
}

fn keeps_every_word(languages: &[Language], grain: Grain, strict: bool) {
    let mut guest = Sharing::new();
    let ram = guest.machine.ram();
    let iommu = strict.then(|| {
        ram.populate(FrameRange::new(Gfn(0), ram.end().0)).unwrap();
        Arc::new(SoftIommu::new(ram))
    });
    let devices: Box<dyn IoMapping> = match &iommu {
        Some(iommu) => Box::new(Arc::clone(iommu)),
        None => Box::new(NoDevices),
    };
    let (daemon, shared) = attach(&guest, grain, devices);
    languages.iter().for_each(|&language| guest.start(language, iommu.clone()));
    let (mut soft, mut hard, mut given) = (0, 0, 0);
    until(format_args!("{ENOUGH} huge frames"), || {
        soft += reclaim(&daemon, &shared, How::Soft, u64::MAX);
        hard += reclaim(&daemon, &shared, How::Hard, 6);
        given += shared.give(&daemon.pager, 5);
        (soft >= ENOUGH && hard >= ENOUGH / 4).then_some(())
    });
    let counts = shared.counts();
    eprintln!(
        "{languages:?} {grain:?} {strict}: {soft} soft, {hard} hard, {given} back, {counts:?}"
    );
    assert_eq!(counts.violations, 0);
    assert_eq!(counts.hard_bytes, (hard - given) * HUGE_BYTES);
    let in_headers: u64 = guest.zones().iter().map(|(_, region)| hard_in_header(region)).sum();
    assert_eq!(in_headers * HUGE_BYTES, counts.hard_bytes);
    all_is_back(guest, daemon, &shared);
}

#[test]
fn no_word_is_lost_while_memory_comes_and_goes() {
    require!(kvmtest::available());
    keeps_every_word(&[Language::C, Language::Rust], Grain::Frame, false);
    keeps_every_word(&[Language::C, Language::C, Language::Rust], Grain::Huge, false);
}

#[test]
fn no_device_meets_what_is_not_there() {
    require!(kvmtest::available());
    for grain in [Grain::Frame, Grain::Huge] {
        keeps_every_word(&[Language::C, Language::Rust], grain, true);
    }
}

/// Higher zones come first, and the frames that the guest should keep are spared.
#[test]
fn zones_are_reclaimed_from_the_top_down() {
    require!(kvmtest::available());
    let guest = Sharing::new();
    let (daemon, shared) = attach(&guest, Grain::Huge, Box::new(NoDevices));
    let in_headers =
        || guest.zones().iter().map(|(_, region)| hard_in_header(region)).collect::<Vec<_>>();
    assert_eq!(reclaim(&daemon, &shared, How::Hard, 10), 10);
    assert_eq!(in_headers(), [0, 10]);
    assert_eq!(reclaim(&daemon, &shared, How::Hard, 10), 10);
    assert_eq!(in_headers(), [5, 15]);
    let (taken, _) = shared.reclaim(&daemon.pager, How::Soft, u64::MAX, 4, |_| true);
    assert_eq!(taken.huge_frames, guest.huge_frames() - 20 - 4);
    assert_eq!(shared.give(&daemon.pager, 7), 7);
    assert_eq!(in_headers(), [0, 13]);
    // A guest that was reset is not touched.
    let (taken, stop) = shared.reclaim(&daemon.pager, How::Hard, 1, 0, |_| false);
    assert!(taken.huge_frames == 0 && matches!(stop, Some(HyperAllocStop::Reset)));
    all_is_back(guest, daemon, &shared);
}

#[test]
fn a_touch_of_what_the_guest_may_not_have_is_counted() {
    require!(kvmtest::available());
    for grain in [Grain::Frame, Grain::Huge] {
        let guest = Sharing::new();
        let (daemon, shared) = attach(&guest, grain, Box::new(NoDevices));
        let violations = Arc::new(AtomicU64::new(0));
        let violation = Arc::clone(&violations);
        shared.on_violation(move || {
            violation.fetch_add(1, Relaxed);
        });
        assert_eq!(reclaim(&daemon, &shared, How::Hard, 2), 2);
        let gpa = Gpa(guest.zones()[1].0 * FRAME_BYTES + HUGE_BYTES + 5 * FRAME_BYTES);
        guest.machine.write_as_vmm(gpa, 7);
        assert_eq!(guest.machine.read_as_vmm(gpa), 7);
        assert_eq!((shared.counts().violations, violations.load(Relaxed)), (1, 1));
        assert_eq!(shared.state(gpa.gfn().huge()), State::Hard);
        // A returned huge frame is like any other.
        assert_eq!(shared.give(&daemon.pager, 2), 2);
        assert_eq!(shared.state(gpa.gfn().huge()), State::Installed);
        assert_eq!(shared.counts().soft_bytes, HUGE_BYTES);
        all_is_back(guest, daemon, &shared);
    }
}

/// The words may be those of the next kernel by then.
#[test]
fn an_install_writes_nothing_to_a_guest_that_may_have_been_reset() {
    require!(kvmtest::available());
    let guest = Sharing::new();
    let (daemon, shared) = attach(&guest, Grain::Frame, Box::new(NoDevices));
    let may_be_reset = Arc::new(AtomicBool::new(true));
    let told = Arc::clone(&may_be_reset);
    shared.ask_of_reset(move || told.load(Relaxed));
    let (base, region) = &guest.zones()[1];
    let has_evicted =
        || region.parts().areas[1].load(Relaxed) & ebb_llfree::layout::AREA_EVICTED != 0;
    let gpa = Gpa(base * FRAME_BYTES + HUGE_BYTES);
    for is_reset in [true, false] {
        may_be_reset.store(is_reset, Relaxed);
        assert!(reclaim(&daemon, &shared, How::Soft, 2) > 0 && has_evicted());
        guest.machine.write_as_vmm(gpa, 7);
        assert_eq!(shared.state(gpa.gfn().huge()), State::Installed);
        assert_eq!(has_evicted(), is_reset);
    }
    all_is_back(guest, daemon, &shared);
}

/// Leaves a huge frame at one of the steps of reclaiming or returning it. Returns `false` if none
/// can be had at once. It must not wait: if both of the guest's threads wait for frames that were
/// left locked, no frame is ever freed.
fn die_at(step: usize, guest: &Sharing, pager: &Pager, shared: &HyperAlloc) -> bool {
    let (base, region) = &guest.zones()[step % 2];
    let host = region.host();
    let huge = |index: usize| HugeFrame(base / 512 + index as u64);
    let is_hard = |index: usize| shared.state(huge(index)) == State::Hard;
    if step >= 5 {
        let found = (0..host.areas())
            .filter(|&index| is_hard(index))
            .find_map(|index| Some((index, pager.residency().lock_huge(huge(index))?)));
        let Some((index, held)) = found else { return false };
        host.return_area(index).unwrap();
        forget(held);
        return true;
    }
    let found = (0..host.areas()).find_map(|index| {
        if is_hard(index) || host.free_areas(0) >> index & 1 == 0 {
            return None;
        }
        let held = pager.residency().lock_huge(huge(index))?;
        let taken = step == 0 || host.hard_reclaim(index).is_ok();
        if !taken {
            held.abandon();
            return None;
        }
        Some((index, held))
    });
    let Some((index, held)) = found else { return false };
    if step < 2 {
        forget(held);
        return true;
    }
    let held = held.record().ok().expect("nobody else uses it");
    if step > 2 {
        pager.residency().empty_huge([&held].into_iter()).unwrap();
    }
    if step > 3 {
        host.return_area(index).unwrap();
    }
    forget(held);
    true
}

#[test]
fn reclaimed_memory_outlives_its_daemon() {
    require!(kvmtest::available());
    for grain in [Grain::Frame, Grain::Huge] {
        let mut guest = Sharing::new();
        let (mut daemon, mut shared) = attach(&guest, grain, Box::new(NoDevices));
        guest.start(Language::C, None);
        guest.start(Language::Rust, None);
        let mut installs = 0;
        let mut left_at = [0; 6];
        for round in 0..20 {
            reclaim(&daemon, &shared, How::Hard, 2);
            until("a reclaim", || {
                (reclaim(&daemon, &shared, How::Soft, u64::MAX) > 0).then_some(())
            });
            until("an install", || (shared.counts().installs > 0).then_some(()));
            installs += shared.counts().installs;
            (0..6).filter(|step| round % 2 == 0 || step % 2 == 1).for_each(|step| {
                left_at[step] += u32::from(die_at(step, &guest, &daemon.pager, &shared));
            });
            let hard = shared.counts().hard_bytes;
            daemon.stop_serving();
            drop((shared, daemon));
            daemon = Daemon::recover(&guest.machine, grain);
            daemon.serve();
            shared = HyperAlloc::attach(&daemon.pager, &guest.headers()).unwrap();
            // Huge frames whose soft reclaim had not returned them yet count as hard-reclaimed.
            let now = shared.counts().hard_bytes;
            assert!((hard.saturating_sub(HUGE_BYTES)..=hard + 3 * HUGE_BYTES).contains(&now));
            shared.give(&daemon.pager, now / HUGE_BYTES / 2);
        }
        eprintln!("{grain:?}: {installs} installs, {left_at:?}, {:?}", shared.counts());
        assert!(!left_at.contains(&0), "{left_at:?}");
        all_is_back(guest, daemon, &shared);
    }
}

/// A guest's thread writes anything over the allocator's state while the host works on it. The host
/// goes on, and takes only memory of the guest.
#[test]
fn a_guest_that_writes_garbage_harms_itself_only() {
    require!(kvmtest::available());
    let guest = Sharing::new();
    let (daemon, shared) = attach(&guest, Grain::Huge, Box::new(NoDevices));
    let leave = AtomicBool::new(false);
    let areas = guest.zones()[0].1.layout();
    let zones = guest.zones();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 0x9e37_79b9_7f4a_7c15u64;
            while !leave.load(Relaxed) {
                for (_, region) in zones {
                    let words = region.words(0, (areas.total_bytes / 8) as usize);
                    random = random.rotate_left(7).wrapping_mul(0xbf58_476d_1ce4_e5b9) + 1;
                    // Half of the values make an area look free, so that something is reclaimed.
                    let areas_at = (areas.areas_bytes / 8) as usize;
                    let value = if random & 1 == 0 { random } else { 0x0200_0200_0200_0200 };
                    words[areas_at + random as usize / 3 % 8].store(value, Relaxed);
                    // Of the header, all is random but for the magic number, which tells that the
                    // header is still there.
                    let rest = 8 + random as usize % (words.len() - 8);
                    words[rest].store(random, Relaxed);
                }
            }
        });
        let mut taken = 0;
        until("many operations", || {
            taken += reclaim(&daemon, &shared, How::Soft, u64::MAX);
            taken += reclaim(&daemon, &shared, How::Hard, 5);
            shared.give(&daemon.pager, 4);
            shared.ask_purge(1);
            let _ = (shared.usage(), shared.has_purged());
            let gpa = Gpa(guest.zones()[0].0 * FRAME_BYTES + taken % 14 * HUGE_BYTES);
            let _ = guest.machine.read_as_vmm(gpa);
            (taken > 500).then_some(())
        });
        leave.store(true, Relaxed);
    });
    // The machine's own first 2 MiB belong to no zone, and were never touched.
    assert_eq!(daemon.pager.ledger().content(Gfn(0)), ebb_ledger::Content::Resident);
    shared.give_back_all(&daemon.pager, Zeros::Fill).unwrap();
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
}
