//! The VM: its memory and its vCPUs.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use ebb_sys::kvm_vm::{Registers, Vm};
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FrameRange, Gfn, Gpa};
use ebb_vm::ram::{Backing, Puncher, Ram, Region};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

use crate::paging;
use crate::program::Program;
use crate::vcpu::Running;

/// The frame through which the guest is told to leave. The host writes it, so it must not be
/// reclaimed.
pub const MAILBOX: Gfn = Gfn(0x100);
/// Frame of the first program. Each program has one frame.
const CODE: Gfn = Gfn(0x101);

/// Lets only one machine exist at a time: two would only wait for each other's processors.
static ALONE: Mutex<()> = Mutex::new(());

/// Checks whether a machine can be had here.
///
/// # Errors
/// Why it cannot, for readers of the list of skipped tests.
pub fn available() -> Result<(), String> {
    Vm::create().map_err(|error| format!("no KVM: /dev/kvm: {error}"))?;
    new_uffd().map(drop).map_err(|error| format!("no userfaultfd: {error}"))
}

/// A VM whose vCPUs all read the same mailbox.
pub struct Machine {
    vm: Vm,
    file: RamFile,
    guest: Arc<Mapping>,
    ram: Arc<Ram>,
    puncher: Cell<Option<Puncher>>,
    uffd: Uffd,
    run_directory: TempDir,
    vcpus: Cell<u32>,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    /// Makes a machine with `bytes` of RAM on small pages. Its page tables and programs are in the
    /// first 2 MiB. The rest is a hole.
    pub fn new(bytes: u64) -> Machine {
        assert!(bytes <= paging::MAX_BYTES, "more than its page tables can map");
        // A failed test may have poisoned the lock; that must not fail the next one.
        let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let file = RamFile::create("kvmtest", bytes).expect("memfd");
        let guest = Arc::new(small_pages(&file, bytes));
        let puncher = Puncher::new(ram_of(&file, &guest));
        let ram = Arc::clone(puncher.ram());
        let vm = Vm::create().expect("/dev/kvm");
        vm.set_memory(0, Gpa(0), Arc::clone(&guest)).expect("KVM_SET_USER_MEMORY_REGION");
        assert!(paging::build(&ram) <= MAILBOX, "page tables reach the mailbox");
        load_programs(&ram);
        Machine {
            vm,
            file,
            guest,
            ram,
            puncher: Cell::new(Some(puncher)),
            uffd: new_uffd().expect("userfaultfd"),
            run_directory: in_memory().expect("run directory"),
            vcpus: Cell::new(0),
            _alone: alone,
        }
    }

    /// Returns the machine's RAM, as the first daemon maps it.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// Returns the RAM for another daemon, which only that daemon punches. The first one gets
    /// [`Machine::ram`]; each later one maps the file anew.
    pub fn puncher(&self) -> Puncher {
        self.puncher.take().unwrap_or_else(|| Puncher::new(ram_of(&self.file, &self.guest)))
    }

    /// Returns the RAM file, as the VMM has it.
    pub fn file(&self) -> &RamFile {
        &self.file
    }

    /// Punches frames, as the VMM does for a balloon: no daemon knows.
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn punch(&self, frames: FrameRange) -> io::Result<()> {
        self.file.punch(frames.start.gpa().0, frames.bytes())
    }

    /// Returns the directory where a daemon keeps its files for this VM.
    pub fn run_directory(&self) -> &Path {
        self.run_directory.path()
    }

    /// Returns a copy of the userfaultfd, as a daemon takes it out of the VMM.
    pub fn uffd(&self) -> Uffd {
        Uffd::from(self.uffd.as_fd().try_clone_to_owned().expect("dup"))
    }

