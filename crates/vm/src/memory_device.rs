//! QEMU's own virtio-mem devices (VIRTIO 1.2, 5.15), and the VM's other memory.

use ebb_units::Gpa;
use serde_json::{Value, json};

use crate::driver::{self, GuestDriver};
use crate::qmp::{Qmp, QmpError};

/// Bound on the bytes of memory that QEMU may tell. A larger answer is not understood.
const BYTES_MAX: u64 = 1 << 52;
/// Most NUMA nodes, as in QEMU.
const NODES_MAX: usize = 128;
/// Most memory devices. QEMU has 256 slots for DIMMs, and KVM has no more.
pub(crate) const DEVICES_MAX: usize = 512;

/// A virtio-mem device of QEMU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryDevice {
    /// The device's QOM path.
    pub path: String,
    /// The guest's NUMA node that it belongs to.
    pub node: u32,
    /// Where the device's region begins.
    pub address: Gpa,
    /// Bytes that the guest has plugged.
    pub plugged_bytes: u64,
    /// Bytes that the guest is asked to plug.
    pub requested_bytes: u64,
    /// Bytes of the device's region.
    pub max_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Whether the guest drives the device.
    pub driver: GuestDriver,
}

/// The memory that a VM has, by where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryReport {
    /// Bytes that the VM began with, DIMMs included.
    pub initial_bytes: u64,
    /// Bytes that the VM began with, by NUMA node. Without nodes, all are on node 0.
    pub node_bytes: Vec<u64>,
    /// The VM's virtio-mem devices.
    pub devices: Vec<MemoryDevice>,
}

/// Asks QEMU for the VM's memory.
///
/// # Errors
/// [`QmpError`].
pub fn look(qmp: &mut Qmp) -> Result<MemoryReport, QmpError> {
    let summary = qmp.execute("query-memory-size-summary", json!({}))?;
    let base = bytes(&summary, "base-memory").ok_or_else(|| unclear("base-memory"))?;
    let list = qmp.execute("query-memory-devices", json!({}))?;
    let (dimms, found) = parse(&list).ok_or_else(|| unclear("query-memory-devices"))?;
    if dimms.len().max(found.len()) > DEVICES_MAX {
        return Err(unclear("query-memory-devices"));
    }
    let mut devices = Vec::new();
    for mut device in found {
        if device.path.is_empty() {
            device.path = anonymous(qmp, device.address)?;
        }
        device.driver = driver::of(qmp, &device.path)?;
        devices.push(device);
    }
    let initial_bytes = base + dimms.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let node_bytes = parse_nodes(&qmp.human("info numa")?, &dimms);
    let node_bytes = if node_bytes.is_empty() { vec![initial_bytes] } else { node_bytes };
    Ok(MemoryReport { initial_bytes, node_bytes, devices })
}

/// Asks the guest to plug `bytes` of the device.
///
/// # Errors
/// [`QmpError::Refused`] if `bytes` is not a whole number of blocks, or more than the region.
pub fn request(qmp: &mut Qmp, device: &MemoryDevice, bytes: u64) -> Result<(), QmpError> {
    let property = json!({ "path": device.path, "property": "requested-size", "value": bytes });
    qmp.execute("qom-set", property).map(drop)
}

fn unclear(what: &str) -> QmpError {
    QmpError::Protocol(format!("its answer on {what} is not understood"))
}

fn bytes(object: &Value, key: &str) -> Option<u64> {
    object.get(key).and_then(Value::as_u64).filter(|bytes| *bytes <= BYTES_MAX)
}

type Dimm = (u32, u64);

/// Parses the nodes and sizes of DIMMs, and the virtio-mem devices. A device without a name has no
/// path yet.
fn parse(list: &Value) -> Option<(Vec<Dimm>, Vec<MemoryDevice>)> {
    let (mut dimms, mut devices) = (Vec::new(), Vec::new());
    for item in list.as_array()? {
        let data = item.get("data")?;
        let node = || u32::try_from(data.get("node").and_then(Value::as_u64)?).ok();
        match item.get("type").and_then(Value::as_str)? {
            "dimm" => dimms.push((node()?, bytes(data, "size")?)),
            "virtio-mem" => devices.push(MemoryDevice {
                path: data.get("id").and_then(Value::as_str).map_or(String::new(), named),
                node: node()?,
                address: Gpa(data.get("memaddr").and_then(Value::as_u64)?),
                plugged_bytes: bytes(data, "size")?,
                requested_bytes: bytes(data, "requested-size")?,
                max_bytes: bytes(data, "max-size")?,
                block_bytes: bytes(data, "block-size").filter(|block| *block > 0)?,
                driver: GuestDriver::Unknown,
            }),
            _ => {}
        }
    }
    devices.sort_by_key(|device| (device.node, device.address));
    Some((dimms, devices))
}

