//! Requests of any content, with changes by the host in between: `flags, then a kind and its
//! bytes...`. The device answers each. Exactly the plugged blocks have memory. A plug never exceeds
//! the requested size, and only ACK changes anything.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

use ebb_units::{FrameRange, Gpa};
use ebb_virtio_mem::{
    BlockMemory, Device, DeviceParts, Geometry, Options, REQUEST_BYTES, Record, Saved, Sizes, Touch,
};

const BLOCK: u64 = 8192;
const BLOCKS: u64 = 130;
const START: Gpa = Gpa(1 << 32);

/// The frames that the host has given, and what it refuses.
#[derive(Default)]
struct Host {
    frames: BTreeSet<u64>,
    refuses: [bool; 2],
    saved: Option<Saved>,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Host>>);

impl Shared {
    fn change(&self, frames: FrameRange, plug: bool) -> io::Result<()> {
        let mut host = self.0.lock().expect("no thread has died");
        let inside = frames.start.gpa() >= START && frames.count > 0;
        let end = frames.end().gpa().0;
        assert!(inside && end <= START.0 + BLOCKS * BLOCK, "outside: {frames:?}");
        if std::mem::take(&mut host.refuses[usize::from(plug)]) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        for gfn in frames.frames() {
            if plug {
                host.frames.insert(gfn.0)
            } else {
                host.frames.remove(&gfn.0)
            };
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.0.lock().expect("no thread has died").frames.len() as u64 * 4096
    }
}

impl BlockMemory for Shared {
    fn plug(&mut self, frames: FrameRange, _: bool) -> io::Result<()> {
        self.change(frames, true)
    }

    fn unplug(&mut self, frames: FrameRange) -> io::Result<()> {
        self.change(frames, false)
    }
}

impl Record for Shared {
    fn keep(&mut self, state: &Saved) -> io::Result<()> {
        let (state, _) = Saved::from_bytes(&state.to_bytes(1)).expect("it was just written");
        self.0.lock().expect("no thread has died").saved = Some(state);
        Ok(())
    }
}

fn start(host: &Shared, flags: u8) -> Device {
    host.0.lock().expect("no thread has died").refuses = [false; 2];
    let parts = DeviceParts {
        memory: Box::new(host.clone()),
        record: Box::new(host.clone()),
        notify: Box::new(|| {}),
    };
    let options = Options {
        inaccessible: flags & 1 == 1,
        prealloc: flags & 2 == 2,
        spare_bytes: u64::from(flags >> 2) * BLOCK,
    };
    let geometry =
        Geometry { start: START, region_bytes: BLOCKS * BLOCK, block_bytes: BLOCK, node: None };
    let saved = host.0.lock().expect("no thread has died").saved.clone();
    let saved = saved.unwrap_or_else(|| Saved::new(geometry).expect("a good region"));
    Device::start(saved, options, parts).expect("a host that does what it is asked")
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let [flags, rest @ ..] = data else { return };
    let mut rest = rest;
    let host = Shared::default();
    let mut device = start(&host, *flags);
    while let [kind, argument, more @ ..] = rest {
        rest = more;
        match kind {
            0..=9 => {
                let _ = device.request_bytes(u64::from(*argument) * BLOCK);
            }
            20..=29 => {
                // Only one kind of call may fail, because a failure on the way back would stop the
                // device.
                let refuses = [argument & 1 == 1, argument & 1 == 0];
                host.0.lock().expect("no thread has died").refuses = refuses;
            }
            30..=39 => device = start(&host, *flags),
            10..=19 | 40..=44 => device.reset(),
            45..=49 => device.negotiated(u64::from(*argument)),
            _ => {
                let length = REQUEST_BYTES.min(more.len());
                let (request, after) = more.split_at(length);
                rest = after;
                ask(&device, &likely(request, *kind, *argument));
            }
        }
        check(&device, &host);
    }
}

/// Makes a request likely to be valid: three in four are near the region.
fn likely(request: &[u8], kind: u8, argument: u8) -> Vec<u8> {
    let mut request = request.to_vec();
    if !kind.is_multiple_of(4) && request.len() == REQUEST_BYTES {
        request[0] %= 5;
        request[1] = 0;
        let block = START.0 + u64::from(argument % (BLOCKS as u8 + 2)) * BLOCK;
        request[8..16].copy_from_slice(&block.to_le_bytes());
        request[17] = 0;
    }
    request
}

fn ask(device: &Device, request: &[u8]) {
    let before = device.sizes();
    let response = device.handle(request).expect("a failing host does not stop it");
    let after = device.sizes();
    let [kind, 0, 0, 0, 0, 0, 0, 0, state, 0] = response else { panic!("{response:?}") };
    assert!(kind <= 3 && state <= 2);
    assert!(kind == 0 || before == after, "it was refused, and yet it was done");
    if after.plugged_bytes > before.plugged_bytes {
        assert!(after.plugged_bytes <= after.requested_bytes);
    }
}

fn check(device: &Device, host: &Shared) {
    let Sizes { usable_bytes, plugged_bytes, requested_bytes } = device.sizes();
    assert_eq!(plugged_bytes, host.bytes());
    assert!(plugged_bytes <= usable_bytes && requested_bytes <= usable_bytes);
    assert!(usable_bytes <= BLOCKS * BLOCK);
    let frames = &host.0.lock().expect("no thread has died").frames;
    for block in 0..BLOCKS {
        let gpa = Gpa(START.0 + block * BLOCK);
        let plugged = device.guard().judge(gpa, true) == Touch::Plugged;
        assert_eq!(plugged, frames.contains(&gpa.gfn().0));
    }
}
