//! How much of a VM's memory may be reclaimed or evicted, given what reaches it. A device that QEMU
//! emulates reads and writes guest memory through QEMU's address space, and its fault waits for
//! memory that is non-resident. Other devices pin the memory, or map it in a process of their own.
//! `docs/devices.md` has the table.
//!
//! There are two sources: the VMM's open descriptors, which need no answer from it, and its
//! objects, for which it is asked by QMP.

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Longest time of one look, after which nothing more is asked.
const LOOK: Duration = Duration::from_secs(20);
/// Longest wait for one piece of an answer.
pub(crate) const PIECE: Duration = Duration::from_secs(10);
/// Most objects in one place. QEMU has fewer.
const OBJECTS_MAX: usize = 8192;
/// Most characters of a name, because names go into messages.
const NAME_MAX: usize = 64;
/// Where QEMU has its devices and other objects.
const PLACES: [&str; 4] =
    ["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached", "/objects"];
/// Drivers of QEMU's block layer that give guest memory to another process or device.
const BLOCK_DRIVERS: [(&str, Kind); 3] = [
    ("virtio-blk-vhost-user", Kind::VhostUser),
    ("virtio-blk-vhost-vdpa", Kind::Vdpa),
    ("virtio-blk-vfio-pci", Kind::Vfio),
];

/// What may be reclaimed or evicted, in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reach {
    /// All memory must stay where it is.
    Nothing,
    /// Free memory may be reclaimed: nobody needs its content.
    FreeOnly,
    /// Memory in use may be evicted as well: a touch waits until it is refilled.
    Everything,
}

/// What reaches the memory other than through the VMM's address space, or why the memory must stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A passed-through device.
    Vfio,
    /// A virtio device in hardware, or one by VDUSE.
    Vdpa,
    /// Memory registered with an RDMA network card.
    Rdma,
    /// Memory that the host cannot read.
    Confidential,
    /// A migration that gives the memory itself to another process.
    SharedMigration,
    /// A device that another process serves.
    VhostUser,
    /// A PCI device that another process serves.
    OtherProcess,
    /// The kernel's SCSI target.
    VhostScsi,
    /// Guest memory used as buffers of the host's graphics.
    Udmabuf,
    /// The VMM does not tell.
    Unknown,
}

impl Kind {
    /// How much may be reclaimed or evicted despite it.
    pub fn reach(self) -> Reach {
        match self {
            Kind::Vfio | Kind::Vdpa | Kind::Rdma | Kind::Confidential | Kind::SharedMigration => {
                Reach::Nothing
            }
            Kind::VhostUser
            | Kind::OtherProcess
            | Kind::VhostScsi
            | Kind::Udmabuf
            | Kind::Unknown => Reach::FreeOnly,
        }
    }

    /// Why no more may be reclaimed or evicted.
    pub fn why(self) -> &'static str {
        match self {
            Kind::Vfio | Kind::Vdpa => {
                "its DMA needs memory that stays where it is, and Ebb does not drive its IOMMU"
            }
            Kind::Rdma => "it pins memory for the network card",
            Kind::Confidential => "the host cannot read or move the memory of such a guest",
            Kind::SharedMigration => {
                "the memory is to be another process's, which Ebb does not hold"
            }
            Kind::VhostUser | Kind::OtherProcess => {
                "it is served by another process, which would find zeros where memory in use was \
                 evicted"
            }
            Kind::VhostScsi => "it pins memory in use while requests are under way",
            Kind::Udmabuf => "it pins the memory in use that is shown",
            Kind::Unknown => "it does not say which devices the VM has",
        }
    }
}

/// Something that reaches the memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its name in QEMU or the kernel.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

impl Device {
    fn new(name: &str, kind: Kind) -> Device {
        let shown = name.chars().take(NAME_MAX).map(|c| if c.is_control() { '?' } else { c });
        Device { name: shown.collect(), kind }
    }

    /// Stands for the unknown devices of a VMM that does not tell which it has.
    pub fn unknown() -> Device {
        Device::new("QEMU", Kind::Unknown)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.kind.why())
    }
}

/// How much may be reclaimed or evicted despite all of these devices.
pub fn reach(devices: &[Device]) -> Reach {
    devices.iter().map(|device| device.kind.reach()).min().unwrap_or(Reach::Everything)
}

/// The device that allows the least to be reclaimed or evicted. `None` if there are no devices.
pub fn narrowest(devices: &[Device]) -> Option<&Device> {
    devices.iter().min_by_key(|device| device.kind.reach())
}

