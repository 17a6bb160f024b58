//! What clients ask of the pilot.

use std::time::Instant;

use ebb_api::{
    PilotDecision, PilotMode, PilotRequest, PilotSight, PilotStage, PilotStatus, PilotVm,
    RuleRequest, VmClass, VmName,
};
use ebb_policy::pilot::{Class, Stage};
use ebb_policy::pressure::Below;
use ebb_units::Bytes;

use super::record::{Rule, Settings};
use super::{Known, Noted};
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, not_allowed, unsaved};
use crate::model::figures::millis;
use crate::model::piloted::{Piloted, PilotedPlugged};
use crate::system::host_memory;

/// Decisions that a status shows.
const SHOWN: usize = 20;

/// Turns the pilot on or off, or changes its reserve.
///
/// # Errors
/// The request makes no sense for this host, or the record cannot be written.
pub fn set(daemon: &Daemon, request: &PilotRequest) -> Answer<PilotStatus> {
    request.check()?;
    request.reserve_bytes.map_or(Ok(()), leaves_enough)?;
    let set = |settings: &mut Settings| {
        settings.set(request);
        Ok(())
    };
    daemon.pilot_record().change(set, unsaved("the pilot's record"))?;
    Ok(status(daemon))
}

/// Takes over what the configuration file says of the pilot, as far as it says something else than
/// when it was last read: what clients have set meanwhile stays. Returns the keys that have changed.
///
/// # Errors
/// `NotAllowed`: the reserve leaves too little of this host. The record cannot be written.
pub fn follow(daemon: &Daemon, file: &PilotRequest) -> Answer<Vec<&'static str>> {
    let mut changed = Vec::new();
    // A file that says nothing new writes nothing: the run directory may be full. Nor is it checked
    // again: the host may have less memory than when the reserve was accepted.
    if daemon.pilot_record().settings().file != *file {
        file.reserve_bytes.map_or(Ok(()), leaves_enough)?;
        let follow = |settings: &mut Settings| {
            changed = settings.follow(file);
            Ok(())
        };
        daemon.pilot_record().change(follow, unsaved("the pilot's record"))?;
    }
    Ok(changed)
}

/// Checks that a reserve leaves something of the host, and of each control group around the VMs.
fn leaves_enough(reserve_bytes: u64) -> Answer<()> {
    match host_memory::totals().into_iter().find(|(_, bytes)| reserve_bytes > bytes / 10 * 9) {
        Some((name, bytes)) => Err(not_allowed(format!(
            "a reserve of {} is more than nine tenths of the {} that {name} has: give less",
            Bytes(reserve_bytes),
            Bytes(bytes)
        ))),
        None => Ok(()),
    }
}

/// Changes the rule of a VM.
///
/// # Errors
/// The request makes no sense, there is no such VM, the bounds exclude each other, or the record
/// cannot be written.
pub fn rule(daemon: &Daemon, name: &VmName, request: &RuleRequest) -> Answer<PilotStatus> {
    request.check()?;
    let listing = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
    let floor_bytes = listing.piloted().map_or(0, |(_, piloted)| piloted.floor_bytes);
    if let Some(max) = request.max_bytes.filter(|max| (1..floor_bytes).contains(max)) {
        return Err(not_allowed(format!(
            "a maximum of {} is below what keeps this guest alive: give {} or more",
            Bytes(max),
            Bytes(floor_bytes)
        )));
    }
    let set = |settings: &mut Settings| {
        let rule = settings.rule_of(name).with(request);
        if let (Some(min), Some(max)) = (rule.min_bytes, rule.max_bytes)
            && min > max
        {
            return Err(not_allowed(format!(
                "a minimum of {} is above the maximum of {}: change both, or take one away with 0",
                Bytes(min),
                Bytes(max)
            )));
        }
        settings.set_rule(name, rule, |other| daemon.is_known(other));
        Ok(())
    };
    daemon.pilot_record().change(set, unsaved("the pilot's record"))?;
    Ok(status(daemon))
}

