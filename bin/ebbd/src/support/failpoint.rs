//! Failures on purpose, for tests: `EBB_FAIL=NAME:PLACE:COUNT` has the thread that comes to this
//! place for the COUNTth time fail, once, where it serves the VM of that name. It panics at
//! `tick`, a worker's round, and at `map`, where a frame has its memory and its word does not say
//! so yet. It gets an error at `close`, in place of closing the userfaultfd in the VMM, at
//! `closed`, after it was closed, and at `lost`, in place of bringing all back for a guest's next
//! kernel. Without the variable `map` is not there, and the others are
//! one look at a constant.

use std::io;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_api::VmName;
use ebb_pager::IoMapping;
use ebb_units::FrameRange;

/// What asks for one: of the first process of a VM, so that the next one gets past it.
pub const VARIABLE: &str = "EBB_FAIL";

struct Wanted {
    vm: String,
    place: String,
    left: AtomicU64,
}

static WANTED: LazyLock<Option<Wanted>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).ok()?;
    let mut words = text.split(':').map(str::to_owned);
    let (vm, place, count) = (words.next()?, words.next()?, words.next()?.parse().ok()?);
    Some(Wanted { vm, place, left: AtomicU64::new(count) })
});

fn wanted(place: &str, vm: &VmName) -> Option<&'static Wanted> {
    WANTED.as_ref().filter(|wanted| wanted.place == place && wanted.vm == vm.as_str())
}

/// A thread of this VM's has come to the place.
pub fn reached(place: &str, vm: &VmName) {
    if let Some(wanted) = wanted(place, vm) {
        count(wanted);
    }
}

/// The same, for a place where an error is told.
///
/// # Errors
/// It is wanted here and now.
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

/// The devices of this VM; with the place `map` in them, if that is wanted.
pub fn devices(devices: Box<dyn IoMapping>, vm: &VmName) -> Box<dyn IoMapping> {
    match wanted("map", vm) {
        Some(wanted) => Box::new(Failing { devices, wanted }),
        None => devices,
    }
}

struct Failing {
    devices: Box<dyn IoMapping>,
    wanted: &'static Wanted,
}

impl IoMapping for Failing {
    fn map(&self, frames: FrameRange) {
        count(self.wanted);
        self.devices.map(frames);
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        self.devices.unmap(frames)
    }

    fn lost(&self, frames: FrameRange) {
        self.devices.lost(frames);
    }

    fn any(&self) -> bool {
        self.devices.any()
    }
}
