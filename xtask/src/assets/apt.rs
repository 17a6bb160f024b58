//! Packages of one Debian release, with an apt state of its own. Of the system's apt it reads only
//! the configuration and the keys, and it changes nothing there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};

use super::cache::Cache;

const MIRROR: &str = "http://deb.debian.org/debian";
/// Mirror of the releases that the other mirrors have dropped.
const ARCHIVE: &str = "http://archive.debian.org/debian";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One release of Debian.
pub struct Suite {
    name: String,
    options: Vec<String>,
}

/// Returns the address of the mirror: `EBB_MIRROR`, or Debian's.
pub fn mirror() -> String {
    std::env::var("EBB_MIRROR").unwrap_or_else(|_| MIRROR.into())
}

/// What the release's list says about a package.
#[derive(Clone)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The names of the packages that it depends on, alternatives included.
    pub depends: Vec<String>,
}

impl Suite {
    /// Gets the release's list of packages. apt checks its signature.
    ///
    /// # Errors
    /// The list cannot be fetched, or no trusted key has signed it.
    pub fn open(cache: &Cache, name: &str) -> anyhow::Result<Suite> {
        Suite::listed(cache, name, &format!("apt/{name}"), "deb", "Packages")
    }

    /// Gets the lists of a release that is on top of another one, as backports are. Packages that
    /// it lacks come from `below`.
    ///
    /// # Errors
    /// As for [`Suite::open`].
    pub fn layered(cache: &Cache, name: &str, below: &str) -> anyhow::Result<Suite> {
        let root = cache.directory(&format!("apt/{name}-on-{below}"))?;
        let mut suite = Suite { name: name.into(), options: options(&root) };
        // apt takes packages from backports only if they are asked for.
        suite.options.extend(["-o".into(), format!("APT::Default-Release={name}")]);
        let mirror = mirror();
        let line = |suite: &str| format!("deb [signed-by={KEYS}] {mirror} {suite} main\n");
        suite.update(&root, &mirror, &[line(name), line(below)].concat())?;
        Ok(suite)
    }

    /// Gets the release's list of source packages.
    ///
    /// # Errors
    /// As for [`Suite::open`].
    pub fn sources(cache: &Cache, name: &str) -> anyhow::Result<Suite> {
        Suite::listed(cache, name, &format!("apt/{name}-sources"), "deb-src", "Sources")
    }

    fn listed(
        cache: &Cache,
        name: &str,
        directory: &str,
        kind: &str,
        list: &str,
    ) -> anyhow::Result<Suite> {
        let root = cache.directory(directory)?;
        let suite = Suite { name: name.into(), options: options(&root) };
        let line = |mirror: &str| {
            format!("{kind} [signed-by={KEYS} target={list}] {mirror} {name} main\n")
        };
        let update = |mirror: &str| suite.update(&root, mirror, &line(mirror));
        update(&mirror()).or_else(|error| {
            // The mirror's error tells more than the archive's.
            update(ARCHIVE).map_err(|_| error)
        })?;
        Ok(suite)
    }

