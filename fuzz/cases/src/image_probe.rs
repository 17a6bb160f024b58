//! A disk image of any content, probed before it is served: `(place, bytes)` of 2 and 16 bytes
//! each. The places count in steps of 16 bytes, 512 bytes and 4 KiB in turn.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ebb_block::Image;

const IMAGE_BYTES: u64 = 1 << 20;
const STEPS: [u64; 3] = [16, 512, 4096];

/// Runs one input.
pub fn run(data: &[u8]) {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len(IMAGE_BYTES).expect("room for it");
    for (index, [low, high, bytes @ ..]) in data.as_chunks::<18>().0.iter().enumerate() {
        let place = u64::from(u16::from_le_bytes([*low, *high])) * STEPS[index % STEPS.len()];
        file.write_all_at(bytes, place % (IMAGE_BYTES - 16)).expect("room for it");
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if let Ok(image) = Image::open_with(&path, false, false) {
        assert_eq!(image.bytes(), IMAGE_BYTES);
    }
}
