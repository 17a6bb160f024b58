//! Where a QEMU keeps its guest's RAM: asked of QEMU, checked against the kernel.
//!
//! `info mtree` gives the guest-physical ranges, `gpa2hva` their address in
//! QEMU, `/proc/PID/maps` the file behind that address. Nothing is assumed of
//! the machine type.

use std::io;

use ebb_sys::mapping::Mapping;
use ebb_sys::process::{Process, Vma};
use ebb_sys::ram_file::RamFile;
use ebb_units::{Gpa, Hva};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::memory_device::DEVICES_MAX;
use crate::memory_tree::{self, Segment};
use crate::qmp::{Qmp, QmpError};
use crate::ram::{Backing, BadLayout, Ram, Region};
use crate::unplugged;

/// Why the RAM of a VMM cannot be held.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel's view of the process could not be had.
    #[error("cannot look into the VMM: {0}")]
    Io(#[from] io::Error),
    /// The answers contradict each other.
    #[error(transparent)]
    Contradiction(#[from] BadLayout),
    /// RAM that nobody else can map.
    #[error(
        "memory backend {0} is no shared memfd, so Ebb cannot reach it: start QEMU with \
         -object memory-backend-memfd,id={0},size=...,share=on"
    )]
    NotShared(String),
    /// RAM whose file cannot be had.
    #[error(
        "the VMM has closed the memfd with inode {0}, and still has its memory mapped: it cannot be \
         served any more"
    )]
    Closed(u64),
    /// No RAM was found at all.
    #[error(
        "the VM has no RAM in a shared memfd: start QEMU with -object \
         memory-backend-memfd,id=ram,size=...,share=on -machine ...,memory-backend=ram"
    )]
    NoRam,
    /// An answer of QEMU that is not understood.
    #[error("QEMU's answer is not understood: {0}")]
    Answer(String),
}

/// One question each: a VM has one for each backend, and one more where a hole lies in it.
const SEGMENTS_MAX: usize = 1024;
/// Questions of where devices are: one for each device and each border of regions in it.
const QUESTIONS_MAX: usize = SEGMENTS_MAX + DEVICES_MAX;
/// What QEMU says of an address without memory.
const NOT_MAPPED: &str = "No memory is mapped at address";

/// Finds all RAM of the VM and maps it here.
///
/// # Errors
/// [`LayoutError`].
pub fn discover(process: &Process, qmp: &mut Qmp) -> Result<Ram, LayoutError> {
    let backends = memory_backends(&qmp.execute("query-memdev", json!({}))?)?;
    let segments = memory_tree::segments(&qmp.human("info mtree")?, &backends);
    let segments = whole(segments, &devices(qmp)?);
    if segments.len() > SEGMENTS_MAX {
        return Err(LayoutError::Answer(format!("{} ranges of memory", segments.len())));
    }
    let mappings = process.mappings()?;
    let mut files = Files { process, inodes: Vec::new(), backings: Vec::new() };
    let mut regions = Vec::new();
    for segment in &segments {
        let mapped = hva(qmp, segment.mapped)?.map(|at| at.0);
        let hva = mapped.and_then(|at| at.checked_sub(segment.mapped - segment.gpa)).map(Hva);
        let hva = hva.ok_or_else(|| LayoutError::Answer(segment.backend.clone()))?;
        let bytes = (segment.last - segment.gpa).saturating_add(1);
        let vma = mappings.iter().find(|v| hva >= v.start && hva.0 - v.start.0 < v.bytes);
        let fits = |v: &Vma| bytes <= v.bytes - (hva.0 - v.start.0);
        let vma = vma.filter(|v| is_shared_memfd(v) && fits(v));
        let vma = vma.ok_or_else(|| LayoutError::NotShared(segment.backend.clone()))?;
        let offset = vma.offset + (hva.0 - vma.start.0);
        let file = files.of(vma.inode)?.ok_or(LayoutError::NotShared(segment.backend.clone()))?;
        regions.push(Region { gpa: Gpa(segment.gpa), bytes, hva, file, offset });
    }
    if regions.is_empty() {
        return Err(LayoutError::NoRam);
    }
    Ok(Ram::new(regions, files.backings)?)
}

