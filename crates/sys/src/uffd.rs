//! userfaultfd(2): the kernel reports the page faults of a range to the process that has the
//! descriptor. ABI: `include/uapi/linux/userfaultfd.h`.

mod abi;
pub mod feature;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use ebb_units::Hva;

use abi::{
    API, ApiArg, CopyArg, EVENT_PAGEFAULT, FLAG_WP, FLAG_WRITE, MODE_DONTWAKE, Message,
    PROTECT_MODE_WP, ProtectArg, RangeArg, RegisterArg, UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER,
    UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE, ZeroArg,
};

pub use abi::USERFAULTFD_IOC_NEW;

/// Target of the link in `/proc/PID/fd` that is a userfaultfd.
pub const LINK: &str = "anon_inode:[userfaultfd]";

/// A range of the VMM's address space.
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
    /// Whether it is a write to a protected page; otherwise it is a touch of a missing page.
    pub write_protected: bool,
    /// Whether it is a write, as far as the kernel knows: where a guest's page faults are served
    /// asynchronously, reads arrive as writes.
    pub write: bool,
}

/// Buffer for the events of one [`Uffd::read`].
pub struct Events {
    messages: [Message; Events::CAPACITY],
}

impl Events {
    /// The most events of one read.
    pub const CAPACITY: usize = 32;

    /// Returns an empty buffer.
    pub fn new() -> Events {
        Events { messages: [Message::default(); Events::CAPACITY] }
    }
}

impl Default for Events {
    fn default() -> Events {
        Events::new()
    }
}

