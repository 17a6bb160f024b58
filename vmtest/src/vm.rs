//! A running VM.

mod arrival;
mod load;
mod ram;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use ebb_api::{DetachReport, ReclaimReport, VmStatus};
use ebb_vm::Qmp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::complaints;
use crate::console::{Console, GuestError, last_lines};
use crate::guest::Guest;
use crate::host::{Host, Ran};
use crate::process;
use crate::wait::until;

pub use self::load::{AccessTimes, Churn};

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

impl Vm {
    /// A VM that Ebb has started, with its console in `vm_directory`.
    pub(crate) fn managed(
        host: Host,
        name: String,
        guest: Guest,
        directory: PathBuf,
        vm_directory: &Path,
    ) -> Vm {
        let status = host.ebb(&format!("status {name} --json")).ok();
        let status: VmStatus = parse(&status);
        Vm::start(host, name, guest, directory, vm_directory, status.pid)
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

    /// Sends a request after which the guest no longer answers.
    pub fn leave(&self, request: &str) {
        self.console().tell(request);
    }

    /// Reboots the guest.
    pub fn reboot(&self) {
        self.console().tell("reboot");
        self.wait_boot();
    }

    /// Sends a request to a guest that may end meanwhile.
    ///
    /// # Errors
    /// The guest does not answer. The answer itself may be an error, too: the guest's own words.
    pub(crate) fn ask(&self, request: &str) -> Result<Result<String, GuestError>, GuestError> {
        self.console().try_ask(request)
    }

    /// Reboots a guest that may end meanwhile.
    ///
    /// # Errors
    /// It does not start again.
    pub(crate) fn try_reboot(&self) -> Result<(), GuestError> {
        let boots = self.boots.fetch_add(1, Ordering::Relaxed) + 1;
        let mut console = self.console();
        console.try_tell("reboot")?;
        console.try_wait_ready(boots)
    }

    /// Resets the guest, and has this done again and again until the guest has booted.
    pub fn reboot_while(&self, act: impl Fn() + Sync) {
        // Dropped as well if the guest does not boot.
        let (booting, booted) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(|| {
                let booted = booted;
                while booted.try_recv() == Err(TryRecvError::Empty) {
                    act();
                }
            });
            let _booting = booting;
            self.reboot();
        });
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

    /// Attaches it by the monitor that Ebb finds.
    pub fn attach_as_found(&self) {
        let line = format!("attach --name {} --pid {}", self.name, self.pid);
        let mut words: Vec<String> = line.split(' ').map(Into::into).collect();
        words.extend(self.guest.common_options().iter().cloned());
        self.host.ebb_words(&words).ok();
    }

    /// Goes on in another QEMU, which has its console at the same place.
    pub(crate) fn go_on_in(&mut self, pid: i32) {
        let file = |name| self.directory.join(name);
        let console = Console::connect(&file("console.sock"), &file("console.log"), pid)
            .unwrap_or_else(|error| panic!("console.sock: {error}"));
        (self.pid, self.console) = (pid, Mutex::new(console));
    }

    /// The directory with the files of a VM that the test has started.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
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
        words.extend(self.guest.common_options().iter().cloned());
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

    /// Runs `action` while no thread of QEMU's runs.
    pub fn frozen<T>(&self, action: impl FnOnce() -> T) -> T {
        process::freeze(self.pid, true);
        let result = action();
        process::freeze(self.pid, false);
        result
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

    /// The guest's console.
    pub fn console(&self) -> MutexGuard<'_, Console> {
        self.console.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error} in {json}"))
}

impl Drop for Vm {
    fn drop(&mut self) {
        let complaints = self.complaints();
        if thread::panicking() {
            // One after the other: each locks the console.
            let tail = self.console().tail();
            let words = self.console().words_of_vmm();
            eprintln!(
                "{}: {tail}\n--- end of ebbd's log ---\n{}\n--- end of what QEMU said ---\n{}\n---",
                self.name,
                last_lines(&self.host.log()),
                last_lines(&words),
            );
        }
        self.kill();
        let forgiven = self.forgiven.load(Ordering::Relaxed) || thread::panicking();
        assert!(forgiven || complaints.is_empty(), "the guest's kernel complains: {complaints:#?}");
    }
}
