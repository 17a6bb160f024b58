//! A VM for tests of controllers, without QEMU and without a processor.
//!
//! This process touches the memory as the guest would. Another process stands for the VMM, because
//! what this one has open changes while other tests run. [`qemu::Qemu`] answers by QMP.

pub mod qemu;

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command as Program, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, LazyLock};

use ebb_inspect::GuestMemory;
use ebb_pager::NothingKnown;
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::Uffd;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::Region;
use ebb_vm::ram::{Backing, Ram};
use tempfile::TempDir;
use testkit::forge::{self, Forge};

use self::qemu::Qemu;
use super::mailbox::Command;
use super::{ContextParts, VmContext};
use crate::model::auto::Auto;
use crate::model::record::{Record, RegionRecord};
use crate::serve::disks::Disks;
use crate::serve::growth::Growth;
use crate::vm::make_pager;

/// Bytes of a RAM file: what a made-up kernel has.
pub const FILE_BYTES: u64 = forge::RAM_BYTES;
const FRAME_WORDS: usize = FRAME_BYTES as usize / 8;
/// The memory of a made-up kernel, with free blocks.
static KERNEL: LazyLock<Forge> = LazyLock::new(|| Forge::with_free_blocks(4));

/// What such a VM has beside its context.
pub struct Machine {
    /// The worker's commands.
    pub commands: Receiver<Command>,
    /// The process in place of QEMU.
    pub vmm: Vmm,
    /// The RAM files as the guest has them mapped.
    guest: Vec<Mapping>,
    _home: TempDir,
}

/// Makes a VM in release mode, with small pages and neither limit nor target. Its memory is one RAM
/// file, all of it a hole. Nothing is known of its guest and devices, and QEMU does not answer.
/// `None`: this host does not let the tests be a VMM.
pub fn context() -> Option<(VmContext, Machine)> {
    with_files(1)
}

/// Makes the same VM with so many RAM files in a row. The VMM has only the first one open.
pub fn with_files(count: usize) -> Option<(VmContext, Machine)> {
    let uffd = Uffd::new().ok().filter(|uffd| make_pager::shake_hands(uffd).is_ok());
    if uffd.is_none() {
        skip("no userfaultfd");
    }
    let uffd = uffd?;
    let home = tempfile::tempdir().expect("a directory");
    let (ram, guest, first) = memory(count);
    let vmm = Vmm::with(first);
    let record = record(home.path(), &vmm.process(), &ram);
    let ledger = make_pager::new_ledger(&ram, &record, home.path()).expect("a ledger");
    let disks = Disks::none().expect("no disks");
    let store = make_pager::store(&ram, None, &record, home.path()).expect("a store");
    let over = (ledger, store);
    let with = (&disks.shared, None);
    let made = make_pager::pager(ram, over, uffd, with, &record, home.path()).expect("a pager");
    let (context, commands) = VmContext::new(ContextParts {
        process: vmm.process(),
        pager: Arc::new(made.pager),
        restored: made.restored,
        qmp: None,
        record,
        directory: home.path(),
        disks,
        growth: Growth::none(),
        passed: made.passed,
    });
    Some((context, Machine { commands, vmm, guest, _home: home }))
}

/// Records that the test of this thread cannot run here.
pub fn skip(reason: &str) {
    testkit::skip::record(std::thread::current().name().unwrap_or("a test"), reason);
}

/// Makes files of memory in a row. Returns them as Ebb and as the guest has them mapped, and a
/// descriptor of the first one.
fn memory(count: usize) -> (Ram, Vec<Mapping>, OwnedFd) {
    let (mut regions, mut files, mut guest) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = None;
    for index in 0..count {
        let file = RamFile::create("machine", FILE_BYTES).expect("memory");
        let [mapping, of_guest] = [small_pages(&file), small_pages(&file)];
        let (gpa, hva) = (Gpa(index as u64 * FILE_BYTES), of_guest.address());
        regions.push(Region { gpa, bytes: FILE_BYTES, hva, file: index, offset: 0 });
        let descriptor = file.as_fd().try_clone_to_owned().expect("a descriptor");
        first.get_or_insert(descriptor);
        files.push(Backing::new(file, mapping));
        guest.push(of_guest);
    }
    let ram = Ram::new(regions, files).expect("regions in a row");
    (ram, guest, first.expect("one file or more"))
}

