//! Choosing what each mechanism has to do.

use super::spread::spread;
use super::{Driver, Mechanism, PAGE_BYTES, SizeParts, SizeRefusal, SizeTarget};

/// What each mechanism has to do, and which of them has the most to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The mechanism that has the most to do.
    pub mechanism: Mechanism,
    /// Why this mechanism, in words.
    pub reason: String,
    /// Bytes that each device is to have plugged, in the order of the devices.
    pub requested_bytes: Vec<u64>,
    /// Bytes that the balloon is to hold.
    pub ballooned_bytes: u64,
    /// Bytes to be hard-reclaimed from the shared allocator.
    pub hard_bytes: u64,
}

/// Plans the way to `target`. `floor_bytes`: the least that a guest lives with.
///
/// # Errors
/// [`SizeRefusal`].
pub fn plan(parts: &SizeParts, target: &SizeTarget, floor_bytes: u64) -> Result<Plan, SizeRefusal> {
    let now = now(parts);
    let plan = match (target.node, target.by) {
        (Some(node), None | Some(Mechanism::VirtioMem)) => of_node(parts, target.bytes, node, now)?,
        (Some(_), Some(other)) => return Err(SizeRefusal::KnowsNoNodes(other)),
        (None, None) => by_size(parts, target.bytes)?,
        (None, Some(Mechanism::VirtioMem)) => by_virtio_mem(parts, target.bytes, now)?,
        (None, Some(Mechanism::Balloon)) => by_balloon(parts, target.bytes, now)?,
        (None, Some(Mechanism::HyperAlloc)) => by_hyper_alloc(parts, target.bytes, now)?,
    };
    let leads_to = (parts.initial_bytes + plan.requested_bytes.iter().sum::<u64>())
        .saturating_sub(plan.ballooned_bytes + plan.hard_bytes);
    match leads_to < floor_bytes {
        true => Err(SizeRefusal::BelowFloor { bytes: target.bytes, floor: floor_bytes }),
        false => Ok(plan),
    }
}

impl Plan {
    /// Checks that the guest can do its part.
    ///
    /// # Errors
    /// [`SizeRefusal::DriverAbsent`].
    pub fn check_drivers(&self, parts: &SizeParts) -> Result<(), SizeRefusal> {
        let differs = parts.devices.iter().zip(&self.requested_bytes);
        let mut idle = differs.filter(|(device, requested)| device.plugged_bytes != **requested);
        if idle.any(|(device, _)| device.driver == Driver::Absent) {
            return Err(SizeRefusal::DriverAbsent(Mechanism::VirtioMem));
        }
        let balloon = parts.balloon.filter(|now| now.ballooned_bytes != self.ballooned_bytes);
        match balloon.is_some_and(|balloon| balloon.driver == Driver::Absent) {
            true => Err(SizeRefusal::DriverAbsent(Mechanism::Balloon)),
            false => Ok(()),
        }
    }
}

/// A plan that changes nothing.
fn now(parts: &SizeParts) -> Plan {
    Plan {
        mechanism: Mechanism::VirtioMem,
        reason: String::new(),
        requested_bytes: parts.devices.iter().map(|device| device.requested_bytes).collect(),
        ballooned_bytes: parts.ballooned_bytes(),
        hard_bytes: parts.hard_bytes.unwrap_or(0),
    }
}

/// Plans without a mechanism asked for: by blocks above what the VM began with, and below by the
/// gentlest mechanism that there is.
fn by_size(parts: &SizeParts, bytes: u64) -> Result<Plan, SizeRefusal> {
    if bytes > parts.max_bytes() {
        let grows = !parts.devices.is_empty();
        return Err(SizeRefusal::TooLarge { bytes, max: parts.max_bytes(), grows });
    }
    let plugged = bytes.saturating_sub(parts.initial_bytes);
    check_whole(parts, plugged, bytes)?;
    let requested_bytes = requested(parts, plugged, |_| true);
    let taken = parts.initial_bytes.saturating_sub(bytes);
    let (taker, why) = match inside(parts) {
        Some(inside) => inside,
        // There is nothing to take.
        None if taken == 0 => (Mechanism::VirtioMem, ""),
        None => return Err(SizeRefusal::NothingTakes(parts.initial_bytes)),
    };
    if taken > 0 {
        check_pieces(taker, bytes, taken)?;
    }
    let (hard_bytes, ballooned_bytes) = match taker {
        Mechanism::HyperAlloc => (taken, 0),
        _ => (0, taken),
    };
    let taken_now = parts.ballooned_bytes() + parts.hard_bytes.unwrap_or(0);
    let (beyond, within) = (plugged.abs_diff(parts.plugged_bytes()), taken.abs_diff(taken_now));
    let (mechanism, reason) = match beyond > within || beyond == within && plugged > 0 {
        true => (Mechanism::VirtioMem, beyond_reason(parts)),
        false => (taker, why.to_owned()),
    };
    Ok(Plan { mechanism, reason, requested_bytes, ballooned_bytes, hard_bytes })
}

fn beyond_reason(parts: &SizeParts) -> String {
    let initial = ebb_units::Bytes(parts.initial_bytes);
    format!("memory beyond the initial {initial} is plugged and unplugged in blocks")
}

/// The mechanism that takes memory that the VM began with.
fn inside(parts: &SizeParts) -> Option<(Mechanism, &'static str)> {
    if parts.hard_bytes.is_some() {
        return Some((Mechanism::HyperAlloc, "its kernel shares its allocator"));
    }
    let balloon = parts.balloon?;
    Some((
        Mechanism::Balloon,
        match balloon.driver {
            Driver::Unknown => "it has one; the VMM does not tell whether the guest drives it",
            _ => "only its balloon can take initial memory from the guest",
        },
    ))
}

