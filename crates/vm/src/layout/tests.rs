use super::*;
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use rustix::fs::{MemfdFlags, memfd_create};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::Relaxed;

/// RAM in a file of this process, as a VMM has it.
fn own_ram(flags: MemfdFlags) -> (std::fs::File, Ram) {
    let file = std::fs::File::from(memfd_create("layout-test", flags).unwrap());
    file.set_len(1 << 20).unwrap();
    let region = Region { gpa: Gpa(0), bytes: 1 << 20, hva: Hva(1 << 30), file: 0, offset: 0 };
    let process = Process::open(std::process::id() as i32).unwrap();
    let inode = file.metadata().unwrap().ino();
    let known = KnownRegion { region, inode, is_unplugged: false };
    let ram = reopen(&process, &[known]).unwrap();
    (file, ram)
}

/// Reopens the RAM of a VMM that has closed one of two files.
fn left(is_on_record: bool) -> (std::fs::File, Result<Ram, LayoutError>) {
    let create = || {
        let file = memfd_create("layout-test", MemfdFlags::ALLOW_SEALING).unwrap();
        let file = std::fs::File::from(file);
        file.set_len(1 << 20).unwrap();
        file
    };
    let (stays, goes) = (create(), create());
    let known = |file: &std::fs::File, gpa: u64| KnownRegion {
        region: Region {
            gpa: Gpa(gpa),
            bytes: 512 << 10,
            hva: Hva(gpa + (1 << 30)),
            file: 0,
            offset: 512 << 10,
        },
        inode: file.metadata().unwrap().ino(),
        is_unplugged: is_on_record && gpa > 0,
    };
    let mut all = [known(&goes, 4 << 30), known(&stays, 0), known(&goes, 8 << 30)];
    let process = Process::own().unwrap();
    let ram = match is_on_record {
        // By now the inode number may belong to another file.
        true => reopen(&process, &all),
        false => {
            drop(goes);
            reopen(&process, &all)
        }
    };
    // Without the file that stays, there is no VM.
    all[1].inode = u64::MAX;
    assert!(matches!(reopen(&process, &all[..2]), Err(LayoutError::NoRam)));
    (stays, ram)
}

#[test]
fn a_vm_is_recovered_with_what_it_has_left() {
    for is_on_record in [false, true] {
        let (file, ram) = left(is_on_record);
        let ram = ram.unwrap();
        assert_eq!((ram.bytes(), ram.first_bytes()), (512 << 10, 1536 << 10));
        assert_eq!(ram.end().gpa(), Gpa((8 << 30) + (512 << 10)));
        ram.words(Gpa(0), 1).unwrap()[0].store(7, Relaxed);
        let mut word = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut word, 512 << 10).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 7);
        assert_eq!((ram.place(Gpa(4 << 30)), ram.place(Gpa(8 << 30))), (None, None));
    }
}

#[test]
fn memory_that_is_still_mapped_has_not_left() {
    let file = memfd_create("layout-test", MemfdFlags::ALLOW_SEALING).unwrap();
    let file = std::fs::File::from(file);
    file.set_len(1 << 20).unwrap();
    let inode = file.metadata().unwrap().ino();
    let mapping = Mapping::new(&file, 0, 1 << 20).unwrap();
    drop(file);
    let region = Region { gpa: Gpa(0), bytes: 1 << 20, hva: mapping.address(), file: 0, offset: 0 };
    let known = [KnownRegion { region, inode, is_unplugged: false }];
    let process = Process::own().unwrap();
    assert!(matches!(reopen(&process, &known), Err(LayoutError::Closed(_))));
    drop(mapping);
    assert!(matches!(reopen(&process, &known), Err(LayoutError::NoRam)));
}

#[test]
fn memory_that_cannot_be_managed_is_refused_with_the_remedies() {
    for refused in [LayoutError::NoRam, LayoutError::NotShared("pc.ram".into())] {
        let told = refused.to_string();
        assert!(told.contains("-machine ...,memory-backend=ram"), "{told}");
        assert!(told.contains("<source type='memfd'/>") && !told.contains("  "), "{told}");
    }
}

