//! All guests of the host, managed or not, as `ebb observe` sees them.

use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ebb_observe::{Observed, Seen, Watches, managers_of_host};
use ebb_sys::process::Process;

/// What a look found counts for this long: a look costs some milliseconds for each VM, and anybody
/// who may read may ask.
const KEPT: Duration = Duration::from_secs(5);
/// While a look takes long, the last one counts for this long: a QEMU that serves its own faults can
/// make a look wait.
const KEPT_MOST: Duration = Duration::from_secs(60);

/// A guest at one moment.
#[derive(Clone, Debug)]
pub struct Guest {
    pub pid: i32,
    pub name: Option<String>,
    /// None: its RAM was not found.
    pub observed: Option<Observed>,
}

/// The guests that are looked at.
#[derive(Default)]
pub struct Guests {
    watches: Mutex<Watches>,
    last: Mutex<Option<(Instant, Vec<Guest>)>>,
}

impl Guests {
    /// The guests of managed VMs, root and libvirt, now or as they were seen last: a few seconds ago, or
    /// while another one looks. None if `/proc` cannot be read. `managed`: processes of managed VMs.
    pub fn look(&self, managed: &[i32]) -> Vec<Guest> {
        let last = self.last().filter(|(at, _)| at.elapsed() < KEPT_MOST);
        let is_recent = last.as_ref().is_some_and(|(at, _)| at.elapsed() < KEPT);
        let watches = match self.watches.try_lock() {
            _ if is_recent => None,
            Ok(watches) => Some(watches),
            // A look that panicked has lost the VM that it looked at, which is opened anew.
            Err(TryLockError::Poisoned(watches)) => Some(watches.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(mut watches) = watches else {
            return last.map_or_else(Vec::new, |(_, guests)| guests);
        };
        // Others may run whatever they name QEMU, as many as they like.
        let users = managers_of_host();
        let is_wanted = |process: &Process| {
            managed.contains(&process.pid()) || process.user().is_ok_and(|it| users.contains(&it))
        };
        let guests: Vec<Guest> = match watches.look(is_wanted) {
            Ok(seen) => seen.into_iter().map(guest).collect(),
            Err(error) => {
                tracing::warn!("the guests of the host: {error}");
                Vec::new()
            }
        };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), guests.clone()));
        guests
    }

    fn last(&self) -> Option<(Instant, Vec<Guest>)> {
        // It is whole between any two statements that change it.
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn guest(Seen { pid, name, observed }: Seen) -> Guest {
    Guest { pid, name, observed: observed.ok() }
}
