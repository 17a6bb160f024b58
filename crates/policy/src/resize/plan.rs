//! Choosing what each mechanism has to do.

use super::spread::spread;
use super::{Driver, Mechanism, Offer, PAGE_BYTES, Refusal, SizeTarget};

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
/// [`Refusal`].
pub fn plan(offer: &Offer, target: &SizeTarget, floor_bytes: u64) -> Result<Plan, Refusal> {
    let now = now(offer);
    let plan = match (target.node, target.by) {
        (Some(node), None | Some(Mechanism::VirtioMem)) => of_node(offer, target.bytes, node, now)?,
        (Some(_), Some(other)) => return Err(Refusal::KnowsNoNodes(other)),
        (None, None) => by_size(offer, target.bytes)?,
        (None, Some(Mechanism::VirtioMem)) => by_virtio_mem(offer, target.bytes, now)?,
        (None, Some(Mechanism::Balloon)) => by_balloon(offer, target.bytes, now)?,
        (None, Some(Mechanism::HyperAlloc)) => by_hyper_alloc(offer, target.bytes, now)?,
    };
    let leads_to = (offer.initial_bytes + plan.requested_bytes.iter().sum::<u64>())
        .saturating_sub(plan.ballooned_bytes + plan.hard_bytes);
    match leads_to < floor_bytes {
        true => Err(Refusal::BelowFloor { bytes: target.bytes, floor: floor_bytes }),
        false => Ok(plan),
    }
}

impl Plan {
    /// Checks that the guest can do its part.
    ///
    /// # Errors
    /// [`Refusal::DriverAbsent`].
    pub fn check_drivers(&self, offer: &Offer) -> Result<(), Refusal> {
        let differs = offer.devices.iter().zip(&self.requested_bytes);
        let mut idle = differs.filter(|(device, requested)| device.plugged_bytes != **requested);
        if idle.any(|(device, _)| device.driver == Driver::Absent) {
            return Err(Refusal::DriverAbsent(Mechanism::VirtioMem));
        }
        let balloon = offer.balloon.filter(|now| now.ballooned_bytes != self.ballooned_bytes);
        match balloon.is_some_and(|balloon| balloon.driver == Driver::Absent) {
            true => Err(Refusal::DriverAbsent(Mechanism::Balloon)),
            false => Ok(()),
        }
    }
}

/// A plan that changes nothing.
fn now(offer: &Offer) -> Plan {
    Plan {
        mechanism: Mechanism::VirtioMem,
        reason: String::new(),
        requested_bytes: offer.devices.iter().map(|device| device.requested_bytes).collect(),
        ballooned_bytes: offer.ballooned_bytes(),
        hard_bytes: offer.hard_bytes.unwrap_or(0),
    }
}

/// Plans without a mechanism asked for: by blocks above what the VM began with, and below by the
/// gentlest mechanism that there is.
fn by_size(offer: &Offer, bytes: u64) -> Result<Plan, Refusal> {
    if bytes > offer.max_bytes() {
        let grows = !offer.devices.is_empty();
        return Err(Refusal::TooLarge { bytes, max: offer.max_bytes(), grows });
    }
    let plugged = bytes.saturating_sub(offer.initial_bytes);
    check_whole(offer, plugged, bytes)?;
    let requested_bytes = requested(offer, plugged, |_| true);
    let taken = offer.initial_bytes.saturating_sub(bytes);
    let (taker, why) = match inside(offer) {
        Some(inside) => inside,
        // There is nothing to take.
        None if taken == 0 => (Mechanism::VirtioMem, ""),
        None => return Err(Refusal::NothingTakes(offer.initial_bytes)),
    };
    if taken > 0 {
        check_pieces(taker, bytes, taken)?;
    }
    let (hard_bytes, ballooned_bytes) = match taker {
        Mechanism::HyperAlloc => (taken, 0),
        _ => (0, taken),
    };
    let taken_now = offer.ballooned_bytes() + offer.hard_bytes.unwrap_or(0);
    let (beyond, within) = (plugged.abs_diff(offer.plugged_bytes()), taken.abs_diff(taken_now));
    let (mechanism, reason) = match beyond > within || beyond == within && plugged > 0 {
        true => (Mechanism::VirtioMem, beyond_reason(offer)),
        false => (taker, why.to_owned()),
    };
    Ok(Plan { mechanism, reason, requested_bytes, ballooned_bytes, hard_bytes })
}

fn beyond_reason(offer: &Offer) -> String {
    let initial = ebb_units::Bytes(offer.initial_bytes);
    format!("memory beyond the initial {initial} is plugged and unplugged in blocks")
}

/// The mechanism that takes memory that the VM began with.
fn inside(offer: &Offer) -> Option<(Mechanism, &'static str)> {
    if offer.hard_bytes.is_some() {
        return Some((Mechanism::HyperAlloc, "its kernel shares its allocator"));
    }
    let balloon = offer.balloon?;
    Some((
        Mechanism::Balloon,
        match balloon.driver {
            Driver::Unknown => "it has one; the VMM does not tell whether the guest drives it",
            _ => "only its balloon can take initial memory from the guest",
        },
    ))
}

