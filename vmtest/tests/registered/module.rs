//! The guest's side of a registration: the module `vprobe` in a real kernel. No Ebb runs here; the
//! test reads the guest's memory and answers in the host's place.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use ebb_inspect::Snapshot;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::{Ram, layout};
use ebb_vprobe::{ACKNOWLEDGEMENT_AT, ANSWER_AT, Answer, Kind, Reason, Record, State};
use serde_json::json;
use vmtest::{Disk, Guest, GuestError, Host, Vm, assets, require, until, until_or};

use crate::reading;

/// Free blocks: the first frame, and the order.
type Blocks = BTreeMap<Gfn, u64>;

/// A guest that has registered, seen from outside.
struct Registered {
    vm: Vm,
    ram: Ram,
    /// QEMU's memory, in which the guest's lies.
    memory: File,
}

impl Registered {
    fn start(guest: Guest) -> Registered {
        Registered::start_on(Host::new(), guest)
    }

    fn start_on(host: Host, guest: Guest) -> Registered {
        let vm = host.qemu(guest);
        vm.guest("sh busybox insmod /vprobe.ko");
        let process = Process::open(vm.pid()).expect("QEMU runs");
        let ram = layout::discover(&process, &mut vm.open_qmp()).expect("its RAM");
        let memory = File::options().write(true).open(format!("/proc/{}/mem", vm.pid()));
        Registered { vm, ram, memory: memory.expect("its memory") }
    }

    /// A copy of all RAM.
    fn snapshot(&self) -> Snapshot {
        let mut copy = Snapshot::new();
        for region in self.ram.regions() {
            let frames = FrameRange::new(region.gpa.gfn(), region.bytes / FRAME_BYTES);
            let mut bytes = vec![0; region.bytes as usize];
            self.ram.read(frames, &mut bytes).expect("RAM");
            let (words, _) = bytes.as_chunks::<8>();
            copy.add(region.gpa, words.iter().map(|&word| u64::from_le_bytes(word)).collect());
        }
        copy
    }

    /// A copy of all RAM, and the free blocks by the helpers at the same time.
    fn stopped(&self, record: &Record) -> (Snapshot, Blocks) {
        self.vm.stopped(|| (self.snapshot(), reading::free_blocks(&self.ram, record)))
    }

    /// The state of the record at an address, if one is there.
    fn state(&self, gpa: Gpa) -> Option<State> {
        Some(reading::record_at(&self.ram, gpa)?.state())
    }

    /// All registrations in force, by address.
    fn records(&self) -> Vec<(Gpa, Record)> {
        let mut found = reading::records(&self.ram);
        found.retain(|(_, record)| record.state() == State::Registered);
        found
    }

    /// The only registration in force.
    fn record(&self) -> (Gpa, Record) {
        until("one registration", || {
            let mut found = self.records();
            (found.len() == 1).then(|| found.remove(0))
        })
    }

    fn write(&self, gpa: Gpa, bytes: &[u8]) {
        let place = self.ram.place(gpa).expect("it is in RAM");
        self.memory.write_all_at(bytes, place.hva.0).expect("RAM");
    }

    fn answer(&self, gpa: Gpa, answer: Answer, token: u64) {
        self.write(Gpa(gpa.0 + ANSWER_AT), &answer.code().to_le_bytes());
        self.write(Gpa(gpa.0 + ACKNOWLEDGEMENT_AT), &token.to_le_bytes());
    }

    /// Whether a processor has an enabled breakpoint at the record.
    fn is_proven(&self, record: &Record) -> bool {
        let text = self.vm.open_qmp().human("info registers -a").expect("registers");
        text.split("CPU#").any(|processor| watches(processor, record.virtual_address()))
    }

    fn wait_proven(&self, record: &Record, proven: bool) {
        until(format_args!("a breakpoint at the record: {proven}"), || {
            (self.is_proven(record) == proven).then_some(())
        });
    }

    fn wait_log(&self, text: &str) {
        until(format_args!("{text:?} in the guest's log"), || {
            self.vm.guest("sh busybox dmesg").contains(text).then_some(())
        });
    }
}

/// Whether one of DR0 to DR3 has the address and is enabled in DR7.
fn watches(registers: &str, address: u64) -> bool {
    let value = |name: &str| {
        let (_, rest) = registers.split_once(&format!("{name}="))?;
        u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
    };
    let enabled = value("DR7").unwrap_or(0);
    (0..4).any(|index| {
        value(&format!("DR{index}")) == Some(address) && enabled >> (2 * index) & 3 != 0
    })
}