#[test]
fn a_vmms_memory_is_sealed_where_it_can_be() {
    let (file, ram) = own_ram(MemfdFlags::ALLOW_SEALING);
    assert!(!ram.may_shrink());
    assert!(file.set_len(4096).is_err());
    ram.words(Gpa(512 << 10), 1).unwrap()[0].store(1, Relaxed);
    assert!(!ram.is_broken());
}

#[test]
fn a_vmm_that_shrinks_its_memory_ends_no_other_process() {
    let (file, ram) = own_ram(MemfdFlags::empty());
    assert!(ram.may_shrink() && !ram.is_broken());
    file.set_len(4096).unwrap();
    ram.words(Gpa(512 << 10), 1).unwrap()[0].store(1, Relaxed);
    assert!(ram.is_broken());
    assert!(ram.populate(ebb_units::FrameRange::new(ebb_units::Gfn(0), 256)).is_ok());
}

/// A QEMU that answers like this.
fn says(answer: impl Fn(&str) -> Value + Send + 'static) -> Qmp {
    use std::io::{BufRead, BufReader, Write};
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let requests = BufReader::new(theirs.try_clone().unwrap());
        for request in requests.lines() {
            let request: Value = serde_json::from_str(&request.unwrap()).unwrap();
            let line = request["arguments"]["command-line"].as_str();
            let answer = answer(line.or(request["execute"].as_str()).unwrap());
            let reply = json!({ "return": answer, "id": request["id"] });
            // The client may have ended.
            let _ = theirs.write_all(format!("{reply}\n").as_bytes());
        }
    });
    Qmp::over(ours)
}

const DEVICE_BYTES: u64 = 2 << 30;

/// RAM that is one virtio-mem device, at 4 GiB.
fn device_ram() -> Ram {
    let file = RamFile::create("layout-test", DEVICE_BYTES).unwrap();
    let mapping = Mapping::new(&file, 0, DEVICE_BYTES).unwrap();
    let (gpa, hva) = (Gpa(4 << 30), Hva(64 << 30));
    let region = Region { gpa, bytes: DEVICE_BYTES, hva, file: 0, offset: 0 };
    Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap()
}

fn virtio_mem() -> Value {
    json!({ "type": "virtio-mem", "data": {
        "memaddr": 4_u64 << 30, "max-size": DEVICE_BYTES, "size": 300 << 20,
        "memdev": "/objects/more",
    } })
}

/// The guest has unplugged the first part of a device with dynamic-memslots=on.
#[test]
fn a_device_of_which_a_part_is_mapped_has_not_moved() {
    for (second, moved) in
        [(Some(65_u64 << 30), None), (Some(1 << 30), Some(Gpa(5 << 30))), (None, None)]
    {
        let mut qmp = says(move |asked| match (asked, second) {
            ("query-memory-devices", _) => json!([virtio_mem()]),
            ("info mtree", Some(_)) => memory_tree::tests::SLOTS
                .replace("100000000-000000013fffffff", "140000000-000000017fffffff")
                .replace("@more 0000000000000000-000000003", "@more 0000000040000000-000000007")
                .into(),
            ("info mtree", None) => "address-space: memory\n".into(),
            ("gpa2hva 0x140000000", Some(hva)) => {
                format!("Host virtual address for 0x140000000 (more) is {hva:#x}\r\n").into()
            }
            _ => "No memory is mapped at address 0x100000000\r\n".into(),
        });
        assert_eq!(super::moved(&mut qmp, &device_ram()).unwrap(), moved);
    }
}