/// The address of a memory device that has other memory than the region that was there when the VM
/// was first held; `None`: there is no such device. A device can leave and its back end be plugged
/// in again elsewhere: the guest's word on an address is then about other memory than ours.
///
/// # Errors
/// [`LayoutError`].
pub fn moved(qmp: &mut Qmp, ram: &Ram) -> Result<Option<Gpa>, LayoutError> {
    let (devices, mut tree) = (devices(qmp)?, None);
    let overlap = |(device, region): (&Device, &Region)| {
        let at = device.start.max(region.gpa.0);
        let last = device.last.min((region.gpa.0 + region.bytes).checked_sub(1)?);
        (at <= last).then_some((at, last))
    };
    let pairs = devices.iter().flat_map(|device| ram.regions().map(move |region| (device, region)));
    let shared = pairs.filter_map(|pair| Some((pair, overlap(pair)?)));
    for (asked, ((device, region), (at, last))) in shared.enumerate() {
        if asked == QUESTIONS_MAX {
            return Err(LayoutError::Answer("memory devices at one address".into()));
        }
        let found = match hva(qmp, at)? {
            Some(hva) => Some((at, hva)),
            None => {
                let tree = match &tree {
                    Some(tree) => tree,
                    None => tree.insert(qmp.human("info mtree")?),
                };
                let mapped = memory_tree::first_mapped(tree, &device.backend, (at, last));
                match mapped {
                    Some(at) => hva(qmp, at)?.map(|hva| (at, hva)),
                    None => None,
                }
            }
        };
        // Where nothing is mapped the guest has no memory to speak of.
        if found.is_some_and(|(at, hva)| hva.0 != region.hva.0 + (at - region.gpa.0)) {
            return Ok(found.map(|(at, _)| Gpa(at)));
        }
    }
    Ok(None)
}

/// Where a memory device is that has an address.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Device {
    start: u64,
    /// Inclusive.
    last: u64,
    /// The name of its memory backend, if it tells.
    backend: String,
}

fn devices(qmp: &mut Qmp) -> Result<Vec<Device>, LayoutError> {
    let list = qmp.execute("query-memory-devices", json!({}))?;
    parse_devices(&list).ok_or_else(|| LayoutError::Answer("query-memory-devices".into()))
}

/// A virtio-mem device with `dynamic-memslots=on` shows only those parts to the processors of which
/// the guest has plugged something. It is found as a whole, like any other device: the guest may
/// plug all of it.
fn whole(mut segments: Vec<Segment>, devices: &[Device]) -> Vec<Segment> {
    for device in devices {
        let of_device = |segment: &Segment| segment.backend == device.backend;
        let is_inside =
            |segment: &Segment| segment.gpa >= device.start && segment.last <= device.last;
        let mut parts = segments.iter().filter(|segment| of_device(segment));
        // One distance from the backend's beginning, and so one run of it.
        let (Some(part), None) = (parts.next().cloned(), parts.next()) else { continue };
        if is_inside(&part) {
            segments.retain(|segment| !of_device(segment));
            segments.push(Segment { gpa: device.start, last: device.last, ..part });
        }
    }
    segments
}

/// Where QEMU has what is at an address; `None`: nothing is mapped there.
fn hva(qmp: &mut Qmp, gpa: u64) -> Result<Option<Hva>, LayoutError> {
    parse_place(&qmp.human(&format!("gpa2hva {gpa:#x}"))?)
}

fn parse_place(text: &str) -> Result<Option<Hva>, LayoutError> {
    match text.trim_start().starts_with(NOT_MAPPED) {
        true => Ok(None),
        false => parse_hva(text).map(Some),
    }
}

/// The memory devices that have an address: others have no memory here. `None`: there cannot be so
/// many, or it is no such list.
fn parse_devices(list: &Value) -> Option<Vec<Device>> {
    let number = |data: &Value, keys: [&str; 2]| {
        keys.iter().find_map(|key| data.get(key).and_then(Value::as_u64))
    };
    let range = |item: &Value| {
        let data = item.get("data")?;
        let Some(start) = number(data, ["addr", "memaddr"]) else { return Some(None) };
        let bytes = number(data, ["max-size", "size"])?;
        let last = bytes.checked_sub(1).and_then(|more| start.checked_add(more));
        let memdev = data.get("memdev").and_then(Value::as_str).unwrap_or_default();
        let backend = memdev.strip_prefix("/objects/").unwrap_or(memdev).to_owned();
        Some(last.map(|last| Device { start, last, backend }))
    };
    let list = list.as_array().filter(|list| list.len() <= DEVICES_MAX)?;
    let devices: Option<Vec<_>> = list.iter().map(range).collect();
    Some(devices?.into_iter().flatten().collect())
}

