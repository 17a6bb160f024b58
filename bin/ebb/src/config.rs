//! `ebb config`: the configuration file of this host. No daemon is asked: it may not start with
//! this file.

use std::path::Path;

use ebb_config::{File, KEYS, Otherwise, PATH, Value};
use serde::Serialize;

/// A setting, as the file leaves it.
#[derive(Serialize)]
pub struct Setting {
    /// The section.
    pub section: &'static str,
    /// The key in it.
    pub key: &'static str,
    /// Its value; none: something counts that no value says.
    pub value: Option<Value>,
    /// What counts then, in words.
    pub otherwise: Option<&'static str>,
    /// Where that is from.
    pub from: Origin,
    /// The line of the file.
    pub line: Option<usize>,
}

/// Where a value is from.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The file.
    File,
    /// The default: the file does not have the key.
    Default,
}

/// Checks a file, and says that it is right.
///
/// # Errors
/// Something is wrong.
pub fn check(named: Option<&Path>) -> anyhow::Result<String> {
    let Some(file) = read(named)? else {
        return Ok(format!("there is no {PATH}: every setting has its default\n"));
    };
    let path = file.path().display();
    Ok(match file.count() {
        0 => format!("{path} sets nothing: every setting has its default\n"),
        count => format!("{path} is right; keys that it sets: {count}\n"),
    })
}

/// All settings, as a file leaves them.
///
/// # Errors
/// Something is wrong with the file.
pub fn settings(named: Option<&Path>) -> anyhow::Result<Vec<Setting>> {
    let file = read(named)?.unwrap_or_default();
    let setting = |key: &'static ebb_config::Key| {
        let found = file.get(key.section, key.name);
        let otherwise = match key.otherwise {
            Otherwise::Words(words) if found.is_none() => Some(words),
            _ => None,
        };
        Setting {
            section: key.section.name(),
            key: key.name,
            value: found.map_or_else(|| key.default_value(), |found| Some(found.value.clone())),
            otherwise,
            from: if found.is_some() { Origin::File } else { Origin::Default },
            line: found.map(|found| found.place.line),
        }
    };
    Ok(KEYS.iter().map(setting).collect())
}

/// Reads the named file, or that of the host; none: there is none, and none is named.
fn read(named: Option<&Path>) -> anyhow::Result<Option<File>> {
    match named {
        // It may be a draft, which others may still change.
        Some(path) => Ok(Some(File::read(path)?)),
        None => match File::read_own(Path::new(PATH)) {
            Err(error) if error.is_missing() => Ok(None),
            read => Ok(Some(read?)),
        },
    }
}
