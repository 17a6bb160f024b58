//! Sharing a change among devices.

/// Shares `bytes` in whole blocks among those with room, as evenly as possible. What finds no room,
/// or is less than a block, goes to nobody.
pub fn spread(bytes: u64, block_bytes: u64, rooms: &[u64]) -> Vec<u64> {
    let block = block_bytes.max(1);
    let mut shares = vec![0; rooms.len()];
    let mut left = bytes / block * block;
    // Each round uses up the room of at least one, or all that is left.
    for _ in 0..=rooms.len() {
        let room = |index: usize, shares: &[u64]| (rooms[index] - shares[index]) / block * block;
        let open: Vec<usize> = (0..rooms.len()).filter(|&i| room(i, &shares) > 0).collect();
        if left == 0 || open.is_empty() {
            break;
        }
        let each = left / block / open.len() as u64 * block;
        let mut odd_blocks = (left - each * open.len() as u64) / block;
        for index in open {
            let odd = if odd_blocks > 0 { block } else { 0 };
            odd_blocks = odd_blocks.saturating_sub(1);
            let share = (each + odd).min(room(index, &shares)).min(left);
            shares[index] += share;
            left -= share;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_even_and_go_where_there_is_room() {
        assert_eq!(spread(8, 2, &[10, 10]), [4, 4]);
        assert_eq!(spread(6, 2, &[10, 10]), [4, 2]);
        assert_eq!(spread(12, 2, &[2, 10, 10]), [2, 6, 4]);
        assert_eq!(spread(100, 2, &[3, 10]), [2, 10]);
        assert_eq!(spread(7, 2, &[10]), [6]);
        assert!(spread(8, 2, &[]).is_empty());
    }

    proptest! {
        #[test]
        fn all_that_fits_is_shared_in_blocks(
            bytes in 0u64..1000,
            block in 1u64..8,
            rooms in prop::collection::vec(0u64..300, 0..6),
        ) {
            let shares = spread(bytes, block, &rooms);
            let room: u64 = rooms.iter().map(|room| room / block * block).sum();
            prop_assert_eq!(shares.iter().sum::<u64>(), (bytes / block * block).min(room));
            for (share, room) in shares.iter().zip(&rooms) {
                prop_assert!(share <= room && share % block == 0);
            }
        }
    }
}
