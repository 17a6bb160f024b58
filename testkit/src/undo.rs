//! Undoes changes that must not outlive this process, whichever way it ends.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest wait for actions that are under way when [`everything`] begins: a swap area may be read
/// back.
const UNDER_WAY: Duration = Duration::from_secs(20);

type Action = Box<dyn Fn() + Send>;

/// Runs its action when it is dropped, or when [`everything`] is undone, whichever is first.
pub struct Undo(u64);

/// A directory that is removed, with all its content, when this is dropped.
pub struct Scratch {
    path: PathBuf,
    _undo: Undo,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// These end processes. Other things cannot be undone while processes use them.
    Processes,
    Other,
}

struct Registry {
    next: u64,
    /// Number of changes not registered yet, and of actions that run.
    under_way: usize,
    /// Whether [`everything`] has begun: no other thread changes or undoes anything from then on.
    closed: bool,
    /// Whether [`everything`] has taken the actions: no thread registers any from then on.
    taken: bool,
    actions: BTreeMap<u64, (Kind, Action)>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry::new());
static DONE: Condvar = Condvar::new();

/// Marks something that [`everything`] waits for.
struct UnderWay;

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    const fn new() -> Registry {
        Registry { next: 0, under_way: 0, closed: false, taken: false, actions: BTreeMap::new() }
    }

    fn insert(&mut self, kind: Kind, action: Action) -> Undo {
        let number = self.next;
        self.next += 1;
        self.actions.insert(number, (kind, action));
        Undo(number)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        registry().under_way -= 1;
        DONE.notify_all();
    }
}

impl Undo {
    /// Changes something on the host by `deed`, and registers the action that undoes it in the end.
    /// `action` makes that from the result of `deed`. [`everything`] does not begin between the
    /// two.
    ///
    /// # Errors
    /// Those of `deed`. There is nothing to undo then.
    pub fn of<T, E, A: Fn() + Send + 'static>(
        deed: impl FnOnce() -> Result<T, E>,
        action: impl FnOnce(&T) -> A,
    ) -> Result<(T, Undo), E> {
        let mut all = registry();
        if all.closed {
            drop(all);
            wait_for_the_end();
        }
        all.under_way += 1;
        let under_way = UnderWay;
        drop(all);
        let done = deed()?;
        let action = action(&done);
        let mut all = registry();
        if all.taken {
            drop(all);
            action();
            wait_for_the_end();
        }
        let undo = all.insert(Kind::Other, Box::new(action));
        drop(all);
        drop(under_way);
        Ok((done, undo))
    }

    /// Registers an action that undoes what this process has done to the host.
    pub fn new(action: impl Fn() + Send + 'static) -> Undo {
        Undo::register(Kind::Other, Box::new(action))
    }

    /// Registers an action that ends processes. [`everything`] runs such actions first.
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
        registry.insert(kind, action)
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
        let _under_way = UnderWay;
        drop(all);
        action();
    }
}

impl Scratch {
    /// Makes a directory in the system's place for temporary files.
    ///
    /// # Errors
    /// Those of mkdir(2).
    pub fn new(prefix: &str) -> io::Result<Scratch> {
        Scratch::new_in(prefix, &std::env::temp_dir())
    }

    /// Makes a directory in `place`.
    ///
    /// # Errors
    /// Those of mkdir(2).
    pub fn new_in(prefix: &str, place: &Path) -> io::Result<Scratch> {
        let make = || Ok(tempfile::Builder::new().prefix(prefix).tempdir_in(place)?.keep());
        let (path, undo) = Undo::of(make, |path: &PathBuf| {
            let removed = path.clone();
            move || {
                if let Err(error) = fs::remove_dir_all(&removed) {
                    eprintln!("{}: {error}", removed.display());
                }
            }
        })
        .map_err(|error: io::Error| error)?;
        Ok(Scratch { path, _undo: undo })
    }

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Runs all actions at once, the newest first, in place of a thread that does not get there. That
/// thread waits for ever from its next [`Undo`] on, so the caller should end this process
/// afterwards.
pub fn everything() {
    let mut all = registry();
    all.closed = true;
    let waited = DONE.wait_timeout_while(all, UNDER_WAY, |all| all.under_way > 0);
    all = waited.unwrap_or_else(PoisonError::into_inner).0;
    all.taken = true;
    let actions = std::mem::take(&mut all.actions);
    drop(all);
    let of = |kind: Kind| actions.values().rev().filter(move |(found, _)| *found == kind);
    // A thread that starts processes may have been at work, so end processes once more.
    for (_, action) in of(Kind::Processes).chain(of(Kind::Other)).chain(of(Kind::Processes)) {
        action();
    }
}

/// Makes a command that changes something on the host or undoes it. It has a process group of its
/// own, since Ctrl-C ends all processes of ours.
pub fn helper(program: &str) -> Command {
    let mut command = Command::new(program);
    command.process_group(0);
    command
}

/// Must be called before this process ends by itself. It does not return once [`everything`] has
/// begun.
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
    fn a_deed_that_failed_is_not_undone() {
        let failed = Undo::of(|| Err::<(), _>("no"), |()| || panic!("undone"));
        assert_eq!(failed.err(), Some("no"));
        // An action that panics is not under way for ever, either.
        let undo = Undo::new(|| panic!("an action"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(undo))).unwrap_err();
        crate::wait::until("nothing to be under way", || (registry().under_way == 0).then_some(()));
    }

    #[test]
    fn a_directory_goes_with_what_is_in_it() {
        let scratch = Scratch::new("ebb-test-").unwrap();
        let path = scratch.path().to_owned();
        fs::write(path.join("file"), "").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
