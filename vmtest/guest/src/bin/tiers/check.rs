//! Whether pages end up where they should, with every byte.

use anyhow::{Context, ensure};
use ebb_tier::{
    Heat, Mover, Outcome, PagePlace, RateLimiter, Rules, Tally, Tier, TierKind, carry_out, plan,
};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use rustix::pipe::{SpliceFlags, pipe, splice};

use crate::peer;
use crate::rig::{FAST, Rig, SLOW};

/// Small, so that there are many batches.
const BATCH: usize = 512;
const ROUNDS: usize = 8;

fn mover() -> Mover {
    Mover::new(4, BATCH, RateLimiter::unlimited())
}

/// Runs all checks in turn. Returns in words what was done.
pub fn run(bytes: u64) -> anyhow::Result<String> {
    let mut rig = Rig::new(bytes)?;
    let whole = move_all(&mut rig)?;
    let waited = a_page_in_use_waits(&mut rig)?;
    let pairs = exchange(&mut rig)?;
    holes_hold_nothing(&mut rig)?;
    Ok(format!("moved {whole}, exchanged {pairs}, waited {waited}"))
}

fn bring(rig: &Rig, node: u32, frames: &[Gfn]) -> anyhow::Result<Tally> {
    let tier = rig.node(node, mover());
    ensure!(tier.kind() == TierKind::Node(node));
    Ok(tier.bring(frames)?.into_iter().collect())
}

/// Moves all pages to a node, and repeats that as long as some are in use.
fn bring_all(rig: &Rig, node: u32) -> anyhow::Result<u64> {
    let mut moved = 0;
    for _ in 0..ROUNDS {
        let tally = bring(rig, node, &rig.frames)?;
        moved += tally.of(Outcome::Moved);
        let here = tally.of(Outcome::Moved) + tally.of(Outcome::There);
        let all = rig.frames.len() as u64;
        ensure!(here + tally.of(Outcome::InUse) == all, "{tally:?}");
        if here == all {
            return Ok(moved);
        }
    }
    anyhow::bail!("some pages do not get to node {node}")
}

fn assert_all_on(rig: &Rig, node: u32) -> anyhow::Result<()> {
    for nodes in [rig.nodes()?, rig.nodes_of_peer()?] {
        let others = nodes.iter().filter(|&&at| at != node as i32).count();
        ensure!(others == 0, "{others} pages are not on node {node}");
    }
    Ok(())
}

fn assert_whole(rig: &mut Rig) -> anyhow::Result<()> {
    let wrong = rig.peer.ask("check")?;
    ensure!(wrong == [0], "wrong bytes: {wrong:?}");
    Ok(())
}

/// Moves all pages there and back, first without and then with a process that writes.
fn move_all(rig: &mut Rig) -> anyhow::Result<u64> {
    assert_all_on(rig, FAST)?;
    let mut moved = bring_all(rig, SLOW)?;
    assert_all_on(rig, SLOW)?;
    let faults = rig.peer.ask("read")?;
    ensure!(faults == [0], "{faults:?} faults on pages that were moved");
    assert_whole(rig)?;
    rig.peer.ask("work")?;
    for node in [FAST, SLOW, FAST] {
        moved += bring_all(rig, node)?;
    }
    rig.peer.ask("stop")?;
    assert_all_on(rig, FAST)?;
    assert_whole(rig)?;
    Ok(moved)
}

/// A pipe has the page, as a disk would: it stays, and moves once the pipe is closed.
fn a_page_in_use_waits(rig: &mut Rig) -> anyhow::Result<u64> {
    let gfn = Gfn(7);
    let (from, to) = pipe()?;
    let mut offset = gfn.gpa().0;
    let flags = SpliceFlags::empty();
    let taken = splice(&rig.file, Some(&mut offset), &to, None, FRAME_BYTES as usize, flags)?;
    ensure!(taken == FRAME_BYTES as usize);
    let frames = [Gfn(6), gfn, Gfn(8)];
    let outcomes = rig.node(SLOW, mover()).bring(&frames)?;
    ensure!(outcomes == [Outcome::Moved, Outcome::InUse, Outcome::Moved], "{outcomes:?}");
    drop((from, to));
    let outcomes = rig.node(SLOW, mover()).bring(&frames)?;
    ensure!(outcomes == [Outcome::There, Outcome::Moved, Outcome::There], "{outcomes:?}");
    bring_all(rig, FAST)?;
    assert_whole(rig)?;
    Ok(1)
}

