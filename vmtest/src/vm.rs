//! A running VM.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ebb_api::{DetachReport, ReclaimReport, VmStatus};
use ebb_sys::process::Process;
use ebb_vm::Qmp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::complaints;
use crate::console::{Console, GuestError};
use crate::guest::Guest;
use crate::host::{Host, Ran};
use crate::process;
use crate::wait::until;

/// Smallest guest RAM. Smaller files that QEMU maps are something else.
const RAM_BYTES_MIN: u64 = 32 << 20;

/// A VM whose guest answers. Dropping it kills it, and complaints of its kernel fail the test.
pub struct Vm {
    host: Host,
    name: String,
    guest: Guest,
    pid: i32,
    directory: PathBuf,
    console: Mutex<Console>,
    boots: AtomicUsize,
    forgiven: AtomicBool,
}

/// Result of a background load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Churn {
    /// Times that memory was allocated, checked and freed.
    pub cycles: u64,
    /// Bytes that differ from what the guest had written.
    pub wrong_bytes: u64,
}

impl Vm {
    /// A VM that Ebb has started, with its console in `held`.
    pub(crate) fn held(
        host: Host,
        name: String,
        guest: Guest,
        directory: PathBuf,
        held: &Path,
    ) -> Vm {
        let status = host.ebb(&format!("status {name} --json")).ok();
        let status: VmStatus = parse(&status);
        Vm::start(host, name, guest, directory, held, status.pid)
    }

    /// A VM that Ebb does not know.
    pub(crate) fn free(host: Host, name: String, guest: Guest, directory: PathBuf, pid: i32) -> Vm {
        let console = directory.clone();
        Vm::start(host, name, guest, directory, &console, pid)
    }

