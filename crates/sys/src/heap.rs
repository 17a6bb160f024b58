//! What the C library's heap keeps of freed memory.

/// The smallest allocation, in bytes, that has a mapping of its own.
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Makes the heap return large allocations to the host as soon as they are freed. By default, glibc
/// keeps up to 32 MiB for each thread once an allocation of that size was freed (mallopt(3),
/// `M_MMAP_THRESHOLD`).
pub fn give_back_large() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it changes a number of the heap, under the heap's own lock.
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
    fn large_allocations_go_back_when_freed() {
        give_back_large();
        let large = || vec![1u8; 8 << 20];
        (0..3).for_each(|_| drop(std::hint::black_box(large())));
        assert!(kept_bytes() < 4 << 20, "{} bytes", kept_bytes());
    }
}
