//! Guest memory whose file another process may shrink.
//!
//! A touch of a mapping beyond its file's end raises SIGBUS, which ends the process. Code that maps
//! a file that others can shrink puts a [`BusGuard`] over the mapping. At such a touch the whole
//! mapping becomes anonymous memory of zeros, the touch goes on there, and the guard says that the
//! mapping is broken. What was read or written since is worthless, and must not be given out.
//! System calls are not affected: they fail with `EFAULT`.
//!
//! SIGBUS is also raised where a hole finds no memory, as in a tmpfs or a pool of hugetlb pages
//! that is full. So no mapping is guarded whose content must be kept.

use std::io;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::SeqCst};

use ebb_units::{FRAME_BYTES, HUGE_BYTES, Hva};

/// Low bits of a range, which count the pages of a mapping: 2 TiB at most.
const COUNT_BITS: u32 = 29;
const GIGANTIC_BYTES: u64 = 1 << 30;

/// A guarded range, in a list that only grows, because the signal handler walks it.
struct Node {
    taken: AtomicBool,
    /// The first page's number, and in the low bits the number of pages. It is one word, so that
    /// the handler never sees half of a change. 0: no range.
    pages: AtomicU64,
    broken: AtomicBool,
    next: AtomicPtr<Node>,
}

static NODES: AtomicPtr<Node> = AtomicPtr::new(null_mut());
static BROKEN: AtomicU64 = AtomicU64::new(0);
static INSTALL: Once = Once::new();

/// The number of mappings that broke since the process began. If it has not changed, no guard has
/// anything new to say: one load tells.
pub fn broken_count() -> u64 {
    BROKEN.load(SeqCst)
}

/// As long as this lives, a mapping may break without ending the process. It must be dropped before
/// the mapping is unmapped: the next mapping at this address is not guarded.
pub struct BusGuard {
    node: &'static Node,
}

impl BusGuard {
    /// Guards a whole mapping of `bytes` bytes that begins at `start`, and whose content may be
    /// lost.
    ///
    /// # Errors
    /// `InvalidInput`: no such mapping is possible.
    pub fn new(start: Hva, bytes: u64) -> io::Result<BusGuard> {
        let (page, count) = (start.0 / FRAME_BYTES, bytes.div_ceil(FRAME_BYTES));
        let fits = count >> COUNT_BITS == 0 && page >> (u64::BITS - COUNT_BITS) == 0;
        if !fits || count == 0 || !start.0.is_multiple_of(FRAME_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        INSTALL.call_once(install);
        let node = take_node();
        node.broken.store(false, SeqCst);
        node.pages.store(page << COUNT_BITS | count, SeqCst);
        Ok(BusGuard { node })
    }

    /// Whether the mapping was touched where its file had nothing.
    pub fn is_broken(&self) -> bool {
        self.node.broken.load(SeqCst)
    }
}

impl Drop for BusGuard {
    fn drop(&mut self) {
        self.node.pages.store(0, SeqCst);
        self.node.taken.store(false, SeqCst);
    }
}

fn nodes() -> impl Iterator<Item = &'static Node> {
    // SAFETY: every pointer in the list comes from `Box::leak` and was published after its content
    // was written.
    let node = |at: &AtomicPtr<Node>| unsafe { at.load(SeqCst).as_ref() };
    std::iter::successors(node(&NODES), move |last| node(&last.next))
}

/// Returns a free node, or a new one.
fn take_node() -> &'static Node {
    let free = |node: &&Node| node.taken.compare_exchange(false, true, SeqCst, SeqCst).is_ok();
    if let Some(node) = nodes().find(free) {
        return node;
    }
    let node: &'static Node = Box::leak(Box::new(Node {
        taken: AtomicBool::new(true),
        pages: AtomicU64::new(0),
        broken: AtomicBool::new(false),
        next: AtomicPtr::new(null_mut()),
    }));
    loop {
        let first = NODES.load(SeqCst);
        node.next.store(first, SeqCst);
        let place = std::ptr::from_ref(node).cast_mut();
        if NODES.compare_exchange(first, place, SeqCst, SeqCst).is_ok() {
            return node;
        }
    }
}

