//! What keeps a VM from its target size, in words.

use std::time::Duration;

use ebb_inspect::PageKind;
use ebb_policy::resize::{Driver, Mechanism, SizeParts, SizeTarget};
use ebb_units::{Bytes, FRAME_BYTES, FrameRange};

use super::progress::Progress;
use crate::vm::context::VmContext;

/// Returns the blocked reason, by what the guest itself tells. `pause_left`: for how much longer
/// the shared allocator leaves the guest alone.
pub fn reason(
    cx: &VmContext,
    (parts, target): (&SizeParts, &SizeTarget),
    progress: &Progress,
    pause_left: Option<Duration>,
) -> String {
    if let Some(no_room) = cx.no_room.as_ref().filter(|_| cx.waits()) {
        return format!("the resize goes on once there is room: {no_room}");
    }
    if let Some(failure) = &progress.failure {
        return failure.clone();
    }
    if let Some(left) = progress.pause_left() {
        return format!(
            "the guest was about to run out of memory, so Ebb emptied its balloon and tries again \
             in {} s",
            left.as_secs() + 1
        );
    }
    // HyperAlloc uses the guest's metadata instead, and tells by itself what it could not take.
    if progress.is_at_least() && progress.mechanism != Mechanism::HyperAlloc {
        let least = Bytes(progress.least_bytes.unwrap_or(0));
        return format!(
            "by its own figures the guest needs {least}, a small reserve included: with less it \
             would run out of memory"
        );
    }
    if let Some(left) = pause_left {
        return format!(
            "the guest was about to run out of memory, so Ebb returned its memory and tries again \
             in {} s",
            left.as_secs() + 1
        );
    }
    let is_silent = parts.size_of(target) > target.bytes && progress.least_bytes.is_none();
    match progress.mechanism {
        Mechanism::HyperAlloc => of_allocator(cx, progress),
        Mechanism::Balloon if is_silent => {
            "the guest reports nothing about its memory, so Ebb does not inflate its balloon".into()
        }
        Mechanism::Balloon => of_balloon(parts, target),
        Mechanism::VirtioMem => of_devices(cx, parts, target),
    }
}

/// Returns the shared allocator's reason. It has said nothing yet of a guest that was reset.
fn of_allocator(cx: &VmContext, progress: &Progress) -> String {
    match (&progress.blocked_reason, cx.guest.guest()) {
        (Some(reason), _) => reason.clone(),
        (None, Err(why)) => {
            format!("the guest is not trusted, so nothing is reclaimed from it: {why}")
        }
        (None, Ok(_)) => String::new(),
    }
}

fn of_devices(cx: &VmContext, parts: &SizeParts, target: &SizeTarget) -> String {
    let concerned = |node: u32| target.node.is_none_or(|wanted| wanted == node);
    let devices = || parts.devices.iter().filter(|device| concerned(device.node));
    if devices().any(|device| device.driver == Driver::Absent) {
        return "the guest does not drive its virtio-mem device (yet): it needs the driver \
                virtio_mem, loaded"
            .into();
    }
    let size = parts.size_of(target);
    if size < target.bytes {
        return format!(
            "the guest does not plug {} more: run dmesg in it, its kernel says why",
            Bytes(target.bytes - size)
        );
    }
    let left = Bytes(size - target.bytes);
    match usage_of(cx, concerned) {
        Some(usage) => format!("the guest does not unplug {left} more: {usage}"),
        None => format!("the guest does not unplug {left} more, and does not show why"),
    }
}

/// Returns what is in the memory that these nodes have plugged; `None`: the guest is not known.
fn usage_of(cx: &VmContext, concerned: impl Fn(u32) -> bool) -> Option<String> {
    let (pager, found) = (&cx.pager, cx.capabilities.as_ref()?);
    let mut guest = cx.guest.guest().ok()?.clone();
    // Where metadata was unplugged since the last look, other memory may be in its place.
    guest.refresh(&pager.view()).ok()?;
    let regions = pager.ram().regions().filter(|region| {
        let mut pluggers = found.pluggers.iter();
        pluggers.any(|plugger| concerned(plugger.device().node) && plugger.has(region))
    });
    let regions: Vec<FrameRange> = regions.map(|region| region.frames()).collect();
    let mut usage = PluggedUsage::default();
    guest.memmap().kinds(&pager.view(), guest.layout(), |frames, kind| {
        let inside = regions.iter().map(|region| overlap(frames, *region)).sum::<u64>();
        usage.add(kind, inside);
    });
    Some(usage.to_string())
}