fn named(id: &str) -> String {
    format!("/machine/peripheral/{id}")
}

/// Finds the path of a device without a name by its address.
fn anonymous(qmp: &mut Qmp, address: Gpa) -> Result<String, QmpError> {
    for path in driver::devices(qmp, "virtio-mem")? {
        let found = driver::property(qmp, &path, "memaddr")?;
        if found.and_then(|value| value.as_u64()) == Some(address.0) {
            return Ok(path);
        }
    }
    Err(unclear("a virtio-mem device without an id"))
}

/// Bytes that each node began with: `node 0 size: 4096 MB` minus `node 0 plugged: 8 MB`, plus its
/// DIMMs, which QEMU counts as plugged.
fn parse_nodes(text: &str, dimms: &[Dimm]) -> Vec<u64> {
    let figure = |node: usize, what: &str| {
        let key = format!("node {node} {what}: ");
        let mib = text.lines().find_map(|line| line.trim().strip_prefix(&key)?.strip_suffix(" MB"));
        mib.and_then(|mib| mib.parse::<u64>().ok()?.checked_mul(1 << 20))
    };
    (0..NODES_MAX)
        .map_while(|node| {
            let dimms = dimms.iter().filter(|(on, _)| usize::try_from(*on) == Ok(node));
            let dimms = dimms.fold(0, |all: u64, (_, bytes)| all.saturating_add(*bytes));
            let plugged = figure(node, "plugged").unwrap_or(0);
            Some(figure(node, "size")?.saturating_sub(plugged).saturating_add(dimms))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn virtio_mem(id: Option<&str>, node: u64, size: u64) -> Value {
        let mut data = json!({
            "memaddr": 0x1_4000_0000u64 * (node + 1), "node": node, "memdev": "/objects/grow0",
            "size": size, "requested-size": 8 * MIB, "max-size": 64 * MIB, "block-size": 2 * MIB,
        });
        if let Some(id) = id {
            data["id"] = id.into();
        }
        json!({ "type": "virtio-mem", "data": data })
    }

    #[test]
    fn devices_are_read_in_order_of_nodes() {
        let dimm = json!({ "type": "dimm", "data": { "node": 1, "size": 128 * MIB, "addr": 0 } });
        let other = json!({ "type": "sgx-epc", "data": {} });
        let list = json!([virtio_mem(None, 1, 4 * MIB), dimm, other, virtio_mem(Some("m0"), 0, 0)]);
        let (dimms, devices) = parse(&list).expect("a list");
        assert_eq!(dimms, [(1, 128 * MIB)]);
        let paths: Vec<&str> = devices.iter().map(|device| device.path.as_str()).collect();
        assert_eq!(paths, ["/machine/peripheral/m0", ""]);
        assert_eq!((devices[1].plugged_bytes, devices[1].max_bytes), (4 * MIB, 64 * MIB));
    }

    #[test]
    fn an_answer_of_another_form_is_none() {
        assert_eq!(parse(&json!({})), None);
        let mut device = virtio_mem(Some("m0"), 0, 0);
        for (key, wrong) in [("block-size", 0), ("size", u64::MAX)] {
            let before = device["data"][key].take();
            device["data"][key] = wrong.into();
            assert_eq!(parse(&json!([device])), None, "{key}");
            device["data"][key] = before;
        }
    }

    #[test]
    fn nodes_are_what_they_began_with() {
        let text = "2 nodes\r\nnode 0 cpus: 0\r\nnode 0 size: 4104 MB\r\nnode 0 plugged: 8 MB\r\n\
                    node 1 cpus: 1\r\nnode 1 size: 4224 MB\r\nnode 1 plugged: 128 MB\r\n";
        assert_eq!(parse_nodes(text, &[]), [4096 * MIB, 4096 * MIB]);
        assert_eq!(parse_nodes(text, &[(1, 128 * MIB)]), [4096 * MIB, 4224 * MIB]);
        assert!(parse_nodes("0 nodes\r\n", &[]).is_empty());
        assert!(parse_nodes("node 0 size: 99999999999999999999 MB", &[]).is_empty());
    }
}
