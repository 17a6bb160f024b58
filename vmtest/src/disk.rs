//! A disk served by `ebbd disk`, and the programs that make and check its content.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_units::Bytes;

use crate::assets::{self, Kernel};
use crate::file_system;
use crate::host::{Host, call, permit};
use crate::process;
use crate::wait::until_or;

/// An image, and the process that serves it.
pub struct Disk {
    image: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    readonly: bool,
    queues: u16,
    server: Option<Child>,
}

impl Disk {
    /// An empty image in the host's directory. It is served from [`Disk::start`] on.
    pub fn new(host: &Host, name: &str, size: &str) -> Disk {
        Disk::new_in(host.directory(), name, size)
    }

    /// An empty image in this directory.
    pub(crate) fn new_in(directory: &Path, name: &str, size: &str) -> Disk {
        let path = |suffix: &str| directory.join(format!("{name}.{suffix}"));
        let bytes: Bytes = size.parse().expect("a size");
        File::create(path("img")).and_then(|file| file.set_len(bytes.0)).expect("an image");
        Disk {
            image: path("img"),
            socket: path("sock"),
            log: path("log"),
            readonly: false,
            queues: 1,
            server: None,
        }
    }

    /// Makes a file system on it.
    pub fn formatted(self, kind: &str) -> Disk {
        file_system::make(kind, &self.image);
        self
    }

    /// Extracts an archive into its file system.
    pub fn filled(self, archive: &Path) -> Disk {
        self.mounted(|at| call(&[&"tar", &"--extract", &"--file", &archive, &"--directory", &at]))
    }

    /// Copies these files into its file system, by these names.
    pub fn with_files(self, files: &[(&Path, &str)]) -> Disk {
        self.mounted(|at| {
            files.iter().for_each(|(file, name)| call(&[&"cp", file, &at.join(name)]))
        })
    }

    /// Copies this kernel into its file system, as `vmlinuz` and `initrd`, for a guest that starts
    /// it.
    pub fn with_kernel(self, kernel: &Kernel) -> Disk {
        self.with_files(&[(&kernel.vmlinuz, "vmlinuz"), (&kernel.initrd, "initrd")])
    }

    /// Fills its file system, which is mounted meanwhile.
    pub(crate) fn mounted(self, fill: impl FnOnce(&Path)) -> Disk {
        let at = self.image.with_extension("mounted");
        std::fs::create_dir(&at).expect("a directory");
        call(&[&"mount", &"-o", &"loop", &self.image, &at]);
        fill(&at);
        call(&[&"umount", &at]);
        std::fs::remove_dir(&at).expect("an empty directory");
        self
    }

    /// Forbids the guest to write.
    pub fn readonly(mut self) -> Disk {
        self.readonly = true;
        self
    }

    /// Sets the number of queues.
    pub fn queues(mut self, count: u16) -> Disk {
        self.queues = count;
        self
    }

    /// The socket to which a front end connects.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The image's file.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Most queues that a front end can ask for.
    pub fn queue_count(&self) -> u16 {
        self.queues
    }

    /// The server's command.
    pub fn command(&self) -> Command {
        let mut command = Command::new(assets::program_directory().join("ebbd"));
        let suffix = if self.readonly { ",readonly" } else { "" };
        command.arg("disk").arg("--socket").arg(&self.socket);
        command.arg("--image").arg(format!("{}{suffix}", self.image.display()));
        command.args(["--queues", &self.queues.to_string()]).stdin(Stdio::null());
        command
    }

    /// Starts the server and waits until front ends can connect.
    pub fn start(&mut self) {
        let log = File::options().create(true).append(true).open(&self.log).expect("a log");
        let served = self.served();
        let child = self.command().stderr(log).spawn();
        self.server = Some(child.expect("ebbd starts"));
        until_or(|| (self.served() > served).then_some(()))
            .unwrap_or_else(|| panic!("a disk is not served: {}", self.text()));
        permit(&self.socket, 0o666);
    }

    /// Process number of the server.
    ///
    /// # Panics
    /// The server does not run.
    pub fn pid(&self) -> i32 {
        self.server.as_ref().expect("it is served").id() as i32
    }

    /// Kills the server between two instructions.
    pub fn kill9(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().expect("it can be killed");
            server.wait().expect("it has ended");
        }
    }

    /// Checks the file system, with no server and no guest using it.
    ///
    /// # Panics
    /// The file system is damaged.
    pub fn check(&mut self, kind: &str) {
        self.kill9();
        file_system::check(kind, &self.image);
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// How often the image has been served.
    fn served(&self) -> usize {
        self.text().matches(" serving ").count()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}---", self.log.display(), self.text());
        }
        if let Some(mut server) = self.server.take() {
            process::kill(server.id() as i32);
            // It has ended: this only reaps it.
            let _ = server.wait();
        }
    }
}
