//! All orders of steps in which a guest can make a page table, use it, free it, and write data in
//! its place, while its accessed bit is cleared. No byte of data may change.
//!
//! The guest's data is the worst possible: bit for bit the entry that was there.

const ACCESSED: u64 = 1 << 5;
const ENTRY: u64 = 0x1234_5000 | 0b0100_0111;
const USED: u64 = ENTRY | ACCESSED;

/// A frame, and what its metadata says of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Memory {
    is_table: bool,
    word: u64,
    /// Whether the guest's writes to the metadata wait.
    is_protected: bool,
}

/// What the guest does, one step after the other.
#[derive(Clone, Copy, Debug)]
enum GuestStep {
    Data(u64),
    /// Sets or clears the page type in the metadata.
    Type(bool),
    Entry(u64),
    /// Its processor uses the entry.
    Use,
    /// Checks that the data is what the guest wrote.
    Check(u64),
}

const LIFE: [GuestStep; 11] = [
    GuestStep::Data(USED),
    GuestStep::Check(USED),
    GuestStep::Data(0),
    GuestStep::Type(true),
    GuestStep::Entry(ENTRY),
    GuestStep::Use,
    GuestStep::Use,
    GuestStep::Type(false),
    GuestStep::Data(USED),
    GuestStep::Check(USED),
    GuestStep::Check(USED),
];

impl GuestStep {
    /// Takes a step. `None`: the guest waits. Otherwise returns whether all is well.
    fn take(self, memory: &mut Memory) -> Option<bool> {
        match self {
            GuestStep::Type(_) if memory.is_protected => return None,
            GuestStep::Type(is_table) => memory.is_table = is_table,
            GuestStep::Data(word) | GuestStep::Entry(word) => memory.word = word,
            GuestStep::Use => memory.word |= ACCESSED,
            GuestStep::Check(word) => return Some(memory.word == word),
        }
        Some(true)
    }
}

/// How far the tracker has come.
#[derive(Clone, Copy, Debug)]
enum Tracker {
    Protect,
    Look,
    Read,
    Swap(u64),
    Unprotect,
    Done,
}

impl Tracker {
    fn take(self, memory: &mut Memory) -> Tracker {
        match self {
            Tracker::Protect => {
                memory.is_protected = true;
                Tracker::Look
            }
            Tracker::Look if memory.is_table => Tracker::Read,
            Tracker::Look => Tracker::Unprotect,
            Tracker::Read if memory.word & 1 == 1 => Tracker::Swap(memory.word),
            Tracker::Read => Tracker::Unprotect,
            Tracker::Swap(read) => {
                if memory.word == read {
                    memory.word = read & !ACCESSED;
                }
                Tracker::Unprotect
            }
            Tracker::Unprotect => {
                memory.is_protected = false;
                Tracker::Done
            }
            Tracker::Done => Tracker::Done,
        }
    }
}

/// The number of orders in which something went wrong, and of all orders.
fn explore(memory: Memory, life: &[GuestStep], tracker: Tracker) -> (u64, u64) {
    let mut found = (0, 0);
    let mut add = |(wrong, all): (u64, u64)| found = (found.0 + wrong, found.1 + all);
    let is_done = matches!(tracker, Tracker::Done);
    if life.is_empty() && is_done {
        return (0, 1);
    }
    if let [step, rest @ ..] = life {
        let mut memory = memory;
        match step.take(&mut memory) {
            Some(true) => add(explore(memory, rest, tracker)),
            Some(false) => add((1, 1)),
            None => assert!(!is_done, "the guest waits for nobody"),
        }
    }
    if !is_done {
        let mut memory = memory;
        let tracker = tracker.take(&mut memory);
        add(explore(memory, life, tracker));
    }
    found
}

const NEW: Memory = Memory { is_table: false, word: 0, is_protected: false };

#[test]
fn no_order_changes_data() {
    let (wrong, all) = explore(NEW, &LIFE, Tracker::Protect);
    // In most other orders the protection makes the guest wait.
    assert!(all > 50, "{all}");
    assert_eq!(wrong, 0, "of {all}");
}

/// The control: neither a look without the protection nor the comparison is enough.
#[test]
fn without_the_protection_data_changes() {
    let (wrong, all) = explore(NEW, &LIFE, Tracker::Look);
    assert!(wrong > 0, "of {all}");
}