/// A region as it was when the VM was first held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownRegion {
    /// Where it lay; its file is found by the inode.
    pub region: Region,
    /// Its file's inode number.
    pub inode: u64,
    /// The VMM is known to have that file no more.
    pub is_gone: bool,
}

/// The RAM of a VMM whose layout is known. Needs no answer from the VMM. What the VMM has
/// unplugged since is gone ([`Ram::is_gone`]).
///
/// # Errors
/// [`LayoutError`]; also if nothing is left: then the VMM is about to end.
pub fn reopen(process: &Process, known: &[KnownRegion]) -> Result<Ram, LayoutError> {
    let mut files = Files { process, inodes: Vec::new(), backings: Vec::new() };
    let (mut regions, mut gone) = (Vec::new(), Vec::new());
    for &KnownRegion { region, inode, is_gone } in known {
        let file = match is_gone || gone.iter().any(|&(other, _)| other == inode) {
            true => None,
            false => files.of(inode)?,
        };
        match file {
            Some(file) => regions.push(Region { file, ..region }),
            None if is_gone || !unplugged::gone(process, &[inode])?.is_empty() => {
                gone.push((inode, region));
            }
            None => return Err(LayoutError::Closed(inode)),
        }
    }
    if regions.is_empty() {
        return Err(LayoutError::NoRam);
    }
    let first_gone = files.backings.len();
    for (_, region) in gone {
        regions.push(Region { file: files.backings.len(), offset: 0, ..region });
        files.backings.push(Backing::stand_in(region.bytes)?);
    }
    let all = first_gone..files.backings.len();
    let ram = Ram::new(regions, files.backings)?;
    all.for_each(|file| ram.set_gone(file));
    Ok(ram)
}

/// The shared memory backends by name; an unshared one is refused, since part
/// of the guest's memory would lie beyond reach.
fn memory_backends(answer: &Value) -> Result<Vec<String>, LayoutError> {
    let list = answer.as_array().ok_or_else(|| LayoutError::Answer("query-memdev".into()))?;
    list.iter()
        .map(|backend| {
            let id = backend.get("id").and_then(Value::as_str).unwrap_or("ram");
            match backend.get("share").and_then(Value::as_bool) {
                Some(true) => Ok(id.to_owned()),
                _ => Err(LayoutError::NotShared(id.to_owned())),
            }
        })
        .collect()
}

/// `Host virtual address for 0x100000 (ram) is 0x7f11200ff000`
fn parse_hva(text: &str) -> Result<Hva, LayoutError> {
    let hex = text.trim().rsplit_once("is 0x").map(|(_, hex)| hex);
    let value = hex.and_then(|hex| u64::from_str_radix(hex, 16).ok());
    value.map(Hva).ok_or_else(|| LayoutError::Answer(text.trim().to_owned()))
}

fn is_shared_memfd(vma: &Vma) -> bool {
    vma.shared_write && vma.name.starts_with("/memfd:")
}

/// The files opened so far, each once.
struct Files<'p> {
    process: &'p Process,
    inodes: Vec<u64>,
    backings: Vec<Backing>,
}

impl Files<'_> {
    fn of(&mut self, inode: u64) -> io::Result<Option<usize>> {
        if let Some(index) = self.inodes.iter().position(|&known| known == inode) {
            return Ok(Some(index));
        }
        let Some(file) = open_memfd(self.process, inode)? else { return Ok(None) };
        // First: its size must not change between the two.
        let is_sealed = file.seal();
        let mapping = Mapping::new(&file, 0, file.bytes()?)?;
        let mapping = if is_sealed { mapping } else { mapping.guarded()? };
        self.inodes.push(inode);
        self.backings.push(Backing { file, mapping });
        Ok(Some(self.backings.len() - 1))
    }
}

