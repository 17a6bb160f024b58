//! Where a QEMU has its guest's RAM, as QEMU tells it, checked against the kernel.
//!
//! `info mtree` gives the guest-physical ranges, `gpa2hva` their address in QEMU, and
//! `/proc/PID/maps` the file at that address. Nothing is assumed about the machine type.

mod error;
mod files;

use std::time::{Duration, Instant};

use ebb_sys::process::{Process, Vma};
use ebb_units::{Gpa, Hva};
use serde_json::{Value, json};

use self::files::Files;
use crate::memory_device::DEVICES_MAX;
use crate::memory_tree::{self, Mapped, Segment};
use crate::qmp::{ANSWER_TIMEOUT, Qmp};
use crate::ram::{Backing, Ram, Region};
use crate::reach;
use crate::shown::{REASON_MAX, shown};
use crate::unplugged;

pub use self::error::LayoutError;

/// Most segments of RAM, each of which costs one question. A VM has one for each backend, and one
/// more for each hole in it.
const SEGMENTS_MAX: usize = 1024;
/// Most questions about where devices are: one for each device, and one for each border of regions
/// in a device.
const QUESTIONS_MAX: usize = SEGMENTS_MAX + DEVICES_MAX;
/// Longest time in which a VMM is asked where its RAM is.
const DISCOVER: Duration = Duration::from_secs(60);
/// Most characters of a device's name that are shown.
const NAME_CHARS_MAX: usize = 64;
/// QEMU's answer for an address without memory.
const NOT_MAPPED: &str = "No memory is mapped at address";

/// Finds all RAM of the VM and maps it in this process. Asks nothing after a minute.
///
/// # Errors
/// [`LayoutError`].
pub fn discover(process: &Process, qmp: &mut Qmp) -> Result<Ram, LayoutError> {
    let end = Instant::now() + DISCOVER;
    qmp.until(end, ANSWER_TIMEOUT, |qmp| discover_in_time(process, qmp))
}

fn discover_in_time(process: &Process, qmp: &mut Qmp) -> Result<Ram, LayoutError> {
    let backends = memory_backends(&qmp.execute("query-memdev", json!({}))?)?;
    let segments = memory_tree::segments(&qmp.human("info mtree")?, &backends);
    let segments = whole(segments, &devices(qmp)?);
    if segments.len() > SEGMENTS_MAX {
        return Err(LayoutError::Answer(format!("{} ranges of memory", segments.len())));
    }
    let mut mappings = process.mappings()?;
    // Files of another kind may have the same inode numbers.
    mappings.retain(is_shared_memfd);
    let mut files = Files { process, inodes: Vec::new(), backings: Vec::new() };
    let mut regions = Vec::new();
    for segment in &segments {
        let mapped = hva(qmp, segment.mapped)?.map(|at| at.0);
        let hva = mapped.and_then(|at| at.checked_sub(segment.mapped - segment.gpa)).map(Hva);
        let hva = hva.ok_or_else(|| LayoutError::Answer(segment.backend.clone()))?;
        let bytes = (segment.last - segment.gpa).saturating_add(1);
        let vma = mappings.iter().find(|v| hva >= v.start && hva.0 - v.start.0 < v.bytes);
        let vma = vma.ok_or_else(|| LayoutError::NotShared(segment.backend.clone()))?;
        let offset = vma.offset.saturating_add(hva.0 - vma.start.0);
        // The kernel splits the mapping where parts of it have advice of their own.
        if !unplugged::is_mapped(&mappings, hva, bytes, (vma.inode, offset)) {
            return Err(LayoutError::NotShared(segment.backend.clone()));
        }
        let file = files.of(vma.inode)?.ok_or(LayoutError::NotShared(segment.backend.clone()))?;
        regions.push(Region { gpa: Gpa(segment.gpa), bytes, hva, file, offset });
    }
    if regions.is_empty() {
        return Err(LayoutError::NoRam);
    }
    Ok(Ram::new(regions, files.backings)?)
}

/// Returns the address at which a memory device has other memory than the region that was there
/// when the VM was attached. `None` if there is no such device. A device can be removed and its
/// backend be plugged in again at another address. What the guest then tells about an address is
/// about other memory than the region's.
///
/// # Errors
/// [`LayoutError`].
pub fn moved(qmp: &mut Qmp, ram: &Ram) -> Result<Option<Gpa>, LayoutError> {
    let (devices, mut mapped) = (devices(qmp)?, None);
    let overlap = |(device, region): (&Device, &Region)| {
        let at = device.start.max(region.gpa.0);
        let last = device.last.min((region.gpa.0 + region.bytes).checked_sub(1)?);
        (at <= last).then_some((at, last))
    };
    let pairs = devices.iter().flat_map(|device| ram.regions().map(move |region| (device, region)));
    let shared = pairs.filter_map(|pair| Some((pair, overlap(pair)?)));
    for (asked, ((device, region), (at, last))) in shared.enumerate() {
        if asked == QUESTIONS_MAX {
            return Err(LayoutError::Answer("memory devices at one address".into()));
        }
        let found = first_mapped(qmp, (&devices, &mut mapped), device, (at, last))?;
        // Where nothing is mapped, the guest has no memory.
        if found.is_some_and(|(at, hva)| hva.0 != region.hva.0 + (at - region.gpa.0)) {
            return Ok(found.map(|(at, _)| Gpa(at)));
        }
    }
    Ok(None)
}