/// Checks the record against what Ebb knows of this kernel without it.
fn assert_agrees((memory, free): &(Snapshot, Blocks), record: &Record, ram: &Ram) {
    let kernel = ebb_inspect::Guest::inspect(memory, &[]).expect("a stock kernel");
    assert_eq!(record.page_size().bytes(), ebb_inspect::PAGE_BYTES as usize);
    assert_eq!(record.max_order(), kernel.layout().max_order());
    let in_ram = |frames: FrameRange| frames.frames().all(|gfn| ram.region_of(gfn).is_some());
    record.check_ram(in_ram).expect("all metadata is in RAM");
    for gfn in (0..ram.end().0).map(Gfn) {
        let known = kernel.memmap().metadata_gpa(gfn).filter(|_| ram.region_of(gfn).is_some());
        let registered = record.page_at(gfn).filter(|_| ram.region_of(gfn).is_some());
        assert_eq!(registered, known, "metadata of {gfn:?}");
    }
    let mut known = Vec::new();
    kernel.memmap().free_blocks(memory, kernel.layout(), 0, |gfn, order| {
        known.push((gfn, u64::from(order)));
    });
    assert!(known.len() > 50, "{}", known.len());
    assert_eq!(free.iter().map(|(&gfn, &order)| (gfn, order)).collect::<Vec<_>>(), known);
}

/// Leaves free blocks of all sizes.
fn fragment(vm: &Vm) {
    vm.guest("fill a 100M");
    vm.guest("files f 60M");
    vm.guest("fill b 30M");
    vm.guest("free a");
    vm.guest("files g 20M");
    vm.guest("rmfiles f");
}

/// One registration from the load of the module to its end.
fn lives(label: &str) {
    let guest = Registered::start(Guest::debian(label));
    let (gpa, record) = guest.record();
    guest.wait_proven(&record, true);
    fragment(&guest.vm);
    let memory = guest.stopped(&record);
    assert_agrees(&memory, &record, &guest.ram);

    guest.answer(gpa, Answer::Accepted, record.token());
    guest.wait_proven(&record, false);
    guest.wait_log("vprobe: the host has accepted the registration");
    guest.write(Gpa(gpa.0 + ACKNOWLEDGEMENT_AT), &[0; 8]);
    guest.wait_proven(&record, true);
    let refusal = Reason::Helper { kind: Kind::PageFree, rule: 3, offset: 7 };
    guest.answer(gpa, Answer::Refused(refusal), record.token());
    guest.wait_proven(&record, false);
    guest.wait_log("vprobe: the host refuses page_free: it writes to memory, at byte 7");
    assert_eq!(guest.record(), (gpa, record.clone()), "an answer changes nothing else");

    guest.vm.guest("sh busybox rmmod vprobe");
    assert_eq!(guest.state(gpa), Some(State::Withdrawn), "the page stays behind");
    assert_eq!(guest.records(), []);
    guest.vm.guest("sh busybox insmod /vprobe.ko");
    let (elsewhere, again) = guest.record();
    assert_ne!(elsewhere, gpa);
    assert_ne!(again.token(), record.token());
    assert_eq!(guest.state(gpa), Some(State::Withdrawn), "and has no other use");
    guest.wait_proven(&again, true);
}

#[test]
fn kernel_6_1_cloud() {
    require!(assets::vprobe("6.1-cloud"));
    lives("6.1-cloud");
}

#[test]
fn kernel_6_1_generic() {
    require!(assets::vprobe("6.1"));
    lives("6.1");
}

#[test]
fn kernel_5_10() {
    require!(assets::vprobe("5.10"));
    lives("5.10");
}

#[test]
fn kernel_6_12() {
    require!(assets::vprobe("6.12"));
    lives("6.12");
}

#[test]
fn kernel_7() {
    require!(assets::vprobe("7.x"));
    lives("7.x");
}

#[test]
fn two_nodes_and_memory_above_4_gib() {
    require!(assets::vprobe("6.1-cloud"));
    let guest = Registered::start(Guest::debian("6.1-cloud").memory("3G").nodes(2));
    let (_, record) = guest.record();
    let memory = guest.stopped(&record);
    assert_agrees(&memory, &record, &guest.ram);
}

/// The blocks of memory that the test tries to take offline. The last one of 1 GiB has a hole at its
/// end, for which Linux refuses that.
const BLOCKS: [u64; 3] = [6, 5, 4];
const BLOCK_BYTES: u64 = 128 << 20;

fn set_block(vm: &Vm, block: u64, state: &str) -> Result<String, GuestError> {
    vm.try_guest(&format!("write /sys/devices/system/memory/memory{block}/state {state}"))
}

