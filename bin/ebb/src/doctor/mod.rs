//! `ebb doctor`: what this host offers, what a lack costs, and how to mend it.
//!
//! It needs no daemon. Every check looks or tries; none concludes from a version.

mod finding;
mod host_pressure;
mod huge_pages;
mod kvm;
mod privilege;
mod qemu;
mod run_dir;
mod swap_dir;
mod user_namespace;
mod userfaultfd;

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use crate::{FAILED, Outcome};
use finding::{Finding, Verdict};

#[derive(Serialize)]
struct Report {
    checks: Vec<Finding>,
    /// What `--fix` did: commands that would do the same.
    fixed: Vec<String>,
}

/// Checks the host. With `fix`, it first mends what can be mended.
pub fn run(run_dir: &Path, fix: bool, json: bool) -> anyhow::Result<Outcome> {
    let run_dir = std::path::absolute(run_dir).context("the run directory")?;
    let mut checks = check(&run_dir);
    let mut fixed = Vec::new();
    if fix {
        fixed = mend(&checks)?;
        checks = check(&run_dir);
    }
    let is_any_missing = checks.iter().any(|finding| finding.verdict == Verdict::Missing);
    let report = Report { checks, fixed };
    let text = if json { serde_json::to_string_pretty(&report)? + "\n" } else { report.text() };
    Ok(Outcome { text, code: if is_any_missing { FAILED } else { 0 } })
}

/// What the checks find, as text and as JSON. Nothing is mended.
pub fn look(run_dir: &Path) -> (String, String) {
    let report = Report { checks: check(run_dir), fixed: Vec::new() };
    let json = serde_json::to_string_pretty(&report).unwrap_or_default();
    (report.text(), json)
}

fn check(run_dir: &Path) -> Vec<Finding> {
    let as_root = !privilege::is_unprivileged();
    vec![
        if as_root { privilege::check() } else { privilege::unprivileged() },
        userfaultfd::check(as_root),
        userfaultfd::check_device(as_root),
        user_namespace::check(),
        huge_pages::check_shmem(),
        huge_pages::check_hugetlb(),
        host_pressure::check(as_root),
        qemu::check(),
        kvm::check(as_root),
        run_dir::check(run_dir, as_root),
        swap_dir::check(run_dir, as_root),
    ]
}

fn mend(checks: &[Finding]) -> anyhow::Result<Vec<String>> {
    let fixes = checks.iter().flat_map(|finding| &finding.fixes);
    fixes
        .map(|fix| fix.apply().with_context(|| fix.to_string()).map(|()| fix.to_string()))
        .collect()
}

impl Report {
    fn text(&self) -> String {
        let done = self.fixed.iter().map(|fix| format!("did: {fix}\n"));
        done.chain(self.checks.iter().map(Finding::text)).collect()
    }
}
