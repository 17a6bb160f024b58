//! Tests of what reaches the memory, from descriptors and from a VMM that gives set answers.

use serde_json::{Value, json};

use super::asked::{OBJECTS_MAX, full_name, kind_of_type, kinds_of_networks, kinds_of_objects};
use super::migration::shared_migration;
use super::*;
use crate::qmp::Qmp;

fn named(devices: &[MemoryUser]) -> Vec<(&str, DeviceKind)> {
    devices.iter().map(|device| (device.name.as_str(), device.kind)).collect()
}

/// What QEMU 7.2 and 11 answer to `qom-list /machine/peripheral`, shortened.
#[test]
fn objects_are_known_by_their_types() {
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
    let found: Vec<(String, DeviceKind)> =
        found.iter().map(|&(name, kind, what)| (full_name(kind, name), what)).collect();
    let expected = [
        ("vhost-user-blk-pci b0", DeviceKind::VhostUser),
        ("vhost-user-fs-pci", DeviceKind::VhostUser),
        ("vfio-pci-nohotplug gpu", DeviceKind::Vfio),
        ("vfio-user-pci u", DeviceKind::OtherProcess),
        ("vhost-scsi-pci s", DeviceKind::VhostScsi),
    ];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind)));
    assert!(kinds_of_objects(&json!({ "no": "list" })).is_err());
    assert!(kinds_of_objects(&json!(vec![1; OBJECTS_MAX + 1])).is_err());
}

#[test]
fn of_very_many_devices_those_that_leave_least_are_named() {
    let count = 4 * OBJECTS_MAX;
    let user = |number: usize| MemoryUser::new(&format!("d{number}"), DeviceKind::VhostUser);
    let mut all: Vec<MemoryUser> = (1..count).map(user).collect();
    all.push(MemoryUser::new("card", DeviceKind::Vfio));
    let kept = bounded(all);
    assert_eq!((kept.len(), kept[0].name.as_str()), (NAMED_MAX + 1, "card"));
    let others = MemoryUser {
        name: format!("{} more devices", count - NAMED_MAX),
        kind: DeviceKind::VhostUser,
    };
    assert_eq!(kept.last(), Some(&others));
    let few = vec![user(1), MemoryUser::new("card", DeviceKind::Vfio)];
    assert_eq!(bounded(few.clone()), few);
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
        assert_eq!(kind_of_type(name).map(DeviceKind::reach), Some(expected), "{name}");
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
    let kinds: Vec<DeviceKind> = found.iter().map(|device| device.kind).collect();
    let expected = [
        DeviceKind::Vfio,
        DeviceKind::Vdpa,
        DeviceKind::Confidential,
        DeviceKind::VhostScsi,
        DeviceKind::Udmabuf,
    ];
    assert_eq!(kinds, expected);
    assert_eq!(reach(&found), Reach::Nothing);
    assert_eq!(narrowest(&found).unwrap().name, "/dev/vfio/vfio");
    let by_iommufd = of_descriptors(["/dev/iommu"]);
    assert_eq!(named(&by_iommufd), [("/dev/iommu", DeviceKind::Iommufd)]);
    assert_eq!(reach(&by_iommufd), Reach::Nothing);
    assert!(by_iommufd[0].to_string().contains("leave out -object iommufd"));
    assert_eq!(reach(&[]), Reach::Everything);
}

/// As QEMU prints them.
#[test]
fn network_back_ends_are_known_by_their_types() {
    let text = "hub 0\n \\ net0: index=0,type=user,net=10.0.2.0\n\
                virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci\n \
                \\ n0: index=0,type=vhost-user,vhost-user0 to charnet0\nh: index=1,type=passt,x\n";
    let expected = [
        ("vhost-user network n0", DeviceKind::VhostUser),
        ("passt network h", DeviceKind::VhostUser),
    ];
    assert_eq!(named(&kinds_of_networks(text)), expected);
}

#[test]
fn a_migration_that_shares_memory_is_reported() {
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

#[test]
fn a_migration_is_under_way_until_it_has_ended() {
    let is_under_way = |status: Option<&str>| {
        Migration { status: status.map(Into::into), ..Migration::default() }.is_under_way()
    };
    for status in ["setup", "active", "pre-switchover", "postcopy-paused", "cancelling", "new"] {
        assert!(is_under_way(Some(status)), "{status}");
    }
    for status in [None, Some("completed"), Some("failed"), Some("cancelled")] {
        assert!(!is_under_way(status), "{status:?}");
    }
}

#[test]
fn a_vmm_that_waits_for_its_guest_says_so() {
    let awaits = |answers: &'static [&'static str]| awaits_guest(&mut vmm(answers).1);
    assert!(awaits(&["{\"return\":{\"status\":\"inmigrate\",\"running\":false}}"]).unwrap());
    assert!(!awaits(&["{\"return\":{\"status\":\"paused\"}}"]).unwrap());
    assert!(!awaits(&["{\"return\":{}}"]).unwrap());
    assert!(awaits(&[]).is_err());
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
fn devices_that_this_daemon_serves_differ_from_the_rest() {
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
    let expected = [
        ("vhost-user-blk-pci b", DeviceKind::VhostUser),
        ("virtio-blk-vhost-user", DeviceKind::VhostUser),
    ];
    assert_eq!(named(&found), expected);
}

#[test]
fn a_vmm_that_does_not_tell_is_no_answer() {
    assert!(of_vmm(&mut vmm(&[]).1, &[], end_of_look()).is_err());
    assert!(of_vmm(&mut vmm(&["{\"return\":{}}"]).1, &[], end_of_look()).is_err());
    assert!(of_vmm(&mut vmm(&["{\"error\":{\"desc\":\"no\"}}"]).1, &[], end_of_look()).is_err());
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
    assert_eq!(MemoryUser::new(&name, DeviceKind::Vfio).name.len(), NAME_MAX);
    assert_eq!(MemoryUser::new("a\nb", DeviceKind::Vfio).name, "a?b");
}
