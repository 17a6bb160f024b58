//! Movers that are killed in the middle of an exchange.

use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use ebb_sys::process::Process;
use ebb_tier::{Heat, Mover, PagePlace, RateLimiter, Rules, Tier, carry_out, plan};
use ebb_units::{Gfn, Hva};

use crate::rig::{FAST, Rig, SLOW, Target};

const KILLS: u64 = 8;
/// Small, so that an exchange has many batches.
const BATCH: usize = 64;
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Kills movers while a process works on the pages. Each page stays on one of the nodes, with every
/// byte, and the next mover goes on. Returns in words what was killed when.
pub fn run(bytes: u64) -> anyhow::Result<String> {
    let mut rig = Rig::new(bytes)?;
    let (half, mut amid) = (rig.frames.len() / 2, 0);
    rig.peer.ask("work")?;
    for kill in 0..KILLS {
        let mut mover = start(&rig, bytes)?;
        let begun = wait_amid(&rig, &mut mover, kill);
        mover.kill()?;
        mover.wait()?;
        begun?;
        amid += u64::from((1..half).contains(&even_on_fast(&rig)?));
        for nodes in [rig.nodes()?, rig.nodes_of_peer()?] {
            let lost = nodes.iter().filter(|&&at| at != FAST as i32 && at != SLOW as i32).count();
            ensure!(lost == 0, "{lost} pages are on no node");
        }
    }
    rig.peer.ask("stop")?;
    let wrong = rig.peer.ask("check")?;
    ensure!(wrong == [0], "wrong bytes: {wrong:?}");
    ensure!(amid > 0, "no mover was killed in mid-exchange");
    exchange(&rig.target, &rig.frames, 0)?;
    ensure!(even_on_fast(&rig)? == half, "what was left is not moved");
    Ok(format!("killed {KILLS}, in mid-exchange {amid}"))
}

/// Starts a process that exchanges pages until it is killed.
fn start(rig: &Rig, bytes: u64) -> anyhow::Result<Child> {
    let file = rig.file.as_fd().as_raw_fd();
    let file = format!("/proc/{}/fd/{file}", std::process::id());
    let (pid, address) = (rig.peer.pid().to_string(), rig.peer.address.0.to_string());
    let mut command = Command::new("/proc/self/exe");
    command.args(["exchange", &pid, &address, &file, &bytes.to_string()]);
    Ok(command.spawn()?)
}

/// Waits until a part of an exchange is done, another one each time.
fn wait_amid(rig: &Rig, mover: &mut Child, kill: u64) -> anyhow::Result<()> {
    let half = rig.frames.len() as u64 / 2;
    let before = even_on_fast(rig)? as u64;
    let part = half * (kill + 1) / (2 * KILLS + 2);
    while (even_on_fast(rig)? as u64).abs_diff(before) < part.max(1) {
        ensure!(mover.try_wait()?.is_none(), "the mover has ended");
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn even_on_fast(rig: &Rig) -> anyhow::Result<usize> {
    let nodes = rig.nodes()?;
    Ok(nodes.iter().step_by(2).filter(|&&node| node == FAST as i32).count())
}

/// The process to be killed: even and odd pages are the hotter ones in turn.
pub fn serve(pid: i32, address: u64, file: &str, bytes: u64) -> anyhow::Result<()> {
    let file = std::fs::File::options().read(true).write(true).open(file)?;
    let target = Target::new(Process::open(pid)?, Hva(address), file.into(), bytes)?;
    let frames = target.frames();
    for round in 0.. {
        exchange(&target, &frames, round % 2)?;
    }
    Ok(())
}

/// Has the fast node contain the pages whose number leaves this remainder modulo 2, and no others.
fn exchange(target: &Target, frames: &[Gfn], rest: u64) -> anyhow::Result<()> {
    let degree = |gfn: Gfn| u32::from(gfn.0 % 2 == rest);
    let mut order: Vec<Heat> =
        frames.iter().map(|&gfn| Heat { gfn, degree: degree(gfn) }).collect();
    order.sort_by_key(|heat| heat.degree);
    let half = frames.len() as u64 / 2;
    let rules = Rules {
        capacity_frames: vec![half, half],
        margin_degrees: 1,
        free_degrees: 1,
        budget_frames: u64::MAX,
    };
    let tiers =
        [FAST, SLOW].map(|node| target.node(node, Mover::new(4, BATCH, RateLimiter::unlimited())));
    let tiers: Vec<&dyn Tier> = tiers.iter().map(|tier| tier as &dyn Tier).collect();
    loop {
        let nodes = target.nodes()?;
        let place = |gfn: Gfn| match nodes.get(gfn.0 as usize) {
            Some(&node @ 0..=1) => PagePlace::Tier(node as u8),
            _ => PagePlace::Nowhere,
        };
        let plan = plan::plan(&order, place, &rules);
        if plan.steps.is_empty() {
            return Ok(());
        }
        carry_out(&tiers, &plan.steps, BATCH)?;
    }
}
