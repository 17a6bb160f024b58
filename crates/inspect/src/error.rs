//! Why a guest's metadata is not believed.

use thiserror::Error;

/// Why no memory may be reclaimed or evicted by this guest's metadata.
///
/// Each message is one line, written to stand after "the guest is not trusted: ".
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Untrusted {
    /// No VMCOREINFO note in the populated part of the RAM.
    #[error(
        "no Linux kernel's note (VMCOREINFO) is in its memory: not Linux, still booting, or its memory is encrypted"
    )]
    NoNote,
    /// The note lacks an entry that is needed.
    #[error("its kernel's note does not give {0}; stock kernels 5.10 and newer do")]
    Lacks(&'static str),
    /// The kernel shares its allocator, and does not say which boot of it does.
    #[error(
        "its kernel has older LLFree patches, which do not tell its boots apart; build it anew (docs/guest-kernel.md)"
    )]
    OldLlfree,
    /// The note gives a value that no x86-64 kernel has.
    #[error("its kernel's note gives {what} as {value:#x}, which no x86-64 kernel has")]
    Absurd {
        /// The entry's name in the note.
        what: &'static str,
        /// The entry's value.
        value: u64,
    },
    /// `SIZE(page)` is not 64.
    #[error("its kernel's struct page has {0} bytes; stock kernels have 64, others are not known")]
    PageBytes(u64),
    /// Memory encryption (SME) is on.
    #[error("its memory is encrypted; its metadata cannot be read")]
    Encrypted,
    /// The kernel's page tables and the note disagree on where the kernel's text is.
    #[error(
        "its page tables do not map its kernel where its note says: the note of an earlier boot, or a kernel still booting"
    )]
    Text,
    /// No vCPU runs on this kernel's page tables.
    #[error("no vCPU runs the kernel found in its memory: it was reset, or is still booting")]
    NotRunning,
    /// The section table leads to no memory map.
    #[error(
        "its kernel's memory map was not found; kernels with SPARSEMEM_VMEMMAP, as all stock ones, are known"
    )]
    NoMemmap,
    /// No populated zone was found.
    #[error("its kernel's memory zones were not found")]
    NoZones,
    /// The free frames found and the guest's own count differ too much.
    #[error(
        "{found} free frames were found where its kernel counts {counted}; more than {tolerance} apart"
    )]
    Gate {
        /// Free frames found by looking at every frame.
        found: u64,
        /// The guest's own NR_FREE_PAGES, summed over zones.
        counted: u64,
        /// The greatest difference allowed, in frames.
        tolerance: u64,
    },
}

impl Untrusted {
    /// Of two kernels found in one memory and both refused, returns the reason of the one that
    /// passed more checks. A kernel that does not run, or is half overwritten, is most likely of an
    /// earlier boot.
    pub fn or(self, other: Untrusted) -> Untrusted {
        if self.may_pass() { other } else { self }
    }

    /// Whether a guest may be refused for this reason only while it boots.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NoNote | Self::Text | Self::NotRunning)
    }
}