/// The pilot, what it sees and what it decided last.
pub fn status(daemon: &Daemon) -> PilotStatus {
    let settings = daemon.pilot_record().settings();
    let vms = daemon.listings().into_iter();
    let vms = vms.filter_map(|(name, listing)| {
        let (status, piloted) = listing.piloted()?;
        Some(vm(name, status.resident_bytes, piloted, &settings))
    });
    let vms = vms.collect();
    let known = daemon.pilot().known();
    PilotStatus {
        mode: settings.mode,
        reserve_percent: settings.percent(),
        reserve_bytes: settings.reserve_bytes,
        attach: settings.attach,
        stall_percent: settings.stall_percent,
        swap_max_bytes: settings.swap_max_bytes,
        stage: known.last.as_ref().map(|last| name_of(last.stage)),
        host: known.last.as_ref().map(|last| last.host.clone()),
        vms,
        decisions: decisions(&known),
    }
}

/// The pilot's settings and the host's stage, for those who show all VMs.
pub struct Glance {
    /// What the pilot does.
    pub mode: PilotMode,
    /// Memory that is to stay available on the host.
    pub reserve: Below,
    /// How short of memory the host is; none: the pilot is off, or has not looked yet.
    pub stage: Option<PilotStage>,
    settings: Settings,
}

/// The part of a VM's rule that those show.
pub struct GlanceRule {
    /// How much the VM's speed matters.
    pub class: VmClass,
    /// Whether the pilot leaves it as it is.
    pub hold: bool,
    /// The class as the policy has it.
    pub policy: Class,
}

impl Glance {
    /// The pilot now.
    pub fn of(daemon: &Daemon) -> Glance {
        let settings = daemon.pilot_record().settings();
        let stage = daemon.pilot().known().last.as_ref().map(|last| name_of(last.stage));
        Glance { mode: settings.mode, reserve: settings.reserve(), stage, settings }
    }

    /// The rule of a VM.
    pub fn rule(&self, name: &VmName) -> GlanceRule {
        let Rule { class, hold, .. } = self.settings.rule_of(name);
        GlanceRule { class, hold, policy: self.settings.rule(name).class }
    }
}

/// What the pilot saw in its last look.
///
/// # Errors
/// It is off, or has not looked yet.
pub fn last_sight(daemon: &Daemon) -> Answer<PilotSight> {
    let known = daemon.pilot().known();
    let sight = known.last.as_ref().map(|last| last.sight.clone());
    sight.ok_or_else(|| {
        let why = "the pilot is off, or has just been turned on: ebb pilot dry-run lets it look";
        ApiError::NotSet(why.into())
    })
}

fn vm(name: VmName, resident_bytes: u64, piloted: Piloted, settings: &Settings) -> PilotVm {
    let rule = settings.rule_of(&name);
    PilotVm {
        class: rule.class,
        weight: rule.weight,
        min_bytes: rule.min_bytes,
        max_bytes: rule.max_bytes,
        hold: rule.hold,
        memory_bytes: piloted.memory_bytes,
        resident_bytes,
        working_bytes: piloted.working_bytes,
        limit_bytes: piloted.limit_bytes,
        compressed_most_bytes: piloted.compressed.map(|compressed| compressed.most_bytes),
        unplugged_bytes: piloted.plugged.map_or(0, PilotedPlugged::unplugged_bytes),
        left_alone: piloted.left_alone,
        name,
    }
}

fn decisions(known: &Known) -> Vec<PilotDecision> {
    let now = Instant::now();
    let shown = |noted: &Noted| {
        Some(PilotDecision {
            number: noted.number,
            age_ms: millis(now.duration_since(noted.at)),
            vm: noted.decision.vm.parse().ok()?,
            action: noted.decision.action.to_string(),
            why: noted.decision.why.clone(),
            outcome: noted.outcome.clone(),
        })
    };
    known.decisions.iter().rev().take(SHOWN).filter_map(shown).collect()
}

pub(super) fn name_of(stage: Stage) -> PilotStage {
    match stage {
        Stage::Ample => PilotStage::Ample,
        Stage::Tight => PilotStage::Tight,
        Stage::Short => PilotStage::Short,
        Stage::Critical => PilotStage::Critical,
    }
}