/// Finds devices by the VMM's open descriptors, as `/proc/PID/fd` names them. Others reach memory
/// through the VMM's address space (vhost-net, vhost-vsock) or not at all: `kvm-vfio` pins nothing,
/// and QEMU keeps it open after the last such device is removed.
pub fn of_descriptors<'a>(links: impl IntoIterator<Item = &'a str>) -> Vec<Device> {
    let mut found: Vec<Device> = Vec::new();
    for link in links {
        if let Some(kind) = of_descriptor(link)
            && found.iter().all(|device| device.kind != kind)
        {
            found.push(Device::new(link, kind));
        }
    }
    found
}

fn of_descriptor(link: &str) -> Option<Kind> {
    const PATHS: [(&str, Kind); 8] = [
        ("/dev/vfio/", Kind::Vfio),
        ("/dev/iommu", Kind::Vfio),
        ("/dev/vhost-vdpa", Kind::Vdpa),
        ("/dev/infiniband/", Kind::Rdma),
        ("/dev/sev", Kind::Confidential),
        ("/dev/vhost-scsi", Kind::VhostScsi),
        ("/dev/udmabuf", Kind::Udmabuf),
        ("anon_inode:[vfio-device]", Kind::Vfio),
    ];
    let named = PATHS.iter().find(|(path, _)| link.starts_with(path)).map(|&(_, kind)| kind);
    let is_private = || link.contains("kvm-gmem") || link.contains("guest_memfd");
    named.or_else(|| is_private().then_some(Kind::Confidential))
}

/// End of a look that begins now, after which nothing is asked.
pub fn end_of_look() -> Instant {
    Instant::now() + LOOK
}

/// Finds devices by what the VMM tells: its objects, network back ends and block drivers. `own` are
/// the character devices that this daemon serves. Asks nothing after `end`.
///
/// # Errors
/// [`QmpError`] if it does not answer, or not in time.
pub fn of_vmm(qmp: &mut Qmp, own: &[String], end: Instant) -> Result<Vec<Device>, QmpError> {
    qmp.until(end, PIECE, |qmp| {
        let mut asked = Asked { qmp };
        let mut found = Vec::new();
        for place in PLACES {
            asked.objects(place, own, &mut found)?;
        }
        asked.machine(&mut found)?;
        asked.networks(&mut found)?;
        asked.block_drivers(&mut found)?;
        Ok(found)
    })
}

/// A migration of the VMM, which concerns all of its memory.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Migration {
    /// What makes the next migration give away the memory itself, if anything does.
    pub shared: Option<Device>,
    /// Status of the last migration, as QEMU names it. `None` if there was none.
    pub status: Option<String>,
}

/// Asks the VMM about its migration. Settings that share the memory cause no event and no
/// descriptor. Asks nothing after `end`.
///
/// # Errors
/// [`QmpError`] if it does not answer, or not in time.
pub fn of_migration(qmp: &mut Qmp, end: Instant) -> Result<Migration, QmpError> {
    qmp.until(end, PIECE, |qmp| {
        let mut asked = Asked { qmp };
        let capabilities = asked.ask_if_known("query-migrate-capabilities", json!({}))?;
        let parameters = asked.ask_if_known("query-migrate-parameters", json!({}))?;
        let answer = asked.ask_if_known("query-migrate", json!({}))?;
        let shared = shared_migration(&capabilities, &parameters);
        let shared = shared.map(|name| Device::new(&name, Kind::SharedMigration));
        let status = answer.get("status").and_then(Value::as_str);
        let status = status.filter(|&status| status != "none" && status.len() <= NAME_MAX);
        Ok(Migration { shared, status: status.map(str::to_owned) })
    })
}

/// A VMM that is asked several questions.
struct Asked<'a> {
    qmp: &'a mut Qmp,
}