fn of_balloon(parts: &SizeParts, target: &SizeTarget) -> String {
    let size = parts.size_of(target);
    match parts.balloon.map(|balloon| balloon.driver) {
        Some(Driver::Absent) => {
            "the guest does not drive its balloon (yet): it needs the driver virtio_balloon, loaded"
                .into()
        }
        _ if size < target.bytes => format!(
            "the guest does not take {} more out of its balloon",
            Bytes(target.bytes - size)
        ),
        _ => format!(
            "the guest's balloon does not answer, or finds no memory: {} more are asked of it",
            Bytes(size - target.bytes)
        ),
    }
}

fn overlap(frames: FrameRange, region: FrameRange) -> u64 {
    let (start, end) = (frames.start.max(region.start), frames.end().min(region.end()));
    end.0.saturating_sub(start.0)
}

/// Frames of plugged memory, by what they are used for.
#[derive(Default)]
struct PluggedUsage {
    kernel: u64,
    processes: u64,
    cache: u64,
    free: u64,
}

impl PluggedUsage {
    fn add(&mut self, kind: PageKind, frames: u64) {
        match kind {
            PageKind::Offline | PageKind::Tail => {}
            PageKind::Free { .. } => self.free += frames,
            PageKind::Anonymous => self.processes += frames,
            PageKind::File => self.cache += frames,
            _ => self.kernel += frames,
        }
    }
}

impl std::fmt::Display for PluggedUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = |frames: u64| Bytes(frames * FRAME_BYTES);
        write!(
            f,
            "of the plugged memory, {} are the kernel's own, which it cannot move, {} are memory \
             of processes, {} page cache, {} free",
            bytes(self.kernel),
            bytes(self.processes),
            bytes(self.cache),
            bytes(self.free)
        )
    }
}

#[cfg(test)]
mod tests {
    use ebb_policy::resize::Plan;
    use ebb_units::Gfn;

    use super::*;
    use crate::vm::context::machine;

    #[test]
    fn a_guest_that_was_reset_is_a_reason() {
        let Some((mut cx, _run)) = machine::context() else { return };
        let plan = Plan {
            mechanism: Mechanism::HyperAlloc,
            reason: String::new(),
            requested_bytes: Vec::new(),
            ballooned_bytes: 0,
            hard_bytes: 0,
        };
        let mut progress = Progress::new(&plan, 0, 0, 0);
        progress.blocked_reason = Some("of the kernel before".into());
        cx.guest.forget("it was reset and is booting");
        progress.begin_again(0);
        let target = SizeTarget { bytes: 0, node: None, by: None };
        let said = reason(&cx, (&SizeParts::default(), &target), &progress, None);
        assert!(said.ends_with("it was reset and is booting"), "{said}");
    }

    #[test]
    fn only_what_lies_inside_counts() {
        let range = |first, count| FrameRange::new(Gfn(first), count);
        assert_eq!(overlap(range(0, 10), range(5, 10)), 5);
        assert_eq!(overlap(range(6, 2), range(5, 10)), 2);
        assert_eq!(overlap(range(0, 5), range(5, 10)), 0);
        assert_eq!(overlap(range(20, 5), range(5, 10)), 0);
    }

    #[test]
    fn usage_names_what_cannot_move() {
        let mut usage = PluggedUsage::default();
        usage.add(PageKind::Slab, 2);
        usage.add(PageKind::Table, 1);
        usage.add(PageKind::Offline, 100);
        usage.add(PageKind::Anonymous, 256);
        let text = usage.to_string();
        assert!(text.contains("12 KiB are the kernel's own"), "{text}");
        assert!(text.contains("1 MiB are memory of processes"), "{text}");
    }
}
