//! Descriptors that a VMM has open, for all that a worker does at one time. They are listed once,
//! at the first use.

use std::io;
use std::sync::Arc;

use ebb_sys::process::Process;

/// Numbers of descriptors, and what they lead to.
pub type Links = [(i32, String)];

/// The list of a VMM's descriptors, made at the first use.
///
/// It does not show descriptors that were opened later.
#[derive(Default)]
pub struct OpenFiles(Option<Vec<(i32, String)>>);

impl OpenFiles {
    /// The list. It must always be asked for the same VMM.
    ///
    /// # Errors
    /// Those of [`Process::descriptors`].
    pub fn of(&mut self, process: &Process) -> io::Result<&Links> {
        let links = match self.0.take() {
            Some(links) => links,
            None => process.descriptors()?,
        };
        Ok(self.0.insert(links))
    }
}

/// A VMM's open descriptors at one moment.
pub struct Descriptors {
    process: Arc<Process>,
    count: Option<u64>,
    links: Vec<(i32, String)>,
}

impl Descriptors {
    /// The descriptors open now.
    ///
    /// # Errors
    /// Those of [`Process::descriptors`].
    pub fn now(process: &Arc<Process>) -> io::Result<Descriptors> {
        let count = process.descriptor_count()?;
        Ok(Descriptors { process: Arc::clone(process), count, links: process.descriptors()? })
    }

    /// Their numbers, and what each led to.
    pub fn all(&self) -> &Links {
        &self.links
    }

    /// What each descriptor led to.
    pub fn links(&self) -> impl Iterator<Item = &str> {
        self.links.iter().map(|(_, link)| link.as_str())
    }

    /// Whether the open descriptors are the same now: by their number, if the kernel tells it. A
    /// device that is plugged in has at least one, for its notifications.
    pub fn holds(&self) -> bool {
        match self.count {
            Some(_) => self.process.descriptor_count().is_ok_and(|now| now == self.count),
            None => self.is_of(&mut OpenFiles::default()),
        }
    }

    /// Whether `open` lists exactly these descriptors.
    pub fn is_of(&self, open: &mut OpenFiles) -> bool {
        open.of(&self.process).is_ok_and(|now| now == self.links)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_tick_have_one_list() {
        let process = Process::own().unwrap();
        let mut open = OpenFiles::default();
        let first = open.of(&process).unwrap().to_vec();
        let _more: Vec<_> = (0..64).map(|_| std::io::pipe().unwrap()).collect();
        assert_eq!(open.of(&process).unwrap(), first);
        assert_ne!(OpenFiles::default().of(&process).unwrap(), first);
    }
}
