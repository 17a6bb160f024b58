//! Memory that the pilot has a guest unplug, and plug again.
//!
//! It is no target: each device is asked once, and nobody insists. Whoever asks a device for another
//! size later has it from then on. The record says what the pilot has asked of which device, and
//! what was to be plugged before, so that each device gets its own back.

#[cfg(test)]
mod tests;

use ebb_policy::resize::{DevicePart, Driver, spread};

use super::Resize;
use super::reported::now_s;
use crate::model::api_error::{Answer, ApiError, not_allowed};
use crate::model::piloted::{PilotedPlugged, PlugRequest};
use crate::model::record::UnpluggedRecord;
use crate::vm::context::VmContext;
use crate::vm::context::capabilities::Plugger;

/// Figures of the guest older than this, in seconds, do not tell whether it is under pressure now.
const FIGURES_AGE_S: u64 = 5;

/// A device, and what the pilot has asked of it.
struct Part {
    gpa: u64,
    device: DevicePart,
    /// What is to be plugged.
    asked_bytes: u64,
    /// What was to be plugged before the pilot took any.
    full_bytes: u64,
}

impl Part {
    /// Whether the guest can unplug some of it.
    fn is_offered(&self) -> bool {
        self.device.driver != Driver::Absent && self.device.plugged_bytes > 0
    }
}

/// Returns what the pilot is to know of the VM's plugged memory; `None`: the guest can unplug none,
/// and the pilot has had it unplug none.
pub fn seen(cx: &VmContext) -> Option<PilotedPlugged> {
    let parts = parts(cx);
    let may_unplug = parts.iter().any(Part::is_offered) && may_unplug(cx).is_ok();
    let is_piloted = !parts.is_empty() && !cx.record.piloted_devices.is_empty();
    (may_unplug || is_piloted).then(|| PilotedPlugged {
        bytes: total(&parts, |part| part.device.plugged_bytes),
        asked_bytes: total(&parts, |part| part.asked_bytes),
        full_bytes: total(&parts, |part| part.full_bytes),
        block_bytes: block_bytes(&parts),
        may_unplug,
    })
}

/// Whether the pilot wants to know what the guest needs, and the guest can unplug memory as far as
/// is known, or has done so for the pilot.
pub(super) fn is_watched(cx: &VmContext) -> bool {
    let plugs = cx.capabilities.as_ref().is_none_or(|found| !found.pluggers.is_empty());
    let is_offered = || cx.mailbox.is_watched() && plugs && may_unplug(cx).is_ok();
    !cx.record.piloted_devices.is_empty() || is_offered()
}

/// Succeeds if the pilot may have the guest unplug memory.
fn may_unplug(cx: &VmContext) -> Answer<()> {
    if cx.record.size.is_some() {
        return Err(not_allowed("ebb resize has set its size: ebb resize NAME off ends that"));
    }
    if cx.guest.shares_allocator() {
        return Err(not_allowed("its kernel shares its allocator, which takes all that is free"));
    }
    cx.may_take()
}

impl Resize {
    /// Has the guest plug or unplug memory.
    ///
    /// # Errors
    /// QEMU does not obey, or may wait for room; the size is somebody else's; somebody else has
    /// changed what is to be plugged; the record cannot be written.
    pub fn plug_by_pilot(&mut self, cx: &mut VmContext, request: PlugRequest) -> Answer<()> {
        if cx.waits() {
            let why = "its guest waits for room, and QEMU may, too: nothing is plugged now";
            return Err(ApiError::Unavailable(why.into()));
        }
        self.look(cx)?;
        let parts = parts(cx);
        let asked_bytes = total(&parts, |part| part.asked_bytes);
        if asked_bytes != request.from_bytes {
            return Err(not_allowed("somebody else has changed what is to be plugged"));
        }
        if request.to_bytes < asked_bytes {
            may_unplug(cx)?;
        }
        self.ask(cx, &parts, &shares(&parts, request.to_bytes))
    }

    /// Gives the guest back all that the pilot has had it unplug. It is nobody's then.
    ///
    /// # Errors
    /// QEMU does not obey, or the record cannot be written.
    pub fn plug_again(&mut self, cx: &mut VmContext) -> Answer<()> {
        if cx.record.piloted_devices.is_empty() {
            return Ok(());
        }
        self.look(cx)?;
        let parts = parts(cx);
        let all: Vec<u64> = parts.iter().map(|part| part.full_bytes).collect();
        self.ask(cx, &parts, &all)
    }

    /// Gives a guest that is about to run out of memory all back. It does not wait for the pilot.
    pub(super) fn plug_for_pressed(&mut self, cx: &mut VmContext) {
        if cx.record.piloted_devices.is_empty() {
            return;
        }
        let since_s = now_s().saturating_sub(FIGURES_AGE_S);
        let figures = cx.capabilities.as_ref().and_then(|found| found.figures(since_s));
        if figures.is_none_or(|figures| !figures.is_pressed()) {
            return;
        }
        match self.plug_again(cx) {
            Ok(()) => tracing::info!("its guest is short of memory, and plugs all again"),
            Err(error) => tracing::warn!("its guest is short of memory, and plugs none: {error}"),
        }
    }

