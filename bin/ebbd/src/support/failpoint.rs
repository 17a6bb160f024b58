//! Failures on purpose, for tests. With `EBB_FAIL=NAME:PLACE:COUNT`, a thread that serves the VM of
//! that name fails once, when it comes to this place for the COUNTth time. Several of these are
//! separated by commas.
//!
//! A panic happens at three places:
//! - `tick`: the worker's tick.
//! - `map`: a frame has its memory, and its word does not say so yet.
//! - `write`: a request is about to overwrite blocks of a disk that Ebb serves.
//!
//! An error happens at four places:
//! - `attach`: a VM that begins to be managed is watched, and its record does not say so yet.
//! - `close`: in place of closing the userfaultfd in the VMM.
//! - `closed`: after the userfaultfd was closed.
//! - `lost`: in place of bringing all memory back for a guest's next kernel.
//!
//! An endless loop happens at one place:
//! - `spin`: the worker's tick.
//!
//! A wait happens at one place:
//! - `step`: a step of `ebb evict`, until the work is cancelled.
//!
//! A wrong deed happens at one place:
//! - `unmap`: memory that is about to be punched stays mapped for passed-through devices.
//!
//! The process ends at one place:
//! - `begin`: a VM that begins to be managed has a userfaultfd, and nothing is watched yet.
//!
//! Without the variable, `map`, `unmap` and `write` do not exist, and each other place costs one
//! look at a constant.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ebb_api::VmName;
use ebb_block::{Block, Direction, Observer};
use ebb_pager::IoMapping;
use ebb_units::{FrameRange, Gfn};

/// The environment variable. Only the first process of a VM fails, so that the next one gets past
/// the place.
pub const VARIABLE: &str = "EBB_FAIL";

const LOOK_EVERY: Duration = Duration::from_millis(1);

struct Wanted {
    vm: String,
    place: String,
    left: AtomicU64,
}

static WANTED: LazyLock<Vec<Wanted>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    text.split(',').filter_map(Wanted::parse).collect()
});

impl Wanted {
    fn parse(text: &str) -> Option<Wanted> {
        let mut words = text.split(':').map(str::to_owned);
        let (vm, place, count) = (words.next()?, words.next()?, words.next()?.parse().ok()?);
        Some(Wanted { vm, place, left: AtomicU64::new(count) })
    }
}

fn wanted(place: &str, vm: &VmName) -> Option<&'static Wanted> {
    WANTED.iter().find(|wanted| wanted.place == place && wanted.vm == vm.as_str())
}

/// Notes that a thread of this VM has come to the place. Panics if that is wanted now.
pub fn reached(place: &str, vm: &VmName) {
    if let Some(wanted) = wanted(place, vm) {
        count(wanted);
    }
}

/// Notes that the worker of this VM has come to its tick. Never returns if an endless loop is wanted
/// now.
pub fn may_spin(vm: &VmName) {
    if wanted("spin", vm).is_some_and(is_now) {
        loop {
            std::hint::spin_loop();
        }
    }
}

/// Notes that the worker of this VM has come to a step. Waits until `is_over`, if that is wanted now.
pub fn may_wait(vm: &VmName, is_over: impl Fn() -> bool) {
    if wanted("step", vm).is_some_and(is_now) {
        while !is_over() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Notes that the process of this VM has come to the place. Ends the process, with no more done, if
/// that is wanted now.
pub fn may_end(place: &str, vm: &VmName) {
    if wanted(place, vm).is_some_and(is_now) {
        std::process::abort();
    }
}

/// Notes that a thread of this VM has come to a place that returns an error.
///
/// # Errors
/// A failure is wanted now.
pub fn fails(place: &str, vm: &VmName) -> io::Result<()> {
    match wanted(place, vm).is_some_and(is_now) {
        true => Err(io::Error::other(format!("{VARIABLE} wants it so"))),
        false => Ok(()),
    }
}

fn count(wanted: &Wanted) {
    if is_now(wanted) {
        panic!("{VARIABLE} wants it so");
    }
}

fn is_now(wanted: &Wanted) -> bool {
    wanted.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)) == Ok(1)
}

/// The devices of this VM, with the places `map` and `unmap` in them if those are wanted.
pub fn devices(devices: Box<dyn IoMapping>, vm: &VmName) -> Box<dyn IoMapping> {
    match (wanted("map", vm), wanted("unmap", vm)) {
        (None, None) => devices,
        (map, unmap) => Box::new(Failing { devices, map, unmaps: unmap.is_none() }),
    }
}

struct Failing {
    devices: Box<dyn IoMapping>,
    map: Option<&'static Wanted>,
    unmaps: bool,
}

impl IoMapping for Failing {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        self.map.into_iter().for_each(count);
        self.devices.map(frames)
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        !self.unmaps || self.devices.unmap(frames)
    }

    fn lost(&self, frames: FrameRange) {
        self.devices.lost(frames);
    }

    fn was_taken(&self, frames: FrameRange) -> bool {
        self.devices.was_taken(frames)
    }

    fn allows(&self, block: FrameRange, metadata: Gfn) -> bool {
        self.devices.allows(block, metadata)
    }

    fn is_whole(&self) -> bool {
        self.devices.is_whole()
    }

    fn any(&self) -> bool {
        self.devices.any()
    }
}

/// The observer of a disk of this VM, with the place `write` in it if that is wanted.
pub fn observer(observer: Arc<dyn Observer>, vm: &VmName) -> Arc<dyn Observer> {
    match wanted("write", vm) {
        None => observer,
        Some(wanted) => Arc::new(FailingDisk { observer, wanted }),
    }
}

struct FailingDisk {
    observer: Arc<dyn Observer>,
    wanted: &'static Wanted,
}

impl Observer for FailingDisk {
    fn wants_content(&self) -> bool {
        self.observer.wants_content()
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        count(self.wanted);
        self.observer.before_overwrite(blocks)
    }

    fn moved(&self, block: u64, gfn: Gfn, content: &Block, direction: Direction) {
        self.observer.moved(block, gfn, content, direction);
    }
}
