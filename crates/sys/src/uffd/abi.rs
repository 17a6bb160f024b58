//! The kernel's side of userfaultfd(2): numbers, and layouts of arguments and events, as in
//! `include/uapi/linux/userfaultfd.h`.

use std::mem::size_of;

pub(super) const API: u64 = 0xaa;

#[repr(C)]
pub(super) struct ApiArg {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RangeArg {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
pub(super) struct RegisterArg {
    pub(super) range: RangeArg,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
pub(super) struct CopyArg {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) copy: i64,
}

#[repr(C)]
pub(super) struct ZeroArg {
    pub(super) range: RangeArg,
    pub(super) mode: u64,
    pub(super) zeropage: i64,
}

#[repr(C)]
pub(super) struct ProtectArg {
    pub(super) range: RangeArg,
    pub(super) mode: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Message {
    pub(super) event: u8,
    pub(super) reserved: [u8; 7],
    pub(super) flags: u64,
    pub(super) address: u64,
    pub(super) thread: u64,
}

const _: () = assert!(size_of::<Message>() == 32);

const fn ioctl_number(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xaa << 8 | number
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;
pub(super) const UFFDIO_API: u64 = ioctl_number(READ_WRITE, 0x3f, size_of::<ApiArg>());
pub(super) const UFFDIO_REGISTER: u64 = ioctl_number(READ_WRITE, 0x00, size_of::<RegisterArg>());
pub(super) const UFFDIO_UNREGISTER: u64 = ioctl_number(READ, 0x01, size_of::<RangeArg>());
pub(super) const UFFDIO_WAKE: u64 = ioctl_number(READ, 0x02, size_of::<RangeArg>());
pub(super) const UFFDIO_COPY: u64 = ioctl_number(READ_WRITE, 0x03, size_of::<CopyArg>());
pub(super) const UFFDIO_ZEROPAGE: u64 = ioctl_number(READ_WRITE, 0x04, size_of::<ZeroArg>());
pub(super) const UFFDIO_WRITEPROTECT: u64 = ioctl_number(READ_WRITE, 0x06, size_of::<ProtectArg>());
/// `_IO(0xAA, 0)` on `/dev/userfaultfd`: makes a userfaultfd.
pub const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_REGISTER == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_aa01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_aa02);
const _: () = assert!(UFFDIO_COPY == 0xc028_aa03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xc018_aa06);

pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const FLAG_WRITE: u64 = 1 << 0;
pub(super) const FLAG_WP: u64 = 1 << 1;
/// Flag of both UFFDIO_COPY and UFFDIO_ZEROPAGE.
pub(super) const MODE_DONTWAKE: u64 = 1 << 0;
pub(super) const PROTECT_MODE_WP: u64 = 1 << 0;
