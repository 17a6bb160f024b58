//! Choosing what each mechanism has to do.

use super::spread::spread;
use super::{Driver, Mechanism, Offer, PAGE_BYTES, Refusal, Wish};

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

/// Plans the way to `wish`. `floor_bytes`: the least that a guest lives with.
///
/// # Errors
/// [`Refusal`].
pub fn plan(offer: &Offer, wish: &Wish, floor_bytes: u64) -> Result<Plan, Refusal> {
    let now = now(offer);
    let plan = match (wish.node, wish.by) {
        (Some(node), None | Some(Mechanism::VirtioMem)) => of_node(offer, wish.bytes, node, now)?,
        (Some(_), Some(other)) => return Err(Refusal::KnowsNoNodes(other)),
        (None, None) => by_size(offer, wish.bytes)?,
        (None, Some(Mechanism::VirtioMem)) => by_virtio_mem(offer, wish.bytes, now)?,
        (None, Some(Mechanism::Balloon)) => by_balloon(offer, wish.bytes, now)?,
        (None, Some(Mechanism::HyperAlloc)) => by_hyper_alloc(offer, wish.bytes, now)?,
    };
    let leads_to = (offer.initial_bytes + plan.requested_bytes.iter().sum::<u64>())
        .saturating_sub(plan.ballooned_bytes + plan.hard_bytes);
    match leads_to < floor_bytes {
        true => Err(Refusal::BelowFloor { bytes: wish.bytes, floor: floor_bytes }),
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
    format!("what goes beyond the {initial} that it began with comes and goes in blocks")
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
            _ => "what it began with can be taken by its balloon alone",
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
mod tests {
    use super::super::{Balloon, Device};
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn device(node: u32, plugged_bytes: u64) -> Device {
        Device {
            node,
            plugged_bytes,
            requested_bytes: plugged_bytes,
            max_bytes: 16 * GIB,
            block_bytes: 2 * MIB,
            driver: Driver::Ready,
        }
    }

    /// 8 GiB on two nodes, and a device for each: the setup of the paper's Table 1.
    fn two_nodes() -> Offer {
        Offer {
            initial_bytes: 8 * GIB,
            node_bytes: vec![4 * GIB; 2],
            devices: vec![device(0, 0), device(1, 0)],
            balloon: Some(Balloon { ballooned_bytes: 0, driver: Driver::Ready }),
            hard_bytes: None,
        }
    }

    fn small() -> Offer {
        Offer { initial_bytes: GIB, node_bytes: vec![GIB], ..Offer::default() }
    }

    fn wish(bytes: u64) -> Wish {
        Wish { bytes, node: None, by: None }
    }

    fn planned(offer: &Offer, wish: Wish) -> Plan {
        plan(offer, &wish, 64 * MIB).expect("it can be had")
    }

    fn refused(offer: &Offer, wish: Wish) -> String {
        plan(offer, &wish, 64 * MIB).expect_err("it cannot be had").to_string()
    }

    #[test]
    fn what_goes_beyond_the_beginning_is_plugged_evenly() {
        let offer = two_nodes();
        let plan = planned(&offer, wish(12 * GIB));
        assert_eq!(plan.mechanism, Mechanism::VirtioMem);
        assert_eq!(plan.requested_bytes, [2 * GIB; 2]);
        let plan = planned(&offer, wish(40 * GIB));
        assert_eq!(plan.requested_bytes, [16 * GIB; 2]);
        assert!(refused(&offer, wish(41 * GIB)).contains("over the maximum of 40 GiB"));
        assert!(refused(&small(), wish(2 * GIB)).contains("--grow-to"));
    }

    #[test]
    fn what_was_taken_comes_back_before_any_is_plugged() {
        let mut offer = two_nodes();
        offer.balloon = Some(Balloon { ballooned_bytes: 3 * GIB, driver: Driver::Ready });
        let plan = planned(&offer, wish(9 * GIB));
        assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::Balloon, 0));
        assert_eq!(plan.requested_bytes.iter().sum::<u64>(), GIB);
    }

    #[test]
    fn what_was_plugged_goes_before_any_is_taken() {
        let mut offer = two_nodes();
        offer.devices[1] = device(1, 8 * GIB);
        let plan = planned(&offer, wish(6 * GIB));
        assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::VirtioMem, 2 * GIB));
        assert_eq!(plan.requested_bytes, [0, 0]);
        let plan = planned(&offer, wish(10 * GIB));
        assert_eq!((plan.requested_bytes, plan.ballooned_bytes), (vec![0, 2 * GIB], 0));
    }

    #[test]
    fn a_shared_allocator_is_preferred_to_the_balloon() {
        let mut offer = two_nodes();
        offer.hard_bytes = Some(0);
        let plan = planned(&offer, wish(6 * GIB));
        assert_eq!((plan.mechanism, plan.hard_bytes), (Mechanism::HyperAlloc, 2 * GIB));
        assert_eq!(plan.ballooned_bytes, 0);
        offer.hard_bytes = None;
        let plan = planned(&offer, wish(6 * GIB));
        assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::Balloon, 2 * GIB));
        let why = refused(&small(), wish(512 * MIB));
        assert!(why.contains("cannot have less than the 1 GiB"), "{why}");
    }

    #[test]
    fn a_node_is_resized_by_its_own_device() {
        let mut offer = two_nodes();
        offer.devices[0] = device(0, GIB);
        let on = |node, bytes| Wish { bytes, node: Some(node), by: None };
        let plan = planned(&offer, on(1, 20 * GIB));
        assert_eq!(plan.requested_bytes, [GIB, 16 * GIB]);
        assert!(refused(&offer, on(2, 8 * GIB)).contains("no NUMA node 2: the VM has 2"));
        assert!(refused(&offer, on(1, 21 * GIB)).contains("maximum of 20 GiB"));
        assert!(refused(&offer, on(1, 3 * GIB)).contains("virtio-mem can reach, 4 GiB"));
        offer.devices.pop();
        assert!(refused(&offer, on(1, 8 * GIB)).contains("no virtio-mem device"));
        let by = Wish { by: Some(Mechanism::Balloon), ..on(0, 8 * GIB) };
        assert!(refused(&offer, by).contains("knows no NUMA nodes"));
    }

    #[test]
    fn what_is_asked_for_is_used_alone() {
        let mut offer = two_nodes();
        offer.devices[0] = device(0, 2 * GIB);
        let by = |mechanism, bytes| Wish { bytes, node: None, by: Some(mechanism) };
        let plan = planned(&offer, by(Mechanism::Balloon, 9 * GIB));
        assert_eq!((plan.ballooned_bytes, plan.requested_bytes), (GIB, vec![2 * GIB, 0]));
        let why = refused(&offer, by(Mechanism::Balloon, 11 * GIB));
        assert!(why.contains("maximum of 10 GiB"), "{why}");
        let why = refused(&offer, by(Mechanism::Balloon, 2 * GIB));
        assert!(why.contains("the balloon can reach, 2"), "{why}");
        let why = refused(&offer, by(Mechanism::VirtioMem, 7 * GIB));
        assert!(why.contains("virtio-mem can reach, 8 GiB"), "{why}");
        let why = refused(&offer, by(Mechanism::HyperAlloc, 7 * GIB));
        assert!(why.contains("needs one with LLFree"), "{why}");
        let why = refused(&small(), by(Mechanism::VirtioMem, 2 * GIB));
        assert!(why.contains("no virtio-mem device"), "{why}");
        let why = refused(&small(), by(Mechanism::Balloon, GIB / 2));
        assert!(why.contains("no balloon"), "{why}");
    }

    #[test]
    fn sizes_between_two_blocks_are_refused_with_the_next_ones() {
        let why = refused(&two_nodes(), wish(9 * GIB + MIB));
        let (below, above) = (9 * GIB, 9 * GIB + 2 * MIB);
        assert!(why.contains(&format!("give {below} or {above}")), "{why}");
        let why = refused(&two_nodes(), wish(7 * GIB + 1));
        let (below, above) = (7 * GIB, 7 * GIB + 4096);
        assert!(why.contains(&format!("give {below} or {above}")), "{why}");
    }

    #[test]
    fn no_guest_is_made_smaller_than_its_kernel() {
        assert!(refused(&two_nodes(), wish(63 * MIB)).contains("give 64 MiB or more"));
    }

    #[test]
    fn a_driver_that_has_nothing_to_do_may_be_absent() {
        let mut offer = two_nodes();
        offer.devices[0].driver = Driver::Absent;
        offer.balloon = Some(Balloon { ballooned_bytes: 0, driver: Driver::Absent });
        let on = |node| Wish { bytes: 5 * GIB, node: Some(node), by: None };
        assert_eq!(planned(&offer, on(1)).check_drivers(&offer), Ok(()));
        let refused = |wish| planned(&offer, wish).check_drivers(&offer).unwrap_err().to_string();
        assert!(refused(on(0)).contains("the driver virtio_mem"));
        assert!(refused(wish(6 * GIB)).contains("the driver virtio_balloon"));
    }

    proptest! {
        /// A plan leads to the target size, and once the size is reached, nothing more has to be
        /// done.
        #[test]
        fn a_plan_leads_to_the_size_and_stays(
            plugged in prop::collection::vec(0u64..8192, 0..4),
            ballooned in 0u64..4 * GIB / 4096,
            shares in any::<bool>(),
            blocks in 300u64..20_000,
        ) {
            let mut offer = two_nodes();
            offer.devices = (0..).zip(&plugged).map(|(node, blocks)| device(node, blocks * 2 * MIB)).collect();
            offer.balloon = Some(Balloon { ballooned_bytes: ballooned * 4096, driver: Driver::Ready });
            offer.hard_bytes = shares.then_some(0);
            let wish = wish(blocks * 2 * MIB);
            if let Ok(first) = plan(&offer, &wish, 64 * MIB) {
                for (device, bytes) in offer.devices.iter_mut().zip(&first.requested_bytes) {
                    prop_assert!(*bytes <= device.max_bytes && bytes % device.block_bytes == 0);
                    (device.plugged_bytes, device.requested_bytes) = (*bytes, *bytes);
                }
                offer.balloon = Some(Balloon { ballooned_bytes: first.ballooned_bytes, driver: Driver::Ready });
                offer.hard_bytes = shares.then_some(first.hard_bytes);
                prop_assert_eq!(offer.size_bytes(), wish.bytes);
                let next = plan(&offer, &wish, 64 * MIB).expect("it was reached");
                prop_assert_eq!(next.requested_bytes, first.requested_bytes);
                prop_assert_eq!(next.ballooned_bytes, first.ballooned_bytes);
                prop_assert_eq!(next.hard_bytes, first.hard_bytes);
            } else {
                prop_assert!(wish.bytes > offer.max_bytes());
            }
        }
    }
}
