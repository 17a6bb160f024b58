//! What `cargo xtask assets` has prepared: kernels, and a QEMU for each.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use testkit::target::profile_directory;
pub use testkit::target::target_directory;

/// A kernel that boots into the test guest's init.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// Debian's package and version.
    pub package: String,
    /// The compressed kernel.
    pub vmlinuz: PathBuf,
    /// Its initial RAM disk.
    pub initrd: PathBuf,
    /// A directory with the `qemu-system-x86_64` that runs it; null: the one in PATH does.
    pub qemu_directory: Option<PathBuf>,
    /// The module `vprobe`, which the guest has as `/vprobe.ko`, or why it does not exist.
    #[serde(default = "not_built")]
    pub vprobe: Result<PathBuf, String>,
}

fn not_built() -> Result<PathBuf, String> {
    Err("there was no vprobe yet: run `cargo xtask assets` again".into())
}

/// Kernels by label, each of them or why it does not exist.
pub type Kernels = BTreeMap<String, Result<Kernel, String>>;

/// The kernel with this label, or why it does not exist.
///
/// # Errors
/// The reason, as recorded when the assets were made.
pub fn kernel(label: &str) -> Result<Kernel, String> {
    let kernels = load().map_err(|error| {
        format!("{}: {error}: run `cargo xtask assets` first", manifest().display())
    })?;
    kernels.get(label).cloned().unwrap_or_else(|| Err(format!("kernel {label} is unknown")))
}

/// The module `vprobe` of the kernel with this label, or why it does not exist.
///
/// # Errors
/// As for [`kernel`], and the reason for this module.
pub fn vprobe(label: &str) -> Result<PathBuf, String> {
    kernel(label)?.vprobe
}

/// The recorded kernels.
///
/// # Errors
/// There is no record, or it is damaged.
pub fn load() -> io::Result<Kernels> {
    Ok(serde_json::from_slice(&fs::read(manifest())?)?)
}

/// Records the kernels.
///
/// # Errors
/// Those of the file system.
pub fn store(kernels: &Kernels) -> io::Result<()> {
    let temporary = tempfile::NamedTempFile::new_in(target_directory())?;
    serde_json::to_writer_pretty(&temporary, kernels)?;
    temporary.persist(manifest())?;
    Ok(())
}

/// The archive of a small Debian's root file system, or why it does not exist.
///
/// # Errors
/// The reason, as recorded when the assets were made.
pub fn userland() -> Result<PathBuf, String> {
    recorded(&userland_manifest(), "cargo xtask assets")
}

/// Records where the archive is, or why it does not exist.
///
/// # Errors
/// Those of the file system.
pub fn store_userland(archive: &Result<PathBuf, String>) -> io::Result<()> {
    fs::write(userland_manifest(), serde_json::to_vec_pretty(archive)?)
}

/// The directory with QEMU 11's `qemu-system-x86_64`, or why it does not exist.
///
/// # Errors
/// The reason, as recorded when it was fetched.
pub fn qemu11() -> Result<PathBuf, String> {
    recorded(&qemu11_manifest(), "cargo xtask qemu11")
}

/// Prometheus' checker of rules and figures, or why it does not exist.
///
/// # Errors
/// The reason, as recorded when it was fetched.
pub fn promtool() -> Result<PathBuf, String> {
    recorded(&promtool_manifest(), "cargo xtask assets")
}

/// Records where promtool is, or why it does not exist.
///
/// # Errors
/// Those of the file system.
pub fn store_promtool(program: &Result<PathBuf, String>) -> io::Result<()> {
    fs::write(promtool_manifest(), serde_json::to_vec_pretty(program)?)
}

/// The directory with Kubernetes' API server and its store, or why it does not exist.
///
/// # Errors
/// The reason, as recorded when they were built.
pub fn kubernetes() -> Result<PathBuf, String> {
    recorded(&kubernetes_manifest(), "cargo xtask soak kubernetes")
}

/// Records where Kubernetes' API server is, or why it does not exist.
///
/// # Errors
/// Those of the file system.
pub fn store_kubernetes(directory: &Result<PathBuf, String>) -> io::Result<()> {
    fs::write(kubernetes_manifest(), serde_json::to_vec_pretty(directory)?)
}

/// What was recorded of an asset; `command`: what makes it.
fn recorded(path: &Path, command: &str) -> Result<PathBuf, String> {
    let recorded = fs::read(path).and_then(|json| Ok(serde_json::from_slice(&json)?));
    recorded
        .unwrap_or_else(|error| Err(format!("{}: {error}: run `{command}` first", path.display())))
}

/// A copy of this QEMU that every user can run, since QEMUs are users of their own. It is in the
/// directory for temporary files, and costs nothing if that is on the same file system.
///
/// # Panics
/// It cannot be copied, or the existing copy is somebody else's.
pub fn for_all_users(programs: &Path) -> PathBuf {
    let whole = programs.parent().expect("a QEMU's directory is in its own");
    let places = env::temp_dir().join("ebb-test-qemu");
    let place = places.join(whole.file_name().expect("it has a name"));
    if !place.exists() {
        fs::create_dir_all(&places).expect("a directory");
        let copy = tempfile::tempdir_in(&places).expect("a directory");
        let to = copy.path().join("qemu");
        let copied = |how: &str| {
            let mut command = Command::new("cp");
            command.args(["--archive", how]).arg(whole).arg(&to).stderr(Stdio::null()).status()
        };
        let linked = copied("--link").expect("cp runs").success();
        assert!(linked || copied("--force").expect("cp runs").success(), "{}", whole.display());
        if let Err(error) = fs::rename(&to, &place) {
            assert!(place.exists(), "{}: {error}", place.display());
        }
    }
    let owner = fs::symlink_metadata(&place).expect("it is there").uid();
    assert_eq!(owner, rustix::process::getuid().as_raw(), "{}: whose is it?", place.display());
    place.join(programs.file_name().expect("it has a name"))
}

/// Records where QEMU 11 is, or why it does not exist.
///
/// # Errors
/// Those of the file system.
pub fn store_qemu11(directory: &Result<PathBuf, String>) -> io::Result<()> {
    fs::write(qemu11_manifest(), serde_json::to_vec_pretty(directory)?)
}

fn qemu11_manifest() -> PathBuf {
    target_directory().join("qemu11.json")
}

fn kubernetes_manifest() -> PathBuf {
    target_directory().join("kubernetes.json")
}

fn promtool_manifest() -> PathBuf {
    target_directory().join("promtool.json")
}

fn userland_manifest() -> PathBuf {
    target_directory().join("userland.json")
}

fn manifest() -> PathBuf {
    target_directory().join("assets.json")
}

/// The directory of `ebb` and `ebbd`: `EBB_BIN_DIR`, or the one of the running program's build.
///
/// # Panics
/// The programs are not there.
pub fn program_directory() -> PathBuf {
    let directory = env::var_os("EBB_BIN_DIR").map_or_else(profile_directory, PathBuf::from);
    for program in ["ebb", "ebbd"] {
        let path = directory.join(program);
        let build = "cargo build --release -p ebb -p ebbd";
        assert!(path.is_file(), "no {}: run `{build}` first", path.display());
    }
    directory
}
