//! Initial RAM disks: the test guest's programs, busybox and a kernel's modules.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::cache::Cache;
use super::cpio::Archive;
use crate::cargo;

const TARGET: &str = "x86_64-unknown-linux-gnu";
const BUSYBOX: &str = "/bin/busybox";

/// Whether a program needs no dynamic loader: one that needs it names it right behind its headers.
fn is_static(program: &[u8]) -> bool {
    let loader = b"/ld-linux-x86-64.so";
    let start = &program[..program.len().min(4096)];
    !start.windows(loader.len()).any(|window| window == loader)
}

/// The programs that all initial RAM disks have.
pub struct Init {
    program: Vec<u8>,
    /// Program that moves pages between nodes of the guest.
    tiers: Vec<u8>,
    busybox: Vec<u8>,
}

impl Init {
    /// Builds the guest's programs, linked so that they need no library at run time.
    ///
    /// # Errors
    /// The programs do not build, or there is no static busybox.
    pub fn build() -> anyhow::Result<Init> {
        let target = vmtest::assets::target_directory().join("guest");
        let mut build = cargo::command();
        build.args(["build", "--quiet", "--release", "--package", "vmtest-guest"]);
        build.args(["--config", "profile.release.debug=0"]);
        build.args(["--config", "profile.release.strip=true"]);
        build.args(["--target", TARGET]).arg("--target-dir").arg(&target);
        build.env_remove("CARGO_ENCODED_RUSTFLAGS");
        build.env("RUSTFLAGS", "-C target-feature=+crt-static");
        cargo::run(&mut build)?;
        let built = |name: &str| {
            let path = target.join(TARGET).join("release").join(name);
            fs::read(&path).with_context(|| path.display().to_string())
        };
        let busybox = fs::read(BUSYBOX).with_context(|| format!("{BUSYBOX}: run scripts/setup"))?;
        ensure!(is_static(&busybox), "{BUSYBOX} is not static: run scripts/setup");
        Ok(Init { program: built("vmtest-guest")?, tiers: built("tiers")?, busybox })
    }

    /// Returns the image for the kernel with these modules, named after its content. Tests load
    /// `vprobe` themselves. The image is not compressed: unpacking takes a translated guest longer
    /// than reading.
    ///
    /// # Errors
    /// The file system fails.
    pub fn image(
        &self,
        cache: &Cache,
        label: &str,
        modules: &Path,
        vprobe: Option<&Path>,
    ) -> anyhow::Result<PathBuf> {
        let image = self.archive(modules, vprobe)?;
        let mut hasher = DefaultHasher::new();
        image.hash(&mut hasher);
        let name = format!("{label}-{:016x}.cpio", hasher.finish());
        let path = cache.directory("initrd")?.join(name);
        if !path.exists() {
            let temporary = cache.temporary()?;
            let unfinished = temporary.path().join("image");
            fs::write(&unfinished, image)?;
            fs::rename(&unfinished, &path)?;
        }
        Ok(path)
    }

    fn archive(&self, modules: &Path, vprobe: Option<&Path>) -> anyhow::Result<Vec<u8>> {
        let mut archive = Archive::default();
        ["dev", "bin", "modules"].iter().for_each(|path| archive.directory(path));
        // Programs do not start without these devices.
        archive.device("dev/console", 5, 1);
        archive.device("dev/null", 1, 3);
        archive.file("init", &self.program);
        archive.file("bin/busybox", &self.busybox);
        archive.file("bin/tiers", &self.tiers);
        if let Some(path) = vprobe {
            archive.file("vprobe.ko", &fs::read(path)?);
        }
        let mut names: Vec<_> = fs::read_dir(modules)?.collect::<Result<_, _>>()?;
        names.sort_by_key(|entry| entry.file_name());
        for entry in names {
            let name = format!("modules/{}", entry.file_name().to_string_lossy());
            archive.file(&name, &fs::read(entry.path())?);
        }
        Ok(archive.finish())
    }
}
