//! The file of the history.
//!
//! ```text
//! table `15 s`    second since 1970 (u64) -> moment       for a day
//! table `5 min`   second since 1970 (u64) -> moment       for 90 days
//!
//! moment          JSON of `Top`, compressed by LZ4, its length before it (u32, little endian)
//! ```
//!
//! Each moment is one transaction, so a process that is killed loses nothing that it has written.

use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ebb_api::{HISTORY_LONG_S, HISTORY_LONG_STEP_S, HISTORY_S, HISTORY_STEP_S, Top};
use redb::{Builder, Database, Error, ReadTransaction, ReadableTable, Table, TableDefinition};

use super::merge::Merging;

type Moments = TableDefinition<'static, u64, &'static [u8]>;

const SHORT: Moments = TableDefinition::new("15 s");
const LONG: Moments = TableDefinition::new("5 min");
/// Most bytes of all moments. The file may be twice as large.
const MOST_BYTES: u64 = 64 << 20;
/// Memory in which parts of the file are kept.
const CACHE_BYTES: usize = 1 << 20;
/// Longest JSON of a moment: some thousand VMs.
const MOMENT_MOST_BYTES: usize = 16 << 20;
/// Moments that are removed at once at most, where there are too many.
const REMOVED_MOST: usize = 256;

/// A history cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StoreError(Box<redb::Error>);

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> StoreError {
        StoreError(Box::new(error.into()))
    }
}

/// An open history.
pub struct Store {
    file: Database,
    /// Bytes of all moments.
    bytes: u64,
    most_bytes: u64,
}

impl Store {
    /// Opens the file, or makes it. A file that makes no sense gets another name, and a new one is
    /// made.
    ///
    /// # Errors
    /// Those of open(2) and read(2); another process has it open.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        match Store::try_open(path) {
            Err(error) if makes_no_sense(&error) => {
                let bad = bad_path(path);
                tracing::warn!(
                    "{} makes no sense ({error}): see {}",
                    path.display(),
                    bad.display()
                );
                fs::rename(path, bad)?;
                Store::try_open(path)
            }
            opened => opened,
        }
    }

    fn try_open(path: &Path) -> Result<Store, StoreError> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = builder().create_file(options.open(path)?)?;
        Store::new(file)
    }

    /// Opens a history that is kept elsewhere.
    #[cfg(test)]
    pub fn on(backend: impl redb::StorageBackend, most_bytes: u64) -> Result<Store, StoreError> {
        let store = Store::new(builder().create_with_backend(backend)?)?;
        Ok(Store { most_bytes, ..store })
    }

    fn new(file: Database) -> Result<Store, StoreError> {
        let write = file.begin_write()?;
        let mut bytes = 0;
        for table in [SHORT, LONG] {
            for moment in write.open_table(table)?.iter()? {
                bytes += moment?.1.value().len() as u64;
            }
        }
        write.commit()?;
        Ok(Store { file, bytes, most_bytes: MOST_BYTES })
    }

    /// Adds a moment, and removes those that are too old, or too much, and those that a clock has
    /// left that was ahead: they would outlast all that is added.
    ///
    /// # Errors
    /// Those of write(2). The store is of no use any more then.
    pub fn add(&mut self, top: &Top) -> Result<(), StoreError> {
        let now = top.at_unix_ms / 1000;
        let write = self.file.begin_write()?;
        let mut bytes = self.bytes;
        {
            let (mut short, mut long) = (write.open_table(SHORT)?, write.open_table(LONG)?);
            insert(&mut short, top, &mut bytes)?;
            // What comes later is of a clock that was ahead.
            let last = long.range(..=now)?.next_back().transpose()?.map_or(0, |(at, _)| at.value());
            if last / HISTORY_LONG_STEP_S < now / HISTORY_LONG_STEP_S {
                let from = now.saturating_sub(HISTORY_LONG_STEP_S - 1);
                let mut merging = Merging::default();
                let _ = each_of(&short, from, now, |top| {
                    merging.add(top);
                    ControlFlow::Continue(())
                })?;
                if let Some(merged) = merging.end() {
                    insert(&mut long, &merged, &mut bytes)?;
                }
            }
            for table in [&mut long, &mut short] {
                remove_after(table, now.saturating_add(HISTORY_STEP_S), &mut bytes)?;
            }
            remove_before(&mut short, now.saturating_sub(HISTORY_S), &mut bytes)?;
            remove_before(&mut long, now.saturating_sub(HISTORY_LONG_S), &mut bytes)?;
            for table in [&mut long, &mut short] {
                while bytes > self.most_bytes && remove_first(table, &mut bytes)? {}
            }
        }
        write.commit()?;
        self.bytes = bytes;
        Ok(())
    }

    /// Begins to read. Whoever adds a moment does not wait for readers, and they do not see it.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&self) -> Result<Reading, StoreError> {
        Ok(Reading(self.file.begin_read()?))
    }
}

/// All moments, as they were once.
pub struct Reading(ReadTransaction);

