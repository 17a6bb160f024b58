//! Figures of guests, managed or not: what their kernels use memory for.

use std::fmt;

use ebb_observe::Usage;

use super::{Meaning, Sheet, bytes, word};
use crate::host::guests::Guest;

static RAM: Meaning = bytes("guest_memory", "RAM of a guest, without what is plugged.");
static RESIDENT: Meaning =
    bytes("guest_memory_resident", "The part of it that takes memory of the host.");
type Gauge = (Meaning, fn(&Usage) -> u64);

/// The figures that only a guest's own kernel knows.
static USAGES: [Gauge; 8] = [
    (bytes("guest_memory_total", "Memory that the guest's kernel manages: MemTotal."), |usage| {
        usage.counters.total_bytes
    }),
    (bytes("guest_memory_used", "The part of it in use that is no page cache."), Usage::used_bytes),
    (
        bytes("guest_memory_anonymous", "The part of what is used that is anonymous: AnonPages."),
        |usage| usage.counters.anonymous_bytes,
    ),
    (
        bytes("guest_memory_slab", "The part of what is used that is kernel objects: Slab."),
        |usage| usage.counters.slab_bytes,
    ),
    (bytes("guest_memory_cache", "Page cache with buffers and shared memory."), |usage| {
        usage.counters.cache_bytes
    }),
    (bytes("guest_memory_free", "Free memory: MemFree."), |usage| usage.counters.free_bytes),
    (
        bytes(
            "guest_memory_available",
            "Free memory, and page cache that was not used for long: MemFree and Inactive(file).",
        ),
        |usage| usage.counters.free_bytes.saturating_add(usage.counters.cold_cache_bytes),
    ),
    (bytes("guest_memory_reclaimable", "Free memory that Ebb would give back now."), |usage| {
        usage.reclaimable_bytes
    }),
];

/// Writes the figures of these guests. What is not known is left out.
pub(super) fn tell(guests: &[Guest], sheet: &mut Sheet<'_>) -> fmt::Result {
    let labels = |guest: &Guest| {
        [("guest", word(guest.name.as_deref().unwrap_or(""))), ("pid", guest.pid.to_string())]
    };
    let seen = || guests.iter().filter_map(|guest| Some((guest, guest.observed.as_ref().ok()?)));
    sheet.gauges(&RAM, seen().map(|(guest, it)| (labels(guest), it.memory_bytes as f64)))?;
    sheet.gauges(&RESIDENT, seen().map(|(guest, it)| (labels(guest), it.resident_bytes as f64)))?;
    for (meaning, of) in &USAGES {
        let known = seen().filter_map(|(guest, it)| Some((guest, it.usage.as_ref().ok()?)));
        sheet.gauges(meaning, known.map(|(guest, usage)| (labels(guest), of(usage) as f64)))?;
    }
    Ok(())
}
