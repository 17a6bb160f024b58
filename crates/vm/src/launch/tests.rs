//! Tests of the command line of a QEMU to be started.

use super::*;

fn memory(bytes: u64) -> LaunchMemory {
    LaunchMemory { file: RamFile::create("launch-test", bytes).unwrap(), bytes }
}

fn words(nodes: &[Node], cpus: u32, served: &[Served]) -> Vec<String> {
    let launch = Launch {
        name: "web",
        directory: Path::new("/run/web"),
        qemu: Path::new("qemu"),
        nodes,
        served,
        prealloc: true,
        balloon: true,
        cpus,
        accelerator: Accelerator::Tcg,
        kernel: None,
        initrd: None,
        append: None,
        disks: &[PathBuf::from("/run/web/sockets/disk0")],
        disk_queues: 1,
        reconnect: Reconnect::Tenth,
        qemu_args: &[],
        cwd: Path::new("/"),
        sandbox: true,
    };
    let handed = Handed {
        nodes: nodes.iter().map(|node| (5, node.growth.as_ref().map(|_| 6))).collect(),
        qmp: 7,
        console: 8,
        sockets: 9,
        kernel: None,
        initrd: None,
    };
    let words = launch.arguments(&handed).into_iter();
    words.map(|word| word.into_string().unwrap()).collect()
}

fn has(words: &[String], key: &str, value: &str) -> bool {
    words.windows(2).any(|pair| pair[0] == key && pair[1].starts_with(value))
}

#[test]
fn a_vm_has_one_node_and_what_it_began_with() {
    let words = words(&[Node { ram: memory(64 << 20), growth: None }], 3, &[]);
    for (key, value) in [
        ("-m", "64M"),
        ("-smp", "3"),
        ("-machine", "q35,memory-backend=ram0"),
        ("-object", "memory-backend-file,id=ram0,size=67108864,mem-path=/proc/self/fd/5,"),
        ("-chardev", "socket,id=ebb-qmp,fd=7,server=on"),
        ("-chardev", "socket,id=ebb-console,fd=8,server=on,wait=off"),
        ("-chardev", "socket,id=ebb-disk0,path=/proc/self/fd/9/disk0,reconnect-ms=100"),
        ("-sandbox", SANDBOX),
        ("-device", "virtio-balloon-pci,"),
    ] {
        assert!(has(&words, key, value), "{key} {value}: {words:?}");
    }
    assert!(!words.iter().any(|word| word.contains("maxmem") || word.contains("virtio-mem")));
    assert!(is_of(&words, "web") && !is_of(&words, "we"));
    assert!(!is_of(&["qemu", NAME, "web"].map(Into::into), "web"));
}

#[test]
fn each_node_that_grows_has_a_device() {
    let node = || Node { ram: memory(32 << 20), growth: Some(memory(128 << 20)) };
    let words = words(&[node(), node()], 4, &[]);
    for (key, value) in [
        ("-m", "64M,slots=0,maxmem=320M"),
        ("-smp", "4,sockets=2,cores=2,threads=1"),
        ("-numa", "node,nodeid=1,cpus=2-3,memdev=ram1"),
        ("-object", "memory-backend-file,id=growth1,size=134217728,mem-path=/proc/self/fd/6,"),
        (
            "-device",
            "virtio-mem-pci,id=ebb-growth1,memdev=growth1,node=1,requested-size=0,prealloc=on",
        ),
    ] {
        assert!(has(&words, key, value), "{key} {value}: {words:?}");
    }
}

#[test]
fn others_serve_devices_at_addresses_of_their_own() {
    let node = || Node { ram: memory(32 << 20), growth: Some(memory(128 << 20)) };
    let served = [0, 1].map(|node| Served {
        socket: format!("/run/web/sockets/memory{node}").into(),
        address: growth_start(64 << 20, 128 << 20, node),
    });
    let words = words(&[node(), node()], 4, &served);
    for (key, value) in [
        ("-m", "64M,slots=0,maxmem=3136M"),
        ("-device", "virtio-pmem-pci,memdev=growth1,memaddr=0x180000000,addr=0x1e.2"),
        ("-chardev", "socket,id=ebb-growth1,path=/proc/self/fd/9/memory1"),
        ("-device", "vhost-user-test-device-pci,id=ebb-growth0,chardev=ebb-growth0,"),
    ] {
        assert!(has(&words, key, value), "{key} {value}: {words:?}");
    }
    assert!(!words.iter().any(|word| word.contains("virtio-mem-pci")));
}

#[test]
fn commas_in_paths_are_doubled() {
    assert_eq!(escape(Path::new("/run/a,b")), "/run/a,,b");
}
