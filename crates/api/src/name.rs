//! Names of VMs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest name, in bytes: it becomes part of socket paths, which end at 107.
pub const NAME_LEN_MAX: usize = 64;

/// A VM's name: 1 to 64 of `A-Z a-z 0-9 . _ -`, not beginning with `.` or `-`.
///
/// So it stands in a path, a URL and a command line as it is, and is never taken
/// for an option or a hidden file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// The text is no name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0:?} is no VM name: use 1 to {NAME_LEN_MAX} letters, digits, dots, dashes and underscores, \
     a letter, digit or underscore first"
)]
pub struct NameError(String);

impl VmName {
    /// The name for a VM that somebody else named: its own, if that is a name and not taken; else
    /// `vm-PID`. `None`: that is taken, too.
    pub fn of_vm(
        own: Option<&str>,
        pid: i32,
        is_taken: impl Fn(&VmName) -> bool,
    ) -> Option<VmName> {
        let names = own.map(str::to_owned).into_iter().chain([format!("vm-{pid}")]);
        names.filter_map(|name| VmName::try_from(name).ok()).find(|name| !is_taken(name))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VmName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<VmName, NameError> {
        VmName::try_from(text.to_owned())
    }
}

impl TryFrom<String> for VmName {
    type Error = NameError;

    fn try_from(text: String) -> Result<VmName, NameError> {
        let fits = (1..=NAME_LEN_MAX).contains(&text.len())
            && !text.starts_with(['.', '-'])
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if fits { Ok(VmName(text)) } else { Err(NameError(text)) }
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> String {
        name.0
    }
}

impl AsRef<str> for VmName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_names_that_are_safe_in_paths_and_urls() {
        for name in ["a", "web-1", "db_2.prod", "7", &"x".repeat(64)] {
            assert_eq!(name.parse::<VmName>().map(String::from), Ok(name.to_owned()));
        }
    }

    #[test]
    fn refuses_all_others() {
        for name in ["", ".", "..", ".a", "-rf", "a/b", "a b", "a%2f", "ü", "a\0", &"x".repeat(65)]
        {
            assert!(name.parse::<VmName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn json_cannot_smuggle_a_bad_name() {
        assert!(serde_json::from_str::<VmName>(r#""web""#).is_ok());
        assert!(serde_json::from_str::<VmName>(r#""../web""#).is_err());
    }
}