    fn update(&self, root: &Path, mirror: &str, line: &str) -> anyhow::Result<()> {
        for directory in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(directory))?;
        }
        fs::write(root.join("status"), "")?;
        fs::write(root.join("sources.list"), line)?;
        let mut update = self.command("apt-get");
        update.args(["--quiet", "--error-on=any", "update"]);
        output(update).with_context(|| format!("Debian's {} at {mirror}", self.name)).map(drop)
    }

    /// Returns the newest version of a package.
    ///
    /// # Errors
    /// There is no such package.
    pub fn package(&self, name: &str) -> anyhow::Result<Package> {
        let mut show = self.command("apt-cache");
        show.args(["show", "--no-all-versions", name]);
        let text = output(show).with_context(|| format!("Debian's {}", self.name))?;
        Package::parse(&text).ok_or_else(|| anyhow!("apt-cache tells no version of {name}"))
    }

    /// Downloads packages, and returns the files. apt checks their checksums.
    ///
    /// # Errors
    /// A package cannot be fetched.
    pub fn download(&self, packages: &[Package], directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let mut download = self.command("apt-get");
        download.current_dir(directory).args(["--quiet", "download"]);
        download
            .args(packages.iter().map(|package| format!("{}={}", package.name, package.version)));
        output(download)?;
        let files = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
        files.collect()
    }

    /// Downloads packages and all that they depend on, for a system that has nothing yet. Returns
    /// the files.
    ///
    /// # Errors
    /// A package cannot be fetched.
    pub fn download_closure(
        &self,
        packages: &[&str],
        directory: &Path,
    ) -> anyhow::Result<Vec<PathBuf>> {
        fs::create_dir_all(directory.join("partial"))?;
        let mut download = self.command("apt-get");
        download.arg("-o").arg(format!("Dir::Cache::archives={}", directory.display()));
        download.args(["--quiet", "--yes", "--no-install-recommends", "--download-only"]);
        download.arg("install").args(packages);
        output(download)?;
        let files = fs::read_dir(directory)?.flatten().map(|entry| entry.path());
        Ok(files.filter(|file| file.extension().is_some_and(|kind| kind == "deb")).collect())
    }

    /// Downloads a package's upstream source. apt checks its checksum.
    ///
    /// # Errors
    /// The source cannot be fetched.
    pub fn download_source(&self, package: &str, directory: &Path) -> anyhow::Result<PathBuf> {
        let mut download = self.command("apt-get");
        download.current_dir(directory).args([
            "--quiet",
            "source",
            "--download-only",
            "--tar-only",
        ]);
        download.arg(package);
        output(download)?;
        let file = fs::read_dir(directory)?.flatten().next().map(|entry| entry.path());
        file.ok_or_else(|| anyhow!("apt-get leaves no source of {package}"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options).env("LC_ALL", "C");
        command
    }
}

impl Package {
    fn parse(text: &str) -> Option<Package> {
        let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let depends = field("Depends:").unwrap_or_default().split([',', '|']);
        let names = depends.filter_map(|item| item.split_whitespace().next());
        Some(Package {
            name: field("Package:")?.into(),
            version: field("Version:")?.into(),
            depends: names.map(str::to_owned).collect(),
        })
    }
}

fn options(root: &Path) -> Vec<String> {
    let root = root.display();
    let settings = [
        format!("Dir::Etc::sourcelist={root}/sources.list"),
        "Dir::Etc::sourceparts=-".into(),
        format!("Dir::State={root}/state"),
        format!("Dir::State::status={root}/status"),
        format!("Dir::Cache={root}/cache"),
        // apt would fetch as an unprivileged user, who cannot write here.
        "APT::Sandbox::User=".into(),
        "Acquire::Languages=none".into(),
        "Acquire::Retries=2".into(),
        "Acquire::http::Timeout=30".into(),
    ];
    settings.into_iter().flat_map(|setting| ["-o".to_owned(), setting]).collect()
}

/// Unpacks a package's files below `directory`.
///
/// # Errors
/// The package is damaged.
pub fn unpack(file: &Path, directory: &Path) -> anyhow::Result<()> {
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(file).arg(directory);
    output(unpack).map(drop)
}

/// Returns what a program prints. If it fails, the error is its own first line that tells why.
fn output(mut command: Command) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{program} does not start"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let is_error = |line: &&str| line.starts_with("E:") || line.starts_with("dpkg-deb: error");
    match errors.lines().find(is_error).or(errors.lines().next()) {
        Some(line) => bail!("{program}: {}", line.trim_start_matches("E: ")),
        None => bail!("{program} fails with {}", output.status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_description_is_read() {
        let text = "Package: linux-image-amd64\nVersion: 6.1.176-1\n\
                    Depends: linux-image-6.1.0-50-amd64 (= 6.1.176-1), a (>= 1) | b\nSize: 1\n";
        let package = Package::parse(text).expect("a package");
        assert_eq!(package.version, "6.1.176-1");
        assert_eq!(package.depends, ["linux-image-6.1.0-50-amd64", "a", "b"]);
    }
}
