//! userfaultfd(2): the kernel hands the page faults of a range to whoever
//! holds the descriptor. ABI: `include/uapi/linux/userfaultfd.h`.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use ebb_units::Hva;

const API: u64 = 0xaa;
/// What `/proc/PID/fd` calls one.
pub const LINK: &str = "anon_inode:[userfaultfd]";

/// Feature bits of `UFFDIO_API` that Ebb asks for or reports.
pub mod feature {
    /// Write-protect faults are reported.
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// Missing faults in hugetlb memory.
    pub const MISSING_HUGETLBFS: u64 = 1 << 4;
    /// Missing faults in shared memory.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// Write-protection of shared and hugetlb memory.
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

    /// What a held VM needs: (bit, the name that the kernel's header gives it).
    pub const NEEDED: [(u64, &str); 4] = [
        (PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
        (MISSING_HUGETLBFS, "MISSING_HUGETLBFS"),
        (MISSING_SHMEM, "MISSING_SHMEM"),
        (WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
    ];

    /// All of [`NEEDED`] in one word.
    pub fn needed() -> u64 {
        NEEDED.iter().fold(0, |bits, (bit, _)| bits | bit)
    }
}

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RangeArg {
    start: u64,
    len: u64,
}

#[repr(C)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct ZeroArg {
    range: RangeArg,
    mode: u64,
    zeropage: i64,
}

#[repr(C)]
struct ProtectArg {
    range: RangeArg,
    mode: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

const _: () = assert!(size_of::<Message>() == 32);

const fn ioctl_number(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xaa << 8 | number
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const UFFDIO_API: u64 = ioctl_number(READ_WRITE, 0x3f, size_of::<ApiArg>());
const UFFDIO_REGISTER: u64 = ioctl_number(READ_WRITE, 0x00, size_of::<RegisterArg>());
const UFFDIO_UNREGISTER: u64 = ioctl_number(READ, 0x01, size_of::<RangeArg>());
const UFFDIO_WAKE: u64 = ioctl_number(READ, 0x02, size_of::<RangeArg>());
const UFFDIO_COPY: u64 = ioctl_number(READ_WRITE, 0x03, size_of::<CopyArg>());
const UFFDIO_ZEROPAGE: u64 = ioctl_number(READ_WRITE, 0x04, size_of::<ZeroArg>());
const UFFDIO_WRITEPROTECT: u64 = ioctl_number(READ_WRITE, 0x06, size_of::<ProtectArg>());
/// `_IO(0xAA, 0)` on `/dev/userfaultfd`: makes a userfaultfd.
pub const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_REGISTER == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_aa01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_aa02);
const _: () = assert!(UFFDIO_COPY == 0xc028_aa03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xc018_aa06);

const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;
/// Of both UFFDIO_COPY and UFFDIO_ZEROPAGE.
const MODE_DONTWAKE: u64 = 1 << 0;
const PROTECT_MODE_WP: u64 = 1 << 0;

/// Part of the VMM's address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HvaRange {
    /// First byte, page aligned.
    pub start: Hva,
    /// Length, a multiple of the page size.
    pub bytes: u64,
}

impl HvaRange {
    fn arg(self) -> RangeArg {
        RangeArg { start: self.start.0, len: self.bytes }
    }
}

/// Which faults of a range are reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// Writes to protected pages only.
    Write,
    /// First touches of missing pages, and writes to protected pages.
    MissingAndWrite,
}

/// A page fault that waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The page's address in the VMM.
    pub address: Hva,
    /// A write to a protected page; else a touch of a missing one.
    pub write_protected: bool,
    /// A write, as far as the kernel knows: where a guest's page faults are served
    /// asynchronously, reads arrive as writes.
    pub write: bool,
}

/// Room for the events of one [`Uffd::read`].
pub struct Events {
    messages: [Message; Events::CAPACITY],
}

impl Events {
    /// Events read at once.
    pub const CAPACITY: usize = 32;

    /// Empty room.
    pub fn new() -> Events {
        Events { messages: [Message::default(); Events::CAPACITY] }
    }
}

impl Default for Events {
    fn default() -> Events {
        Events::new()
    }
}

/// A userfaultfd: of this process, or taken out of another one.
pub struct Uffd {
    fd: OwnedFd,
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Uffd {
        Uffd { fd }
    }
}

