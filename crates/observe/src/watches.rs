//! All QEMUs of a host, looked at again and again.

use std::collections::BTreeMap;
use std::io;

use ebb_sys::process::Process;

use crate::discover::running;
use crate::ram::NoRam;
use crate::watch::{Observed, Watch};

/// The VMs that are looked at.
#[derive(Default)]
pub struct Watches(BTreeMap<i32, Watch>);

/// What one look found of a QEMU.
pub struct Seen {
    /// Its process number.
    pub pid: i32,
    /// The VM's name by its command line. `None`: it has none.
    pub name: Option<String>,
    /// What was seen, or why its RAM was not found.
    pub observed: Result<Observed, NoRam>,
}

impl Watches {
    /// Looks at the QEMUs that run and are wanted, in the order of their processes. Nothing of a VM is
    /// held open afterwards.
    ///
    /// # Errors
    /// As reading `/proc`.
    pub fn look(&mut self, is_wanted: impl Fn(&Process) -> bool) -> io::Result<Vec<Seen>> {
        let wanted = running(is_wanted)?;
        self.0.retain(|pid, _| wanted.iter().any(|(running, _)| running == pid));
        let seen = |(pid, name)| Seen { pid, name, observed: self.look_at(pid) };
        Ok(wanted.into_iter().map(seen).collect())
    }

    fn look_at(&mut self, pid: i32) -> Result<Observed, NoRam> {
        // If this fails, its RAM is looked for again next time: it may have been there only in part.
        let mut watch = match self.0.remove(&pid) {
            Some(watch) => watch,
            None => Watch::open(pid)?,
        };
        let observed = watch.look()?;
        watch.close();
        self.0.insert(pid, watch);
        Ok(observed)
    }
}
