//! How the C library's heap keeps what was freed.

/// Allocations of so many bytes or more have a mapping of their own.
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Has the heap give large allocations back to the host as soon as they are freed. By itself,
/// glibc keeps up to 32 MiB for each thread once an allocation of that size was freed
/// (mallopt(3), `M_MMAP_THRESHOLD`).
pub fn give_back_large() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it changes a number of the heap's, under the heap's own lock.
        let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES) } == 1;
        debug_assert!(is_set, "glibc takes thresholds up to 32 MiB");
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    fn kept_bytes() -> usize {
        // SAFETY: it fills a struct of integers.
        unsafe { libc::mallinfo2() }.fordblks
    }

    #[test]
    fn what_is_large_goes_back_when_it_is_freed() {
        give_back_large();
        let large = || vec![1u8; 8 << 20];
        (0..3).for_each(|_| drop(std::hint::black_box(large())));
        assert!(kept_bytes() < 4 << 20, "{} bytes", kept_bytes());
    }
}
