//! What was measured, and on which machine. Results with different identities must not be mixed.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Debug;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_sys::kvm::{self, Verdict};
use serde::{Deserialize, Serialize};
use vmtest::assets;

use crate::cargo;

/// Kernels that guests may have.
const GUESTS: [&str; 4] = ["6.1-cloud", "6.12", "llfree", "buddy"];

/// Arguments of `git` for all files but documents, so that a commit of results leaves earlier
/// results valid.
const SOURCES: [&str; 4] = ["--", ".", ":!docs", ":!*.md"];

/// A machine.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Machine {
    pub cpu: String,
    pub kernel: String,
    pub cores: usize,
    pub memory_gib: u64,
    /// Accelerator of the guests: KVM or TCG.
    pub accelerator: String,
}

/// A build of the project on a machine.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Identity {
    pub commit: String,
    pub machine: Machine,
    pub qemu: String,
    /// Digest of the programs and of what guests boot, because a changed tree has the same commit.
    pub programs: String,
    pub quick: bool,
}

impl Identity {
    /// Returns the identity of this build on this machine.
    pub fn here(quick: bool) -> Identity {
        let machine = Machine {
            cpu: cpu_model(),
            kernel: rustix::system::uname().release().to_string_lossy().into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib(),
            accelerator: accelerator().into(),
        };
        Identity { commit: commit(), machine, qemu: qemu(), programs: programs(), quick }
    }

    /// Says in a few words how another identity differs from this one, or returns `None` if they
    /// are the same.
    pub fn difference(&self, other: &Identity) -> Option<String> {
        let of = |what: &str, one: &dyn Debug, than: &dyn Debug| {
            Some(format!("other {what} ({one:?}, not {than:?})"))
        };
        match self {
            _ if self == other => None,
            _ if self.quick != other.quick => {
                Some(if self.quick { "a quick run" } else { "a full run" }.to_owned())
            }
            _ if self.commit != other.commit => of("sources", &self.commit, &other.commit),
            _ if self.machine != other.machine => of("machines", &self.machine, &other.machine),
            _ if self.qemu != other.qemu => of("QEMUs", &self.qemu, &other.qemu),
            _ => of("programs", &self.programs, &other.programs),
        }
    }

    /// Returns an identity for tests.
    #[cfg(test)]
    pub fn of_test() -> Identity {
        let [cpu, kernel, accelerator] = ["a CPU", "6.18", "TCG"].map(String::from);
        let machine = Machine { cpu, kernel, cores: 2, memory_gib: 24, accelerator };
        let [commit, qemu, programs] = ["c0ffee", "QEMU 7", "0"].map(String::from);
        Identity { commit, machine, qemu, programs, quick: false }
    }
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "unknown CPU".into(), |(_, model)| model.to_owned())
}

/// Returns the machine's memory in GiB, rounded to the nearest, because the kernel keeps a varying
/// part.
fn memory_gib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    (kib.unwrap_or(0) + (1 << 19)) >> 20
}

/// Returns the accelerator that the daemon would choose.
fn accelerator() -> &'static str {
    match kvm::probe() {
        Verdict::Hardware => "KVM",
        _ => "TCG",
    }
}

fn qemu() -> String {
    let output = Command::new("qemu-system-x86_64").arg("--version").output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let line = String::from_utf8_lossy(&text).lines().next().unwrap_or_default().to_owned();
    if line.is_empty() { "unknown".into() } else { line }
}

/// Returns the last commit that changed [`SOURCES`], with a `+` if they have uncommitted changes.
fn commit() -> String {
    let git = |words: &[&str]| {
        let output =
            Command::new("git").args(words).current_dir(cargo::workspace()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    let of_sources = |words: &[&str]| git(&[words, &SOURCES].concat());
    let hash = of_sources(&["log", "-1", "--format=%h", "--abbrev=12"]);
    let Some(hash) = hash.filter(|hash| !hash.is_empty()) else { return "unknown".into() };
    match of_sources(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if changes.is_empty() => hash,
        _ => hash + "+",
    }
}

fn programs() -> String {
    let me = std::env::current_exe().unwrap_or_default();
    let beside = || me.parent().map(Path::to_owned).unwrap_or_default();
    // Some benchmarks do not need these files, so any may be missing.
    let programs = std::env::var_os("EBB_BIN_DIR").map_or_else(beside, PathBuf::from);
    let own = [programs.join("ebb"), programs.join("ebbd"), me].into_iter();
    let kernels = GUESTS.iter().filter_map(|label| assets::kernel(label).ok());
    let booted = kernels.flat_map(|kernel| [kernel.vmlinuz, kernel.initrd]);
    let mut hasher = DefaultHasher::new();
    own.chain(booted).for_each(|path| digest(&path, &mut hasher));
    // The file's name contains a digest.
    hasher.write(assets::userland().unwrap_or_default().as_os_str().as_encoded_bytes());
    format!("{:016x}", hasher.finish())
}

/// Adds a file to the digest. A missing file counts as missing.
fn digest(path: &Path, hasher: &mut DefaultHasher) {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    hasher.write_u8(u8::from(read.is_ok()));
    hasher.write(&bytes);
}