fn small_pages(file: &RamFile) -> Mapping {
    let mapping = Mapping::new(file, 0, FILE_BYTES).expect("a mapping");
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

fn record(home: &Path, process: &Process, ram: &Ram) -> Record {
    let text = include_str!("../../../../../fuzz/corpus/vm_json/whole");
    let record: Record = serde_json::from_str(text).expect("a record");
    let inode = |region: &Region| ram.files()[region.file].identity().expect("an inode").1;
    Record {
        pid: process.pid(),
        start_ticks: process.start_ticks().expect("it runs"),
        boot: String::new(),
        logs: None,
        qmp: home.join("qmp.sock"),
        swap: home.join("swap"),
        evicts: false,
        size: None,
        auto: Auto::default(),
        limit_bytes: None,
        share: None,
        growth: Vec::new(),
        regions: ram.regions().map(|region| RegionRecord::new(region, inode(region))).collect(),
        ..record
    }
}

/// A process in place of QEMU. It does nothing, and ends when this is dropped.
pub struct Vmm(Child);

impl Vmm {
    /// Starts one that has this file open, and two pipes.
    pub fn with(file: impl Into<Stdio>) -> Vmm {
        let mut child = Program::new("sh")
            .args(["-c", "echo; read word"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .expect("a shell");
        let output = child.stdout.as_mut().expect("a pipe");
        // Once it says something, it has nothing more open of what this process has.
        BufReader::new(output).read_line(&mut String::new()).expect("a line");
        Vmm(child)
    }

    /// Returns the process.
    pub fn process(&self) -> Process {
        Process::open(self.0.id() as i32).expect("it runs")
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    /// Returns words of the first RAM file, as the guest has them mapped. A touch of a watched hole
    /// waits until the fault is served.
    pub fn words(&self, gpa: Gpa, count: usize) -> &[AtomicU64] {
        self.guest[0].words(gpa.0, count).expect("words of the first RAM file")
    }

    /// Has the guest use frames that are not watched.
    pub fn touch(&self, frames: FrameRange) {
        self.guest[0].populate(frames.start.gpa().0, frames.bytes()).expect("memory");
    }

    /// Has the guest write to frames that are not watched, and evicts them.
    pub fn evict(&self, cx: &mut VmContext, frames: FrameRange) {
        frames.frames().for_each(|gfn| self.words(gfn.gpa(), 1)[0].store(!gfn.0, Relaxed));
        cx.begin_to_evict().expect("it is watched");
        let frames: Vec<Gfn> = frames.frames().collect();
        let evicted = cx.pager.evictor().evict(&frames, &NothingKnown).expect("room");
        assert_eq!(evicted.saved, frames.len() as u64);
    }

    /// Boots a made-up kernel, which QEMU says that the processor runs. Nobody has inspected it.
    pub fn boot(&self, cx: &mut VmContext) -> Qemu {
        for gpa in (0..forge::FIRST_SPARE.0).map(|gfn| Gfn(gfn).gpa()) {
            let from = KERNEL.mem.words(gpa, FRAME_WORDS).expect("words of its RAM");
            let from = from.iter().map(|word| word.load(Relaxed));
            let pairs = from.zip(self.words(gpa, FRAME_WORDS));
            pairs.filter(|(word, _)| *word != 0).for_each(|(word, to)| to.store(word, Relaxed));
        }
        let qemu = Qemu::of(cx);
        qemu.runs(forge::ROOT);
        qemu
    }

    /// Boots a made-up kernel that is trusted.
    pub fn boot_trusted(&self, cx: &mut VmContext) -> Qemu {
        let qemu = self.boot(cx);
        let is_trusted = cx.guest.confirm(&cx.pager, cx.qmp.socket(), false, None);
        assert!(is_trusted, "{:?}", cx.guest.kernel());
        cx.guest.renew_witness();
        cx.guest.bring_back_needed(&cx.pager);
        qemu
    }
}