impl Asked<'_> {
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.qmp.execute(command, arguments)
    }

    /// Asks, and returns null where older versions or other builds do not know the command.
    fn ask_if_known(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        match self.ask(command, arguments) {
            Err(QmpError::Refused { .. }) => Ok(Value::Null),
            answer => answer,
        }
    }

    fn objects(
        &mut self,
        place: &str,
        own: &[String],
        found: &mut Vec<Device>,
    ) -> Result<(), QmpError> {
        let list = self.ask("qom-list", json!({ "path": place }))?;
        for (name, object_type, kind) in kinds_of_objects(&list)? {
            let path = format!("{place}/{name}");
            if kind == Kind::VhostUser && self.is_own(&path, own)? {
                continue;
            }
            found.push(Device::new(&full_name(object_type, name), kind));
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

    fn machine(&mut self, found: &mut Vec<Device>) -> Result<(), QmpError> {
        let arguments = json!({ "path": "/machine", "property": "confidential-guest-support" });
        let support = self.ask_if_known("qom-get", arguments)?;
        if let Some(path) = support.as_str().filter(|path| !path.is_empty()) {
            let name = format!("confidential guest support by {path}");
            found.push(Device::new(&name, Kind::Confidential));
        }
        Ok(())
    }

    /// QEMU has neither an object nor a QMP command for them.
    fn networks(&mut self, found: &mut Vec<Device>) -> Result<(), QmpError> {
        found.extend(kinds_of_networks(&self.qmp.human("info network")?));
        Ok(())
    }

    fn block_drivers(&mut self, found: &mut Vec<Device>) -> Result<(), QmpError> {
        let nodes = self.ask_if_known("query-named-block-nodes", json!({ "flat": true }))?;
        for driver in nodes.as_array().into_iter().flatten().filter_map(|node| node.get("drv")) {
            let known = BLOCK_DRIVERS.iter().find(|(name, _)| driver.as_str() == Some(name));
            found.extend(known.map(|&(name, kind)| Device::new(name, kind)));
        }
        Ok(())
    }
}

/// The children of one place that reach the memory: name, type and kind.
fn kinds_of_objects(list: &Value) -> Result<Vec<(&str, &str, Kind)>, QmpError> {
    let list = list.as_array().filter(|list| list.len() <= OBJECTS_MAX);
    let list = list.ok_or_else(|| QmpError::Protocol("qom-list answers no list".into()))?;
    Ok(list.iter().filter_map(kind_of_entry).collect())
}

fn kind_of_entry(entry: &Value) -> Option<(&str, &str, Kind)> {
    let object_type = entry.get("type")?.as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
    Some((entry.get("name")?.as_str()?, object_type, kind_of_type(object_type)?))
}

/// The kind by the name of QEMU's type, from 7.2 to 11.
fn kind_of_type(name: &str) -> Option<Kind> {
    const PREFIXES: [(&str, Kind); 11] = [
        ("vhost-user-", Kind::VhostUser),
        ("cryptodev-vhost-user", Kind::VhostUser),
        ("vfio-user-", Kind::OtherProcess),
        ("x-pci-proxy-dev", Kind::OtherProcess),
        ("vfio-", Kind::Vfio),
        ("iommufd", Kind::Vfio),
        ("vhost-vdpa-", Kind::Vdpa),
        ("vhost-scsi", Kind::VhostScsi),
        ("pvrdma", Kind::Rdma),
        ("sev-", Kind::Confidential),
        ("tdx-guest", Kind::Confidential),
    ];
    // Made with the machine for passed-through graphics. It is no device by itself.
    if name == "vfio-pci-igd-lpc-bridge" {
        return None;
    }
    PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|&(_, kind)| kind)
}

/// The name to show. A device without a name of its own has a number in brackets.
fn full_name(object_type: &str, name: &str) -> String {
    match name.contains('[') {
        true => object_type.to_owned(),
        false => format!("{object_type} {name}"),
    }
}

/// Parses `NAME: index=0,type=vhost-user,...`
fn kinds_of_networks(text: &str) -> Vec<Device> {
    let of_line = |line: &str| {
        let line = line.trim_start_matches([' ', '\\']);
        let (name, rest) = line.split_once(": ")?;
        let back_end = rest.split(',').find_map(|word| word.strip_prefix("type="))?;
        let kind = match back_end {
            // passt serves by vhost-user only if it is told to, which QEMU does not show.
            "vhost-user" | "passt" => Kind::VhostUser,
            "vhost-vdpa" => Kind::Vdpa,
            _ => return None,
        };
        Some(Device::new(&format!("{back_end} network {name}"), kind))
    };
    text.lines().take(OBJECTS_MAX).filter_map(of_line).collect()
}

