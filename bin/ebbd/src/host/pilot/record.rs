//! The pilot's settings, on record in the run directory.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_api::{PilotMode, PilotRequest, RESERVE_PERCENT_DEFAULT, RuleRequest, VmClass, VmName};
use ebb_policy::pilot::{Class, HostRule, VmRule, WEIGHT_DEFAULT};
use ebb_policy::pressure::Below;
use ebb_sys::process::Process;
use serde::{Deserialize, Serialize};

use crate::support::state_file;

const FILE: &str = "pilot.json";
/// Rules outlive their VMs, up to so many.
const RULES_MOST: usize = 10_000;
/// Most detached VMs to remember.
const LEFT_MOST: usize = 10_000;

/// The settings, and the file that has them.
pub struct PilotRecord {
    path: PathBuf,
    settings: Mutex<Settings>,
}

/// The settings.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Settings {
    pub mode: PilotMode,
    #[serde(default)]
    pub reserve_percent: Option<u32>,
    /// In place of the percentage.
    #[serde(default)]
    pub reserve_bytes: Option<u64>,
    /// Rules of VMs, by name, that are not the default.
    #[serde(default)]
    pub rules: BTreeMap<VmName, Rule>,
    /// Whether VMs that somebody else started are attached.
    #[serde(default)]
    pub attach: bool,
    /// In place of the daemon's option.
    #[serde(default)]
    pub stall_percent: Option<u32>,
    #[serde(default)]
    pub swap_max_bytes: Option<u64>,
    /// VMs that were detached, and so are not attached again by the pilot.
    #[serde(default)]
    pub left: Vec<Left>,
    /// What the configuration file said when it was last read.
    #[serde(default)]
    pub file: PilotRequest,
}

/// A VM that is left alone: its process, by number and start time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(super) struct Left {
    pub pid: i32,
    pub start_ticks: u64,
}

impl Left {
    /// The process with this number, if there is one.
    pub fn of(pid: i32) -> Option<Left> {
        Some(Left { pid, start_ticks: Process::start_ticks_of(pid).ok()? })
    }
}

/// The rule of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Rule {
    pub class: VmClass,
    pub weight: u32,
    pub min_bytes: Option<u64>,
    pub max_bytes: Option<u64>,
    pub hold: bool,
}

impl Default for Rule {
    fn default() -> Rule {
        Rule {
            class: VmClass::default(),
            weight: WEIGHT_DEFAULT,
            min_bytes: None,
            max_bytes: None,
            hold: false,
        }
    }
}

impl Rule {
    /// The rule after a request. 0 takes a bound away.
    pub fn with(self, request: &RuleRequest) -> Rule {
        let RuleRequest { class, min_bytes, max_bytes, weight, hold } = *request;
        let bound = |new: Option<u64>, old| new.map_or(old, |bytes| Some(bytes).filter(|&b| b > 0));
        Rule {
            class: class.unwrap_or(self.class),
            weight: weight.unwrap_or(self.weight),
            min_bytes: bound(min_bytes, self.min_bytes),
            max_bytes: bound(max_bytes, self.max_bytes),
            hold: hold.unwrap_or(self.hold),
        }
    }

    fn for_policy(self) -> VmRule {
        VmRule {
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            weight: self.weight,
            class: match self.class {
                VmClass::Batch => Class::Batch,
                VmClass::Normal => Class::Normal,
                VmClass::Latency => Class::Latency,
            },
            is_held: self.hold,
        }
    }
}

/// The policy's class as clients name it.
pub(super) fn class_for_clients(class: Class) -> VmClass {
    match class {
        Class::Batch => VmClass::Batch,
        Class::Normal => VmClass::Normal,
        Class::Latency => VmClass::Latency,
    }
}

impl Settings {
    /// Memory that is to stay available on the host.
    pub fn reserve(&self) -> Below {
        match self.reserve_bytes {
            Some(bytes) => Below::Bytes(bytes),
            None => Below::Percent(self.percent().unwrap_or(RESERVE_PERCENT_DEFAULT)),
        }
    }

    /// The same in percent; none: the size counts.
    pub fn percent(&self) -> Option<u32> {
        let percent = self.reserve_percent.unwrap_or(RESERVE_PERCENT_DEFAULT);
        self.reserve_bytes.is_none().then_some(percent)
    }

    /// The part of the time in which tasks may wait, in percent. `option`: the daemon's. None: waits
    /// do not count.
    pub fn stall_percent(&self, option: Option<u32>) -> Option<u32> {
        self.stall_percent.or(option).filter(|percent| *percent > 0)
    }

    /// The host's settings as the policy has them.
    pub fn host_rule(&self, stall_percent: Option<u32>) -> HostRule {
        HostRule {
            reserve: self.reserve(),
            stall_permille: self.stall_percent(stall_percent).map(|percent| percent * 10),
            swap_max_bytes: self.swap_max_bytes,
        }
    }

