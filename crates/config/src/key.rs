//! A key of the file: its name, its values, and what counts without it.

use std::fmt;

use crate::keys::KEYS;
use crate::value::Value;

/// A table of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Section {
    /// The options of `ebbd`.
    Daemon,
    /// The settings of `ebb pilot`.
    Pilot,
}

impl Section {
    /// All of them.
    pub const ALL: [Section; 2] = [Section::Daemon, Section::Pilot];

    /// Its name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Section::Daemon => "daemon",
            Section::Pilot => "pilot",
        }
    }

    /// The section of this name.
    pub(crate) fn named(name: &str) -> Option<Section> {
        Section::ALL.into_iter().find(|section| section.name() == name)
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.name())
    }
}

/// Which values a key takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A size: 0, or this many bytes or more.
    Size {
        /// The least size beside 0.
        least_bytes: u64,
    },
    /// A whole number.
    Number {
        /// The least.
        least: u64,
        /// The most.
        most: u64,
    },
    /// Yes or no.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// An absolute path.
    Path,
    /// An IP address and a port.
    Address,
    /// A user, by name or number.
    User,
    /// A size, or a part of the host's memory.
    Reserve,
}

/// What counts without a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Otherwise {
    /// This value, as the command line takes it.
    Value(&'static str),
    /// Something that no value says, in words.
    Words(&'static str),
}

/// A key of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// The table that it is in.
    pub section: Section,
    /// Its name, that of the option on the command line.
    pub name: &'static str,
    /// Which values it takes.
    pub kind: Kind,
    /// What counts without it.
    pub otherwise: Otherwise,
}

impl Key {
    /// The key of this name; none: the section has no such key.
    pub fn find(section: Section, name: &str) -> Option<&'static Key> {
        KEYS.iter().find(|key| key.section == section && key.name == name)
    }

    /// The value that counts without it; none: something counts that no value says.
    pub fn default_value(&self) -> Option<Value> {
        let Otherwise::Value(text) = self.otherwise else { return None };
        match self.kind {
            Kind::Switch => Some(Value::Switch(text == "true")),
            Kind::Number { .. } => text.parse().ok().map(Value::Number),
            _ => Some(Value::Text(text.into())),
        }
    }
}
