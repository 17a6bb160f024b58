//! `ebb report`: a file for a bug report. It holds what Ebb and the host say of themselves, and
//! nothing of what is in a guest's memory. It works as far as possible without a daemon, and starts
//! none.

mod bundle;
mod daemon;
mod host;
mod redact;

use std::path::{Path, PathBuf};

use anyhow::Context;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;

use self::bundle::Bundle;
use crate::progress::Progress;
use crate::{doctor, show};

/// What was written.
#[derive(Serialize)]
pub struct Written {
    /// The file.
    pub file: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// What it holds.
    pub parts: Vec<Part>,
    /// What it does not hold, and why.
    pub missing: Vec<String>,
}

/// A file in the bundle.
#[derive(Clone, Serialize)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// What it has.
    pub what: &'static str,
}

/// Writes a bundle about the daemon of `run_dir`, and about this host. Without a name, the file is
/// named after the time.
///
/// # Errors
/// The file exists, or cannot be written.
pub fn write(run_dir: &Path, file: Option<PathBuf>, json: bool) -> anyhow::Result<Written> {
    let run_dir = std::path::absolute(run_dir).context("the run directory")?;
    let now = Timestamp::now();
    let local = now.to_zoned_datetime(TimeZone::system());
    let name = format!("ebb-report-{}", local.strftime("%Y%m%dT%H%M%S"));
    let file = file.unwrap_or_else(|| format!("{name}.tar.gz").into());
    // Before anything is gathered: a name that is taken is refused at once.
    let place = bundle::Place::new(&file)?;
    let mut bundle = Bundle::default();
    let mut progress = Progress::new(json);
    let mut tell = |what: &str| progress.show(&format!("{}: {what}", file.display()));
    tell("the host");
    host::add(&mut bundle, &run_dir);
    tell("ebb doctor");
    let (text, json) = doctor::look(&run_dir);
    bundle.text("doctor.txt", "what `ebb doctor` says of this host", &text);
    bundle.text("doctor.json", "the same as JSON", &json);
    tell("the daemon and its VMs");
    daemon::add(&mut bundle, &run_dir);
    tell("writing");
    let made = format!("ebb {}, {}\n", env!("CARGO_PKG_VERSION"), now);
    let (parts, missing) = bundle.finish(&made);
    let bytes = place.write(&name, &parts, now.as_second())?;
    drop(progress);
    let parts = parts.into_iter().map(|(part, _)| part).collect();
    Ok(Written { file, bytes, parts, missing })
}

impl Written {
    /// What was written, as people read it.
    pub fn text(&self) -> String {
        show::report(self)
    }
}
