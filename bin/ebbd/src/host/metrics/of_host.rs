//! Figures of the host.

use std::fmt;
use std::iter::once;

use ebb_api::{PilotMode, PilotStage, SeenBound, TopHost};

use super::{Meaning, Sheet, bytes, is, plain, word};
use crate::host::pilot::Glance;
use crate::host::registry::Daemon;
use crate::host::top;
use crate::model::api_error::Answer;

static BUILD: Meaning = plain("build_info", "The release of ebbd. The value is always 1.");
static TOTAL: Meaning = bytes("host_memory", "All memory of the host.");
static AVAILABLE: Meaning = bytes("host_memory_available", "The part of it that is available.");
static GROUP_TOTAL: Meaning =
    bytes("host_group_memory", "The limit of a control group that bounds VMs further.");
static GROUP_AVAILABLE: Meaning =
    bytes("host_group_memory_available", "The part of it that is available.");
static RESERVE: Meaning =
    bytes("host_memory_reserve", "Memory that is to stay available, by the pilot's settings.");
static STALL: Meaning = plain(
    "host_memory_stall_ratio",
    "Part of the last 10 s in which some task of the host waited for memory (PSI).",
);
static PILOT: Meaning = plain("pilot_mode", "1 for the pilot's mode, 0 for the others.");
static STAGE: Meaning = plain(
    "pilot_stage",
    "1 for the host's stage by the pilot, 0 for the others. None while the pilot is off.",
);

/// The host at one moment.
#[derive(Debug)]
pub struct Host(TopHost);

impl Host {
    /// Reads the host's memory.
    pub fn of(daemon: &Daemon) -> Answer<Host> {
        top::host(&Glance::of(daemon)).map(Host)
    }

    /// Writes its figures.
    pub(super) fn tell(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let Host(host) = self;
        sheet.gauges(&BUILD, once(([("version", env!("CARGO_PKG_VERSION"))], 1.0)))?;
        sheet.gauge(&TOTAL, Some(host.total_bytes as f64))?;
        sheet.gauge(&AVAILABLE, Some(host.available_bytes as f64))?;
        sheet.gauge(&RESERVE, Some(host.reserve_bytes as f64))?;
        let of_group = |it: &SeenBound, bytes: u64| ([("group", word(&it.name))], bytes as f64);
        let groups = || host.bounds.iter();
        sheet.gauges(&GROUP_TOTAL, groups().map(|it| of_group(it, it.total_bytes)))?;
        sheet.gauges(&GROUP_AVAILABLE, groups().map(|it| of_group(it, it.available_bytes)))?;
        let stall = host.stall_permille.map(|permille| f64::from(permille) / 1000.0);
        sheet.gauge(&STALL, stall)?;
        let modes = PilotMode::ALL.iter();
        let modes = modes.map(|mode| ([("mode", mode.as_str())], is(*mode == host.pilot)));
        sheet.gauges(&PILOT, modes)?;
        let stage = |now: PilotStage| {
            PilotStage::ALL.iter().map(move |stage| (stage.as_str(), *stage == now))
        };
        let stages = host.stage.into_iter().flat_map(stage);
        sheet.gauges(&STAGE, stages.map(|(name, it_is)| ([("stage", name)], is(it_is))))
    }
}
