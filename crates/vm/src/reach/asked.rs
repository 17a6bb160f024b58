//! A VMM that is asked for its devices: its objects, network back ends and block drivers.

use std::time::Instant;

use serde_json::{Value, json};

use super::{DeviceKind, MemoryUser, PIECE, bounded};
use crate::qmp::{Qmp, QmpError};

/// Most objects in one place. QEMU has fewer.
pub(super) const OBJECTS_MAX: usize = 8192;
/// Where QEMU has its devices and other objects.
const PLACES: [&str; 4] =
    ["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached", "/objects"];
/// Drivers of QEMU's block layer that give guest memory to another process or device.
const BLOCK_DRIVERS: [(&str, DeviceKind); 3] = [
    ("virtio-blk-vhost-user", DeviceKind::VhostUser),
    ("virtio-blk-vhost-vdpa", DeviceKind::Vdpa),
    ("virtio-blk-vfio-pci", DeviceKind::Vfio),
];

/// Finds devices by what the VMM tells: its objects, network back ends and block drivers. `own` are
/// the character devices that this daemon serves. Of very many devices, one stands for those that
/// restrict the least. Asks nothing after `end`.
///
/// # Errors
/// [`QmpError`] if it does not answer, or not in time.
pub fn of_vmm(qmp: &mut Qmp, own: &[String], end: Instant) -> Result<Vec<MemoryUser>, QmpError> {
    qmp.until(end, PIECE, |qmp| {
        let mut asked = Asked::new(qmp);
        let mut found = Vec::new();
        for place in PLACES {
            asked.objects(place, own, &mut found)?;
        }
        asked.machine(&mut found)?;
        asked.networks(&mut found)?;
        asked.block_drivers(&mut found)?;
        Ok(bounded(found))
    })
}

/// A VMM that is asked several questions.
pub(super) struct Asked<'a> {
    qmp: &'a mut Qmp,
}

impl<'a> Asked<'a> {
    /// Asks over this connection.
    pub(super) fn new(qmp: &'a mut Qmp) -> Asked<'a> {
        Asked { qmp }
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.qmp.execute(command, arguments)
    }

    /// Asks, and returns null where older versions or other builds do not know the command.
    pub(super) fn ask_if_known(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        match self.ask(command, arguments) {
            Err(QmpError::Refused { .. }) => Ok(Value::Null),
            answer => answer,
        }
    }

    fn objects(
        &mut self,
        place: &str,
        own: &[String],
        found: &mut Vec<MemoryUser>,
    ) -> Result<(), QmpError> {
        let list = self.ask("qom-list", json!({ "path": place }))?;
        for (name, object_type, kind) in kinds_of_objects(&list)? {
            let path = format!("{place}/{name}");
            if kind == DeviceKind::VhostUser && self.is_own(&path, own)? {
                continue;
            }
            found.push(MemoryUser::new(&full_name(object_type, name), kind));
        }
        Ok(())
    }

    /// Whether this daemon serves the device.
    fn is_own(&mut self, path: &str, own: &[String]) -> Result<bool, QmpError> {
        if own.is_empty() {
            return Ok(false);
        }
        let arguments = json!({ "path": path, "property": "chardev" });
        let chardev = self.ask_if_known("qom-get", arguments)?;
        Ok(chardev.as_str().is_some_and(|chardev| own.iter().any(|own| own == chardev)))
    }

    fn machine(&mut self, found: &mut Vec<MemoryUser>) -> Result<(), QmpError> {
        let arguments = json!({ "path": "/machine", "property": "confidential-guest-support" });
        let support = self.ask_if_known("qom-get", arguments)?;
        if let Some(path) = support.as_str().filter(|path| !path.is_empty()) {
            let name = format!("confidential guest support by {path}");
            found.push(MemoryUser::new(&name, DeviceKind::Confidential));
        }
        Ok(())
    }

    /// QEMU has neither an object nor a QMP command for them.
    fn networks(&mut self, found: &mut Vec<MemoryUser>) -> Result<(), QmpError> {
        found.extend(kinds_of_networks(&self.qmp.human("info network")?));
        Ok(())
    }

    fn block_drivers(&mut self, found: &mut Vec<MemoryUser>) -> Result<(), QmpError> {
        let nodes = self.ask_if_known("query-named-block-nodes", json!({ "flat": true }))?;
        for driver in nodes.as_array().into_iter().flatten().filter_map(|node| node.get("drv")) {
            let known = BLOCK_DRIVERS.iter().find(|(name, _)| driver.as_str() == Some(name));
            found.extend(known.map(|&(name, kind)| MemoryUser::new(name, kind)));
        }
        Ok(())
    }
}

/// The children of one place that reach the memory: name, type and kind.
pub(super) fn kinds_of_objects(list: &Value) -> Result<Vec<(&str, &str, DeviceKind)>, QmpError> {
    let list = list.as_array().filter(|list| list.len() <= OBJECTS_MAX);
    let list = list.ok_or_else(|| QmpError::Protocol("qom-list answers no list".into()))?;
    Ok(list.iter().filter_map(kind_of_entry).collect())
}

fn kind_of_entry(entry: &Value) -> Option<(&str, &str, DeviceKind)> {
    let object_type = entry.get("type")?.as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
    Some((entry.get("name")?.as_str()?, object_type, kind_of_type(object_type)?))
}

/// The kind by the name of QEMU's type, from 7.2 to 11.
pub(super) fn kind_of_type(name: &str) -> Option<DeviceKind> {
    const PREFIXES: [(&str, DeviceKind); 11] = [
        ("vhost-user-", DeviceKind::VhostUser),
        ("cryptodev-vhost-user", DeviceKind::VhostUser),
        ("vfio-user-", DeviceKind::OtherProcess),
        ("x-pci-proxy-dev", DeviceKind::OtherProcess),
        ("vfio-", DeviceKind::Vfio),
        ("iommufd", DeviceKind::Iommufd),
        ("vhost-vdpa-", DeviceKind::Vdpa),
        ("vhost-scsi", DeviceKind::VhostScsi),
        ("pvrdma", DeviceKind::Rdma),
        ("sev-", DeviceKind::Confidential),
        ("tdx-guest", DeviceKind::Confidential),
    ];
    // Made with the machine for passed-through graphics. It is no device by itself.
    if name == "vfio-pci-igd-lpc-bridge" {
        return None;
    }
    PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|&(_, kind)| kind)
}

/// The name to show. A device without a name of its own has a number in brackets.
pub(super) fn full_name(object_type: &str, name: &str) -> String {
    match name.contains('[') {
        true => object_type.to_owned(),
        false => format!("{object_type} {name}"),
    }
}

/// Parses `NAME: index=0,type=vhost-user,...`
pub(super) fn kinds_of_networks(text: &str) -> Vec<MemoryUser> {
    let of_line = |line: &str| {
        let line = line.trim_start_matches([' ', '\\']);
        let (name, rest) = line.split_once(": ")?;
        let back_end = rest.split(',').find_map(|word| word.strip_prefix("type="))?;
        let kind = match back_end {
            // passt serves by vhost-user only if it is told to, which QEMU does not show.
            "vhost-user" | "passt" => DeviceKind::VhostUser,
            "vhost-vdpa" => DeviceKind::Vdpa,
            _ => return None,
        };
        Some(MemoryUser::new(&format!("{back_end} network {name}"), kind))
    };
    text.lines().take(OBJECTS_MAX).filter_map(of_line).collect()
}
