//! What clients ask of the pilot.

use std::time::Instant;

use ebb_api::{PilotDecision, PilotRequest, PilotStage, PilotStatus, PilotVm, RuleRequest, VmName};
use ebb_policy::pilot::Stage;
use ebb_units::Bytes;

use super::record::Settings;
use super::{Known, Noted};
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, not_allowed, unsaved};
use crate::model::figures::millis;
use crate::model::piloted::Piloted;
use crate::system::host_facts;

/// Decisions that a status shows.
const SHOWN: usize = 20;

/// Turns the pilot on or off, or changes its reserve.
///
/// # Errors
/// The request makes no sense for this host, or the record cannot be written.
pub fn set(daemon: &Daemon, request: &PilotRequest) -> Answer<PilotStatus> {
    request.check()?;
    if let (Some(bytes), Some(host)) = (request.reserve_bytes, host_facts::memory_bytes())
        && bytes > host / 10 * 9
    {
        return Err(not_allowed(format!(
            "a reserve of {} is more than nine tenths of the {} that this host has: give less",
            Bytes(bytes),
            Bytes(host)
        )));
    }
    let set = |settings: &mut Settings| {
        settings.set(request);
        Ok(())
    };
    daemon.pilot_record().change(set, unsaved("the pilot's record"))?;
    Ok(status(daemon))
}

/// Changes the rule of a VM.
///
/// # Errors
/// The request makes no sense, there is no such VM, the bounds exclude each other, or the record
/// cannot be written.
pub fn rule(daemon: &Daemon, name: &VmName, request: &RuleRequest) -> Answer<PilotStatus> {
    request.check()?;
    daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
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
        match settings.set_rule(name, rule) {
            true => Ok(()),
            false => {
                Err(not_allowed("too many VMs have rules: remove pilot.json while ebbd is down"))
            }
        }
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
        stage: known.host.as_ref().map(|(stage, _)| name_of(*stage)),
        host: known.host.as_ref().map(|(_, host)| host.clone()),
        vms,
        decisions: decisions(&known),
    }
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

fn name_of(stage: Stage) -> PilotStage {
    match stage {
        Stage::Ample => PilotStage::Ample,
        Stage::Tight => PilotStage::Tight,
        Stage::Short => PilotStage::Short,
        Stage::Critical => PilotStage::Critical,
    }
}