    fn start(
        host: Host,
        name: String,
        guest: Guest,
        directory: PathBuf,
        console: &Path,
        pid: i32,
    ) -> Vm {
        let (socket, log) = (console.join("console.sock"), console.join("console.log"));
        let console = Console::connect(&socket, &log, pid)
            .unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
        let (boots, forgiven) = (AtomicUsize::new(0), AtomicBool::new(false));
        let vm =
            Vm { host, name, guest, pid, directory, console: Mutex::new(console), boots, forgiven };
        vm.wait_boot();
        vm
    }

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
        let moved = |word: String| {
            let word = word.replace(&self.directory.display().to_string(), &to);
            if word.starts_with("memory-backend-") {
                return self.memory_like(&word, shares);
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

    /// A memory backend with the same name and size.
    fn memory_like(&self, word: &str, shares: bool) -> String {
        let kept =
            word.split(',').filter(|part| part.starts_with("id=") || part.starts_with("size="));
        let kept = kept.collect::<Vec<_>>().join(",");
        match shares {
            false => format!("memory-backend-memfd,{kept},share=on"),
            true => format!(
                "memory-backend-file,{kept},mem-path={},share=on",
                self.ram_paths().next().expect("a memfd").display()
            ),
        }
    }

    /// The descriptors of its guest's RAM.
    fn ram_paths(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("QEMU runs");
        entries.flatten().map(|entry| entry.path()).filter(|path| {
            let is_large = |file: fs::Metadata| file.len() >= RAM_BYTES_MIN;
            fs::read_link(path).is_ok_and(|target| is_ram(&target))
                && fs::metadata(path).is_ok_and(is_large)
        })
    }

    /// Its name in Ebb.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The VM's host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Sends a request to the guest, and returns its answer.
    ///
    /// # Panics
    /// The guest reports a failure, or does not answer.
    pub fn guest(&self, request: &str) -> String {
        let mut console = self.console();
        let answer = console.ask(request);
        answer.unwrap_or_else(|GuestError(why)| console.fail(&format!("guest: {request}: {why}")))
    }

    /// Sends a request that the guest may fail.
    ///
    /// # Errors
    /// The guest's own words.
    pub fn try_guest(&self, request: &str) -> Result<String, GuestError> {
        self.console().ask(request)
    }

    /// Sets the longest time to wait for the guest, for requests that take long.
    pub fn be_patient(&self, patience: Duration) {
        self.console().be_patient(patience);
    }

    /// Sends a request after which the guest no longer answers.
    pub fn leave(&self, request: &str) {
        self.console().tell(request);
    }

    /// All that the guest has printed.
    pub fn console_text(&self) -> String {
        self.console().text()
    }

    /// Starts a load that uses at most `size`, until it is stopped.
    pub fn churn(&self, size: &str) {
        self.guest(&format!("churn load 86400 {size}"));
    }

    /// Waits for this many more cycles of the load.
    pub fn churn_on(&self, cycles: u64) {
        self.guest(&format!("churnon load {cycles}"));
    }

    /// Ends the load.
    pub fn churn_stop(&self) -> Churn {
        let answer = self.guest("churnstop load");
        let mut words = answer.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(cycles)), Some(Ok(wrong_bytes))) => {
                if wrong_bytes > 0 {
                    eprintln!("{}: wrong bytes: {answer}", self.name);
                }
                Churn { cycles, wrong_bytes }
            }
            _ => panic!("churnstop answers {answer:?}"),
        }
    }

    /// The frames that a program of the guest uses, by `hotframes NAME` or `accessframes NAME`, in
    /// the order in which it reports them.
    pub fn frames(&self, request: &str) -> Vec<u64> {
        let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let answer = self.guest(request);
        let runs = answer.split_whitespace().map(|run| run.split_once('+').expect("a run"));
        runs.flat_map(|(first, count)| hex(first)..hex(first) + hex(count)).collect()
    }

    /// Leaves this many files of 48 KiB in the guest's memory, each beside a hole of that size.
    /// Returns a checksum of what they contain.
    pub fn scatter(&self, files: u32) -> String {
        self.guest(&format!(
            "sh busybox mkdir /tmp/keep /tmp/go; i=0; while [ $i -lt {files} ]; do \
             for at in keep go; do busybox head -c 49152 /dev/urandom >/tmp/$at/$i; done; \
             i=$((i+1)); done; busybox rm -r /tmp/go"
        ));
        self.scattered()
    }

    /// Checksum of the files of [`Vm::scatter`].
    pub fn scattered(&self) -> String {
        self.guest("sh cd /tmp/keep && busybox cat * | busybox md5sum")
    }

    /// Reboots the guest.
    pub fn reboot(&self) {
        self.console().tell("reboot");
        self.wait_boot();
    }

    /// Has the guest's kernel start another one from these files, without a reset.
    pub fn kexec(&self, kernel: &str, initrd: &str) {
        self.console().tell(&format!("kexec {kernel} {initrd}"));
        self.wait_boot();
    }

    /// Waits until the guest has booted once more.
    pub fn wait_boot(&self) {
        let boots = self.boots.fetch_add(1, Ordering::Relaxed) + 1;
        self.console().wait_ready(boots);
    }

    /// Has the guest's kernel panic.
    pub fn panic(&self) {
        self.forgive();
        self.console().tell("panic");
        self.wait_console("Kernel panic");
    }

    /// Has the guest power off, and waits for QEMU's end.
    pub fn power_off(&self) {
        self.console().tell("poweroff");
        self.wait_end();
    }

    /// Kills QEMU.
    pub fn kill(&self) {
        process::kill(self.pid);
    }

    /// Waits until QEMU has ended.
    pub fn wait_end(&self) {
        until(format_args!("the end of {}", self.name), || {
            (!process::runs(self.pid)).then_some(())
        });
    }

    /// Runs `ebb VERB NAME REST`, where `line` is `VERB REST`.
    pub fn ebb(&self, line: &str) -> Ran {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        self.host.ebb(&format!("{verb} {} {rest}", self.name))
    }

    /// Its current status.
    pub fn status(&self) -> VmStatus {
        until(format_args!("figures of {} as it is now", self.name), || {
            Some(self.last_status()).filter(|status| status.age_ms == 0)
        })
    }

    /// Its last status, if it is slow to answer.
    pub fn last_status(&self) -> VmStatus {
        parse(&self.ebb("status --json").ok())
    }

    /// Waits until Ebb trusts the guest.
    pub fn wait_trusted(&self) -> VmStatus {
        until(format_args!("trust in the guest of {}", self.name), || {
            Some(self.status()).filter(|status| status.guest.trusted)
        })
    }

    /// Reclaims all free memory.
    pub fn reclaim(&self) -> ReclaimReport {
        parse(&self.ebb("reclaim --json").ok())
    }

    /// The control socket of a QEMU that Ebb does not know.
    pub fn own_qmp_socket(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    /// Attaches it.
    pub fn attach(&self) {
        self.try_attach().ok();
    }

    /// Tries to attach it, which Ebb may refuse.
    pub fn try_attach(&self) -> Ran {
        let socket = self.own_qmp_socket();
        let line = format!("attach --name {} --pid {}", self.name, self.pid);
        let mut words: Vec<String> = line.split(' ').map(Into::into).collect();
        words.extend(["--qmp".into(), socket.display().to_string()]);
        words.extend(self.guest.hold_args().iter().cloned());
        self.host.ebb_words(&words)
    }

    /// Detaches it.
    pub fn detach(&self) -> DetachReport {
        parse(&self.ebb("detach --json").ok())
    }

    /// Executes a command on the test's own control socket.
    ///
    /// # Panics
    /// QEMU refuses it.
    pub fn qmp(&self, command: &str, arguments: Value) -> Value {
        self.open_qmp().execute(command, arguments).expect("QMP")
    }

    /// Connects to the test's own control socket.
    ///
    /// # Panics
    /// QEMU does not answer there.
    pub fn open_qmp(&self) -> Qmp {
        Qmp::connect(&self.qmp_socket()).expect("QMP")
    }

    /// Path of the test's own control socket. QEMU serves one connection at a time.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory.join("test.sock")
    }

    /// Runs `action` while the guest's processors are stopped.
    pub fn stopped<T>(&self, action: impl FnOnce() -> T) -> T {
        self.qmp("stop", json!({}));
        let result = action();
        self.qmp("cont", json!({}));
        result
    }

    /// Host memory of the guest's RAM, as the kernel counts it.
    pub fn host_bytes(&self) -> u64 {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("QEMU runs");
        let files = entries.flatten().filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            let is_memory = is_ram(&target);
            is_memory.then(|| fs::metadata(entry.path()).ok()).flatten()
        });
        let mut seen = HashSet::new();
        let ram = files.filter(|file| file.len() >= RAM_BYTES_MIN && seen.insert(file.ino()));
        ram.map(|file| file.blocks() * 512).sum()
    }

    /// Waits until the console has shown `text`.
    pub fn wait_console(&self, text: &str) {
        let console = self.console();
        let found = console.wait_text(text);
        found.unwrap_or_else(|GuestError(why)| console.fail(&why));
    }

    /// Complaints of the guest's kernel so far.
    pub fn complaints(&self) -> Vec<String> {
        complaints::in_log(&self.console().text())
    }

    /// Ignores complaints, for tests that cause them.
    pub fn forgive(&self) {
        self.forgiven.store(true, Ordering::Relaxed);
    }

    fn console(&self) -> MutexGuard<'_, Console> {
        self.console.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a descriptor leads to RAM, by its file's name. Boot files may be in memory, too.
fn is_ram(target: &Path) -> bool {
    let name = target.to_string_lossy();
    name.starts_with("/memfd:") && !name.starts_with("/memfd:ebb-boot")
}

fn parse<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error} in {json}"))
}

impl Drop for Vm {
    fn drop(&mut self) {
        let complaints = self.complaints();
        if thread::panicking() {
            let log = self.host.log();
            let lines: Vec<&str> = log.lines().collect();
            let log = &lines[lines.len().saturating_sub(30)..];
            eprintln!(
                "{}: {}\n--- end of ebbd's log ---\n{}\n---",
                self.name,
                self.console().tail(),
                log.join("\n")
            );
        }
        self.kill();
        let forgiven = self.forgiven.load(Ordering::Relaxed) || thread::panicking();
        assert!(forgiven || complaints.is_empty(), "the guest's kernel complains: {complaints:#?}");
    }
}
