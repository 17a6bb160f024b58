//! Whether this host can run the demo, in the words of `ebb doctor`.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use ebb_units::Bytes;
use serde::Deserialize;
use vmtest::{Host, assets};

/// The VM, QEMU itself and some air.
const NEEDS: Bytes = Bytes(3 << 30);
#[derive(Deserialize)]
struct Report {
    checks: Vec<Finding>,
}

#[derive(Deserialize)]
struct Finding {
    check: String,
    verdict: String,
    found: String,
    cost: Option<String>,
    mend: Option<String>,
}

/// What the user should know before it starts.
///
/// # Errors
/// It cannot run here: why, and what to do.
///
/// # Panics
/// `ebb` is not built.
pub fn check() -> anyhow::Result<Option<String>> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the demo takes root, as Ebb itself does: use sudo"
    );
    let available = available()?;
    ensure!(
        available >= NEEDS,
        "the demo needs {NEEDS} of free memory, and {available} are available"
    );
    let programs = assets::program_directory();
    let checks = doctor()?.checks;
    if let Some(lack) = checks.iter().find(|finding| finding.verdict == "missing") {
        bail!("{}: {}; to mend it: {}", lack.check, lack.found, lack.mend());
    }
    let huge =
        checks.iter().find(|finding| finding.check == "shmem THP" && finding.verdict != "ok");
    Ok(huge.map(|lack| small_pages(lack, &programs)))
}

fn small_pages(lack: &Finding, programs: &Path) -> String {
    format!(
        "No huge pages for the VMs: {}. What that costs: {}.\n\
         To turn them on: {} (the programs are in {}).\n\
         The demo changes nothing by itself, and goes on with small pages.",
        lack.found,
        lack.cost.as_deref().unwrap_or("unknown"),
        lack.mend(),
        programs.display(),
    )
}

/// Asked of a run directory as the demo's daemon has it, not of the system's.
fn doctor() -> anyhow::Result<Report> {
    let ran = Host::new().ebb("doctor --json");
    serde_json::from_str(&ran.stdout)
        .with_context(|| format!("ebb doctor: {}", ran.stderr.trim_end()))
}

fn available() -> anyhow::Result<Bytes> {
    let path = "/proc/meminfo";
    let table = fs::read_to_string(path).context(path)?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).context("no MemAvailable")?;
    Ok(Bytes(kib.parse::<u64>()? << 10))
}

impl Finding {
    fn mend(&self) -> &str {
        self.mend.as_deref().unwrap_or("see ebb doctor")
    }
}