    /// The rule of a VM as the policy has it.
    pub fn rule(&self, name: &VmName) -> VmRule {
        self.rule_of(name).for_policy()
    }

    /// The rule of a VM.
    pub fn rule_of(&self, name: &VmName) -> Rule {
        self.rules.get(name).copied().unwrap_or_default()
    }

    /// Sets what the request names; the rest stays.
    pub fn set(&mut self, request: &PilotRequest) {
        let PilotRequest { mode, reserve_percent, reserve_bytes, .. } = *request;
        let PilotRequest { attach, stall_percent, swap_max_bytes, .. } = *request;
        self.mode = mode.unwrap_or(self.mode);
        self.attach = attach.unwrap_or(self.attach);
        if reserve_percent.is_some() || reserve_bytes.is_some() {
            (self.reserve_percent, self.reserve_bytes) = (reserve_percent, reserve_bytes);
        }
        self.stall_percent = stall_percent.or(self.stall_percent);
        let quota = |bytes| Some(bytes).filter(|bytes| *bytes > 0);
        self.swap_max_bytes = swap_max_bytes.map_or(self.swap_max_bytes, quota);
    }

    /// Takes over what the configuration file says, as far as it says something else than when it was
    /// last read. What it no longer says is as it was at first. Returns the keys that have changed.
    pub fn follow(&mut self, file: &PilotRequest) -> Vec<&'static str> {
        let before = std::mem::replace(&mut self.file, *file);
        let mut changed = Vec::new();
        if file.mode != before.mode {
            self.mode = file.mode.unwrap_or_default();
            changed.push("mode");
        }
        let reserve = |said: &PilotRequest| (said.reserve_percent, said.reserve_bytes);
        if reserve(file) != reserve(&before) {
            (self.reserve_percent, self.reserve_bytes) = reserve(file);
            changed.push("reserve");
        }
        if file.attach != before.attach {
            self.attach = file.attach.unwrap_or_default();
            changed.push("attach");
        }
        if file.stall_percent != before.stall_percent {
            self.stall_percent = file.stall_percent;
            changed.push("stall");
        }
        if file.swap_max_bytes != before.swap_max_bytes {
            self.swap_max_bytes = file.swap_max_bytes.filter(|bytes| *bytes > 0);
            changed.push("swap-max");
        }
        changed
    }

    /// Sets the rule of a VM. If there are many rules, those of VMs that do not exist are dropped.
    pub fn set_rule(&mut self, name: &VmName, rule: Rule, exists: impl Fn(&VmName) -> bool) {
        if rule == Rule::default() {
            self.rules.remove(name);
            return;
        }
        self.rules.insert(name.clone(), rule);
        if self.rules.len() > RULES_MOST {
            self.rules.retain(|name, _| exists(name));
        }
    }
}

impl PilotRecord {
    /// The settings that an earlier daemon left.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn open(run_dir: &Path) -> io::Result<Arc<PilotRecord>> {
        let path = run_dir.join(FILE);
        let settings = state_file::load_own::<Settings>(&path)?.unwrap_or_default();
        Ok(Arc::new(PilotRecord { path, settings: Mutex::new(settings) }))
    }

    pub(super) fn settings(&self) -> Settings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that an operator detaches this process: the pilot does not attach it again.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn leave(&self, pid: i32) -> io::Result<()> {
        let Some(process) = Left::of(pid) else { return Ok(()) };
        let note = |settings: &mut Settings| {
            settings.left.retain(|other| other.pid != pid && Left::of(other.pid) == Some(*other));
            settings.left.push(process);
            let surplus = settings.left.len().saturating_sub(LEFT_MOST);
            settings.left.drain(..surplus);
            Ok(())
        };
        self.change(note, |error| error)
    }

    /// Changes the settings. `change` may refuse; then nothing has changed.
    ///
    /// # Errors
    /// Those of `change`, and of writing the file, mapped by `unsaved`.
    pub(super) fn change<E>(
        &self,
        change: impl FnOnce(&mut Settings) -> Result<(), E>,
        unsaved: impl FnOnce(io::Error) -> E,
    ) -> Result<(), E> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = settings.clone();
        change(&mut next)?;
        state_file::save(&self.path, &next).map_err(unsaved)?;
        *settings = next;
        Ok(())
    }
}

/// The settings that a daemon left in `run_dir`, as the policy has them: for the host, and for a VM.
///
/// # Errors
/// Says in one line that the record cannot be read, or that no VM can have this name.
pub fn on_record(run_dir: &Path, vm: &str) -> Result<(HostRule, VmRule), String> {
    let record = PilotRecord::open(run_dir).map_err(|error| error.to_string())?;
    let name = vm.parse().map_err(|error: ebb_api::NameError| error.to_string())?;
    let settings = record.settings();
    Ok((settings.host_rule(None), settings.rule(&name)))
}