/// What makes the next migration give away the memory itself, if anything does.
fn shared_migration(capabilities: &Value, parameters: &Value) -> Option<String> {
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
    let is_over = |status| matches!(status, "none" | "completed" | "failed" | "cancelled");
    match answer.get("status").and_then(Value::as_str) {
        Some(status) if !is_over(status) => qmp.execute("migrate_cancel", json!({})).map(|_| true),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(devices: &[Device]) -> Vec<(&str, Kind)> {
        devices.iter().map(|device| (device.name.as_str(), device.kind)).collect()
    }

    /// What QEMU 7.2 and 11 answer to `qom-list /machine/peripheral`, shortened.
    #[test]
    fn objects_are_told_by_their_types() {
        let list = json!([
            { "name": "type", "type": "string" },
            { "name": "b0", "type": "child<vhost-user-blk-pci>" },
            { "name": "device[1]", "type": "child<vhost-user-fs-pci>" },
            { "name": "rp0", "type": "child<pcie-root-port>" },
            { "name": "n", "type": "child<virtio-net-pci>" },
            { "name": "bridge", "type": "child<vfio-pci-igd-lpc-bridge>" },
            { "name": "gpu", "type": "child<vfio-pci-nohotplug>" },
            { "name": "u", "type": "child<vfio-user-pci>" },
            { "name": "v", "type": "child<vhost-vsock-pci>" },
            { "name": "s", "type": "child<vhost-scsi-pci>" },
            { "name": "bus", "type": "link<vfio-pci>" },
        ]);
        let found = kinds_of_objects(&list).unwrap();
        let found: Vec<(String, Kind)> =
            found.iter().map(|&(name, kind, what)| (full_name(kind, name), what)).collect();
        let expected = [
            ("vhost-user-blk-pci b0", Kind::VhostUser),
            ("vhost-user-fs-pci", Kind::VhostUser),
            ("vfio-pci-nohotplug gpu", Kind::Vfio),
            ("vfio-user-pci u", Kind::OtherProcess),
            ("vhost-scsi-pci s", Kind::VhostScsi),
        ];
        assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind)));
        assert!(kinds_of_objects(&json!({ "no": "list" })).is_err());
        assert!(kinds_of_objects(&json!(vec![1; OBJECTS_MAX + 1])).is_err());
    }

    #[test]
    fn each_kind_leaves_something_or_nothing() {
        for (name, expected) in [
            ("vfio-pci", Reach::Nothing),
            ("iommufd", Reach::Nothing),
            ("vhost-vdpa-device-pci", Reach::Nothing),
            ("pvrdma", Reach::Nothing),
            ("sev-guest", Reach::Nothing),
            ("sev-snp-guest", Reach::Nothing),
            ("tdx-guest", Reach::Nothing),
            ("vhost-user-gpu-pci", Reach::FreeOnly),
            ("vhost-user-test-device-pci", Reach::FreeOnly),
            ("cryptodev-vhost-user", Reach::FreeOnly),
            ("x-pci-proxy-dev", Reach::FreeOnly),
        ] {
            assert_eq!(kind_of_type(name).map(Kind::reach), Some(expected), "{name}");
        }
        for name in ["virtio-blk-pci", "vhost-vsock-pci", "ivshmem-plain", "memory-backend-memfd"] {
            assert_eq!(kind_of_type(name), None, "{name}");
        }
    }

    #[test]
    fn descriptors_tell_what_pins_memory() {
        let links = [
            "socket:[23392]",
            "/dev/kvm",
            "anon_inode:kvm-vfio",
            "/dev/vhost-net",
            "/dev/vhost-vsock",
            "/memfd:ram0 (deleted)",
            "anon_inode:[eventfd]",
        ];
        assert_eq!(of_descriptors(links), []);
        let links = [
            "/dev/vfio/vfio",
            "/dev/vfio/12",
            "/dev/vhost-vdpa-0",
            "/dev/sev",
            "/dev/vhost-scsi",
            "/dev/udmabuf",
            "anon_inode:[kvm-gmem]",
        ];
        let found = of_descriptors(links);
        let kinds: Vec<Kind> = found.iter().map(|device| device.kind).collect();
        let expected = [Kind::Vfio, Kind::Vdpa, Kind::Confidential, Kind::VhostScsi, Kind::Udmabuf];
        assert_eq!(kinds, expected);
        assert_eq!(reach(&found), Reach::Nothing);
        assert_eq!(narrowest(&found).unwrap().name, "/dev/vfio/vfio");
        assert_eq!(reach(&of_descriptors(["/dev/iommu"])), Reach::Nothing);
        assert_eq!(reach(&[]), Reach::Everything);
    }

    /// As QEMU prints them.
    #[test]
    fn network_back_ends_are_told_by_their_types() {
        let text = "hub 0\n \\ net0: index=0,type=user,net=10.0.2.0\n\
                    virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci\n \
                    \\ n0: index=0,type=vhost-user,vhost-user0 to charnet0\nh: index=1,type=passt,x\n";
        let expected =
            [("vhost-user network n0", Kind::VhostUser), ("passt network h", Kind::VhostUser)];
        assert_eq!(named(&kinds_of_networks(text)), expected);
    }

    #[test]
    fn a_migration_that_shares_memory_is_told() {
        let capabilities = |state| {
            json!([{ "capability": "xbzrle", "state": true },
                   { "capability": "x-ignore-shared", "state": state }])
        };
        let none = json!({});
        assert_eq!(shared_migration(&capabilities(false), &none), None);
        assert!(shared_migration(&capabilities(true), &none).unwrap().contains("x-ignore-shared"));
        let mode = |mode: &str| shared_migration(&Value::Null, &json!({ "mode": mode }));
        assert_eq!(mode("normal"), None);
        assert_eq!(mode("cpr-transfer").unwrap(), "migration in mode cpr-transfer");
    }

    /// A VMM that gives these answers, then closes the connection.
    fn vmm(answers: &'static [&'static str]) -> (tempfile::TempDir, Qmp) {
        use std::io::{BufRead, BufReader, Write};
        let dir = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join("qmp")).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut requests = BufReader::new(stream.try_clone().unwrap());
            stream.write_all(b"{\"QMP\":{}}\n").unwrap();
            for answer in ["{\"return\":{}}"].iter().chain(answers) {
                requests.read_line(&mut String::new()).unwrap();
                stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
            }
        });
        let qmp = Qmp::connect(&dir.path().join("qmp")).unwrap();
        (dir, qmp)
    }

    #[test]
    fn what_this_daemon_serves_is_told_from_the_rest() {
        const NONE: &str = "{\"return\":[]}";
        let (_dir, mut qmp) = vmm(&[
            "{\"return\":[{\"name\":\"a\",\"type\":\"child<vhost-user-blk-pci>\"},\
             {\"name\":\"b\",\"type\":\"child<vhost-user-blk-pci>\"}]}",
            "{\"return\":\"ebb-disk0\"}",
            "{\"return\":\"ebb-disk00\"}",
            NONE,
            NONE,
            NONE,
            "{\"error\":{\"desc\":\"no such property\"}}",
            "{\"return\":\"\"}",
            "{\"return\":[{\"drv\":\"raw\"},{\"drv\":\"virtio-blk-vhost-user\"}]}",
        ]);
        let found = of_vmm(&mut qmp, &["ebb-disk0".into()], end_of_look()).unwrap();
        let expected =
            [("vhost-user-blk-pci b", Kind::VhostUser), ("virtio-blk-vhost-user", Kind::VhostUser)];
        assert_eq!(named(&found), expected);
    }

    #[test]
    fn a_vmm_that_does_not_tell_is_no_answer() {
        assert!(of_vmm(&mut vmm(&[]).1, &[], end_of_look()).is_err());
        assert!(of_vmm(&mut vmm(&["{\"return\":{}}"]).1, &[], end_of_look()).is_err());
        assert!(
            of_vmm(&mut vmm(&["{\"error\":{\"desc\":\"no\"}}"]).1, &[], end_of_look()).is_err()
        );
        assert!(of_migration(&mut vmm(&[]).1, end_of_look()).is_err());
    }

    /// A look asks one question after the other.
    #[test]
    fn a_look_that_is_over_asks_nothing_more() {
        const ANSWERS: [&str; 3] = ["{\"return\":[]}", "{\"return\":{}}", "{\"return\":{}}"];
        assert!(of_migration(&mut vmm(&ANSWERS).1, end_of_look()).is_ok());
        let over = end_of_look().checked_sub(LOOK + PIECE).expect("a while after boot");
        assert!(of_migration(&mut vmm(&ANSWERS).1, over).is_err());
        assert!(of_vmm(&mut vmm(&ANSWERS).1, &[], over).is_err());
    }

    #[test]
    fn a_hostile_name_is_cut() {
        let name = format!("{}\u{1b}[2J", "x".repeat(1000));
        assert_eq!(Device::new(&name, Kind::Vfio).name.len(), NAME_MAX);
        assert_eq!(Device::new("a\nb", Kind::Vfio).name, "a?b");
    }
}
