//! Where a VM's memory is, in parts that add up to all of it.

use ebb_api::MemoryParts;

/// What is known of a VM's memory, in bytes. The figures are read one after the other while the VM
/// runs, so they may not fit together.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counted {
    /// All of it.
    pub memory: u64,
    /// What takes host memory.
    pub resident: u64,
    /// Evicted, with the content in the store.
    pub saved: u64,
    /// The part of that in compressed memory.
    pub compressed: u64,
    /// Evicted, with the content in a block of the guest's disk.
    pub disk_backed: u64,
    /// Free by the guest's own count. `None`: the guest is not trusted.
    pub free: Option<u64>,
    /// What the guest does not count because it may not use it: in the balloon, or hard-reclaimed.
    pub withheld: u64,
}

/// Returns the parts. Where the figures contradict each other, those of the host come first, and the
/// guest's last.
pub fn of(counted: Counted) -> MemoryParts {
    let mut left = counted.memory;
    let mut take = |bytes: u64| {
        let taken = bytes.min(left);
        left -= taken;
        taken
    };
    let (resident, saved) = (take(counted.resident), take(counted.saved));
    let disk_backed_bytes = take(counted.disk_backed);
    let (empty_bytes, compressed_bytes) = (left, counted.compressed.min(saved));
    // What is empty is free in the guest, or withheld. Few frames in use are empty as well.
    let free_and_empty = empty_bytes.saturating_sub(counted.withheld);
    let free_bytes = counted.free.map(|free| free.saturating_sub(free_and_empty).min(resident));
    let parts = MemoryParts {
        in_use_bytes: resident - free_bytes.unwrap_or(0),
        free_bytes,
        empty_bytes,
        compressed_bytes,
        swapped_bytes: saved - compressed_bytes,
        disk_backed_bytes,
    };
    debug_assert_eq!(parts.sum_bytes(), counted.memory, "{counted:?}");
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn each_part_is_what_it_is_called() {
        let parts = of(Counted {
            memory: 1024 * MIB,
            resident: 500 * MIB,
            saved: 100 * MIB,
            compressed: 60 * MIB,
            disk_backed: 24 * MIB,
            free: Some(450 * MIB),
            withheld: 50 * MIB,
        });
        let wanted = MemoryParts {
            // 400 MiB are empty, 350 of them free in the guest, which has 100 more.
            in_use_bytes: 400 * MIB,
            free_bytes: Some(100 * MIB),
            empty_bytes: 400 * MIB,
            compressed_bytes: 60 * MIB,
            swapped_bytes: 40 * MIB,
            disk_backed_bytes: 24 * MIB,
        };
        assert_eq!(parts, wanted);
    }

    #[test]
    fn a_guest_that_is_not_trusted_has_no_known_free_memory() {
        let parts = of(Counted { memory: 10, resident: 6, ..Counted::default() });
        assert_eq!((parts.in_use_bytes, parts.free_bytes, parts.empty_bytes), (6, None, 4));
    }

    #[test]
    fn parts_add_up_whatever_the_figures_say() {
        let odd = [0, 1, 7, 100, u64::MAX];
        for memory in odd {
            for resident in odd {
                for saved in odd {
                    for [compressed, disk_backed, free, withheld] in
                        [[0; 4], [u64::MAX; 4], [1, 2, 3, 4], [100, 0, u64::MAX, 0]]
                    {
                        let free = Some(free);
                        let counted = Counted {
                            memory,
                            resident,
                            saved,
                            compressed,
                            disk_backed,
                            free,
                            withheld,
                        };
                        let parts = of(counted);
                        assert_eq!(parts.sum_bytes(), memory, "{counted:?}: {parts:?}");
                        assert!(parts.resident_bytes() <= resident, "{counted:?}: {parts:?}");
                    }
                }
            }
        }
    }
}
