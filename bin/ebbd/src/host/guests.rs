//! All guests of the host, managed or not, as `ebb observe` sees them.

use std::time::Instant;

use ebb_observe::{Observed, Seen, Watches, managers_of_host};
use ebb_sys::process::Process;

use super::kept::Kept;

/// A guest at one moment.
#[derive(Clone, Debug)]
pub struct Guest {
    pub pid: i32,
    pub name: Option<String>,
    /// What was seen, or why its RAM was not found.
    pub observed: Result<Observed, String>,
}

/// The guests that are looked at. A look costs some milliseconds for each VM.
#[derive(Default)]
pub struct Guests(Kept<Watches, Vec<Guest>>);

impl Guests {
    /// The guests of managed VMs, root and libvirt, and when they were seen: no guests if `/proc`
    /// cannot be read. None: another one looks, and nothing is known. `managed`: processes of
    /// managed VMs.
    pub fn look(&self, managed: &[i32]) -> Option<(Instant, Vec<Guest>)> {
        self.0.look(|watches| match watches.look(is_wanted(managed)) {
            Ok(seen) => seen.into_iter().map(guest).collect(),
            Err(error) => {
                tracing::warn!("the guests of the host: {error}");
                Vec::new()
            }
        })
    }
}

/// Whether a process is looked at: that of a managed VM, or of root or libvirt. Others may run
/// whatever they name QEMU, as many as they like.
pub(super) fn is_wanted(managed: &[i32]) -> impl Fn(&Process) -> bool {
    let users = managers_of_host();
    move |process: &Process| {
        managed.contains(&process.pid()) || process.user().is_ok_and(|it| users.contains(&it))
    }
}

fn guest(Seen { pid, name, observed }: Seen) -> Guest {
    Guest { pid, name, observed: observed.map_err(|why| why.to_string()) }
}