/// The VMM keeps the memfd open; its descriptor is known by the inode.
fn open_memfd(process: &Process, inode: u64) -> io::Result<Option<RamFile>> {
    for (number, link) in process.descriptors()? {
        if link.starts_with("/memfd:") {
            let file = match process.descriptor(number) {
                Ok(descriptor) => RamFile::from(descriptor),
                // The VMM has closed it since.
                Err(error) if error.raw_os_error() == Some(Errno::BADF.raw_os_error()) => continue,
                Err(error) => return Err(error),
            };
            if file.identity()?.1 == inode {
                return Ok(Some(file));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let known = KnownRegion { region, inode, is_gone: false };
        let ram = reopen(&process, &[known]).unwrap();
        (file, ram)
    }

    /// What a VMM has left of two files, one of which it has closed.
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
            is_gone: is_on_record && gpa > 0,
        };
        let mut all = [known(&goes, 4 << 30), known(&stays, 0), known(&goes, 8 << 30)];
        let process = Process::own().unwrap();
        let ram = match is_on_record {
            // Its number may be another file's by now.
            true => reopen(&process, &all),
            false => {
                drop(goes);
                reopen(&process, &all)
            }
        };
        // Without what stays there is no VM.
        all[1].inode = u64::MAX;
        assert!(matches!(reopen(&process, &all[..2]), Err(LayoutError::NoRam)));
        (stays, ram)
    }

    #[test]
    fn a_vm_is_taken_up_with_what_it_has_left() {
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
    fn memory_that_is_still_mapped_is_not_gone() {
        let file = memfd_create("layout-test", MemfdFlags::ALLOW_SEALING).unwrap();
        let file = std::fs::File::from(file);
        file.set_len(1 << 20).unwrap();
        let inode = file.metadata().unwrap().ino();
        let mapping = Mapping::new(&file, 0, 1 << 20).unwrap();
        drop(file);
        let region =
            Region { gpa: Gpa(0), bytes: 1 << 20, hva: mapping.address(), file: 0, offset: 0 };
        let known = [KnownRegion { region, inode, is_gone: false }];
        let process = Process::own().unwrap();
        assert!(matches!(reopen(&process, &known), Err(LayoutError::Closed(_))));
        drop(mapping);
        assert!(matches!(reopen(&process, &known), Err(LayoutError::NoRam)));
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
    fn a_vmm_that_shrinks_its_memory_ends_nobody_else() {
        let (file, ram) = own_ram(MemfdFlags::empty());
        assert!(ram.may_shrink() && !ram.is_broken());
        file.set_len(4096).unwrap();
        ram.words(Gpa(512 << 10), 1).unwrap()[0].store(1, Relaxed);
        assert!(ram.is_broken());
        assert!(ram.populate(ebb_units::FrameRange::new(ebb_units::Gfn(0), 256)).is_ok());
    }

    /// A QEMU that says this.
    fn says(answer: impl Fn(&str) -> Value + Send + 'static) -> Qmp {
        use std::io::{BufRead, BufReader, Write};
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let requests = BufReader::new(theirs.try_clone().unwrap());
            for request in requests.lines() {
                let request: Value = serde_json::from_str(&request.unwrap()).unwrap();
                let line = request["arguments"]["command-line"].as_str();
                let answer = answer(line.or(request["execute"].as_str()).unwrap());
                let told = json!({ "return": answer, "id": request["id"] });
                // The one who asks may be gone.
                let _ = theirs.write_all(format!("{told}\n").as_bytes());
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
        Ram::new(vec![region], vec![Backing { file, mapping }]).unwrap()
    }

    fn virtio_mem() -> Value {
        json!({ "type": "virtio-mem", "data": {
            "memaddr": 4_u64 << 30, "max-size": DEVICE_BYTES, "size": 300 << 20,
            "memdev": "/objects/more",
        } })
    }

    /// The guest has unplugged what lies in the first part of a device with dynamic-memslots=on.
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
        let parts =
            memory_tree::segments(memory_tree::tests::SLOTS, &["more".into(), "ram".into()]);
        let found = whole(parts, &devices);
        let ranges: Vec<_> = found.iter().map(|found| (found.gpa, found.last)).collect();
        assert_eq!(ranges, [(0, (512 << 20) - 1), (4 << 30, (4 << 30) + DEVICE_BYTES - 1)]);
        // What contradicts the tree changes nothing.
        let elsewhere = [Device { start: 8 << 30, ..devices[0].clone() }];
        let parts = memory_tree::segments(memory_tree::tests::SLOTS, &["more".into()]);
        assert_eq!(whole(parts.clone(), &elsewhere), parts);
    }

    /// As many devices as there can be, each over all regions.
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
        let ram = Ram::new((0..8).map(region).collect(), vec![Backing { file, mapping }]).unwrap();
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
        let device = |start, last, backend: &str| Device { start, last, backend: backend.into() };
        let expected = [
            device(1 << 32, (1 << 32) + (256 << 20) - 1, "mem0"),
            device(2 << 32, (9 << 30) - 1, ""),
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
}