/// Half of the pages may be fast: in the end these are the hotter half.
fn exchange(rig: &mut Rig) -> anyhow::Result<u64> {
    let (even, _): (Vec<Gfn>, Vec<Gfn>) = rig.frames.iter().partition(|gfn| gfn.0 % 2 == 0);
    let half = even.len() as u64;
    let moved = bring(rig, SLOW, &even)?;
    ensure!(moved.of(Outcome::Moved) == half, "{moved:?}");
    let mut order: Vec<Heat> =
        rig.frames.iter().map(|&gfn| Heat { gfn, degree: degree(gfn) }).collect();
    order.sort_by_key(|heat| heat.degree);
    let capacity_frames = vec![rig.frames.len() as u64 - half, half];
    let rules =
        Rules { capacity_frames, margin_degrees: 1, free_degrees: 1, budget_frames: u64::MAX };
    let tiers = [rig.node(FAST, mover()), rig.node(SLOW, mover())];
    let tiers: Vec<&dyn Tier> = tiers.iter().map(|tier| tier as &dyn Tier).collect();
    let mut pairs = 0;
    rig.peer.ask("work")?;
    for round in 0.. {
        let nodes = rig.nodes()?;
        let place = |gfn: Gfn| match nodes.get(gfn.0 as usize) {
            Some(&node @ 0..=1) => PagePlace::Tier(node as u8),
            _ => PagePlace::Nowhere,
        };
        let plan = plan::plan(&order, place, &rules);
        if plan.steps.is_empty() {
            break;
        }
        ensure!(round < ROUNDS, "{} steps are left", plan.steps.len());
        pairs += carry_out(&tiers, &plan.steps, BATCH)?.up.of(Outcome::Moved);
    }
    rig.peer.ask("stop")?;
    let nodes = &rig.nodes()?;
    let on = |node: i32| {
        let here = rig.frames.iter().filter(move |gfn| nodes[gfn.0 as usize] == node);
        here.map(|&gfn| degree(gfn)).collect::<Vec<_>>()
    };
    let (fast, slow) = (on(FAST as i32), on(SLOW as i32));
    ensure!(fast.len() as u64 == rules.capacity_frames[0], "{} pages are fast", fast.len());
    ensure!(
        fast.iter().min() >= slow.iter().max(),
        "a page is slow that is hotter than a fast one"
    );
    assert_whole(rig)?;
    Ok(pairs)
}

/// Degrees in no order, the same each time.
fn degree(gfn: Gfn) -> u32 {
    (gfn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % 25
}

fn holes_hold_nothing(rig: &mut Rig) -> anyhow::Result<()> {
    let hole = FrameRange::new(Gfn(100), 3);
    let place = rig.ram().range(hole).context("a hole in RAM")?;
    rig.file.punch(place.offset, hole.bytes())?;
    let frames: Vec<Gfn> = FrameRange::new(Gfn(99), 5).frames().collect();
    let tally = bring(rig, SLOW, &frames)?;
    ensure!(tally.of(Outcome::Nothing) == 3, "{tally:?}");
    ensure!(rig.ram().is_hole(hole)?, "moving gave a hole memory");
    let outside = bring(rig, SLOW, &[Gfn(u64::MAX), Gfn(rig.frames.len() as u64)])?;
    ensure!(outside.of(Outcome::Nothing) == 2, "{outside:?}");
    Ok(())
}

/// Moves more than the second node has room for. What does not fit stays, with every byte.
pub fn full(bytes: u64) -> anyhow::Result<String> {
    let mut rig = Rig::new(bytes)?;
    let tally = bring(&rig, SLOW, &rig.frames)?;
    let (moved, left) = (tally.of(Outcome::Moved), tally.of(Outcome::NoRoom));
    ensure!(moved > 0 && left > 0, "{tally:?}");
    let slow = rig.nodes()?.iter().filter(|&&node| node == SLOW as i32).count() as u64;
    // The kernel looks for memory on a full node, and unmaps a page there now and then. The node of
    // such a page is unknown until it is touched again.
    ensure!(slow > 0 && slow <= moved, "{slow} pages are on node {SLOW}: {tally:?}");
    assert_whole(&mut rig)?;
    let counts = vec![0; rig.frames.len()];
    ensure!(peer::check(rig.mapping()?, &counts) == 0, "wrong bytes");
    Ok(format!("moved {moved}, no room for {left}"))
}