    /// Whether a vCPU waits for a fault that nobody has read yet.
    pub fn fault_waits(&self) -> bool {
        let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).expect("poll") > 0
    }

    /// Starts a program on a new vCPU. The program's source describes its `arguments`.
    pub fn start(&self, program: Program, arguments: Registers) -> Running {
        let number = self.vcpus.replace(self.vcpus.get() + 1);
        let vcpu = self.vm.vcpu(number).expect("KVM_CREATE_VCPU");
        let (rip, rbx) = (entry(program).gpa().0, MAILBOX.gpa().0);
        Running::start(format!("vcpu{number}"), vcpu, Registers { rip, rbx, ..arguments })
    }

    /// Tells all programs to leave, or (`false`) those that start later to stay.
    pub fn tell_to_leave(&self, leave: bool) {
        self.set(MAILBOX.gpa(), u64::from(leave));
    }

    /// Reads one word of memory that is known to be resident.
    pub fn get(&self, gpa: Gpa) -> u64 {
        self.ram.words(gpa, 1).expect("in RAM")[0].load(Relaxed)
    }

    /// Reads one word as a device of the VMM would: its faults are served like the guest's.
    pub fn read_as_vmm(&self, gpa: Gpa) -> u64 {
        self.guest.words(gpa.0, 1).expect("in RAM")[0].load(Relaxed)
    }

    /// Writes one word as a device of the VMM would.
    pub fn write_as_vmm(&self, gpa: Gpa, value: u64) {
        self.guest.words(gpa.0, 1).expect("in RAM")[0].store(value, Relaxed);
    }

    /// Returns the memory as the guest and the VMM's devices map it: touches of missing memory are
    /// served like theirs.
    pub fn guest(&self) -> &Arc<Mapping> {
        &self.guest
    }

    /// Removes all memory from the VMM's page table, as a clock hand does.
    pub fn forget(&self) {
        self.guest.forget(0, self.guest.bytes()).expect("MADV_DONTNEED");
    }

    /// Writes one word of memory without the pager's knowledge.
    pub fn set(&self, gpa: Gpa, value: u64) {
        self.ram.words(gpa, 1).expect("in RAM")[0].store(value, Relaxed);
    }
}

impl Drop for Machine {
    /// Tells programs to leave: after a failure some may still run, or wait for a fault. Closing
    /// the userfaultfd, which comes next, wakes them.
    fn drop(&mut self) {
        self.tell_to_leave(true);
    }
}

fn new_uffd() -> io::Result<Uffd> {
    let uffd = Uffd::new()?;
    uffd.handshake(feature::needed())?;
    Ok(uffd)
}

/// The RAM as a daemon finds it, by a descriptor and a mapping of its own.
fn ram_of(file: &RamFile, guest: &Mapping) -> Ram {
    let file = RamFile::from(file.as_fd().try_clone_to_owned().expect("dup"));
    let (bytes, hva) = (guest.bytes(), guest.address());
    let mapping = small_pages(&file, bytes);
    let region = Region { gpa: Gpa(0), bytes, hva, file: 0, offset: 0 };
    Ram::new(vec![region], vec![Backing::new(file, mapping)]).expect("one region")
}

fn small_pages(file: &RamFile, bytes: u64) -> Mapping {
    let mapping = Mapping::new(file, 0, bytes).expect("mmap");
    // A kernel without huge pages fails this call, and does not need it.
    let _ = mapping.use_huge_pages(false);
    mapping
}

fn entry(program: Program) -> Gfn {
    let index = Program::ALL.iter().position(|&other| other == program);
    Gfn(CODE.0 + index.expect("all are listed") as u64)
}

fn load_programs(ram: &Ram) {
    for program in Program::ALL {
        let words = ram.words(entry(program).gpa(), 512).expect("in RAM");
        assert!(program.code().len() <= 4096, "a program is at most a frame");
        for (word, bytes) in words.iter().zip(program.code().chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(eight), Relaxed);
        }
    }
}

/// Makes a directory in memory, as a run directory should be, or a temporary one if that cannot be
/// had.
fn in_memory() -> std::io::Result<TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}
