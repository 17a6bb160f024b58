//! Checks whether this host can run the demo, by what `ebb doctor` says.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use ebb_sys::meminfo::MemInfo;
use ebb_units::Bytes;
use serde::Deserialize;
use vmtest::{Host, assets};

/// Memory that the demo needs: for the VM, for QEMU itself, and some to spare.
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

/// Checks the host. Returns what the user should know before the demo starts.
///
/// # Errors
/// The demo cannot run here. The error says why, and what to do.
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

/// Runs `ebb doctor` on a run directory like that of the demo's daemon, not on the system's.
fn doctor() -> anyhow::Result<Report> {
    let ran = Host::new().ebb("doctor --json");
    serde_json::from_str(&ran.stdout)
        .with_context(|| format!("ebb doctor: {}", ran.stderr.trim_end()))
}

fn available() -> anyhow::Result<Bytes> {
    Ok(Bytes(MemInfo::read().context("/proc/meminfo")?.available_bytes))
}

impl Finding {
    fn mend(&self) -> &str {
        self.mend.as_deref().unwrap_or("see ebb doctor")
    }
}
