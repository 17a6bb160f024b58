//! What a check found, and what can be done about it.

use std::fmt;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::PathBuf;

use serde::Serialize;

/// How well the host does in one check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There is nothing to do.
    Ok,
    /// Ebb works, but the lack costs something.
    Degraded,
    /// A main part of Ebb does not work.
    Missing,
    /// Only root can tell.
    Unknown,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub verdict: Verdict,
    /// What the host has.
    pub found: String,
    /// Cost of the lack.
    pub cost: Option<&'static str>,
    /// How to mend the lack.
    pub mend: Option<String>,
    #[serde(skip)]
    pub fixes: Vec<Fix>,
}

impl Finding {
    pub fn ok(check: &'static str, found: impl Into<String>) -> Finding {
        let found = found.into();
        Finding { check, verdict: Verdict::Ok, found, cost: None, mend: None, fixes: vec![] }
    }

    pub fn degraded(
        check: &'static str,
        found: impl Into<String>,
        cost: &'static str,
        mend: impl Into<String>,
    ) -> Finding {
        let (cost, mend) = (Some(cost), Some(mend.into()));
        Finding { verdict: Verdict::Degraded, cost, mend, ..Finding::ok(check, found) }
    }

    pub fn missing(
        check: &'static str,
        found: impl Into<String>,
        cost: &'static str,
        mend: impl Into<String>,
    ) -> Finding {
        Finding { verdict: Verdict::Missing, ..Finding::degraded(check, found, cost, mend) }
    }

    /// Returns a finding about what this user cannot see.
    pub fn unknown(check: &'static str, found: impl Into<String>) -> Finding {
        let mend = Some("run ebb doctor as root".into());
        let cost = Some("nothing by itself: only root can tell whether it is well");
        Finding { verdict: Verdict::Unknown, cost, mend, ..Finding::ok(check, found) }
    }

    /// Returns a finding about a lack that `--fix` mends.
    pub fn fixable(
        check: &'static str,
        found: impl Into<String>,
        cost: &'static str,
        fixes: Vec<Fix>,
    ) -> Finding {
        let by_hand = fixes.iter().map(Fix::to_string).collect::<Vec<_>>().join("; ");
        let mend = format!("ebb doctor --fix, or by hand: {by_hand}");
        Finding { fixes, ..Finding::degraded(check, found, cost, mend) }
    }

    pub fn text(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Ok => "OK",
            Verdict::Degraded => "DEGRADED",
            Verdict::Missing => "MISSING",
            Verdict::Unknown => "UNKNOWN",
        };
        let detail = |label: &str, text: &str| format!("{:10}{label:<15}{text}\n", "");
        let cost = self.cost.map(|cost| detail("costs", cost)).unwrap_or_default();
        let mend = self.mend.as_deref().map(|mend| detail("mend", mend)).unwrap_or_default();
        format!("{verdict:<10}{:<15}{}\n{cost}{mend}", self.check, self.found)
    }
}

/// What `--fix` does about a lack. It is shown as a command that would do the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fix {
    Write { path: PathBuf, text: &'static str },
    MakeDir { path: PathBuf },
    Close { path: PathBuf },
}

impl Fix {
    pub fn apply(&self) -> io::Result<()> {
        match self {
            Fix::Write { path, text } => fs::write(path, text),
            Fix::MakeDir { path } => DirBuilder::new().recursive(true).mode(0o700).create(path),
            Fix::Close { path } => fs::set_permissions(path, Permissions::from_mode(0o700)),
        }
    }
}

impl fmt::Display for Fix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fix::Write { path, text } => write!(f, "echo {text} > {}", path.display()),
            Fix::MakeDir { path } => write!(f, "mkdir -p -m 700 {}", path.display()),
            Fix::Close { path } => write!(f, "chmod 700 {}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixable_lack_says_how_by_hand_too() {
        let fix = Fix::Write { path: "/sys/x".into(), text: "advise" };
        let text = Finding::fixable("shmem THP", "never", "time", vec![fix]).text();
        assert!(text.starts_with("DEGRADED  shmem THP      never\n"), "{text}");
        assert!(text.contains("by hand: echo advise > /sys/x"), "{text}");
    }
}
