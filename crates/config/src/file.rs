//! The file as a whole: read, and each of its keys checked.

#[cfg(test)]
mod tests;

use std::fs::{Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_api::PilotRequest;
use ebb_units::Bytes;
use rustix::fs::OFlags;
use rustix::process::geteuid;
use toml_edit::Document;

use crate::error::{ConfigError, Place};
use crate::key::{Key, Section};
use crate::keys::KEYS;
use crate::value::{self, Value};

/// Longest file.
const MOST_BYTES: u64 = 1 << 20;
/// Permissions by which others change a file.
const WRITE_OF_OTHERS: u32 = 0o022;

/// A configuration file. The default has no key.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct File {
    path: PathBuf,
    settings: Vec<Setting>,
}

/// A key that the file has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The key.
    pub key: &'static Key,
    /// Its value.
    pub value: Value,
    /// Where the value stands.
    pub place: Place,
}

impl File {
    /// Reads a file, whoever can change it.
    ///
    /// # Errors
    /// It cannot be read, or something in it is wrong.
    pub fn read(path: &Path) -> Result<File, ConfigError> {
        read(path, |_| Ok(()))
    }

    /// Reads a file that nobody but root and this user can change.
    ///
    /// # Errors
    /// It cannot be read, others can change it, or something in it is wrong.
    pub fn read_own(path: &Path) -> Result<File, ConfigError> {
        read(path, |metadata| check_owner(path, metadata))
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// Says where something is wrong, and what to do.
    pub fn parse(path: &Path, text: &str) -> Result<File, ConfigError> {
        let wrong = |span, why: &str| ConfigError::wrong(path, Place::of(text, span), why);
        let document = Document::parse(text).map_err(|error| {
            let form = "write NAME = VALUE, and text in quotes";
            wrong(error.span(), &format!("{}: {form}", error.message()))
        })?;
        let (root, mut settings) = (document.as_table(), Vec::new());
        for (name, item) in root.iter() {
            let span = root.key(name).and_then(toml_edit::Key::span);
            let section =
                Section::named(name).ok_or_else(|| wrong(span.clone(), &outside(name)))?;
            let keys = item.as_table_like().ok_or_else(|| {
                wrong(span, &format!("{name} is a section: write {section} on a line of its own"))
            })?;
            for (name, item) in keys.iter() {
                let span = keys.key(name).and_then(toml_edit::Key::span);
                let key = Key::find(section, name)
                    .ok_or_else(|| wrong(span.clone(), &unknown(section, name)))?;
                let no_key = format!("{name} is a key, and no section");
                let value = item.as_value().ok_or_else(|| wrong(span, &no_key))?;
                let span = value.span();
                let why = |why: String| wrong(span.clone(), &format!("{name}: {why}"));
                let value = key.kind.read(value).map_err(why)?;
                settings.push(Setting { key, value, place: Place::of(text, span) });
            }
        }
        Ok(File { path: path.into(), settings })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The keys that it has in a section.
    pub fn of(&self, section: Section) -> impl Iterator<Item = &Setting> {
        self.settings.iter().filter(move |setting| setting.key.section == section)
    }

    /// A key that it has; none: it does not have it.
    pub fn get(&self, section: Section, name: &str) -> Option<&Setting> {
        self.of(section).find(|setting| setting.key.name == name)
    }

    /// Number of keys that it has.
    pub fn count(&self) -> usize {
        self.settings.len()
    }

    /// What it says of the pilot. What it does not say is none.
    pub fn pilot(&self) -> PilotRequest {
        let text = |name| Some(self.get(Section::Pilot, name)?.value.to_string());
        // All of them were checked when the file was parsed.
        let reserve = text("reserve").and_then(|text| value::reserve(&text).ok());
        let swap_max = text("swap-max").and_then(|text| text.parse::<Bytes>().ok());
        PilotRequest {
            mode: text("mode").and_then(|text| value::mode(&text)),
            attach: text("attach").map(|text| text == "true"),
            stall_percent: text("stall").and_then(|text| text.parse().ok()),
            swap_max_bytes: swap_max.map(|size| size.0),
            ..reserve.unwrap_or_default()
        }
    }

    /// The error that a key of this file has a value that cannot be used, and `why`.
    pub fn wrong(&self, setting: &Setting, why: &str) -> ConfigError {
        ConfigError::wrong(&self.path, setting.place, &format!("{}: {why}", setting.key.name))
    }
}

fn read(
    path: &Path,
    check: impl FnOnce(&Metadata) -> Result<(), ConfigError>,
) -> Result<File, ConfigError> {
    let io = |error| ConfigError::Io(path.into(), error);
    // Without these flags, opening a pipe waits for its writer.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(flags.bits() as i32).open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(ConfigError::NoFile(path.into()));
    }
    check(&metadata)?;
    let mut content = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut content).map_err(io)?;
    if content.len() as u64 > MOST_BYTES {
        return Err(ConfigError::TooLarge(path.into(), MOST_BYTES));
    }
    let text = String::from_utf8(content).map_err(|_| ConfigError::NoText(path.into()))?;
    File::parse(path, &text)
}

fn check_owner(path: &Path, metadata: &Metadata) -> Result<(), ConfigError> {
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    match () {
        () if uid != 0 && uid != geteuid().as_raw() => Err(ConfigError::Owner(path.into(), uid)),
        () if mode & WRITE_OF_OTHERS != 0 => Err(ConfigError::Mode(path.into(), mode)),
        () => Ok(()),
    }
}

/// What is wrong with a name that is no section's.
fn outside(name: &str) -> String {
    match KEYS.iter().find(|key| key.name == name) {
        Some(key) => format!("{name} is in no section: put it below {}", key.section),
        None => {
            format!("there is no section {name:?}: give {} or {}", Section::Daemon, Section::Pilot)
        }
    }
}

/// What is wrong with a name that is none of the section's keys.
fn unknown(section: Section, name: &str) -> String {
    let dashes = name.replace('_', "-");
    if Key::find(section, &dashes).is_some() {
        return format!("{section} has no key {name:?}: write {dashes}");
    }
    match KEYS.iter().find(|key| key.name == name) {
        Some(key) => format!("{name} is no key of {section}: put it below {}", key.section),
        None => format!("{section} has no key {name:?}: `ebb config show` lists all"),
    }
}
