//! Messages of hostile front ends and back-ends.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The front end's memory, to which its messages refer.
pub(crate) struct Memory {
    /// Size of the first region, and start of the second one.
    pub(crate) bytes: u64,
    /// Address of the first region in the front end. That of the second one is twice as high.
    pub(crate) address: u64,
    pub(crate) second_bytes: u64,
}

/// Sends a message that is made likely to be valid. Returns `false` if the connection has ended.
pub(crate) fn say(
    to: &UnixStream,
    (kind, flags): (u32, u8),
    body: &[u8],
    files: &[BorrowedFd<'_>],
    memory: &Memory,
) -> bool {
    let Memory { bytes, address, second_bytes } = *memory;
    let body: Vec<u8> = match (kind, flags >> 4 & 3) {
        // A table of RAM, and rings in it.
        (5, 0) => words(&[1, 0, bytes, address, 0]),
        (5, 1) => words(&[2, 0, bytes, address, 0, bytes, second_bytes, address * 2, 0]),
        (8, 0) => words(&[16 << 32]),
        (9, 0) => words(&[0, address, address + 0x2000, address + 0x1000, 0]),
        (10..=18, 0) => words(&[0]),
        (18, 1) => words(&[1 << 32]),
        _ => body.to_vec(),
    };
    let version = if flags & 7 == 7 { u32::from(flags) } else { 1 | u32::from(flags & 12) };
    let length = if flags >> 6 == 3 { body.len() as u32 + 3 } else { body.len() as u32 };
    let header = [kind, version, length].map(u32::to_ne_bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    let parts = [IoSlice::new(header.as_flattened()), IoSlice::new(&body)];
    sendmsg(to, &parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
