//! Checks descriptors that a front end sends, before anybody uses them.

use std::os::fd::{AsFd, AsRawFd};

use ebb_sys::ram_file::keep_from_shrinking;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink};
use vhost::vhost_user::message::FrontendReq as Request;

use crate::connection::{Message, Parted};

/// The link in `/proc/self/fd` of an eventfd.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// Seals guest memory where possible, and makes a ring's descriptors nonblocking. Those must be
/// eventfds: a read or write of anything else might never return.
///
/// # Errors
/// A ring's descriptor is no eventfd.
pub fn vet(message: &mut Message) -> Result<(), Parted> {
    match Request::try_from(message.request) {
        Ok(Request::SET_MEM_TABLE | Request::ADD_MEM_REG) => {
            for file in &message.files {
                // A file that cannot be sealed is guarded once it is mapped.
                keep_from_shrinking(file);
            }
            Ok(())
        }
        Ok(Request::SET_VRING_KICK | Request::SET_VRING_CALL | Request::SET_VRING_ERR) => {
            message.files.iter().try_for_each(use_without_waiting)
        }
        _ => Ok(()),
    }
}

fn use_without_waiting(event: &(impl AsFd + AsRawFd)) -> Result<(), Parted> {
    let link = readlink(format!("/proc/self/fd/{}", event.as_raw_fd()), Vec::new())?;
    if link.as_bytes() != EVENTFD {
        return Err(Parted::NoEvent);
    }
    Ok(fcntl_setfl(event, fcntl_getfl(event)? | OFlags::NONBLOCK)?)
}

/// Whether a message changes which memory the front end shares.
pub fn changes_memory(message: &Message) -> bool {
    use Request as R;
    let request = Request::try_from(message.request);
    matches!(request, Ok(R::SET_MEM_TABLE | R::ADD_MEM_REG | R::REM_MEM_REG))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn message(request: Request, file: std::os::fd::OwnedFd) -> Message {
        Message { files: [file].into(), ..Message::new(request.into(), Vec::new()) }
    }

    #[test]
    fn only_an_eventfd_signals_and_a_full_one_does_not_block() {
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let refused = vet(&mut message(Request::SET_VRING_CALL, stream.into()));
        assert!(matches!(refused, Err(Parted::NoEvent)));
        // An eventfd that is full, and blocks.
        let full = eventfd(u32::MAX, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1 - u64::from(u32::MAX)).to_ne_bytes()).unwrap();
        let mut message = message(Request::SET_VRING_CALL, full);
        vet(&mut message).unwrap();
        let written = rustix::io::write(&message.files[0], &1u64.to_ne_bytes());
        assert_eq!(written, Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn memory_is_sealed_where_it_can_be() {
        for (flags, is_sealed) in [(MemfdFlags::ALLOW_SEALING, true), (MemfdFlags::empty(), false)]
        {
            let mut message = message(Request::SET_MEM_TABLE, memfd_create("vet", flags).unwrap());
            ftruncate(&message.files[0], 8192).unwrap();
            vet(&mut message).unwrap();
            assert_eq!(ftruncate(&message.files[0], 4096).is_err(), is_sealed);
        }
    }
}
