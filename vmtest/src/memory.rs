//! A virtio-mem device served by `ebbd memory` behind `ebbd relay`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use ebb_units::Bytes;
use serde::Deserialize;

use crate::assets;
use crate::guest::Guest;
use crate::host::Host;
use crate::process;
use crate::wait::until;

/// Address of the region: above all memory of a guest of 1 GiB.
const ADDRESS: u64 = 5 << 30;

/// A region, and the processes that serve it.
pub struct MemoryDevice {
    directory: PathBuf,
    size: Bytes,
    options: Vec<String>,
    relay: Child,
    server: Option<Server>,
}

struct Server {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// What the device reports.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Sizes {
    /// Size that the guest is asked to have.
    pub requested_bytes: u64,
    /// Size that the guest has.
    pub plugged_bytes: u64,
    /// Size of the usable region.
    pub usable_bytes: u64,
    /// Violations.
    pub violations: u64,
    /// Why a size was refused.
    pub error: Option<String>,
}

impl MemoryDevice {
    /// A device of up to `size` in the host's directory, which must be in memory, with further
    /// options of `ebbd memory`. It is served from now on.
    pub fn new(host: &Host, size: &str, options: &str) -> MemoryDevice {
        let directory = host.directory().to_owned();
        let path = |name: &str| directory.join(name);
        let mut relay = ebbd("relay");
        relay.arg("--socket").arg(path("front.sock")).arg("--device").arg(path("memory.sock"));
        let relay = relay.stderr(log(&path("relay.log"))).stdin(Stdio::null()).spawn();
        let mut device = MemoryDevice {
            directory,
            size: size.parse().expect("a size"),
            options: options.split_whitespace().map(Into::into).collect(),
            relay: relay.expect("ebbd starts"),
            server: None,
        };
        until("a relay", || device.path("front.sock").exists().then_some(()));
        device.start();
        device
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The server's command.
    pub fn command(&self) -> Command {
        let mut command = ebbd("memory");
        command.arg("--socket").arg(self.path("memory.sock"));
        command.arg("--file").arg(self.path("region"));
        command.args(["--address", &format!("{ADDRESS:#x}"), "--size", &self.size.0.to_string()]);
        command.args(&self.options);
        command
    }

    /// Starts the server.
    ///
    /// # Panics
    /// It already runs.
    pub fn start(&mut self) {
        assert!(self.server.is_none(), "it runs already");
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log(&self.path("memory.log")));
        let mut child = command.spawn().expect("ebbd starts");
        let requests = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        self.server = Some(Server { child, requests, answers });
    }

    /// Kills the server between two instructions.
    ///
    /// # Panics
    /// There is no server.
    pub fn kill9(&mut self) {
        let Server { mut child, .. } = self.server.take().expect("a server");
        child.kill().expect("it can be killed");
        child.wait().expect("it has ended");
    }

    /// The device's current sizes.
    pub fn sizes(&mut self) -> Sizes {
        self.tell("")
    }

    /// Requests a size, which may be refused.
    pub fn request(&mut self, size: &str) -> Sizes {
        self.tell(size)
    }

    fn tell(&mut self, line: &str) -> Sizes {
        let server = self.server.as_mut().expect("a server");
        writeln!(server.requests, "{line}").expect("the server listens");
        let mut answer = String::new();
        server.answers.read_line(&mut answer).expect("the server answers");
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error} in {answer:?}"))
    }

    /// Requests a size, and waits until the guest's driver has reached it.
    pub fn resize(&mut self, size: &str) {
        let wanted = self.request(size);
        assert_eq!(wanted.error, None);
        self.wait_plugged();
    }

    /// Waits until the guest has the requested size.
    pub fn wait_plugged(&mut self) {
        until("the guest's driver to come to the requested size", || {
            let sizes = self.sizes();
            (sizes.plugged_bytes == sizes.requested_bytes).then_some(())
        });
    }

    /// Host memory of the region.
    pub fn host_bytes(&self) -> u64 {
        fs::metadata(self.path("region")).expect("the region's file").blocks() * 512
    }
}

impl Guest {
    /// Adds a virtio-mem device that another process serves, for QEMU 11.
    pub fn served_memory(self, device: &MemoryDevice) -> Guest {
        let (file, socket) = (device.path("region"), device.path("front.sock"));
        self.room("16G").qemu_args(&format!(
            "-object memory-backend-file,id=region,mem-path={},size={},share=on,reserve=off \
             -device virtio-pmem-pci,memdev=region,memaddr={ADDRESS:#x},addr=1e.1 \
             -chardev socket,id=memory,path={} \
             -device vhost-user-test-device-pci,chardev=memory,virtio-id=24,num_vqs=1,\
             config_size=56",
            file.display(),
            device.size.0,
            socket.display()
        ))
    }
}

fn ebbd(subcommand: &str) -> Command {
    let mut command = Command::new(assets::program_directory().join("ebbd"));
    command.arg(subcommand);
    command
}

fn log(path: &Path) -> File {
    File::options().create(true).append(true).open(path).expect("a log")
}

impl Drop for MemoryDevice {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["memory.log", "relay.log"] {
                let text = fs::read_to_string(self.path(name)).unwrap_or_default();
                eprintln!("--- {name} ---\n{text}---");
            }
        }
        let server = self.server.take().map(|server| server.child);
        for child in server.iter().chain([&self.relay]) {
            process::kill(child.id() as i32);
        }
        // They have ended: this only reaps them.
        let _ = (server.map(|mut server| server.wait()), self.relay.wait());
    }
}
