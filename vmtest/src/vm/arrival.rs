//! A second QEMU for a VM, to which its guest is to migrate.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ebb_sys::process::Process;

use super::Vm;
use crate::console::Console;
use crate::host::Host;

impl Vm {
    /// A VM whose guest is to migrate from this one. Nothing stands between its console and the
    /// test.
    pub(crate) fn arriving(&self, host: Host, name: String, directory: PathBuf, pid: i32) -> Vm {
        let (socket, log) = (directory.join("console.qemu"), directory.join("console.log"));
        let console = Console::connect(&socket, &log, pid)
            .unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
        Vm {
            host,
            name,
            guest: self.guest.clone(),
            pid,
            directory,
            console: Mutex::new(console),
            boots: AtomicUsize::new(self.boots.load(Ordering::Relaxed)),
            forgiven: AtomicBool::new(false),
        }
    }

    /// The arguments of its QEMU, changed for another QEMU with its files in `directory` and with
    /// memory of its own, or with the same memory.
    pub(crate) fn arguments_in(&self, directory: &Path, shares: bool) -> Vec<String> {
        let words = Process::open(self.pid).and_then(|qemu| qemu.command_line());
        let to = directory.display().to_string();
        let shared = shares.then(|| self.ram_paths().next().expect("a memfd"));
        let moved = |word: String| {
            let word = word.replace(&self.directory.display().to_string(), &to);
            if word.starts_with("memory-backend-") {
                return backend_like(&word, shared.as_deref());
            }
            let file = word.strip_prefix("/proc/self/fd/");
            let file = file.map(|number| format!("/proc/{}/fd/{number}", self.pid));
            let socket = [("ebb-qmp", "qmp.sock"), ("ebb-console", "console.qemu")];
            let socket =
                socket.into_iter().find(|(id, _)| word.starts_with(&format!("socket,id={id},fd=")));
            let socket = socket
                .map(|(id, name)| format!("socket,id={id},path={to}/{name},server=on,wait=off"));
            file.or(socket).unwrap_or(word)
        };
        let words = words.expect("QEMU runs").into_iter().skip(1);
        words.filter(|word| word != "-S").map(moved).collect()
    }
}

/// A memory backend with the name and size of another one, whose memory is new or that of a file.
fn backend_like(word: &str, file: Option<&Path>) -> String {
    let kept = word.split(',').filter(|part| part.starts_with("id=") || part.starts_with("size="));
    let kept = kept.collect::<Vec<_>>().join(",");
    match file {
        None => format!("memory-backend-memfd,{kept},share=on"),
        Some(file) => {
            format!("memory-backend-file,{kept},mem-path={},share=on", file.display())
        }
    }
}