/// A memory device that the VM did not have when it was attached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Added {
    /// QEMU's name for it.
    pub name: String,
    /// Where the device's range begins.
    pub gpa: Gpa,
    /// Bytes of the device's range, of which the guest may have only a part.
    pub bytes: u64,
}

/// Returns the memory devices that have memory for the guest, none of it in `ram`. Whatever this
/// memory is, it is not managed. A device that was unplugged and plugged in again at another
/// address has its old memory, and does not count. Asks nothing after `end`
/// ([`reach::end_of_look`]).
///
/// # Errors
/// [`LayoutError`].
pub fn added(qmp: &mut Qmp, ram: &Ram, end: Instant) -> Result<Vec<Added>, LayoutError> {
    qmp.until(end, reach::PIECE, |qmp| added_in_time(qmp, ram))
}

fn added_in_time(qmp: &mut Qmp, ram: &Ram) -> Result<Vec<Added>, LayoutError> {
    let is_managed = |device: &Device| {
        let overlaps = |region: &Region| {
            region.gpa.0 <= device.last && device.start < region.gpa.0.saturating_add(region.bytes)
        };
        ram.regions().any(overlaps)
    };
    let (devices, mut mapped, mut added) = (devices(qmp)?, None, Vec::new());
    for device in devices.iter().filter(|device| device.has_memory && !is_managed(device)) {
        let range = (device.start, device.last);
        let found = match first_mapped(qmp, (&devices, &mut mapped), device, range) {
            // Whatever QEMU has at that address, it is not memory in `ram`.
            Err(LayoutError::Answer(_)) => None,
            found => found?,
        };
        let is_in = |hva: Hva, region: &Region| {
            hva.0.checked_sub(region.hva.0).is_some_and(|inside| inside < region.bytes)
        };
        if found.is_some_and(|(_, hva)| ram.regions().any(|region| is_in(hva, region))) {
            continue;
        }
        added.push(Added {
            name: device.name.chars().take(NAME_CHARS_MAX).collect(),
            gpa: Gpa(device.start),
            bytes: (device.last - device.start).saturating_add(1),
        });
    }
    Ok(added)
}

/// The first address in a range of a device that has memory, and its address in QEMU. `None` if
/// there is no memory in the range. Asks for what is mapped of `devices` at most once.
fn first_mapped(
    qmp: &mut Qmp,
    (devices, mapped): (&[Device], &mut Option<Mapped>),
    device: &Device,
    (at, last): (u64, u64),
) -> Result<Option<(u64, Hva)>, LayoutError> {
    if let Some(hva) = hva(qmp, at)? {
        return Ok(Some((at, hva)));
    }
    let mapped = match mapped {
        Some(mapped) => mapped,
        None => mapped.insert(all_mapped(qmp, devices)?),
    };
    match mapped.first(&device.backend, (at, last)) {
        Some(at) => Ok(hva(qmp, at)?.map(|hva| (at, hva))),
        None => Ok(None),
    }
}

fn all_mapped(qmp: &mut Qmp, devices: &[Device]) -> Result<Mapped, LayoutError> {
    let backends: Vec<String> = devices.iter().map(|device| device.backend.clone()).collect();
    let mapped = Mapped::new(&qmp.human("info mtree")?, &backends);
    mapped.ok_or_else(|| LayoutError::Answer("info mtree".into()))
}

/// The range of a memory device that has an address.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Device {
    start: u64,
    /// Last address, inclusive.
    last: u64,
    /// Name of the memory backend, empty if QEMU does not tell it.
    backend: String,
    /// Whether it is a virtio-mem device, of which the guest plugs and unplugs parts.
    has_parts: bool,
    /// Whether the guest has some of its memory.
    has_memory: bool,
    name: String,
}

fn devices(qmp: &mut Qmp) -> Result<Vec<Device>, LayoutError> {
    let list = qmp.execute("query-memory-devices", json!({}))?;
    parse_devices(&list).ok_or_else(|| LayoutError::Answer("query-memory-devices".into()))
}

/// Replaces a virtio-mem device's segment by one of its whole range, because the guest may plug all
/// of it. With `dynamic-memslots=on`, the processors see only those parts in which the guest has
/// plugged something.
fn whole(mut segments: Vec<Segment>, devices: &[Device]) -> Vec<Segment> {
    for device in devices.iter().filter(|device| device.has_parts) {
        let of_device = |segment: &Segment| segment.backend == device.backend;
        let is_inside =
            |segment: &Segment| segment.gpa >= device.start && segment.last <= device.last;
        let mut parts = segments.iter().filter(|segment| of_device(segment));
        // A single segment means that all parts have one distance from the backend's beginning.
        let (Some(part), None) = (parts.next().cloned(), parts.next()) else { continue };
        if is_inside(&part) {
            segments.retain(|segment| !of_device(segment));
            segments.push(Segment { gpa: device.start, last: device.last, ..part });
        }
    }
    segments
}

