//! `ebb detach --all`: every VM that Ebb manages.

use ebb_api::{DetachReport, VmName, VmSummary};
use serde::Serialize;

use crate::{FAILED, Outcome, show};

/// What became of one VM.
#[derive(Serialize)]
struct Detached {
    name: VmName,
    /// What was brought back; null: the VM stays managed.
    report: Option<DetachReport>,
    /// Why the VM stays managed; null: it is detached.
    error: Option<String>,
}

/// Detaches these VMs, one after the other: each may need memory of the host for what comes back.
///
/// # Errors
/// No answer can be shown. A VM that stays managed is in the outcome.
pub fn all(
    managed: Vec<VmSummary>,
    json: bool,
    mut send: impl FnMut(&VmName) -> anyhow::Result<DetachReport>,
) -> anyhow::Result<Outcome> {
    let detached: Vec<Detached> = managed
        .into_iter()
        .map(|VmSummary { name, .. }| match send(&name) {
            Ok(report) => Detached { name, report: Some(report), error: None },
            Err(error) => Detached { name, report: None, error: Some(format!("{error:#}")) },
        })
        .collect();
    let failed = detached.iter().any(|vm| vm.report.is_none());
    let text = match json {
        true => serde_json::to_string_pretty(&detached)? + "\n",
        false if detached.is_empty() => "there is no VM to detach\n".into(),
        false => detached.iter().map(Detached::line).collect(),
    };
    Ok(Outcome { text, code: if failed { FAILED } else { 0 } })
}

impl Detached {
    fn line(&self) -> String {
        match (&self.report, &self.error) {
            (Some(report), _) => show::detached(&self.name, report),
            (None, why) => {
                let why = why.as_deref().unwrap_or_default().replace(char::is_control, "?");
                format!("{} stays managed: {why}\n", self.name)
            }
        }
    }
}