impl Reading {
    /// Calls `each` with the moments from a second to another one, the latest last, until it breaks
    /// off.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn each(
        &self,
        from: u64,
        to: u64,
        mut each: impl FnMut(Top) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let (short, long) = (self.0.open_table(SHORT)?, self.0.open_table(LONG)?);
        let first = short.first()?.map_or(u64::MAX, |(at, _)| at.value());
        if from < first && each_of(&long, from, to.min(first - 1), &mut each)?.is_break() {
            return Ok(());
        }
        each_of(&short, from, to, each).map(drop)
    }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn insert(table: &mut Table<'_, u64, &[u8]>, top: &Top, bytes: &mut u64) -> Result<(), StoreError> {
    let text = serde_json::to_vec(top).map_err(io::Error::from)?;
    let moment = lz4_flex::block::compress_prepend_size(&text);
    *bytes += moment.len() as u64;
    let before = table.insert(top.at_unix_ms / 1000, &moment[..])?;
    *bytes -= before.map_or(0, |before| before.value().len() as u64);
    Ok(())
}

/// Calls `each` with the moments that make sense, from a second to another one.
fn each_of(
    table: &impl ReadableTable<u64, &'static [u8]>,
    from: u64,
    to: u64,
    mut each: impl FnMut(Top) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, StoreError> {
    if from > to {
        return Ok(ControlFlow::Continue(()));
    }
    for moment in table.range(from..=to)? {
        if let Some(top) = moment_of(moment?.1.value())
            && each(top).is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Parses a moment. What is in the file may be of another release.
fn moment_of(bytes: &[u8]) -> Option<Top> {
    let (length, _) = lz4_flex::block::uncompressed_size(bytes).ok()?;
    if length > MOMENT_MOST_BYTES {
        return None;
    }
    let text = lz4_flex::block::decompress_size_prepended(bytes).ok()?;
    serde_json::from_slice(&text).ok()
}

fn remove_before(
    table: &mut Table<'_, u64, &[u8]>,
    second: u64,
    bytes: &mut u64,
) -> Result<(), StoreError> {
    for _ in 0..REMOVED_MOST {
        let first = table.first()?.map(|(at, _)| at.value());
        if first.is_none_or(|first| first >= second) {
            break;
        }
        remove_first(table, bytes)?;
    }
    Ok(())
}

fn remove_after(
    table: &mut Table<'_, u64, &[u8]>,
    second: u64,
    bytes: &mut u64,
) -> Result<(), StoreError> {
    for _ in 0..REMOVED_MOST {
        let last = table.last()?.map(|(at, _)| at.value());
        if last.is_none_or(|last| last <= second) {
            break;
        }
        if let Some((_, moment)) = table.pop_last()? {
            *bytes = bytes.saturating_sub(moment.value().len() as u64);
        }
    }
    Ok(())
}

/// Removes the oldest moment. Returns whether there was one.
fn remove_first(table: &mut Table<'_, u64, &[u8]>, bytes: &mut u64) -> Result<bool, StoreError> {
    let Some((_, moment)) = table.pop_first()? else { return Ok(false) };
    *bytes = bytes.saturating_sub(moment.value().len() as u64);
    Ok(true)
}

/// Whether the file is not what a store has written.
fn makes_no_sense(error: &StoreError) -> bool {
    match &*error.0 {
        Error::Corrupted(_) | Error::UpgradeRequired(_) | Error::TableTypeMismatch { .. } => true,
        Error::Io(error) => {
            matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
        }
        _ => false,
    }
}

fn bad_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".bad");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment that a release before this one has written: it knew no times of faults.
    const OLD: &str = r#"{"at_unix_ms":1795874703000,"host":{"total_bytes":68719476736,
        "available_bytes":21474836480,"reserve_bytes":6442450944,"bounds":[],"stall_permille":4,
        "pilot":"off","stage":null},"vms":[{"name":"web","state":"held","state_reason":null,
        "age_ms":300,"memory_bytes":2147483648,"parts":null,"compressed_in_bytes":0,
        "limit_bytes":null,"limit_by_pilot":false,"working_bytes":null,"faults_per_s":12,
        "refaulted_bytes_per_s":0,"misses_memory":false,"waits":false,"waiting_touches":0,
        "class":"normal","hold":false,"warnings":0}]}"#;

    #[test]
    fn moments_of_an_earlier_release_are_read() {
        let read = |text: &str| moment_of(&lz4_flex::block::compress_prepend_size(text.as_bytes()));
        let top = read(OLD).unwrap();
        assert_eq!((top.vms[0].faults_per_s, &top.vms[0].fault_ns), (Some(12), &None));
        assert_eq!(read(&OLD.replace("web", "")), None, "it makes no sense");
        // Of a later release, which knows more.
        let later = OLD.replace("\"warnings\":0", "\"warnings\":0,\"more\":{\"a\":1}");
        assert_eq!(read(&later), Some(top));
    }
}