fn install() {
    // SAFETY: `action` is plain data, all of whose fields may be zero; the handler has the
    // signature that SA_SIGINFO asks for, and calls only what a signal handler may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigaction(libc::SIGBUS, &action, null_mut());
    }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes the handler of a signal with SA_SIGINFO a whole siginfo, with an
    // address for SIGBUS.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    // Other codes, such as that for a page that the hardware lost, are not handled here.
    if code != libc::BUS_ADRERR || !replace(address) {
        // The program then repeats the access, which raises the signal again and ends it.
        // SAFETY: as in `install`; the default action has no handler.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

/// Puts zeros over the guarded mapping around `address`. `false`: there is none, or that failed.
fn replace(address: u64) -> bool {
    let mut found = None;
    for node in nodes() {
        let pages = node.pages.load(SeqCst);
        let (first, count) = (pages >> COUNT_BITS, pages & ((1 << COUNT_BITS) - 1));
        if (first..first + count).contains(&(address / FRAME_BYTES)) {
            // This comes first: a thread that sees the zeros sees this. A mapping can have several
            // guards.
            node.broken.store(true, SeqCst);
            found = Some((first, count));
        }
    }
    let Some((first, count)) = found else { return false };
    BROKEN.fetch_add(1, SeqCst);
    put_zeros(first * FRAME_BYTES, count * FRAME_BYTES)
}

fn put_zeros(start: u64, bytes: u64) -> bool {
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
    );
    // A mapping of hugetlb pages reaches to the end of its last page, and is replaced only whole.
    [FRAME_BYTES, HUGE_BYTES, GIGANTIC_BYTES].into_iter().any(|page_bytes| {
        let length = bytes.next_multiple_of(page_bytes) as usize;
        // SAFETY: the maker of the guard says that the whole mapping at `start` is its own and that
        // its content may be lost. Accesses to it are volatile or atomic, and go on in the new
        // mapping. With pages of 4 KiB the length is that of the guard. A larger length is tried
        // only where the kernel does not cut the mapping at the smaller one, because its pages are
        // larger.
        let place = unsafe { libc::mmap(start as *mut _, length, prot, flags, -1, 0) };
        place != libc::MAP_FAILED
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn a_shrunk_file_does_not_end_the_process() {
        let (shrunk, whole) = (
            memfd_create("bus", MemfdFlags::CLOEXEC).unwrap(),
            memfd_create("bus", MemfdFlags::CLOEXEC).unwrap(),
        );
        let map = |file| {
            ftruncate(file, 16 * FRAME_BYTES).unwrap();
            let mapping = Mapping::new(file, 0, 16 * FRAME_BYTES).unwrap();
            mapping.words(0, 1).unwrap()[0].store(7, Relaxed);
            mapping
        };
        let (one, other) = (map(&shrunk), map(&whole));
        let guard = |mapping: &Mapping| BusGuard::new(mapping.address(), mapping.bytes()).unwrap();
        let (one_guard, other_guard) = (guard(&one), guard(&other));
        let count = broken_count();
        ftruncate(&shrunk, FRAME_BYTES).unwrap();
        assert_eq!(one.words(0, 1).unwrap()[0].load(Relaxed), 7);
        assert!(!one_guard.is_broken());
        let word = &one.words(8 * FRAME_BYTES, 1).unwrap()[0];
        word.store(5, Relaxed);
        assert_eq!(word.load(Relaxed), 5);
        assert!(one_guard.is_broken() && !other_guard.is_broken());
        assert!(broken_count() > count);
        assert_eq!(one.words(0, 1).unwrap()[0].load(Relaxed), 0);
        assert_eq!(other.words(0, 1).unwrap()[0].load(Relaxed), 7);
        // The next guard takes the place of this one, and is not broken.
        drop(one_guard);
        assert!(!guard(&one).is_broken());
    }

    #[test]
    fn impossible_ranges_are_not_guarded() {
        for (start, bytes) in [(0x1000, 0), (0x1001, 4096), (0x1000, 1 << 42), (1 << 60, 4096)] {
            assert!(BusGuard::new(Hva(start), bytes).is_err());
        }
    }
}
