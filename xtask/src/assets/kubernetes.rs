//! Kubernetes' API server and the store that it needs (etcd), for tests. Nobody packages the
//! server, so both are built from Go's modules, in the versions of
//! `vmtest/tests/kubernetes/server/go.mod`.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::cache::{self, Cache};
use crate::cargo::workspace;

const MODULE: &str = "vmtest/tests/kubernetes/server/go.mod";
/// The programs, and the packages that they are built from.
const PROGRAMS: [(&str, &str); 2] = [
    ("etcd", "go.etcd.io/etcd/server/v3"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
];
/// Where Go's own archive is unpacked by custom.
const GO: &str = "/usr/local/go/bin/go";
/// Number to change when the same module is built in another way.
const RECIPE: u32 = 1;

/// Returns a directory with both programs. What is in the cache is not built again.
///
/// # Errors
/// There is no Go, a module cannot be fetched, or the build fails.
pub fn build(cache: &Cache) -> anyhow::Result<PathBuf> {
    let module = fs::read(workspace().join(MODULE)).context(MODULE)?;
    let mut hasher = DefaultHasher::new();
    (&module, RECIPE).hash(&mut hasher);
    let directory = cache.directory("kubernetes")?.join(format!("{:016x}", hasher.finish()));
    if directory.exists() {
        return Ok(directory);
    }
    let go = go()?;
    let work = cache.temporary()?;
    let (source, made) = (work.path().join("source"), work.path().join("made"));
    fs::create_dir(&source)?;
    fs::create_dir(&made)?;
    fs::write(source.join("go.mod"), &module)?;
    for (program, package) in PROGRAMS {
        println!("{:<10} building {program}, some minutes", "kubernetes");
        build_one(&go, &source, package, &made.join(program)).context(program)?;
    }
    fs::rename(&made, &directory).with_context(|| cache::base_name(&directory))?;
    Ok(directory)
}

/// Returns the Go in PATH, or the one where its own archive is unpacked.
fn go() -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).map(|place| place.join("go"));
    let mut places = in_path.chain([PathBuf::from(GO)]);
    places.find(|place| place.is_file()).context("there is no Go in PATH: install it")
}

fn build_one(go: &Path, source: &Path, package: &str, to: &Path) -> anyhow::Result<()> {
    let mut build = Command::new(go);
    build.current_dir(source).args(["build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o"]);
    build.arg(to).arg(package);
    // No C library, and no settings of this user's.
    build.env("CGO_ENABLED", "0").env("GOWORK", "off").env("GOFLAGS", "-buildvcs=false");
    let output = build.output().with_context(|| go.display().to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let tells = |line: &&str| !line.starts_with("go: downloading") && !line.starts_with('#');
    let why = errors.lines().find(tells).unwrap_or("no reason given");
    bail!("go build: {why}")
}
