//! A VM's record in memory and in its directory.

use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use crate::model::api_error::{Answer, unsaved};
use crate::model::record::Record;

/// The record. It is read as such, and changed by [`OnRecord::change`] and [`OnRecord::note`].
pub struct OnRecord {
    record: Record,
    directory: PathBuf,
    /// Why the file differs from the record, if it does.
    why_unsaved: Option<String>,
}

impl Deref for OnRecord {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl OnRecord {
    /// Wraps a record that is the same in the VM's directory.
    pub fn new(record: Record, directory: &Path) -> OnRecord {
        OnRecord { record, directory: directory.to_owned(), why_unsaved: None }
    }

    /// The VM's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Changes the record for a caller that waits for an answer.
    ///
    /// # Errors
    /// The record cannot be written; then nothing has changed.
    pub fn change(&mut self, change: impl FnOnce(&mut Record)) -> Answer<()> {
        self.try_change(change).map_err(unsaved("the VM's record"))
    }

    /// Does as [`OnRecord::change`], with the error as it is.
    ///
    /// # Errors
    /// As [`Record::change`]; then nothing has changed.
    pub fn try_change(&mut self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        self.record.change(&self.directory, change)?;
        self.why_unsaved = None;
        Ok(())
    }

    /// Notes what has happened already. It stays noted if it cannot be written;
    /// [`OnRecord::save_again`] then tries again.
    pub fn note(&mut self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record);
        self.save();
    }

    /// Writes the record, if it could not be written before.
    pub fn save_again(&mut self) {
        if self.why_unsaved.is_some() {
            self.save();
        }
    }

    /// Returns why the file differs from the record, if it does.
    pub fn why_unsaved(&self) -> Option<&str> {
        self.why_unsaved.as_deref()
    }

    fn save(&mut self) {
        let saved = self.record.save(&self.directory);
        let why = saved.err().map(|error| error.to_string());
        if let Some(why) = why.as_ref().filter(|_| self.why_unsaved.is_none()) {
            tracing::error!("its record: {why}");
        }
        self.why_unsaved = why;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let text = include_str!("../../../../../fuzz/corpus/vm_json/whole");
        serde_json::from_str(text).expect("a record")
    }

    #[test]
    fn what_was_noted_without_room_is_written_later() {
        let home = tempfile::tempdir().expect("a directory");
        let directory = home.path().join("vm");
        let mut on_record = OnRecord::new(record(), &directory);
        let before = on_record.auto.on;
        assert!(on_record.change(|record| record.auto.on = !before).is_err());
        assert_eq!((on_record.auto.on, on_record.why_unsaved()), (before, None));
        on_record.note(|record| record.auto.on = !before);
        assert_eq!(on_record.auto.on, !before);
        assert!(on_record.why_unsaved().is_some());
        std::fs::create_dir(&directory).expect("room for it");
        on_record.save_again();
        assert_eq!(on_record.why_unsaved(), None);
        let kept = Record::load(&directory).expect("a record").expect("it is there");
        assert_eq!(kept.auto.on, !before);
    }
}
