//! Starting a stock QEMU whose RAM can be held.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_sys::ram_file::RamFile;

/// What runs the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// As QEMU names it.
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

/// A VM to be started.
pub struct Launch<'a> {
    /// Its name.
    pub name: &'a str,
    /// The directory of its sockets and logs.
    pub directory: &'a Path,
    /// The QEMU to start: a name looked up in PATH, or a path.
    pub qemu: &'a Path,
    /// Its RAM, made beforehand.
    pub ram: &'a RamFile,
    /// The size of that RAM.
    pub memory_bytes: u64,
    /// Processors.
    pub cpus: u32,
    /// What runs it.
    pub accelerator: Accelerator,
    /// A kernel for direct boot.
    pub kernel: Option<&'a Path>,
    /// Its initial RAM disk.
    pub initrd: Option<&'a Path>,
    /// Its command line.
    pub append: Option<&'a str>,
    /// Sockets of vhost-user-blk disks, each with so many queues.
    pub disks: &'a [PathBuf],
    /// Queues of each disk.
    pub disk_queues: u16,
    /// More arguments for QEMU, as they are.
    pub qemu_args: &'a [String],
    /// Where relative paths among those begin.
    pub cwd: &'a Path,
}

impl Launch<'_> {
    /// The control socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    /// Where QEMU's own messages go.
    pub fn log_path(&self) -> PathBuf {
        self.directory.join("qemu.log")
    }

    /// Starts QEMU, stopped before its guest's first instruction, in a process
    /// group of its own: it outlives this process.
    ///
    /// # Errors
    /// As fork(2) and execve(2): `NotFound` when there is no such QEMU.
    pub fn start(&self) -> io::Result<Child> {
        let log = File::create(self.log_path())?;
        Command::new(self.qemu)
            .args(self.arguments())
            .current_dir(self.cwd)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
    }

    fn arguments(&self) -> Vec<OsString> {
        let Launch { name, memory_bytes, cpus, .. } = self;
        let ram = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            rustix::fd::AsFd::as_fd(self.ram).as_raw_fd()
        );
        let socket = |file| escape(&self.directory.join(file));
        let mut words: Vec<OsString> = Vec::new();
        let mut option = |key: &str, value: String| words.extend([key.into(), value.into()]);
        option("-name", escape(Path::new(name)));
        option("-machine", "q35,memory-backend=ram".into());
        option("-accel", self.accelerator.name().into());
        if self.accelerator == Accelerator::Kvm {
            option("-cpu", "host".into());
        }
        option("-m", format!("{}M", memory_bytes >> 20));
        option("-smp", cpus.to_string());
        // The memfd is ours, opened by its path in /proc: QEMU's own memfd
        // backend cannot be told to align its mapping to 2 MiB, and without
        // that no huge page is ever mapped.
        option(
            "-object",
            format!(
                "memory-backend-file,id=ram,size={memory_bytes},mem-path={ram},share=on,align=2M"
            ),
        );
        option("-qmp", format!("unix:{},server=on,wait=off", escape(&self.qmp_path())));
        option(
            "-chardev",
            format!(
                "socket,id=ebb-console,path={},server=on,wait=off,logfile={}",
                socket("console.sock"),
                socket("console.log")
            ),
        );
        option("-serial", "chardev:ebb-console".into());
        option("-display", "none".into());
        for (index, socket) in self.disks.iter().enumerate() {
            let (id, queues) = (format!("ebb-disk{index}"), self.disk_queues);
            // Whoever serves it may die and come back.
            option("-chardev", format!("socket,id={id},path={},reconnect=1", escape(socket)));
            option("-device", format!("vhost-user-blk-pci,chardev={id},num-queues={queues}"));
        }
        words.extend(["-nodefaults".into(), "-no-user-config".into(), "-S".into()]);
        for (key, file) in [("-kernel", self.kernel), ("-initrd", self.initrd)] {
            if let Some(file) = file {
                words.extend([key.into(), file.into()]);
            }
        }
        if let Some(append) = self.append {
            words.extend(["-append".into(), append.into()]);
        }
        words.extend(self.qemu_args.iter().map(OsString::from));
        words
    }
}

/// In QEMU's option strings a comma ends a value; two stand for one.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(escape(Path::new("/run/a,b")), "/run/a,,b");
    }
}
