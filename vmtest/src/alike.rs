//! QEMUs that Ebb does not know, but which equal those that it starts. Their command line is that
//! of `ebb run`, except for what a comparison is about.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ebb_sys::kvm::{self, Verdict};
use ebb_sys::ram_file::RamFile;
use ebb_vm::launch::{Accelerator, Launch, LaunchMemory, Node, Reconnect};

use crate::guest::Guest;

const BALLOON: &str = "virtio-balloon";
const DISK: &str = "--disk";
const BACKEND: &str = "memory-backend-";
/// Beginnings of words that name a socket which a QEMU inherits.
const CONTROL: &str = "socket,id=ebb-qmp,fd=";
const CONSOLE: &str = "socket,id=ebb-console,fd=";

impl Guest {
    /// The command line that `ebb run --privileged` starts for it, with one node that does not
    /// grow.
    ///
    /// # Panics
    /// There is no memory for a file of its size.
    pub fn ebb_line(&self, name: &str, directory: &Path) -> Vec<String> {
        let bytes = self.memory.0;
        let file = RamFile::create("ebb-test", bytes).expect("a memfd");
        let served = self.options.iter().filter(|word| *word == DISK).count();
        let disks: Vec<PathBuf> =
            (0..served).map(|index| directory.join(format!("disk{index}"))).collect();
        let words = self.common_args(directory);
        let line = self.command_line();
        let launch = Launch {
            name,
            directory,
            qemu: Path::new("qemu-system-x86_64"),
            nodes: &[Node { ram: LaunchMemory { file, bytes }, growth: None }],
            served: &[],
            prealloc: false,
            balloon: !words.iter().any(|word| word.contains(BALLOON)),
            cpus: self.cpus,
            accelerator: accelerator(),
            kernel: Some(&self.kernel.vmlinuz),
            initrd: Some(&self.kernel.initrd),
            append: Some(&line),
            disks: &disks,
            disk_queues: self.cpus as u16,
            reconnect: Reconnect::Second,
            qemu_args: &words,
            cwd: Path::new("/"),
            sandbox: false,
        };
        launch.outline()
    }

    /// The same for a QEMU that Ebb does not know. Its RAM has the backend of [`Guest::ram`], it
    /// runs from the beginning, and it makes its sockets itself.
    ///
    /// # Panics
    /// Those of [`Guest::ebb_line`].
    pub fn alike_line(&self, name: &str, directory: &Path) -> Vec<String> {
        let words = self.ebb_line(name, directory).into_iter();
        words.filter(|word| word != "-S").map(|word| self.own(word, directory)).collect()
    }

    fn own(&self, word: String, directory: &Path) -> String {
        if word.starts_with(BACKEND) {
            return format!("{BACKEND}{},id=ram0,size={}", self.ram, self.memory.0);
        }
        let at = |file: &str| directory.join(file).display().to_string();
        if word.starts_with(CONTROL) {
            return format!("socket,id=ebb-qmp,path={},server=on,wait=off", at("qmp.sock"));
        }
        if word.starts_with(CONSOLE) {
            let (socket, log) = (at("console.sock"), at("console.log"));
            // In a VM of Ebb's, a process of its own writes the log.
            let of = "server=on,wait=off,logfile";
            return format!("socket,id=ebb-console,path={socket},{of}={log}");
        }
        word
    }
}

/// The accelerator that the daemon chooses.
fn accelerator() -> Accelerator {
    static VERDICT: OnceLock<Verdict> = OnceLock::new();
    match VERDICT.get_or_init(kvm::probe) {
        Verdict::Hardware => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    }
}
