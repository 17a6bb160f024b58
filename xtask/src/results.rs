//! `cargo xtask results`: copies the benchmarks' JSON into `docs/results`. It writes
//! `docs/benchmarks.md` and the table in `README.md` from that, and a page for each benchmark beside
//! its JSON.

mod page;
mod readme;
mod row;
mod taken;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::cargo;
use page::Page;
use readme::{Entry, Readme};
use taken::Taken;

/// Names of files in `docs/results`.
const TEMPLATE: &str = "template.md";
const CAUSES: &str = "causes.json";
const ENTRIES: &str = "readme.json";

#[derive(clap::Args)]
pub struct Args {
    /// Where the results are [default: target/bench]
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    from: Option<PathBuf>,
    /// Accept results of several commits or machines; the page says so
    #[arg(long)]
    mixed: bool,
    /// Write nothing; fail if docs/benchmarks.md, a benchmark's page, or the table in README.md
    /// differs from what docs/results makes
    #[arg(long)]
    check: bool,
}

/// Why goals are not met: by benchmark, and by the beginning of a row's name.
type Causes = BTreeMap<String, BTreeMap<String, String>>;

/// Returns the directory where benchmarks leave their results.
pub fn taken() -> PathBuf {
    vmtest::assets::target_directory().join("bench")
}

/// Takes results into the documents, or checks that the documents agree with them.
///
/// # Errors
/// A page is not what the results make it, a result is unusable, or the file system fails.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = cargo::workspace();
    if !args.check {
        let from = args.from.clone().unwrap_or_else(taken);
        take(&from, &results(root), args.mixed)?;
    }
    for (path, text) in pages(root)? {
        if args.check {
            let is = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let path = path.display();
            ensure!(is == text, "{path} is not of docs/results: run `cargo xtask results`");
            continue;
        }
        fs::write(&path, text)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Copies the results of every finished benchmark. Results of quick runs and of a changed tree do
/// not count. Unless `mixed`, all results in `to` must then be of one commit and machine.
fn take(from: &Path, to: &Path, mixed: bool) -> anyhow::Result<()> {
    let (mut good, mut unread) = (Vec::new(), Vec::new());
    for name in crate::bench::names() {
        let Ok(text) = fs::read_to_string(from.join(format!("{name}.json"))) else { continue };
        match Taken::parse(&text).map(|taken| (taken.is_result(), taken)) {
            Ok((Ok(()), taken)) => good.push((name, taken)),
            Ok((Err(why), _)) => println!("{name}: not taken: {why}"),
            // The other results are still taken.
            Err(why) => unread.push(format!("{name}.json: {why}")),
        }
    }
    let stays = |name: &String| good.iter().all(|(taken, _)| taken != name);
    let others = there(to)?.into_iter().filter(|(name, _)| stays(name));
    let others: Vec<_> = others.collect();
    let all = good.iter().chain(&others).map(|(_, taken)| taken);
    ensure!(
        mixed || origins(all) <= 1,
        "results of several commits or machines: --mixed takes them"
    );
    for (name, taken) in &good {
        fs::write(to.join(format!("{name}.json")), taken.normal()?)?;
        let picture = format!("{name}.svg");
        if from.join(&picture).exists() {
            fs::copy(from.join(&picture), to.join(&picture))?;
        }
    }
    println!("{} benchmarks taken from {}", good.len(), from.display());
    ensure!(unread.is_empty(), "not read: {}", unread.join("; "));
    Ok(())
}

/// Returns how many different origins these results have: commit, machine and QEMU.
fn origins<'a>(all: impl Iterator<Item = &'a Taken>) -> usize {
    let mut found = Vec::new();
    for Taken { identity, .. } in all {
        let origin = (&identity.commit, &identity.machine, &identity.qemu);
        if !found.contains(&origin) {
            found.push(origin);
        }
    }
    found.len()
}

/// Returns the results that are in the documents.
fn there(results: &Path) -> anyhow::Result<Vec<(String, Taken)>> {
    let mut all = Vec::new();
    for name in crate::bench::names() {
        let path = results.join(format!("{name}.json"));
        if path.exists() {
            let taken = Taken::parse(&fs::read_to_string(&path)?);
            let taken = taken.with_context(|| path.display().to_string())?;
            let has_picture = path.with_extension("svg").exists();
            all.push((name.clone(), Taken { has_picture, ..taken }));
        }
    }
    Ok(all)
}

