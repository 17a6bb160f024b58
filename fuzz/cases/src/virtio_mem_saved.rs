//! A virtio-mem device's state of any content: `first byte | state`. An odd first byte makes the
//! checksum right, so that the code behind it is reached.

use ebb_virtio_mem::Saved;
use twox_hash::XxHash3_128;

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((first, state)) = data.split_first() else { return };
    let mut bytes = state.to_vec();
    if first & 1 == 1 {
        bytes.extend(XxHash3_128::oneshot(state).to_le_bytes());
    }
    let Ok((saved, sequence)) = Saved::from_bytes(&bytes) else { return };
    let again = Saved::from_bytes(&saved.to_bytes(sequence)).expect("it was just written");
    assert_eq!(again, (saved, sequence));
}
