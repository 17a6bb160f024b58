//! A value of the file, checked.

use std::fmt;
use std::net::SocketAddr;

use ebb_api::{PilotMode, PilotRequest};
use ebb_units::Bytes;
use serde::Serialize;
use toml_edit::Value as Toml;

use crate::key::Kind;

/// A value of the file. It prints as the command line takes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Yes or no.
    Switch(bool),
    /// A whole number.
    Number(u64),
    /// A size, a word, a path.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Switch(on) => write!(f, "{on}"),
            Value::Number(number) => write!(f, "{number}"),
            Value::Text(text) => write!(f, "{text}"),
        }
    }
}

impl Kind {
    /// Checks a value.
    ///
    /// # Errors
    /// Says what is wrong, and what to write.
    pub(crate) fn read(self, value: &Toml) -> Result<Value, String> {
        match self {
            Kind::Size { least_bytes } => size(value, least_bytes),
            Kind::Number { least, most } => number(value, least, most),
            Kind::Switch => {
                let why = || format!("{}: write true or false, without quotes", shown(value));
                value.as_bool().map(Value::Switch).ok_or_else(why)
            }
            Kind::Choice(words) => {
                let is_one = |text: &&str| words.contains(text);
                let why = || format!("{} is not one of {}", shown(value), quoted(words));
                value.as_str().filter(is_one).map(text).ok_or_else(why)
            }
            Kind::Path => {
                let is_path = |text: &&str| text.starts_with('/') && !text.contains('\0');
                let why = || format!("{} is no absolute path: write it as \"/a/b\"", shown(value));
                value.as_str().filter(is_path).map(text).ok_or_else(why)
            }
            Kind::Address => {
                let is_address = |text: &&str| text.parse::<SocketAddr>().is_ok();
                let form = "write it as \"192.0.2.7:7443\" or \"[::]:7443\"";
                let why = || format!("{} is no IP address with a port: {form}", shown(value));
                value.as_str().filter(is_address).map(text).ok_or_else(why)
            }
            Kind::User => {
                let is_user = |text: &String| !text.is_empty() && !text.contains('\0');
                let why = || format!("{} is no user: write a name, UID or \"own\"", shown(value));
                written(value).filter(is_user).map(Value::Text).ok_or_else(why)
            }
            Kind::Reserve => {
                let text = written(value).ok_or_else(|| no_size(value))?;
                reserve(&text).map(|_| Value::Text(text))
            }
        }
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

/// What stands there, of a text or a whole number.
fn written(value: &Toml) -> Option<String> {
    value.as_str().map(str::to_owned).or_else(|| value.as_integer().map(|it| it.to_string()))
}

/// The value as an error shows it.
fn shown(value: &Toml) -> String {
    match (value.as_str(), value.as_integer(), value.as_bool()) {
        (Some(text), ..) => format!("{text:?}"),
        (_, Some(number), _) => number.to_string(),
        (.., Some(on)) => on.to_string(),
        _ => format!("this {}", value.type_name()),
    }
}

fn quoted(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
    words.join(", ")
}

fn no_size(value: &Toml) -> String {
    format!("{} is no size: write it as \"512M\"", shown(value))
}

fn size(value: &Toml, least_bytes: u64) -> Result<Value, String> {
    let text = written(value).ok_or_else(|| no_size(value))?;
    let Bytes(bytes) = text.parse::<Bytes>().map_err(|error| error.to_string())?;
    if bytes > 0 && bytes < least_bytes {
        return Err(format!(
            "{} is too little: give {} or more, or 0",
            Bytes(bytes),
            Bytes(least_bytes)
        ));
    }
    Ok(Value::Text(text))
}

fn number(value: &Toml, least: u64, most: u64) -> Result<Value, String> {
    let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
    let number = number.filter(|number| (least..=most).contains(number));
    number.map(Value::Number).ok_or_else(|| {
        let quotes = if value.is_str() { ", without quotes" } else { "" };
        format!("{}: write a whole number from {least} to {most}{quotes}", shown(value))
    })
}

/// The request that sets this reserve.
///
/// # Errors
/// Says what is wrong, and what to write.
pub(crate) fn reserve(text: &str) -> Result<PilotRequest, String> {
    let (reserve_percent, reserve_bytes) = match text.strip_suffix('%') {
        Some(percent) => {
            let form = "write a whole number, as \"10%\"";
            let why = |_| format!("{text:?} is no part of memory: {form}");
            (Some(percent.parse::<u32>().map_err(why)?), None)
        }
        None => {
            let size = text.parse::<Bytes>().map_err(|error| format!("{error}, or 10%"))?;
            (None, Some(size.0))
        }
    };
    let request = PilotRequest { reserve_percent, reserve_bytes, ..PilotRequest::default() };
    request.check().map_err(|error| error.to_string())?;
    Ok(request)
}

/// The pilot's mode of this name.
pub(crate) fn mode(text: &str) -> Option<PilotMode> {
    match text {
        "off" => Some(PilotMode::Off),
        "dry-run" => Some(PilotMode::DryRun),
        "on" => Some(PilotMode::On),
        _ => None,
    }
}
