//! The configuration file of a host, `/etc/ebb/ebb.toml`: which keys it has, and what they say.
//! Format: `docs/config.md`.
//!
//! This crate reads the file and checks each value by itself. It does not know what the file
//! changes, and decides nothing.
#![forbid(unsafe_code)]

mod error;
mod file;
mod key;
mod keys;
mod value;

pub use error::{ConfigError, Place};
pub use file::{File, Setting};
pub use key::{Key, Kind, Otherwise, Section};
pub use keys::KEYS;
pub use value::Value;

/// The file, where no other one is named.
pub const PATH: &str = "/etc/ebb/ebb.toml";
