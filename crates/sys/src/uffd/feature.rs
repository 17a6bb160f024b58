//! Feature bits of `UFFDIO_API` that Ebb asks for or reports.

/// Write-protect faults are reported.
pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// Missing faults in hugetlb memory.
pub const MISSING_HUGETLBFS: u64 = 1 << 4;
/// Missing faults in shared memory.
pub const MISSING_SHMEM: u64 = 1 << 5;
/// Write-protection of shared and hugetlb memory.
pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

/// Features that a managed VM needs: (bit, name in the kernel's header).
pub const NEEDED: [(u64, &str); 4] = [
    (PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
    (MISSING_HUGETLBFS, "MISSING_HUGETLBFS"),
    (MISSING_SHMEM, "MISSING_SHMEM"),
    (WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
];

/// All of [`NEEDED`] in one word.
pub fn needed() -> u64 {
    NEEDED.iter().fold(0, |bits, (bit, _)| bits | bit)
}
