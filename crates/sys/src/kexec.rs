//! Setting the kernel to boot next, without the firmware: kexec_file_load(2). For guests of tests.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Loads a kernel image with its initial RAM disk; reboot(2) then starts it.
///
/// # Errors
/// As kexec_file_load(2): `EPERM` without the privilege, `ENOEXEC` if `kernel` is no kernel.
/// `InvalidInput`: the command line contains a NUL.
pub fn load(kernel: &File, initrd: &File, command_line: &str) -> io::Result<()> {
    let line = CString::new(command_line).map_err(|_| io::ErrorKind::InvalidInput)?;
    let bytes = line.as_bytes_with_nul();
    // SAFETY: the files are open. The line with its NUL has this many bytes and outlives the call,
    // which only reads it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            bytes.len(),
            bytes.as_ptr(),
            0_u64,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
