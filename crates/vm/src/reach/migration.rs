//! A migration of the VMM, and whether it gives the memory away.

use std::time::Instant;

use serde_json::{Value, json};

use super::asked::Asked;
use super::{DeviceKind, MemoryUser, NAME_MAX, PIECE};
use crate::qmp::{Qmp, QmpError};
use crate::shown::shown;

/// A migration of the VMM, which concerns all of its memory.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Migration {
    /// What makes the next migration give away the memory itself, if anything does.
    pub shared: Option<MemoryUser>,
    /// Status of the last migration, as QEMU names it. `None` if there was none.
    pub status: Option<String>,
}

impl Migration {
    /// Whether the guest is about to migrate, or does so now.
    pub fn is_under_way(&self) -> bool {
        self.status.as_deref().is_some_and(|status| !is_over(status))
    }
}

/// Whether a migration of this status has ended, or there was none.
fn is_over(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

/// Whether the VMM waits for its guest, which another VMM or a file is to send.
///
/// # Errors
/// [`QmpError`] if the VMM does not answer.
pub fn awaits_guest(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let answer = qmp.execute("query-status", json!({}))?;
    Ok(answer.get("status").and_then(Value::as_str) == Some("inmigrate"))
}

/// Asks the VMM about its migration. Settings that share the memory cause no event and no
/// descriptor. Asks nothing after `end`.
///
/// # Errors
/// [`QmpError`] if it does not answer, or not in time.
pub fn of_migration(qmp: &mut Qmp, end: Instant) -> Result<Migration, QmpError> {
    qmp.until(end, PIECE, |qmp| {
        let mut asked = Asked::new(qmp);
        let capabilities = asked.ask_if_known("query-migrate-capabilities", json!({}))?;
        let parameters = asked.ask_if_known("query-migrate-parameters", json!({}))?;
        let answer = asked.ask_if_known("query-migrate", json!({}))?;
        let shared = shared_migration(&capabilities, &parameters);
        let shared = shared.map(|name| MemoryUser::new(&name, DeviceKind::SharedMigration));
        let status = answer.get("status").and_then(Value::as_str);
        let status = status.filter(|&status| status != "none" && status.len() <= NAME_MAX);
        Ok(Migration { shared, status: status.map(|status| shown(status, NAME_MAX)) })
    })
}

/// What makes the next migration give away the memory itself, if anything does.
pub(super) fn shared_migration(capabilities: &Value, parameters: &Value) -> Option<String> {
    let is_on = |capability: &&Value| {
        capability.get("capability").and_then(Value::as_str) == Some("x-ignore-shared")
            && capability.get("state").and_then(Value::as_bool) == Some(true)
    };
    if capabilities.as_array().into_iter().flatten().any(|capability| is_on(&capability)) {
        return Some("migration with x-ignore-shared".into());
    }
    let mode = parameters.get("mode").and_then(Value::as_str)?;
    mode.starts_with("cpr-").then(|| format!("migration in mode {mode}"))
}

/// Cancels a migration that is in progress. Returns whether there was one.
///
/// # Errors
/// [`QmpError`] if the VMM does not answer.
pub fn cancel_migration(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let answer = qmp.execute("query-migrate", json!({}))?;
    match answer.get("status").and_then(Value::as_str) {
        Some(status) if !is_over(status) => qmp.execute("migrate_cancel", json!({})).map(|_| true),
        _ => Ok(false),
    }
}
