//! A VM's passed-through devices: their descriptors are taken when the VM begins or is recovered,
//! and then the devices are followed.

use std::io;
use std::sync::Arc;

use ebb_api::{Mode, RunRequest};
use ebb_passthrough::{Covers, Held, HeldNumbers, PassedThrough};
use ebb_sys::process::Process;
use ebb_vm::reach::{DeviceKind, MemoryUser};

use super::context::VmContext;
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::model::record::{PassedRecord, Record};
use crate::support::open_files::Links;

/// Why such a VM is in strict mode.
pub const WHY_STRICT: &str = "a device that is passed through reaches its memory by itself";
/// Order of the smallest blocks that are reclaimed beside such a device: a huge frame.
pub const MIN_ORDER: u8 = 9;

/// Takes QEMU's descriptors of passed-through devices, while QEMU waits before its guest's first
/// instruction. `None`: there are no such devices.
///
/// # Errors
/// Ebb cannot drive their IOMMU, or something else that was asked for does not go with them.
pub fn take_new(process: &Process, request: &RunRequest) -> Answer<Option<Held>> {
    let links = process.descriptors().map_err(failed("QEMU's descriptors"))?;
    let held = Held::take(process, &links).map_err(|refused| {
        not_allowed(format!("the VM has devices that are passed through, and {refused}"))
    })?;
    let asked = [
        (request.mode == Some(Mode::Release), "strict mode: leave out --mode release"),
        (request.grow_to_bytes.is_some(), "memory that stays plugged: leave out --grow-to"),
        (request.tier.is_some(), "all of its memory: leave out --tier"),
        (request.strict_disk().is_some(), "the only strict DMA: leave out dma=strict"),
    ];
    let wrong = asked.iter().find(|(is_asked, _)| held.is_some() && *is_asked);
    wrong.map_or(Ok(held), |(_, what)| {
        Err(not_allowed(format!("a device that is passed through needs {what}")))
    })
}

/// Takes the same descriptors again for a VM that is recovered. `None`: it has no such devices any
/// more.
///
/// # Errors
/// Whether devices reach the memory cannot be told: the VM must wait.
pub fn take_again(process: &Process, record: &mut Record) -> io::Result<Option<Held>> {
    let Some(PassedRecord { container, devices, .. }) = &record.passed_through else {
        return Ok(None);
    };
    let had = HeldNumbers { container: *container, devices: devices.clone() };
    let held = Held::take_again(process, &process.descriptors()?, &had);
    let held = held.map_err(|refused| {
        io::Error::other(format!("its devices that are passed through: {refused}"))
    })?;
    if held.is_none() {
        record.passed_through = None;
    }
    Ok(held)
}

/// What is on record of such devices.
pub fn on_record(numbers: HeldNumbers, in_pieces: bool) -> PassedRecord {
    PassedRecord { in_pieces, container: numbers.container, devices: numbers.devices }
}

/// Maps the VM's memory in pieces, if that is not done yet. The record says so before, so that the
/// next process does it if this one ends meanwhile. `save` writes the record. `again`: an earlier
/// process may have begun with it.
///
/// # Errors
/// Those of `save`, or devices may not reach all memory: the guest must not begin.
pub fn convert(
    passed: Option<&PassedThrough>,
    again: bool,
    record: &mut Record,
    save: impl Fn(&Record) -> Answer<()>,
) -> Answer<()> {
    let Some((passed, numbers)) = passed.and_then(|passed| Some((passed, passed.numbers()?)))
    else {
        return Ok(());
    };
    if record.passed_through.as_ref().is_some_and(|passed| passed.in_pieces) {
        return Ok(());
    }
    record.passed_through = Some(on_record(numbers.clone(), false));
    save(record)?;
    passed.convert(again).map_err(not_allowed)?;
    record.passed_through = Some(on_record(numbers, true));
    save(record)
}

/// Follows the VM's devices by its descriptors.
pub fn keep(cx: &mut VmContext, process: &Process, links: &Links) -> Covers {
    let Some(passed) = cx.passed.as_ref().map(Arc::clone) else { return Covers::None };
    let before = passed.numbers();
    let covers = passed.keep(process, links).unwrap_or_else(|refused| {
        tracing::warn!("of the devices that are passed through: {refused}");
        Covers::Some
    });
    let now = passed.numbers();
    if now.is_none() {
        cx.passed = None;
    }
    if now != before {
        cx.record.note(|record| {
            record.passed_through = now.map(|numbers| on_record(numbers, true));
        });
    }
    covers
}

/// Notes of devices that were found that their memory is mapped in pieces. An iommufd stays what it
/// is, also while no device uses it: the next device that is plugged in may.
pub fn in_pieces(found: &mut [MemoryUser]) {
    let passed = found.iter_mut().filter(|device| device.kind == DeviceKind::Vfio);
    passed.for_each(|device| device.kind = DeviceKind::VfioInPieces);
}