#[test]
fn a_device_of_which_a_part_is_mapped_is_found_as_a_whole() {
    let devices = parse_devices(&json!([virtio_mem()])).unwrap();
    let parts = memory_tree::segments(memory_tree::tests::SLOTS, &["more".into(), "ram".into()]);
    let found = whole(parts, &devices);
    let ranges: Vec<_> = found.iter().map(|found| (found.gpa, found.last)).collect();
    assert_eq!(ranges, [(0, (512 << 20) - 1), (4 << 30, (4 << 30) + DEVICE_BYTES - 1)]);
    // Devices that contradict the tree change nothing.
    let other_address = [Device { start: 8 << 30, ..devices[0].clone() }];
    let parts = memory_tree::segments(memory_tree::tests::SLOTS, &["more".into()]);
    assert_eq!(whole(parts.clone(), &other_address), parts);
}

#[test]
fn memory_that_came_later_differs_from_managed_memory() {
    let dimm = |id: &str, at: u64, bytes: u64| {
        json!({ "type": "dimm", "data": {
            "id": id, "addr": at, "size": bytes, "memdev": "/objects/private",
        } })
    };
    let end = (4 << 30) + DEVICE_BYTES;
    let idle = json!({ "type": "virtio-mem", "data": {
        "id": "idle", "memaddr": 32_u64 << 30, "max-size": 1 << 30, "size": 0,
    } });
    let long = "x".repeat(1000);
    let list = json!([
        virtio_mem(),
        idle,
        dimm("below", (4 << 30) - 4096, 4096),
        dimm("last", end - 4096, 4096),
        dimm(&long, end, 4096),
    ]);
    let mut qmp = says(move |asked| match asked.strip_prefix("gpa2hva 0x") {
        Some(gpa) => format!("... (private) is 0x7f{gpa:0>10}\r\n").into(),
        None => list.clone(),
    });
    let found = super::added(&mut qmp, &device_ram(), reach::end_of_look()).unwrap();
    let found: Vec<_> = found.iter().map(|found| (found.name.len(), found.gpa.0)).collect();
    assert_eq!(found, [(5, (4 << 30) - 4096), (NAME_CHARS_MAX, end)]);
}

/// Ebb has the file of this memory, and serves and counts it.
#[test]
fn memory_that_returned_at_another_address_is_managed() {
    // Managed memory begins at 64 GiB.
    let ours = 64_u64 << 30;
    for (hva, is_managed) in [
        (Some(ours - 1), false),
        (Some(ours), true),
        (Some(ours + DEVICE_BYTES - 1), true),
        (Some(ours + DEVICE_BYTES), false),
        (Some(0), false),
        (None, false),
    ] {
        let mut qmp = says(move |asked| match (asked, hva) {
            ("query-memory-devices", _) => json!([{ "type": "dimm", "data": {
                "id": "again", "addr": 8_u64 << 30, "size": 256 << 20, "memdev": "/objects/more",
            } }]),
            ("gpa2hva 0x200000000", Some(0)) => "Memory at address 0x200000000 is not RAM".into(),
            ("gpa2hva 0x200000000", Some(hva)) => format!("(more) is {hva:#x}\r\n").into(),
            ("info mtree", None) => "address-space: memory\n".into(),
            _ => "No memory is mapped at address 0x200000000\r\n".into(),
        });
        let found = super::added(&mut qmp, &device_ram(), reach::end_of_look()).unwrap();
        assert_eq!(found.is_empty(), is_managed, "{hva:?}");
    }
}

/// The worker waits for the answer, and so does the limit.
#[test]
fn memory_that_came_later_is_not_asked_for_after_the_look() {
    let (asked, questions) = std::sync::mpsc::channel();
    let mut qmp = says(move |what| {
        asked.send(what.to_owned()).unwrap();
        json!([])
    });
    let now = Instant::now();
    let over = now.checked_sub(std::time::Duration::from_secs(1)).unwrap();
    assert!(matches!(super::added(&mut qmp, &device_ram(), over), Err(LayoutError::Qmp(_))));
    // The end of one look does not end another.
    assert_eq!(super::added(&mut qmp, &device_ram(), reach::end_of_look()).unwrap(), []);
    drop(qmp);
    assert_eq!(questions.iter().collect::<Vec<_>>(), ["query-memory-devices"]);
}

