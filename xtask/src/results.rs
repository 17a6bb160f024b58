//! `cargo xtask results`: the benchmarks' JSON is taken into `docs/results`, and
//! `docs/benchmarks.md` is written from it.

mod page;
mod taken;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::cargo;
use page::Page;
use taken::Taken;

/// Below `docs/results`.
const TEMPLATE: &str = "template.md";
const CAUSES: &str = "causes.json";

#[derive(clap::Args)]
pub struct Args {
    /// Where the results are [default: target/bench]
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    from: Option<PathBuf>,
    /// Take nothing; fail where docs/benchmarks.md is not what docs/results makes
    #[arg(long)]
    check: bool,
}

/// Why goals are not met: by benchmark, and by how a row begins.
type Causes = BTreeMap<String, BTreeMap<String, String>>;

/// Where benchmarks leave their results.
pub fn taken() -> PathBuf {
    vmtest::assets::target_directory().join("bench")
}

/// Takes results into the documents, or checks that they are in there.
///
/// # Errors
/// The page is not what it should be, a result is of no use, or the file system's.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let documents = cargo::workspace().join("docs");
    if !args.check {
        take(&args.from.clone().unwrap_or_else(taken), &documents.join("results"))?;
    }
    let path = documents.join("benchmarks.md");
    let page = page(&documents.join("results"))?;
    if args.check {
        let is = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(is == page, "docs/benchmarks.md is not of docs/results: run `cargo xtask results`");
        return Ok(());
    }
    fs::write(&path, page)?;
    println!("{}", path.display());
    Ok(())
}

/// Copies every finished benchmark; quick ones and those of a changed tree are no results.
fn take(from: &Path, to: &Path) -> anyhow::Result<()> {
    let (mut count, mut unread) = (0, Vec::new());
    for name in crate::bench::names() {
        let Ok(text) = fs::read_to_string(from.join(format!("{name}.json"))) else { continue };
        let taken = match Taken::parse(&text) {
            Ok(taken) => taken,
            // The others are of use.
            Err(why) => {
                unread.push(format!("{name}.json: {why}"));
                continue;
            }
        };
        if let Err(why) = taken.is_result() {
            println!("{name}: not taken: {why}");
            continue;
        }
        fs::write(to.join(format!("{name}.json")), taken.normal()?)?;
        let picture = format!("{name}.svg");
        if from.join(&picture).exists() {
            fs::copy(from.join(&picture), to.join(&picture))?;
        }
        count += 1;
    }
    println!("{count} benchmarks taken from {}", from.display());
    ensure!(unread.is_empty(), "not read: {}", unread.join("; "));
    Ok(())
}

/// What `docs/benchmarks.md` is to be.
fn page(results: &Path) -> anyhow::Result<String> {
    let read = |name: &str| {
        let path = results.join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let causes: Causes = serde_json::from_str(&read(CAUSES)?).context(CAUSES)?;
    let mut all = Vec::new();
    for name in crate::bench::names() {
        let path = results.join(format!("{name}.json"));
        if path.exists() {
            all.push(Taken::parse(&fs::read_to_string(&path)?).with_context(|| name)?);
        }
    }
    Page { template: &read(TEMPLATE)?, causes: &causes, all: &all }.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_that_of_the_results() {
        run(&Args { from: None, check: true }).unwrap();
    }

    #[test]
    fn a_result_that_cannot_be_read_keeps_no_other_from_it() {
        let [from, to] = [(), ()].map(|()| vmtest::Scratch::new("ebb-test-").unwrap());
        let names = crate::bench::names();
        fs::write(from.path().join(format!("{}.json", names[0])), "{}").unwrap();
        let good = crate::bench::tests::written(&[1.0; 5], &[2.0; 5]);
        fs::write(from.path().join(format!("{}.json", names[1])), good).unwrap();
        let error = take(from.path(), to.path()).unwrap_err().to_string();
        assert!(error.contains(&names[0]), "{error}");
        assert!(to.path().join(format!("{}.json", names[1])).exists());
    }
}
