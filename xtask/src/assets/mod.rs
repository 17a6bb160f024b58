//! `cargo xtask assets`: makes what real VMs boot from, out of Debian's packages.
//!
//! Everything goes to a cache outside the tree, under a name that tells what it was made from, by a
//! rename once it is complete. What is in the cache is not fetched again. The cache may be deleted
//! at any time. The target directory gets a list of what was found (see `vmtest::assets`), with the
//! reason for each asset that is missing.

pub(crate) mod apt;
mod build_root;
pub(crate) mod cache;
mod cpio;
pub(crate) mod initrd;
mod kernel;
mod kubernetes;
mod modules;
mod promtool;
mod qemu;
mod qemu11;
mod userland;
mod vprobe;

use std::path::PathBuf;

use anyhow::{bail, ensure};
use vmtest::assets::Kernel;

use cache::Cache;
use kernel::{KERNELS, Source};

/// The kernel that demo, benchmarks and most tests boot.
const DEFAULT: &str = "6.1-cloud";

#[derive(clap::Args)]
pub struct Args {
    /// Look for newer packages even if one is cached
    #[arg(long)]
    refresh: bool,
    /// Make the small Debian even if only some kernels are named
    #[arg(long)]
    userland: bool,
    /// Fetch promtool even if only some kernels are named
    #[arg(long)]
    promtool: bool,
    /// Kernels to make [default: all; only 6.1-cloud must succeed]
    #[arg(value_name = "KERNEL")]
    labels: Vec<String>,
}

/// Fetches QEMU 11, and prints where it is.
///
/// # Errors
/// QEMU 11 cannot be fetched, or does not run here.
pub fn run_qemu11() -> anyhow::Result<()> {
    let directory = qemu11::fetch(&Cache::open()?);
    vmtest::assets::store_qemu11(
        &directory.as_ref().map_err(|error| format!("{error:#}")).cloned(),
    )?;
    println!("{}", directory?.join(qemu::PROGRAM).display());
    Ok(())
}

/// Builds Kubernetes' API server for tests. They get the reason if it cannot be built.
///
/// # Errors
/// It cannot be built.
pub fn run_kubernetes() -> anyhow::Result<()> {
    let directory = kubernetes::build(&Cache::open()?);
    vmtest::assets::store_kubernetes(
        &directory.as_ref().map_err(|error| format!("{error:#}")).cloned(),
    )?;
    println!("{:<10} {}", "kubernetes", directory?.display());
    Ok(())
}

/// Makes the requested assets, or all.
///
/// # Errors
/// A kernel that was asked for cannot be made.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let wanted = sources(&args.labels)?;
    let cache = Cache::open()?;
    let init = initrd::Init::build()?;
    let mut kernels = vmtest::assets::load().unwrap_or_default();
    for source in &wanted {
        let made = make(&cache, &init, source, args.refresh).map_err(|error| format!("{error:#}"));
        match &made {
            Ok(kernel) => {
                println!("{:<10} {}", source.label, kernel.package);
                if let Err(why) = &kernel.vprobe {
                    println!("{:<10} without vprobe: {why}", source.label);
                }
            }
            Err(why) => println!("{:<10} unavailable: {why}", source.label),
        }
        kernels.insert(source.label.into(), made);
    }
    vmtest::assets::store(&kernels)?;
    if args.labels.is_empty() || args.userland {
        let archive = userland::archive(&cache).map_err(|error| format!("{error:#}"));
        match &archive {
            Ok(path) => println!("{:<10} {}", "userland", cache::base_name(path)),
            Err(why) => println!("{:<10} unavailable: {why}", "userland"),
        }
        vmtest::assets::store_userland(&archive)?;
    }
    if args.labels.is_empty() || args.promtool {
        let program = promtool::fetch(&cache).map_err(|error| format!("{error:#}"));
        match &program {
            Ok(path) => println!("{:<10} {}", "promtool", path.display()),
            Err(why) => println!("{:<10} unavailable: {why}", "promtool"),
        }
        vmtest::assets::store_promtool(&program)?;
    }
    if args.labels.is_empty() {
        let directory = qemu11::fetch(&cache).map_err(|error| format!("{error:#}"));
        match &directory {
            Ok(path) => println!("{:<10} {}", "qemu11", path.display()),
            Err(why) => println!("{:<10} unavailable: {why}", "qemu11"),
        }
        vmtest::assets::store_qemu11(&directory)?;
    }
    let required = |label: &&str| *label == DEFAULT || args.labels.iter().any(|l| l == label);
    let missing = wanted.iter().map(|source| source.label).filter(required);
    let missing: Vec<_> = missing.filter(|&label| kernels[label].is_err()).collect();
    ensure!(missing.is_empty(), "no kernel {}: see above", missing.join(", "));
    Ok(())
}

fn sources(labels: &[String]) -> anyhow::Result<Vec<&'static Source>> {
    if labels.is_empty() {
        return Ok(KERNELS.iter().collect());
    }
    let find = |label: &String| match KERNELS.iter().find(|source| source.label == label) {
        Some(source) => Ok(source),
        None => {
            let known: Vec<_> = KERNELS.iter().map(|source| source.label).collect();
            bail!("no kernel is called {label}: take one of {}", known.join(", "))
        }
    };
    labels.iter().map(find).collect()
}

fn make(
    cache: &Cache,
    init: &initrd::Init,
    source: &Source,
    refresh: bool,
) -> anyhow::Result<Kernel> {
    let qemu_directory: Option<PathBuf> = match source.needs_newer_qemu {
        true => Some(qemu::backport(cache, refresh)?),
        false => None,
    };
    let directory = kernel::fetch(cache, source, refresh)?;
    let package = cache::base_name(&directory);
    let vprobe = vprobe::module(cache, source, &package).map_err(|error| format!("{error:#}"));
    let own = vprobe.as_deref().ok();
    Ok(Kernel {
        initrd: init.image(cache, source.label, &directory.join("modules"), own)?,
        package,
        vmlinuz: directory.join("vmlinuz"),
        qemu_directory,
        vprobe,
    })
}
