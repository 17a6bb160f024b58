//! What must not outlive this process, whichever way it ends.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// An action that is under way when [`everything`] begins has so much longer.
const UNDER_WAY: Duration = Duration::from_secs(3);

type Action = Box<dyn Fn() + Send>;

/// Does its action when it goes, or when [`everything`] is undone: whichever is first.
pub struct Undo(u64);

/// A directory that goes with all that is in it.
pub struct Scratch {
    path: PathBuf,
    _undo: Undo,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Others cannot be undone while they hold on to it.
    Processes,
    Other,
}

struct Registry {
    next: u64,
    under_way: usize,
    /// Nobody else undoes anything from now on.
    closed: bool,
    actions: BTreeMap<u64, (Kind, Action)>,
}

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { next: 0, under_way: 0, closed: false, actions: BTreeMap::new() });
static DONE: Condvar = Condvar::new();

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Undo {
    /// Undoes what this process has done to the host.
    pub fn new(action: impl Fn() + Send + 'static) -> Undo {
        Undo::register(Kind::Other, Box::new(action))
    }

    /// Ends processes; [`everything`] does that first.
    pub fn processes(action: impl Fn() + Send + 'static) -> Undo {
        Undo::register(Kind::Processes, Box::new(action))
    }

    fn register(kind: Kind, action: Action) -> Undo {
        let mut registry = registry();
        if registry.closed {
            drop(registry);
            action();
            wait_for_the_end();
        }
        let number = registry.next;
        registry.next += 1;
        registry.actions.insert(number, (kind, action));
        Undo(number)
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let mut all = registry();
        if all.closed {
            drop(all);
            wait_for_the_end();
        }
        let Some((_, action)) = all.actions.remove(&self.0) else { return };
        all.under_way += 1;
        drop(all);
        action();
        registry().under_way -= 1;
        DONE.notify_all();
    }
}

impl Scratch {
    /// In the system's place for such.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn new(prefix: &str) -> io::Result<Scratch> {
        Scratch::new_in(prefix, &std::env::temp_dir())
    }

    /// In this directory.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn new_in(prefix: &str, place: &Path) -> io::Result<Scratch> {
        let path = tempfile::Builder::new().prefix(prefix).tempdir_in(place)?.keep();
        let gone = path.clone();
        let undo = Undo::new(move || {
            if let Err(error) = fs::remove_dir_all(&gone) {
                eprintln!("{}: {error}", gone.display());
            }
        });
        Ok(Scratch { path, _undo: undo })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Undoes all at once, what came last first, on behalf of a thread that does not get there: that
/// one waits from its next [`Undo`] on, so the caller is to end this process then.
pub fn everything() {
    let mut all = registry();
    all.closed = true;
    let waited = DONE.wait_timeout_while(all, UNDER_WAY, |all| all.under_way > 0);
    all = waited.unwrap_or_else(PoisonError::into_inner).0;
    let actions = std::mem::take(&mut all.actions);
    drop(all);
    let of = |kind: Kind| actions.values().rev().filter(move |(found, _)| *found == kind);
    // Who starts processes may have been at it: a second look.
    for (_, action) in of(Kind::Processes).chain(of(Kind::Other)).chain(of(Kind::Processes)) {
        action();
    }
}

/// To be called before this process ends by itself: does not return once [`everything`] began.
pub fn settle() {
    if registry().closed {
        wait_for_the_end();
    }
}

fn wait_for_the_end() -> ! {
    loop {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_what_is_in_it() {
        let scratch = Scratch::new("ebb-test-").unwrap();
        let path = scratch.path().to_owned();
        fs::write(path.join("file"), "").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
