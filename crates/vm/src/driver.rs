//! Whether the guest drives a device of QEMU, and which of the offered features its driver
//! accepted.

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// First major version of QEMU that may end by an assertion (`visit_start_struct`) when it is asked
/// for a device's status. This was seen with 11.1, for a balloon that is not driven.
const ENDS_WHEN_ASKED: u64 = 11;

/// What the guest's driver is known to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GuestDriver {
    /// The driver drives the device, with these features.
    Ready {
        /// The features by QEMU's names, such as `VIRTIO_BALLOON_F_REPORTING`.
        features: Vec<String>,
    },
    /// There is no driver, or it has not begun.
    Absent,
    /// Not known: QEMU does not tell (before 7.2), or must not be asked (from 11 on).
    Unknown,
}

impl GuestDriver {
    /// Whether the driver accepted this feature. `None` if not known.
    pub fn took(&self, feature: &str) -> Option<bool> {
        match self {
            GuestDriver::Ready { features } => Some(features.iter().any(|name| name == feature)),
            GuestDriver::Absent => Some(false),
            GuestDriver::Unknown => None,
        }
    }
}

/// Asks about the virtio device behind the proxy at QOM path `path`.
///
/// # Errors
/// [`QmpError`], except for a refusal, which gives [`GuestDriver::Unknown`].
pub fn of(qmp: &mut Qmp, path: &str) -> Result<GuestDriver, QmpError> {
    if major_version(qmp)? >= ENDS_WHEN_ASKED {
        return Ok(GuestDriver::Unknown);
    }
    let backend = format!("{path}/virtio-backend");
    match qmp.execute("x-query-virtio-status", json!({ "path": backend })) {
        Ok(answer) => Ok(parse(&answer)),
        Err(QmpError::Refused { .. }) => Ok(GuestDriver::Unknown),
        Err(error) => Err(error),
    }
}

fn major_version(qmp: &mut Qmp) -> Result<u64, QmpError> {
    let version = qmp.execute("query-version", json!({}))?;
    Ok(version.pointer("/qemu/major").and_then(Value::as_u64).unwrap_or(0))
}

fn parse(answer: &Value) -> GuestDriver {
    let Some(statuses) = answer.pointer("/status/statuses") else { return GuestDriver::Unknown };
    match names(statuses).any(|name| name == "VIRTIO_CONFIG_S_DRIVER_OK") {
        false => GuestDriver::Absent,
        true => {
            let features = answer.pointer("/guest-features/dev-features");
            let features = features.map(|list| names(list).map(str::to_owned).collect());
            GuestDriver::Ready { features: features.unwrap_or_default() }
        }
    }
}

/// The names in a list of `NAME: what it means`.
fn names(list: &Value) -> impl Iterator<Item = &str> {
    let items = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    items.map(|text| text.split(':').next().unwrap_or(text))
}

/// Returns the QOM paths of the devices whose type begins with `kind`, from QEMU's command line or
/// hot-plugged.
///
/// # Errors
/// [`QmpError`].
pub fn devices(qmp: &mut Qmp, kind: &str) -> Result<Vec<String>, QmpError> {
    let mut found = Vec::new();
    for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let list = qmp.execute("qom-list", json!({ "path": parent }))?;
        for child in list.as_array().into_iter().flatten() {
            let text = |key| child.get(key).and_then(Value::as_str).unwrap_or_default();
            let child_type = text("type").strip_prefix("child<");
            if child_type.is_some_and(|child_type| child_type.starts_with(kind)) {
                found.push(format!("{parent}/{}", text("name")));
            }
        }
    }
    Ok(found)
}

/// Returns a property of the object at `path`. `None` if QEMU refuses.
///
/// # Errors
/// [`QmpError`], except for a refusal.
pub fn property(qmp: &mut Qmp, path: &str, name: &str) -> Result<Option<Value>, QmpError> {
    match qmp.execute("qom-get", json!({ "path": path, "property": name })) {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_ready_once_it_says_so() {
        let status = |statuses: &[&str]| {
            json!({
                "status": { "statuses": statuses },
                "guest-features": {
                    "dev-features": ["VIRTIO_BALLOON_F_REPORTING: Page reporting VQ available"],
                },
            })
        };
        let ready = parse(&status(&["VIRTIO_CONFIG_S_DRIVER: x", "VIRTIO_CONFIG_S_DRIVER_OK: y"]));
        assert_eq!(ready.took("VIRTIO_BALLOON_F_REPORTING"), Some(true));
        assert_eq!(ready.took("VIRTIO_BALLOON_F_STATS_VQ"), Some(false));
        let absent = parse(&status(&["VIRTIO_CONFIG_S_DRIVER: x"]));
        assert_eq!((absent.took("x"), absent), (Some(false), GuestDriver::Absent));
        assert_eq!(parse(&json!([])), GuestDriver::Unknown);
        assert_eq!(GuestDriver::Unknown.took("x"), None);
    }
}
