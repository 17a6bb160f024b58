//! One call of `cargo xtask bench`: what it measures, and where its results go.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde::Deserialize;

use super::identity::Identity;
use crate::seed;

/// One call of [`super::run`].
pub struct Session {
    pub identity: Identity,
    /// Seed of the order of sides.
    pub seed: u64,
    pub directory: PathBuf,
    /// Whether to keep finished results, and not to take them again.
    resume: bool,
    /// Names of the block files that this session has opened.
    opened: RefCell<BTreeSet<String>>,
}

/// The part of a finished benchmark's JSON that identifies it.
#[derive(Deserialize)]
struct Finished {
    #[serde(flatten)]
    identity: Identity,
}

impl Session {
    /// Begins a session. Without `seed`, a random one is taken.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn new(
        identity: Identity,
        resume: bool,
        seed: Option<u64>,
        directory: PathBuf,
    ) -> anyhow::Result<Session> {
        let say = || directory.display().to_string();
        fs::create_dir_all(&directory).with_context(say)?;
        // The path is made absolute, because others may use it from another directory.
        let directory = directory.canonicalize().with_context(say)?;
        let seed = seed.map_or_else(seed::any, Ok)?;
        Ok(Session { identity, seed, directory, resume, opened: RefCell::default() })
    }

    /// Whether to continue the blocks in a file of this name. This counts as opening the file.
    pub fn goes_on(&self, name: &str) -> bool {
        let is_known = !self.opened.borrow_mut().insert(name.to_owned());
        self.resume || is_known
    }

    /// Whether a benchmark is finished and need not be taken again.
    ///
    /// # Errors
    /// The finished result is of another build, machine or form, and would be lost.
    pub fn is_finished(&self, name: &str) -> anyhow::Result<bool> {
        let path = self.directory.join(format!("{name}.json"));
        let finished = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let Some(Finished { identity }) = finished else { return Ok(false) };
        let other = identity.difference(&self.identity);
        let is_kept = identity.quick || !(self.resume || self.identity.quick);
        if let (false, Some(other)) = (is_kept, &other) {
            bail!("{} is of {other}: name another directory by --results", path.display());
        }
        Ok(self.resume && other.is_none())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::bench::report::Report;

    fn session(directory: &Path, resume: bool) -> Session {
        Session::new(Identity::of_test(), resume, Some(1), directory.to_owned()).unwrap()
    }

    #[test]
    fn only_what_is_of_the_same_build_is_finished() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let mut one = session(directory.path(), true);
        let mut report = Report::new("x");
        report.finish(&one);
        report.save(&one.directory).unwrap();
        assert!(one.is_finished("x").unwrap() && !one.is_finished("y").unwrap());
        assert!(!session(directory.path(), false).is_finished("x").unwrap());
        one.identity.machine.kernel += "+";
        let error = one.is_finished("x").unwrap_err().to_string();
        assert!(error.contains("other machines"), "{error}");
        one.identity = Identity { quick: true, ..Identity::of_test() };
        let error = one.is_finished("x").unwrap_err().to_string();
        assert!(error.contains("of a full run"), "{error}");
    }
}