fn of_node(parts: &SizeParts, bytes: u64, node: u32, now: Plan) -> Result<Plan, SizeRefusal> {
    let count = parts.node_bytes.len();
    let initial = usize::try_from(node).ok().and_then(|node| parts.node_bytes.get(node));
    let initial = *initial.ok_or(SizeRefusal::NoNode { node, count })?;
    if parts.on(node).next().is_none() {
        return Err(SizeRefusal::NoDeviceOn(node));
    }
    let by = Mechanism::VirtioMem;
    let plugged =
        bytes.checked_sub(initial).ok_or(SizeRefusal::TooSmall { bytes, min: initial, by })?;
    let room: u64 = parts.on(node).map(|device| device.max_bytes).sum();
    if plugged > room {
        return Err(SizeRefusal::TooLarge { bytes, max: initial + room, grows: true });
    }
    check_whole(parts, plugged, bytes)?;
    let requested_bytes = requested(parts, plugged, |device| device == node);
    let reason = "nothing else knows of NUMA nodes".into();
    Ok(Plan { mechanism: by, reason, requested_bytes, ..now })
}

fn by_virtio_mem(parts: &SizeParts, bytes: u64, now: Plan) -> Result<Plan, SizeRefusal> {
    let by = Mechanism::VirtioMem;
    if parts.devices.is_empty() {
        return Err(SizeRefusal::Lacks(by));
    }
    let min = parts.initial_bytes.saturating_sub(now.ballooned_bytes + now.hard_bytes);
    let plugged = bytes.checked_sub(min).ok_or(SizeRefusal::TooSmall { bytes, min, by })?;
    let room = parts.max_bytes() - parts.initial_bytes;
    if plugged > room {
        return Err(SizeRefusal::TooLarge { bytes, max: min + room, grows: true });
    }
    check_whole(parts, plugged, bytes)?;
    let requested_bytes = requested(parts, plugged, |_| true);
    Ok(Plan { mechanism: by, reason: asked(), requested_bytes, ..now })
}

fn by_balloon(parts: &SizeParts, bytes: u64, now: Plan) -> Result<Plan, SizeRefusal> {
    let by = Mechanism::Balloon;
    let balloon = parts.balloon.ok_or(SizeRefusal::Lacks(by))?;
    let max = parts.size_bytes() + balloon.ballooned_bytes;
    let ballooned_bytes = max.checked_sub(bytes);
    let ballooned_bytes =
        ballooned_bytes.ok_or(SizeRefusal::TooLarge { bytes, max, grows: true })?;
    // QEMU counts the balloon against what the VM began with, and refuses a balloon of all of it.
    if ballooned_bytes >= parts.initial_bytes {
        let min = (max + PAGE_BYTES).saturating_sub(parts.initial_bytes);
        return Err(SizeRefusal::TooSmall { bytes, min, by });
    }
    check_pieces(by, bytes, ballooned_bytes)?;
    Ok(Plan { mechanism: by, reason: asked(), ballooned_bytes, ..now })
}

fn by_hyper_alloc(parts: &SizeParts, bytes: u64, now: Plan) -> Result<Plan, SizeRefusal> {
    let by = Mechanism::HyperAlloc;
    let hard_now = parts.hard_bytes.ok_or(SizeRefusal::Lacks(by))?;
    let max = parts.size_bytes() + hard_now;
    let hard_bytes = max.checked_sub(bytes);
    let hard_bytes = hard_bytes.ok_or(SizeRefusal::TooLarge { bytes, max, grows: true })?;
    Ok(Plan { mechanism: by, reason: asked(), hard_bytes, ..now })
}

fn asked() -> String {
    "asked for".into()
}

/// Checks that the size is reached by whole blocks.
fn check_whole(parts: &SizeParts, plugged: u64, bytes: u64) -> Result<(), SizeRefusal> {
    let block = parts.block_bytes();
    match plugged % block {
        0 => Ok(()),
        odd => {
            let by = Mechanism::VirtioMem;
            Err(SizeRefusal::NotWhole { bytes, below: bytes - odd, block, by })
        }
    }
}

/// Checks that the size is reached by whole pages. HyperAlloc takes one huge frame more if need be.
fn check_pieces(by: Mechanism, bytes: u64, taken: u64) -> Result<(), SizeRefusal> {
    let odd = taken % PAGE_BYTES;
    if by == Mechanism::HyperAlloc || odd == 0 {
        return Ok(());
    }
    let below = (bytes + odd).saturating_sub(PAGE_BYTES);
    Err(SizeRefusal::NotWhole { bytes, below, block: PAGE_BYTES, by })
}

/// Returns the bytes that each device is to have plugged so that the devices of the chosen nodes
/// have `plugged` bytes in all. The difference to what was requested of them is shared evenly.
fn requested(parts: &SizeParts, plugged: u64, takes_part: impl Fn(u32) -> bool) -> Vec<u64> {
    let devices = &parts.devices;
    let part = |device: &super::DevicePart| takes_part(device.node);
    let before: u64 = devices.iter().filter(|d| part(d)).map(|d| d.requested_bytes).sum();
    let grows = plugged > before;
    let room = |device: &super::DevicePart| match (part(device), grows) {
        (false, _) => 0,
        (true, true) => device.max_bytes.saturating_sub(device.requested_bytes),
        (true, false) => device.requested_bytes,
    };
    let rooms: Vec<u64> = devices.iter().map(room).collect();
    let shares = spread(plugged.abs_diff(before), parts.block_bytes(), &rooms);
    let pairs = devices.iter().zip(shares);
    pairs
        .map(|(device, share)| match grows {
            true => device.requested_bytes + share,
            false => device.requested_bytes - share,
        })
        .collect()
}

#[cfg(test)]
mod tests;
