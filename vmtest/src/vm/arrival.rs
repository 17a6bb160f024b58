//! A second QEMU for a VM, to which its guest is to migrate, and the migration itself.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use ebb_sys::process::Process;
use serde_json::{Value, json};

use super::Vm;
use crate::console::Console;
use crate::host::{Host, permit};
use crate::wait::until;

/// Bytes a second of a migration that is to last.
const SLOW: u64 = 4 << 20;
/// Bytes a second of a migration that is to end.
const FAST: u64 = 1 << 30;

impl Host {
    /// A socket that accepts one connection and discards what it gets: where guests migrate that
    /// never arrive.
    ///
    /// # Panics
    /// There can be no such socket.
    pub fn nowhere(&self) -> PathBuf {
        let path = self.directory().join("nowhere.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        thread::spawn(move || {
            let (mut from, _) = listener.accept().expect("a migration");
            // The migration is cancelled.
            let _ = io::copy(&mut from, &mut io::sink());
        });
        path
    }
}

impl Vm {
    /// Begins to migrate the guest to whoever listens at this socket.
    pub fn begin_migration(&self, socket: &Path) {
        permit(socket, 0o666);
        self.qmp("migrate", json!({ "uri": format!("unix:{}", socket.display()) }));
    }

    /// Migrates the guest to another QEMU, and waits until it runs there.
    pub fn migrate_to(&self, to: &Vm, socket: &Path) {
        self.begin_migration(socket);
        self.wait_migration("completed");
        to.wait_running();
    }

    /// Keeps migrations from their end: QEMU moves the guest only once what is left to be sent
    /// takes a millisecond, and a guest that goes on writing always leaves more than that.
    pub fn hold_migration(&self) {
        self.set_migration(json!({ "max-bandwidth": SLOW, "downtime-limit": 1 }));
    }

    /// Lets a migration end that was held.
    pub fn let_migration_end(&self) {
        self.set_migration(json!({ "max-bandwidth": FAST, "downtime-limit": 60_000 }));
    }

    /// Sets parameters of migrations.
    pub fn set_migration(&self, parameters: Value) {
        self.qmp("migrate-set-parameters", parameters);
    }

    /// Sets a capability of the next migration.
    pub fn set_migration_capability(&self, capability: &str, on: bool) {
        let capability = json!([{ "capability": capability, "state": on }]);
        self.qmp("migrate-set-capabilities", json!({ "capabilities": capability }));
    }

    /// Waits until the last migration has this status.
    ///
    /// # Panics
    /// It has failed, and that is not what is awaited.
    pub fn wait_migration(&self, status: &str) {
        until(format_args!("a migration that is {status}"), || {
            let state = self.qmp("query-migrate", json!({}));
            assert!(status == "failed" || state["status"] != "failed", "{state}");
            (state["status"] == status).then_some(())
        });
    }

    /// Waits until a migration has sent so much, and goes on.
    ///
    /// # Panics
    /// It has ended.
    pub fn wait_sent(&self, bytes: u64) {
        until(format_args!("{bytes} bytes to be sent"), || {
            let state = self.qmp("query-migrate", json!({}));
            assert!(state["status"] != "failed" && state["status"] != "completed", "{state}");
            let sent = state["ram"]["transferred"].as_u64().unwrap_or(0);
            (state["status"] == "active" && sent >= bytes).then_some(())
        });
    }

    /// Waits until the guest's processors run. What is sent over the serial line before that is
    /// lost.
    pub fn wait_running(&self) {
        until("the guest to go on", || {
            (self.qmp("query-status", json!({}))["status"] == "running").then_some(())
        });
    }
}

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