/// A userfaultfd of this process, or a copy of one from another process.
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
    /// Wraps a descriptor copied from another process, which may have put anything at its number.
    ///
    /// # Errors
    /// `InvalidInput`: it is not a userfaultfd. Otherwise as readlink(2).
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

    /// Makes a userfaultfd over this process's own memory.
    ///
    /// # Errors
    /// `EPERM` without the privilege, `ENOSYS` on a kernel without userfaultfd.
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

    /// Makes one as [`Uffd::new`] does, but from an open `/dev/userfaultfd`, which needs no other
    /// privilege.
    ///
    /// # Errors
    /// `ENOTTY`: `device` is another device.
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

    /// Agrees on `features` with the kernel, and returns all features that the kernel has. This
    /// works once in a descriptor's life.
    ///
    /// # Errors
    /// `EINVAL`: the kernel lacks one of them, or the handshake was made before.
    pub fn handshake(&self, features: u64) -> io::Result<u64> {
        let mut arg = ApiArg { api: API, features, ioctls: 0 };
        self.ioctl(UFFDIO_API, &mut arg)?;
        Ok(arg.features)
    }

    /// Makes this descriptor report the faults of `range`.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has the range. `EINVAL`: no mapping is there, or one of a kind
    /// that cannot be watched.
    pub fn register(&self, range: HvaRange, watch: Watch) -> io::Result<()> {
        let mode = match watch {
            Watch::Write => 2,
            Watch::MissingAndWrite => 1 | 2,
        };
        let mut arg = RegisterArg { range: range.arg(), mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut arg)
    }

    /// Gives the faults of `range` back to the kernel, and ends the protections in it.
    pub fn unregister(&self, range: HvaRange) -> io::Result<()> {
        self.ioctl(UFFDIO_UNREGISTER, &mut range.arg())
    }

    /// Wakes the threads that wait for a page of `range`: they try again.
    pub fn wake(&self, range: HvaRange) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut range.arg())
    }

    /// Fills one missing page. Its waiters sleep until [`Uffd::wake`].
    ///
    /// # Errors
    /// `EEXIST`: the page is there already. `ESRCH`: the process has ended.
    pub fn copy(&self, to: Hva, page: &[u8]) -> io::Result<()> {
        let mode = MODE_DONTWAKE;
        let src = page.as_ptr() as u64;
        let mut arg = CopyArg { dst: to.0, src, len: page.len() as u64, mode, copy: 0 };
        self.again(UFFDIO_COPY, &mut arg)
    }

    /// As [`Uffd::copy`], for a run of pages. Returns the number of bytes filled: all, or those
    /// before the first page that was there already.
    ///
    /// # Errors
    /// As [`Uffd::copy`], if not even the first page was filled.
    pub fn copy_run(&self, to: Hva, pages: &[u8]) -> io::Result<u64> {
        let mode = MODE_DONTWAKE;
        fill_run(|done| {
            let left = &pages[done as usize..];
            let (src, dst) = (left.as_ptr() as u64, to.0 + done);
            let mut arg = CopyArg { dst, src, len: left.len() as u64, mode, copy: 0 };
            (self.ioctl(UFFDIO_COPY, &mut arg), arg.copy)
        })
    }

    /// Fills missing pages with zeros, and wakes their waiters if `wake` is set.
    ///
    /// # Errors
    /// As [`Uffd::copy`]. If a page is there already, nobody is woken.
    pub fn zero(&self, range: HvaRange, wake: bool) -> io::Result<()> {
        let mode = if wake { 0 } else { MODE_DONTWAKE };
        let mut arg = ZeroArg { range: range.arg(), mode, zeropage: 0 };
        self.again(UFFDIO_ZEROPAGE, &mut arg)
    }

    /// Fills a run of missing pages with zeros. Their waiters sleep until [`Uffd::wake`]. Returns
    /// the number of bytes filled: all, or those before the first page that was there already.
    ///
    /// # Errors
    /// As [`Uffd::copy`], if not even the first page was filled.
    pub fn zero_run(&self, range: HvaRange) -> io::Result<u64> {
        fill_run(|done| {
            let left = HvaRange { start: Hva(range.start.0 + done), bytes: range.bytes - done };
            let mut arg = ZeroArg { range: left.arg(), mode: MODE_DONTWAKE, zeropage: 0 };
            (self.ioctl(UFFDIO_ZEROPAGE, &mut arg), arg.zeropage)
        })
    }

    /// Protects `range`: from now on a write to it is a fault.
    pub fn protect(&self, range: HvaRange) -> io::Result<()> {
        self.again(
            UFFDIO_WRITEPROTECT,
            &mut ProtectArg { range: range.arg(), mode: PROTECT_MODE_WP },
        )
    }

    /// Ends the protection of `range`, and wakes the threads that wait to write to it.
    pub fn unprotect(&self, range: HvaRange) -> io::Result<()> {
        self.again(UFFDIO_WRITEPROTECT, &mut ProtectArg { range: range.arg(), mode: 0 })
    }

    /// Reads the faults that wait now, if any. Does not wait for one.
    ///
    /// # Errors
    /// As read(2). A VMM that has ended reads as no events.
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

    /// Makes the descriptor non-blocking again: poll(2) reports only an error for a blocking one.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn never_wait(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        Ok(rustix::fs::fcntl_setfl(&self.fd, flags | rustix::fs::OFlags::NONBLOCK)?)
    }

    /// Reads as read(2) does, without waiting. A flag of this one call says so, because the VMM
    /// shares the open file and may make it blocking.
    fn read_at_once(&self, events: &mut Events) -> io::Result<usize> {
        let iov_base = events.messages.as_mut_ptr().cast();
        let room = libc::iovec { iov_base, iov_len: Events::CAPACITY * size_of::<Message>() };
        // SAFETY: `room` is all of `events`, and every bit pattern is a valid message.
        let got = unsafe { libc::preadv2(self.fd.as_raw_fd(), &room, 1, -1, libc::RWF_NOWAIT) };
        if let Ok(bytes) = usize::try_from(got) {
            return Ok(bytes);
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.read_before_6_10(room),
            error => Err(error),
        }
    }

    /// Reads on kernels before 6.10, which have no such flag: makes the descriptor non-blocking
    /// each time.
    fn read_before_6_10(&self, room: libc::iovec) -> io::Result<usize> {
        self.never_wait()?;
        // SAFETY: `room` is all of an `Events`: `read_at_once`, the only caller, makes it so.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), room.iov_base, room.iov_len) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Repeats the call while it returns `EAGAIN`: the VMM's mappings change under it (fork,
    /// mremap), and the kernel wants the call made again. The number of calls is bounded, because a
    /// VMM that an attacker controls could keep this up for ever.
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
        // `request` (asserted in `abi`), so the kernel stays within `arg`.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, arg as *mut T) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Fills a run of pages. `fill` gets the number of bytes filled so far, continues after them, and
/// returns how many it filled (or an error's negative number, which counts as 0). Returns the
/// number of bytes filled: all, or those before the first page that was there already. Fails if not
/// even the first page was filled, or after `EAGAIN` 1000 times in a row without a filled page.
fn fill_run(mut fill: impl FnMut(u64) -> (io::Result<()>, i64)) -> io::Result<u64> {
    let (mut done, mut in_vain) = (0, 0);
    // EAGAIN comes as in `again`, and also after a part was filled.
    while in_vain < 1000 {
        let (result, filled) = fill(done);
        let filled = u64::try_from(filled).unwrap_or(0);
        done += filled;
        in_vain = if filled > 0 { 0 } else { in_vain + 1 };
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) if done == 0 => return Err(error),
            _ => return Ok(done),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// Returns the features of this kernel's userfaultfd, and keeps no descriptor.
///
/// # Errors
/// As [`Uffd::new`].
pub fn probe() -> io::Result<u64> {
    Uffd::new()?.handshake(0)
}