    /// Ends the pilot's part in devices that somebody else has asked for another size.
    pub(super) fn notice_others(&mut self, cx: &mut VmContext) {
        let is_first = !std::mem::replace(&mut self.is_compared, true);
        let parts = parts(cx);
        let requested = |record: &UnpluggedRecord| {
            let part = parts.iter().find(|part| part.gpa == record.gpa);
            part.map(|part| part.device.requested_bytes)
        };
        let own = |record: &UnpluggedRecord| {
            let asked_bytes = requested(record)?;
            // The process before this one may have ended before it asked.
            let is_late = is_first && asked_bytes == record.before_bytes;
            let is_own = asked_bytes == record.asked_bytes || is_late;
            let is_less = asked_bytes < record.full_bytes;
            (is_own && is_less).then_some(UnpluggedRecord { asked_bytes, ..*record })
        };
        let left: Vec<_> = cx.record.piloted_devices.iter().filter_map(own).collect();
        if left != cx.record.piloted_devices {
            tracing::info!("what is plugged has changed: the pilot goes by what it is now");
            cx.record.note(|record| record.piloted_devices = left);
        }
    }

    /// Asks each device for its part. The record has it first: whatever ends this process, the next
    /// one knows what is to be given back.
    fn ask(&mut self, cx: &mut VmContext, parts: &[Part], wanted: &[u64]) -> Answer<()> {
        let record = |(part, &asked_bytes): (&Part, &u64)| {
            let Part { gpa, full_bytes, asked_bytes: before_bytes, .. } = *part;
            let record = UnpluggedRecord { gpa, full_bytes, asked_bytes, before_bytes };
            (asked_bytes < full_bytes || before_bytes < full_bytes).then_some(record)
        };
        let records: Vec<UnpluggedRecord> = parts.iter().zip(wanted).filter_map(record).collect();
        cx.record.change(|record| record.piloted_devices = records)?;
        // Until all is asked for, some of the devices may be as before.
        self.is_compared = false;
        let VmContext { capabilities, qmp, .. } = cx;
        let (Some(found), Some(qmp)) = (capabilities, qmp.socket()) else {
            return Err(not_allowed("QEMU's QMP socket does not answer"));
        };
        for ((plugger, part), &bytes) in found.pluggers.iter_mut().zip(parts).zip(wanted) {
            if part.device.requested_bytes != bytes {
                plugger.request(qmp, bytes).map_err(not_allowed)?;
            }
        }
        self.is_compared = true;
        let is_back = |record: &UnpluggedRecord| record.asked_bytes >= record.full_bytes;
        if cx.record.piloted_devices.iter().any(is_back) {
            cx.record.note(|record| record.piloted_devices.retain(|record| !is_back(record)));
        }
        Ok(())
    }
}

/// Returns the devices as they were seen last.
fn parts(cx: &VmContext) -> Vec<Part> {
    let pluggers = cx.capabilities.iter().flat_map(|found| &found.pluggers);
    let part = |plugger: &Plugger| {
        let (gpa, device) = (plugger.address().0, plugger.device());
        let record = cx.record.piloted_devices.iter().find(|record| record.gpa == gpa);
        let (asked_bytes, full_bytes) = match record {
            Some(record) => (record.asked_bytes, record.full_bytes.min(device.max_bytes)),
            None => (device.requested_bytes, device.requested_bytes),
        };
        Part { gpa, device, asked_bytes, full_bytes }
    };
    pluggers.map(part).collect()
}

/// Returns what each device is to have plugged so that all have `bytes` in all. The change is shared
/// evenly, and no device gets more than it had.
fn shares(parts: &[Part], bytes: u64) -> Vec<u64> {
    if bytes >= total(parts, |part| part.full_bytes) {
        return parts.iter().map(|part| part.full_bytes).collect();
    }
    let asked_bytes = total(parts, |part| part.asked_bytes);
    let grows = bytes > asked_bytes;
    let room = |part: &Part| match grows {
        true => part.full_bytes.saturating_sub(part.asked_bytes),
        false if part.is_offered() => part.asked_bytes,
        false => 0,
    };
    let rooms: Vec<u64> = parts.iter().map(room).collect();
    let shares = spread(bytes.abs_diff(asked_bytes), block_bytes(parts), &rooms);
    let after = |(part, share): (&Part, u64)| match grows {
        true => part.asked_bytes + share,
        false => part.asked_bytes - share,
    };
    parts.iter().zip(shares).map(after).collect()
}

fn total(parts: &[Part], of: impl Fn(&Part) -> u64) -> u64 {
    parts.iter().map(of).fold(0, u64::saturating_add)
}

/// Returns what is plugged or unplugged at a time.
fn block_bytes(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.device.block_bytes).max().unwrap_or(1)
}