/// Takes a block offline. One that holds a page in use for a while refuses.
fn take_offline(vm: &Vm) -> u64 {
    let mut refusals = Vec::new();
    let taken = until_or(|| {
        refusals.clear();
        BLOCKS.into_iter().find(|&block| match set_block(vm, block, "offline") {
            Ok(_) => true,
            Err(GuestError(why)) => {
                refusals.push(format!("memory{block}: {why}"));
                false
            }
        })
    });
    taken.unwrap_or_else(|| panic!("no block goes offline: {refusals:?}"))
}

#[test]
fn memory_that_goes_offline_is_registered_no_more() {
    require!(assets::vprobe("6.1-cloud"));
    // What moves is all that the blocks hold.
    let guest = Registered::start(Guest::debian("6.1-cloud").append("movablecore=512M"));
    let (gpa, before) = guest.record();
    let block = take_offline(&guest.vm);
    let frame = Gpa(block * BLOCK_BYTES).gfn();
    assert!(before.page_at(frame).is_some());
    let (at, without) = guest.record();
    assert_eq!((at, without.page_at(frame)), (gpa, None));
    assert_ne!(without.token(), before.token());
    guest.wait_proven(&without, true);
    set_block(&guest.vm, block, "online").expect("it was online");
    let (at, with) = guest.record();
    assert_eq!(at, gpa);
    assert_eq!(with.page_at(frame), before.page_at(frame));
    assert!(![before.token(), without.token()].contains(&with.token()));
}

/// Nothing is registered while the kernel may free metadata of huge pages.
fn keeps_off_huge_pages(label: &str) {
    const REFUSAL: &str = "vprobe: no registration: huge pages free metadata";
    let guest = Registered::start(Guest::debian(label));
    let (gpa, before) = guest.record();
    let set = |value: u8| {
        guest.vm.guest(&format!("write /proc/sys/vm/hugetlb_optimize_vmemmap {value}"));
    };
    set(1);
    guest.wait_log(REFUSAL);
    assert_eq!(guest.state(gpa), Some(State::Withdrawn));
    set(0);
    let (at, after) = guest.record();
    assert_eq!(at, gpa);
    assert_ne!(after.token(), before.token());
    guest.vm.guest("sh busybox rmmod vprobe");
    set(1);
    guest.vm.guest("sh busybox dmesg -c");
    guest.vm.try_guest("sh busybox insmod /vprobe.ko").expect_err("it loads");
    guest.wait_log(REFUSAL);
    assert_eq!(guest.records(), []);
}

#[test]
fn huge_pages_that_free_metadata_forbid_it() {
    require!(assets::vprobe("6.1-cloud"));
    keeps_off_huge_pages("6.1-cloud");
}

#[test]
fn huge_pages_that_free_metadata_forbid_it_on_7() {
    require!(assets::vprobe("7.x"));
    keeps_off_huge_pages("7.x");
}

#[test]
fn a_guest_that_sleeps_has_withdrawn() {
    require!(assets::vprobe("6.1-cloud"));
    // On a busy host, a guest of two processors once did not wake in QEMU 7.2's emulation, which
    // starts the second one anew.
    let guest = Registered::start(Guest::debian("6.1-cloud").cpus(1));
    let (gpa, before) = guest.record();
    guest.vm.leave("sh echo mem > /sys/power/state");
    until("a sleeping guest", || {
        (guest.vm.qmp("query-status", json!({}))["status"] == "suspended").then_some(())
    });
    assert_eq!(guest.state(gpa), Some(State::Withdrawn));
    guest.vm.qmp("system_wakeup", json!({}));
    let (at, after) = guest.record();
    assert_eq!(at, gpa);
    assert_ne!(after.token(), before.token());
    guest.wait_proven(&after, true);
}

#[test]
fn another_kernel_finds_nothing_registered() {
    let kernel = assets::kernel("6.1-cloud");
    require!(assets::vprobe("6.1-cloud"));
    let kernel = kernel.expect("it has the module");
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "256M").formatted("ext4").with_kernel(&kernel);
    let drive = format!("-drive file={},if=virtio,format=raw", disk.image().display());
    let guest = Registered::start_on(host, Guest::debian("6.1-cloud").qemu_args(&drive));
    let (gpa, _) = guest.record();
    guest.vm.guest("mount ext4 /dev/vda /mnt");
    guest.vm.kexec("/mnt/vmlinuz", "/mnt/initrd");
    // The next kernel may have written to the page.
    let left = guest.state(gpa);
    assert!(left.is_none_or(|state| state == State::Withdrawn), "{left:?}");
    assert_eq!(guest.records(), []);
}