/// The address in QEMU of what is at a guest-physical address. `None` if nothing is mapped there.
fn hva(qmp: &mut Qmp, gpa: u64) -> Result<Option<Hva>, LayoutError> {
    parse_place(&qmp.human(&format!("gpa2hva {gpa:#x}"))?)
}

fn parse_place(text: &str) -> Result<Option<Hva>, LayoutError> {
    match text.trim_start().starts_with(NOT_MAPPED) {
        true => Ok(None),
        false => parse_hva(text).map(Some),
    }
}

/// Parses the memory devices that have an address. Others have no memory here. `None` if there are
/// too many, or it is not such a list.
fn parse_devices(list: &Value) -> Option<Vec<Device>> {
    let number = |data: &Value, keys: [&str; 2]| {
        keys.iter().find_map(|key| data.get(key).and_then(Value::as_u64))
    };
    let range = |item: &Value| {
        let data = item.get("data")?;
        let Some(start) = number(data, ["addr", "memaddr"]) else { return Some(None) };
        let bytes = number(data, ["max-size", "size"])?;
        let last = bytes.checked_sub(1).and_then(|more| start.checked_add(more));
        let memdev = data.get("memdev").and_then(Value::as_str).unwrap_or_default();
        let backend = memdev.strip_prefix("/objects/").unwrap_or(memdev).to_owned();
        let has_parts = data.get("max-size").is_some();
        let has_memory = data.get("size").and_then(Value::as_u64).is_some_and(|bytes| bytes > 0);
        let name = data.get("id").and_then(Value::as_str).unwrap_or("without a name").to_owned();
        Some(last.map(|last| Device { start, last, backend, has_parts, has_memory, name }))
    };
    let list = list.as_array().filter(|list| list.len() <= DEVICES_MAX)?;
    let devices: Option<Vec<_>> = list.iter().map(range).collect();
    Some(devices?.into_iter().flatten().collect())
}

/// A region as it was when the VM was attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownRegion {
    /// Where the region lay. Its file is found by the inode, not by the index.
    pub region: Region,
    /// The file's inode number.
    pub inode: u64,
    /// Whether the VMM is known to have the file no longer.
    pub is_unplugged: bool,
}

/// Opens the RAM of a VMM whose layout is known. Needs no answer from the VMM. Files that the VMM
/// has unplugged since count as such ([`Ram::is_unplugged`]).
///
/// # Errors
/// [`LayoutError`]; also if no RAM is left, because the VMM is about to end.
pub fn reopen(process: &Process, known: &[KnownRegion]) -> Result<Ram, LayoutError> {
    let mut files = Files { process, inodes: Vec::new(), backings: Vec::new() };
    let (mut regions, mut absent) = (Vec::new(), Vec::new());
    for &KnownRegion { region, inode, is_unplugged } in known {
        let file = match is_unplugged || absent.iter().any(|&(other, _)| other == inode) {
            true => None,
            false => files.of(inode)?,
        };
        match file {
            Some(file) => regions.push(Region { file, ..region }),
            None if is_unplugged || !unplugged::absent(process, &[inode])?.is_empty() => {
                absent.push((inode, region));
            }
            None => return Err(LayoutError::Closed(inode)),
        }
    }
    if regions.is_empty() {
        return Err(LayoutError::NoRam);
    }
    let first_absent = files.backings.len();
    for (_, region) in absent {
        regions.push(Region { file: files.backings.len(), offset: 0, ..region });
        files.backings.push(Backing::stand_in(region.bytes)?);
    }
    let all = first_absent..files.backings.len();
    let ram = Ram::new(regions, files.backings)?;
    all.for_each(|file| ram.set_unplugged(file));
    Ok(ram)
}

/// The names of the memory backends. One that is not shared is refused, because Ebb could not reach
/// that part of the guest's memory.
fn memory_backends(answer: &Value) -> Result<Vec<String>, LayoutError> {
    let list = answer.as_array().ok_or_else(|| LayoutError::Answer("query-memdev".into()))?;
    list.iter()
        .map(|backend| {
            let id = backend.get("id").and_then(Value::as_str).unwrap_or("ram");
            match backend.get("share").and_then(Value::as_bool) {
                Some(true) => Ok(id.to_owned()),
                _ => Err(LayoutError::NotShared(id.to_owned())),
            }
        })
        .collect()
}

/// Parses `Host virtual address for 0x100000 (ram) is 0x7f11200ff000`.
fn parse_hva(text: &str) -> Result<Hva, LayoutError> {
    let hex = text.trim().rsplit_once("is 0x").map(|(_, hex)| hex);
    let value = hex.and_then(|hex| u64::from_str_radix(hex, 16).ok());
    value.map(Hva).ok_or_else(|| LayoutError::Answer(shown(text.trim(), REASON_MAX)))
}

fn is_shared_memfd(vma: &Vma) -> bool {
    vma.shared_write && vma.name.starts_with("/memfd:")
}

#[cfg(test)]
mod tests;