/// The most devices that there can be, each over all regions.
#[test]
fn devices_at_one_address_are_not_asked_for_without_end() {
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&asked);
    let mut qmp = says(move |what| match what {
        "query-memory-devices" => Value::from(vec![virtio_mem(); DEVICES_MAX]),
        _ => {
            count.fetch_add(1, Relaxed);
            let gpa = what.trim_start_matches("gpa2hva 0x");
            let gpa = u64::from_str_radix(gpa, 16).unwrap();
            format!("is {:#x}", gpa + (60 << 30)).into()
        }
    });
    let file = RamFile::create("layout-test", 8 << 20).unwrap();
    let mapping = Mapping::new(&file, 0, 8 << 20).unwrap();
    let region = |at: u64| Region {
        gpa: Gpa((4 << 30) + (at << 20)),
        bytes: 1 << 20,
        hva: Hva((64 << 30) + (at << 20)),
        file: 0,
        offset: at << 20,
    };
    let ram = Ram::new((0..8).map(region).collect(), vec![Backing::new(file, mapping)]).unwrap();
    assert!(matches!(super::moved(&mut qmp, &ram), Err(LayoutError::Answer(_))));
    assert_eq!(asked.load(Relaxed), QUESTIONS_MAX);
}

#[test]
fn nonsense_gives_nothing() {
    assert!(parse_hva("No memory is mapped at address 0x0").is_err());
    assert_eq!(parse_place("No memory is mapped at address 0x140000000\r\n").unwrap(), None);
    assert!(parse_place("Memory at address 0xe0000is not RAM\r\n").is_err());
    assert_eq!(parse_hva("... (ram) is 0x7f11200ff000\r\n").unwrap(), Hva(0x7f11_200f_f000));
}

/// As QEMU 10 prints them, shortened.
#[test]
fn memory_devices_are_where_they_say() {
    let answer = json!([
        { "type": "dimm", "data": { "addr": 4_294_967_296_u64, "size": 268_435_456,
                                    "memdev": "/objects/mem0", "node": 0, "slot": 0 } },
        { "type": "virtio-mem", "data": { "memaddr": 8_589_934_592_u64, "size": 0,
                                          "max-size": 1_073_741_824 } },
        { "type": "sgx-epc", "data": { "memaddr": 0, "size": 0 } },
        { "type": "other", "data": {} },
    ]);
    let device = |start, last, backend: &str, has_parts| Device {
        start,
        last,
        backend: backend.into(),
        has_parts,
        has_memory: !has_parts,
        name: "without a name".into(),
    };
    let expected = [
        device(1 << 32, (1 << 32) + (256 << 20) - 1, "mem0", false),
        device(2 << 32, (9 << 30) - 1, "", true),
    ];
    assert_eq!(parse_devices(&answer).unwrap(), expected);
    let many = |count| Value::from(vec![answer[0].clone(); count]);
    assert!(parse_devices(&many(DEVICES_MAX)).is_some());
    assert_eq!(parse_devices(&many(DEVICES_MAX + 1)), None);
    assert_eq!(parse_devices(&json!({})), None);
    assert_eq!(parse_devices(&json!([{ "data": { "addr": 0 } }])), None);
    let far = json!([{ "data": { "addr": u64::MAX, "size": 2 } }]);
    assert_eq!(parse_devices(&far).unwrap(), []);
}

#[test]
fn unshared_memory_is_refused_by_name() {
    let answer = json!([{ "id": "r0", "share": true }, { "id": "r1", "share": false }]);
    let error = memory_backends(&answer).unwrap_err();
    assert!(error.to_string().contains("memory backend r1 "), "{error}");
}

#[test]
fn memory_that_is_not_shared_is_reported_with_options_that_work() {
    let message = LayoutError::NotShared("pc.ram".into()).to_string();
    // QEMU refuses a backend with that name.
    assert!(!message.contains("id=pc.ram"), "{message}");
    assert!(message.contains("id=ram,") && message.contains("memory-backend=ram"), "{message}");
    assert!(!message.contains('\n') && !message.contains("  "), "{message}");
}