impl Uffd {
    /// One that was taken out of another process, which may have put anything at its number.
    ///
    /// # Errors
    /// `InvalidInput`: it is no userfaultfd; as readlink(2).
    pub fn taken(fd: OwnedFd) -> io::Result<Uffd> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        match link.as_os_str() == LINK {
            true => Ok(Uffd { fd }),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the VMM has {} where its userfaultfd should be", link.display()),
            )),
        }
    }

    /// A userfaultfd over this process's own memory.
    ///
    /// # Errors
    /// `EPERM` without the privilege, `ENOSYS` on a kernel without it.
    pub fn new() -> io::Result<Uffd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: userfaultfd(2) takes one integer and touches no memory of ours.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call just returned this descriptor; nobody else has it.
        Ok(Uffd { fd: unsafe { OwnedFd::from_raw_fd(fd as i32) } })
    }

    /// As [`Uffd::new`], from an open `/dev/userfaultfd`, which needs no other privilege.
    ///
    /// # Errors
    /// `ENOTTY`: it is another device.
    pub fn of_device(device: &File) -> io::Result<Uffd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: this ioctl takes one integer and touches no memory of ours.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call just returned this descriptor; nobody else has it.
        Ok(Uffd { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Agrees on `features` with the kernel; once in a descriptor's life.
    /// Returns all features that the kernel has.
    ///
    /// # Errors
    /// `EINVAL` when the kernel lacks one, or when the handshake was made before.
    pub fn handshake(&self, features: u64) -> io::Result<u64> {
        let mut arg = ApiArg { api: API, features, ioctls: 0 };
        self.ioctl(UFFDIO_API, &mut arg)?;
        Ok(arg.features)
    }

    /// Hands the faults of `range` to this descriptor.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has it. `EINVAL`: no such mapping, or one
    /// of a kind that cannot be watched.
    pub fn register(&self, range: HvaRange, watch: Watch) -> io::Result<()> {
        let mode = match watch {
            Watch::Write => 2,
            Watch::MissingAndWrite => 1 | 2,
        };
        let mut arg = RegisterArg { range: range.arg(), mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut arg)
    }

    /// Gives the faults of `range` back to the kernel; protections in it end.
    pub fn unregister(&self, range: HvaRange) -> io::Result<()> {
        self.ioctl(UFFDIO_UNREGISTER, &mut range.arg())
    }

    /// Lets whoever waits for a page of `range` try again.
    pub fn wake(&self, range: HvaRange) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut range.arg())
    }

    /// Fills one missing page; its waiters sleep on until they are woken.
    ///
    /// # Errors
    /// `EEXIST`: the page is there already. `ESRCH`: the process is gone.
    pub fn copy(&self, to: Hva, page: &[u8]) -> io::Result<()> {
        let mode = MODE_DONTWAKE;
        let src = page.as_ptr() as u64;
        let mut arg = CopyArg { dst: to.0, src, len: page.len() as u64, mode, copy: 0 };
        self.again(UFFDIO_COPY, &mut arg)
    }

    /// As [`Uffd::copy`] for pages in a row. Returns how many bytes were filled before one that was
    /// there already, or all.
    ///
    /// # Errors
    /// As [`Uffd::copy`], when not even the first was filled.
    pub fn copy_run(&self, to: Hva, pages: &[u8]) -> io::Result<u64> {
        let mode = MODE_DONTWAKE;
        fill_run(|done| {
            let left = &pages[done as usize..];
            let (src, dst) = (left.as_ptr() as u64, to.0 + done);
            let mut arg = CopyArg { dst, src, len: left.len() as u64, mode, copy: 0 };
            (self.ioctl(UFFDIO_COPY, &mut arg), arg.copy)
        })
    }

    /// Fills missing pages with zeros, and wakes their waiters if `wake` says so.
    ///
    /// # Errors
    /// As [`Uffd::copy`]; where a page is there already nobody is woken.
    pub fn zero(&self, range: HvaRange, wake: bool) -> io::Result<()> {
        let mode = if wake { 0 } else { MODE_DONTWAKE };
        let mut arg = ZeroArg { range: range.arg(), mode, zeropage: 0 };
        self.again(UFFDIO_ZEROPAGE, &mut arg)
    }

    /// Fills missing pages in a row with zeros; their waiters sleep on until they are
    /// woken. Returns how many bytes were filled before one that was there already, or
    /// all.
    ///
    /// # Errors
    /// As [`Uffd::copy`], when not even the first was filled.
    pub fn zero_run(&self, range: HvaRange) -> io::Result<u64> {
        fill_run(|done| {
            let left = HvaRange { start: Hva(range.start.0 + done), bytes: range.bytes - done };
            let mut arg = ZeroArg { range: left.arg(), mode: MODE_DONTWAKE, zeropage: 0 };
            (self.ioctl(UFFDIO_ZEROPAGE, &mut arg), arg.zeropage)
        })
    }

    /// From now on a write to `range` is a fault.
    pub fn protect(&self, range: HvaRange) -> io::Result<()> {
        self.again(
            UFFDIO_WRITEPROTECT,
            &mut ProtectArg { range: range.arg(), mode: PROTECT_MODE_WP },
        )
    }

    /// Writes to `range` go through again; whoever waited to write is woken.
    pub fn unprotect(&self, range: HvaRange) -> io::Result<()> {
        self.again(UFFDIO_WRITEPROTECT, &mut ProtectArg { range: range.arg(), mode: 0 })
    }

    /// Reads the faults that wait now; none when there are none.
    ///
    /// # Errors
    /// As read(2); a VMM that is gone reads as no events.
    pub fn read<'e>(&self, events: &'e mut Events) -> io::Result<impl Iterator<Item = Fault> + 'e> {
        let count = match self.read_at_once(events) {
            Ok(bytes) => bytes / size_of::<Message>(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        Ok(events.messages[..count].iter().filter(|m| m.event == EVENT_PAGEFAULT).map(|m| Fault {
            address: Hva(m.address),
            write_protected: m.flags & FLAG_WP != 0,
            write: m.flags & (FLAG_WRITE | FLAG_WP) != 0,
        }))
    }

    /// Tells the descriptor again not to wait: poll(2) has only an error for one that does.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn never_wait(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        Ok(rustix::fs::fcntl_setfl(&self.fd, flags | rustix::fs::OFlags::NONBLOCK)?)
    }

    /// As read(2), without waiting: by a flag of this one call, since whether the descriptor
    /// waits is the VMM's to change, which shares the open file.
    fn read_at_once(&self, events: &mut Events) -> io::Result<usize> {
        let iov_base = events.messages.as_mut_ptr().cast();
        let room = libc::iovec { iov_base, iov_len: Events::CAPACITY * size_of::<Message>() };
        // SAFETY: `room` is all of `events`, for whose messages every bit pattern is one.
        let got = unsafe { libc::preadv2(self.fd.as_raw_fd(), &room, 1, -1, libc::RWF_NOWAIT) };
        if let Ok(bytes) = usize::try_from(got) {
            return Ok(bytes);
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.read_before_6_10(room),
            error => Err(error),
        }
    }

    /// Kernels before 6.10 know no such flag: the descriptor is told not to wait each time.
    fn read_before_6_10(&self, room: libc::iovec) -> io::Result<usize> {
        self.never_wait()?;
        // SAFETY: as its caller says of `room`.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), room.iov_base, room.iov_len) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// EAGAIN says that the VMM's mappings are changing under the call (fork,
    /// mremap): the kernel wants it made again. Bounded, because a VMM that
    /// has been taken over could keep it up for ever.
    fn again<T>(&self, request: u64, arg: &mut T) -> io::Result<()> {
        for _ in 0..1000 {
            match self.ioctl(request, arg) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                result => return result,
            }
        }
        Err(io::Error::from(io::ErrorKind::WouldBlock))
    }

    fn ioctl<T>(&self, request: u64, arg: &mut T) -> io::Result<()> {
        // SAFETY: every caller passes the struct whose size is encoded in
        // `request` (asserted above), so the kernel stays within `arg`.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, arg as *mut T) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Fills pages in a row. `fill` goes on behind so many bytes, and tells how many it filled
/// (or an error's negative number, which counts for nothing). Returns how many bytes were
/// filled before one that was there already, or all; an error when not even the first was.
fn fill_run(mut fill: impl FnMut(u64) -> (io::Result<()>, i64)) -> io::Result<u64> {
    let mut done = 0;
    // EAGAIN: as in `again`, and after a part was filled.
    for _ in 0..1000 {
        let (result, filled) = fill(done);
        done += u64::try_from(filled).unwrap_or(0);
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) if done == 0 => return Err(error),
            _ => return Ok(done),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// The features of this kernel's userfaultfd, without keeping one.
///
/// # Errors
/// As [`Uffd::new`].
pub fn probe() -> io::Result<u64> {
    Uffd::new()?.handshake(0)
}

#[cfg(test)]
mod tests {
    use ebb_units::FRAME_BYTES;

    use super::*;
    use crate::mapping::Mapping;
    use crate::pagemap::Pagemap;
    use crate::process::Process;
    use crate::ram_file::RamFile;

    /// This process may lack the privilege; then the VM tests, which need it
    /// too, say so.
    fn over(file: &RamFile, watch: Watch) -> Option<(Uffd, Mapping, HvaRange)> {
        let uffd = match Uffd::new() {
            Ok(uffd) => uffd,
            Err(error) => {
                eprintln!("SKIPPED: no userfaultfd here: {error}");
                return None;
            }
        };
        uffd.handshake(feature::needed()).unwrap();
        let mapping = Mapping::new(file, 0, file.bytes().unwrap()).unwrap();
        let range = HvaRange { start: mapping.address(), bytes: mapping.bytes() };
        uffd.register(range, watch).unwrap();
        Some((uffd, mapping, range))
    }

    fn one_fault(uffd: &Uffd) -> Fault {
        let mut events = Events::new();
        loop {
            if let Some(fault) = uffd.read(&mut events).unwrap().next() {
                return fault;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_missing_page_waits_for_its_content() {
        let file = RamFile::create("uffd-test", 1 << 20).unwrap();
        let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                mapping.words(8 << 10, 1).unwrap()[0].load(std::sync::atomic::Ordering::Relaxed)
            });
            let fault = one_fault(&uffd);
            assert_eq!(fault.address, Hva(range.start.0 + (8 << 10)));
            assert!(!fault.write_protected && !fault.write);
            uffd.copy(fault.address, &[7; 4096]).unwrap();
            uffd.wake(range).unwrap();
            assert_eq!(reader.join().unwrap(), 0x0707_0707_0707_0707);
        });
    }

    #[test]
    fn a_protected_page_waits_for_leave_to_be_written() {
        let file = RamFile::create("uffd-test", 1 << 20).unwrap();
        let Some((uffd, mapping, range)) = over(&file, Watch::Write) else { return };
        let word = &mapping.words(0, 1).unwrap()[0];
        word.store(1, std::sync::atomic::Ordering::Relaxed);
        uffd.protect(range).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| word.store(2, std::sync::atomic::Ordering::Relaxed));
            assert!(one_fault(&uffd).write_protected);
            assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 1);
            uffd.unprotect(range).unwrap();
            writer.join().unwrap();
        });
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[test]
    fn pages_in_a_row_come_to_be_written() {
        let file = RamFile::create("uffd-test", 1 << 20).unwrap();
        let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
        assert_eq!(uffd.copy_run(range.start, &[7; 8192]).unwrap(), 8192);
        let word = &mapping.words(4096, 1).unwrap()[0];
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 0x0707_0707_0707_0707);
        // Nobody would serve a fault.
        word.store(2, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(
            uffd.copy_run(range.start, &[8; 8192]).unwrap_err().raw_os_error(),
            Some(libc::EEXIST)
        );
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    /// The kernel keeps a mark in its place.
    #[test]
    fn a_protected_page_that_is_forgotten_is_not_mapped() {
        let file = RamFile::create("marked", 2 * FRAME_BYTES).unwrap();
        let Some((uffd, mapping, range)) = over(&file, Watch::Write) else { return };
        mapping.populate(0, 2 * FRAME_BYTES).unwrap();
        let first = HvaRange { start: range.start, bytes: FRAME_BYTES };
        uffd.protect(first).unwrap();
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        let mapped = || {
            let mut bytes = 0;
            pagemap.mapped(range, |part| bytes += part.bytes).map(|()| bytes)
        };
        match mapped() {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                return eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN");
            }
            all => assert_eq!(all.unwrap(), 2 * FRAME_BYTES),
        }
        mapping.forget(0, FRAME_BYTES).unwrap();
        assert_eq!(mapped().unwrap(), FRAME_BYTES);
    }

    #[test]
    fn what_is_no_userfaultfd_is_refused() {
        let file = RamFile::create("uffd-test", 4096).unwrap();
        let copy = file.as_fd().try_clone_to_owned().unwrap();
        let error = Uffd::taken(copy).err().unwrap();
        assert!(error.to_string().contains("memfd:uffd-test"), "{error}");
        let Ok(uffd) = Uffd::new() else { return eprintln!("SKIPPED: no userfaultfd here") };
        assert!(Uffd::taken(uffd.fd).is_ok());
    }

    #[test]
    fn a_descriptor_that_is_told_to_wait_is_read_without_waiting() {
        let file = RamFile::create("uffd-test", 1 << 20).unwrap();
        let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
        let flags = rustix::fs::fcntl_getfl(&uffd.fd).unwrap();
        let waits = flags - rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&uffd.fd, waits).unwrap();
        let mut events = Events::new();
        assert_eq!(uffd.read(&mut events).unwrap().count(), 0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                mapping.words(0, 1).unwrap()[0].load(std::sync::atomic::Ordering::Relaxed)
            });
            assert_eq!(one_fault(&uffd).address, range.start);
            uffd.zero(HvaRange { bytes: 4096, ..range }, true).unwrap();
            assert_eq!(reader.join().unwrap(), 0);
        });
    }

    #[test]
    fn a_second_descriptor_is_refused() {
        let file = RamFile::create("uffd-test", 1 << 20).unwrap();
        let Some((_first, _mapping, range)) = over(&file, Watch::Write) else { return };
        let second = Uffd::new().unwrap();
        second.handshake(0).unwrap();
        let error = second.register(range, Watch::Write).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
    }
}