/// Returns the directory of the results that are in the documents.
fn results(root: &Path) -> PathBuf {
    root.join("docs/results")
}

/// Returns the text that `docs/benchmarks.md`, `README.md` and the benchmarks' own pages must have.
fn pages(root: &Path) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let results = &results(root);
    let readme = root.join("README.md");
    let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
    let causes: Causes = serde_json::from_str(&read(&results.join(CAUSES))?).context(CAUSES)?;
    let entries = read(&results.join(ENTRIES))?;
    let entries: Vec<Entry> = serde_json::from_str(&entries).context(ENTRIES)?;
    let all: Vec<Taken> = there(results)?.into_iter().map(|(_, taken)| taken).collect();
    for taken in &all {
        taken.is_result().with_context(|| taken.name.clone())?;
    }
    let is_mixed = origins(all.iter()) > 1;
    let (template, names) = (&read(&results.join(TEMPLATE))?, &crate::bench::names());
    let page = Page { template, causes: &causes, all: &all, names, is_mixed };
    let table = Readme { old: &read(&readme)?, entries: &entries, all: &all, names }.text()?;
    let first = [(root.join("docs/benchmarks.md"), page.text()?), (readme, table)];
    let own = page.details().into_iter();
    let own = own.map(|(name, text)| (results.join(format!("{name}.md")), text));
    Ok(first.into_iter().chain(own).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_that_of_the_results() {
        run(&Args { from: None, mixed: false, check: true }).unwrap();
    }

    #[test]
    fn a_result_that_cannot_be_read_keeps_no_other_from_it() {
        let [from, to] = [(), ()].map(|()| vmtest::Scratch::new("ebb-test-").unwrap());
        let names = crate::bench::names();
        fs::write(from.path().join(format!("{}.json", names[0])), "{}").unwrap();
        let good = crate::bench::tests::written(&[1.0; 5], &[2.0; 5]);
        fs::write(from.path().join(format!("{}.json", names[1])), good).unwrap();
        let error = take(from.path(), to.path(), false).unwrap_err().to_string();
        assert!(error.contains(&names[0]), "{error}");
        assert!(to.path().join(format!("{}.json", names[1])).exists());
    }

    #[test]
    fn results_of_two_commits_do_not_mix_unless_they_may() {
        let [from, root] = [(), ()].map(|()| vmtest::Scratch::new("ebb-test-").unwrap());
        let to = results(root.path());
        fs::create_dir_all(&to).unwrap();
        let names = crate::bench::names();
        let one = crate::bench::tests::written(&[1.0; 5], &[2.0; 5]);
        let other = one.replace("c0ffee", "decaf");
        assert_ne!(one, other);
        fs::write(to.join(format!("{}.json", names[0])), &one).unwrap();
        fs::write(from.path().join(format!("{}.json", names[1])), &other).unwrap();
        let error = take(from.path(), &to, false).unwrap_err().to_string();
        assert!(error.contains("several commits"), "{error}");
        assert_eq!(there(&to).unwrap().len(), 1);
        take(from.path(), &to, true).unwrap();
        // A result that replaces the only one of another commit mixes nothing.
        fs::write(from.path().join(format!("{}.json", names[0])), &other).unwrap();
        take(from.path(), &to, false).unwrap();
        for (name, text) in [(TEMPLATE, "<!-- results -->\n"), (CAUSES, "{}"), (ENTRIES, "[]")] {
            fs::write(to.join(name), text).unwrap();
        }
        let readme = root.path().join("README.md");
        fs::write(readme, "<!-- results -->\n<!-- /results -->\n").unwrap();
        let first = || pages(root.path()).map(|pages| pages[0].1.clone());
        assert!(!first().unwrap().contains("several commits"));
        fs::write(to.join(format!("{}.json", names[2])), &one).unwrap();
        assert!(first().unwrap().contains("several commits"));
        let changed = one.replace("c0ffee", "c0ffee+");
        fs::write(to.join(format!("{}.json", names[2])), changed).unwrap();
        assert!(first().is_err());
    }
}