fn of_node(offer: &Offer, bytes: u64, node: u32, now: Plan) -> Result<Plan, Refusal> {
    let count = offer.node_bytes.len();
    let initial = usize::try_from(node).ok().and_then(|node| offer.node_bytes.get(node));
    let initial = *initial.ok_or(Refusal::NoNode { node, count })?;
    if offer.on(node).next().is_none() {
        return Err(Refusal::NoDeviceOn(node));
    }
    let by = Mechanism::VirtioMem;
    let plugged =
        bytes.checked_sub(initial).ok_or(Refusal::TooSmall { bytes, min: initial, by })?;
    let room: u64 = offer.on(node).map(|device| device.max_bytes).sum();
    if plugged > room {
        return Err(Refusal::TooLarge { bytes, max: initial + room, grows: true });
    }
    check_whole(offer, plugged, bytes)?;
    let requested_bytes = requested(offer, plugged, |device| device == node);
    let reason = "nothing else knows of NUMA nodes".into();
    Ok(Plan { mechanism: by, reason, requested_bytes, ..now })
}

fn by_virtio_mem(offer: &Offer, bytes: u64, now: Plan) -> Result<Plan, Refusal> {
    let by = Mechanism::VirtioMem;
    if offer.devices.is_empty() {
        return Err(Refusal::Lacks(by));
    }
    let min = offer.initial_bytes.saturating_sub(now.ballooned_bytes + now.hard_bytes);
    let plugged = bytes.checked_sub(min).ok_or(Refusal::TooSmall { bytes, min, by })?;
    let room = offer.max_bytes() - offer.initial_bytes;
    if plugged > room {
        return Err(Refusal::TooLarge { bytes, max: min + room, grows: true });
    }
    check_whole(offer, plugged, bytes)?;
    let requested_bytes = requested(offer, plugged, |_| true);
    Ok(Plan { mechanism: by, reason: asked(), requested_bytes, ..now })
}

fn by_balloon(offer: &Offer, bytes: u64, now: Plan) -> Result<Plan, Refusal> {
    let by = Mechanism::Balloon;
    let balloon = offer.balloon.ok_or(Refusal::Lacks(by))?;
    let max = offer.size_bytes() + balloon.ballooned_bytes;
    let ballooned_bytes = max.checked_sub(bytes);
    let ballooned_bytes = ballooned_bytes.ok_or(Refusal::TooLarge { bytes, max, grows: true })?;
    // QEMU counts the balloon against what the VM began with, and refuses a balloon of all of it.
    if ballooned_bytes >= offer.initial_bytes {
        let min = (max + PAGE_BYTES).saturating_sub(offer.initial_bytes);
        return Err(Refusal::TooSmall { bytes, min, by });
    }
    check_pieces(by, bytes, ballooned_bytes)?;
    Ok(Plan { mechanism: by, reason: asked(), ballooned_bytes, ..now })
}

fn by_hyper_alloc(offer: &Offer, bytes: u64, now: Plan) -> Result<Plan, Refusal> {
    let by = Mechanism::HyperAlloc;
    let hard_now = offer.hard_bytes.ok_or(Refusal::Lacks(by))?;
    let max = offer.size_bytes() + hard_now;
    let hard_bytes = max.checked_sub(bytes);
    let hard_bytes = hard_bytes.ok_or(Refusal::TooLarge { bytes, max, grows: true })?;
    Ok(Plan { mechanism: by, reason: asked(), hard_bytes, ..now })
}

fn asked() -> String {
    "asked for".into()
}

/// Checks that the size is reached by whole blocks.
fn check_whole(offer: &Offer, plugged: u64, bytes: u64) -> Result<(), Refusal> {
    let block = offer.block_bytes();
    match plugged % block {
        0 => Ok(()),
        odd => {
            Err(Refusal::NotWhole { bytes, below: bytes - odd, block, by: Mechanism::VirtioMem })
        }
    }
}

/// Checks that the size is reached by whole pages. HyperAlloc takes one huge frame more if need be.
fn check_pieces(by: Mechanism, bytes: u64, taken: u64) -> Result<(), Refusal> {
    let odd = taken % PAGE_BYTES;
    if by == Mechanism::HyperAlloc || odd == 0 {
        return Ok(());
    }
    let below = (bytes + odd).saturating_sub(PAGE_BYTES);
    Err(Refusal::NotWhole { bytes, below, block: PAGE_BYTES, by })
}

/// Returns the bytes that each device is to have plugged so that the devices of the chosen nodes
/// have `plugged` bytes in all. The difference to what was requested of them is shared evenly.
fn requested(offer: &Offer, plugged: u64, takes_part: impl Fn(u32) -> bool) -> Vec<u64> {
    let devices = &offer.devices;
    let part = |device: &super::Device| takes_part(device.node);
    let before: u64 = devices.iter().filter(|d| part(d)).map(|d| d.requested_bytes).sum();
    let grows = plugged > before;
    let room = |device: &super::Device| match (part(device), grows) {
        (false, _) => 0,
        (true, true) => device.max_bytes.saturating_sub(device.requested_bytes),
        (true, false) => device.requested_bytes,
    };
    let rooms: Vec<u64> = devices.iter().map(room).collect();
    let shares = spread(plugged.abs_diff(before), offer.block_bytes(), &rooms);
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
