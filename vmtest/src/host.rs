//! A run directory with its daemon and its VMs.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ebb_api::{State, VmSummary, route};

use crate::assets;
use crate::guest::Guest;
use crate::process;
use crate::undo::{Scratch, Undo};
use crate::vm::Vm;
use crate::wait::until;

/// What the process of a VM is called.
const SERVER: &str = "ebbd-vm";
/// `TMPFS_MAGIC` of `include/uapi/linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;

/// An Ebb of one's own. Copies are handles on the same; the last one to go
/// kills what runs and removes the directory.
#[derive(Clone)]
pub struct Host(Arc<Inner>);

struct Inner {
    // Taken away in this order.
    _processes: Undo,
    directory: Scratch,
    /// What its daemon and QEMUs are told by the environment.
    settings: Mutex<BTreeMap<String, OsString>>,
    programs: PathBuf,
    /// Where the first guest's QEMU is.
    qemu_directory: OnceLock<Option<PathBuf>>,
    vms: AtomicUsize,
}

/// What a command left behind.
#[derive(Debug)]
pub struct Ran {
    /// Its arguments.
    pub line: String,
    /// Its exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Ran {
    /// Runs a command to its end.
    pub fn of(command: &mut Command) -> Ran {
        let Output { status, stdout, stderr } = command.output().expect("the program starts");
        let words = command.get_args().map(|word| word.to_string_lossy());
        Ran {
            line: words.collect::<Vec<_>>().join(" "),
            code: status.code(),
            stdout: String::from_utf8_lossy(&stdout).into(),
            stderr: String::from_utf8_lossy(&stderr).into(),
        }
    }

    /// Its output.
    ///
    /// # Panics
    /// It failed.
    pub fn ok(self) -> String {
        let Ran { line, code, stdout, stderr } = self;
        assert_eq!(code, Some(0), "{line}: {stderr}{stdout}");
        stdout
    }

    /// Its output, of a resize that may have stopped short.
    ///
    /// # Panics
    /// It failed.
    pub fn ok_or_short(self) -> String {
        match self.code == Some(i32::from(route::EXIT_SHORT)) {
            true => self.stdout,
            false => self.ok(),
        }
    }

    /// The one line with which it refused.
    ///
    /// # Panics
    /// It succeeded, or said more or less than one line.
    pub fn refused(self) -> String {
        let Ran { line, code, stdout, stderr } = self;
        assert!(code.is_some_and(|code| code != 0), "{line}: ends with {code:?}: {stdout}");
        assert!(stdout.is_empty(), "{line}: refuses, and yet prints {stdout}");
        assert_eq!(stderr.lines().count(), 1, "{line}: {stderr}");
        stderr
    }
}

impl Default for Host {
    fn default() -> Host {
        Host::new()
    }
}

impl Host {
    /// A run directory of its own; no daemon yet.
    ///
    /// # Panics
    /// `ebb` is not built.
    pub fn new() -> Host {
        Host::at(&env::temp_dir())
    }

    /// The same on tmpfs, where a run directory belongs.
    ///
    /// # Errors
    /// There is none.
    pub fn in_memory() -> Result<Host, String> {
        let place = Path::new("/dev/shm");
        match is_in_memory(place) {
            true => Ok(Host::at(place)),
            false => Err(format!("{} is no tmpfs", place.display())),
        }
    }

    /// The same in a directory that is there.
    ///
    /// # Panics
    /// `ebb` is not built, or the directory is none.
    pub fn at(place: &Path) -> Host {
        let directory = Scratch::new_in("ebb-test-", place).expect("a directory");
        // QEMUs are users of their own, and their drives are below.
        permit(directory.path(), 0o711);
        let mut settings = BTreeMap::new();
        if !is_in_memory(place) {
            settings.insert("EBB_ALLOW_KEYS_ON_DISK".into(), "true".into());
        }
        let below = directory.path().to_owned();
        Host(Arc::new(Inner {
            _processes: Undo::processes(move || end_all(&below)),
            directory,
            settings: Mutex::new(settings),
            programs: assets::program_directory(),
            qemu_directory: OnceLock::new(),
            vms: AtomicUsize::new(0),
        }))
    }

    /// Sets a variable of the environment of the daemon from its next start on, and of each QEMU
    /// that is not confined.
    ///
    /// # Panics
    /// Another thread did while it set one.
    pub fn set(&self, name: &str, value: impl Into<OsString>) {
        self.0.settings.lock().expect("settings").insert(name.into(), value.into());
    }

    /// Where things of this host are.
    pub fn directory(&self) -> &Path {
        self.0.directory.path()
    }

    /// Whether it is on a disk.
    pub fn is_on_disk(&self) -> bool {
        !is_in_memory(self.directory())
    }

    /// The daemon's directory.
    pub fn run_directory(&self) -> PathBuf {
        self.directory().join("run")
    }

    /// Runs `ebb` with the words of `line`.
    pub fn ebb(&self, line: &str) -> Ran {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.ebb_words(&words)
    }

    /// Runs `ebb` with `words`.
    pub fn ebb_words(&self, words: &[impl AsRef<str>]) -> Ran {
        Ran::of(self.command("ebb").args(words.iter().map(AsRef::as_ref)))
    }

    /// `ebb` or `ebbd`, told this host's run directory.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.0.programs.join(program));
        command.arg("--run-dir").arg(self.run_directory());
        command.env("PATH", self.path()).env_remove("EBB_RUN_DIR").stdin(Stdio::null());
        command.envs(self.0.settings.lock().expect("settings").iter());
        command
    }

    /// Has Ebb start a VM and waits until its guest answers.
    pub fn run(&self, guest: Guest) -> Vm {
        self.use_qemu(&guest);
        let (name, directory) = self.new_vm();
        self.ebb_words(&guest.run_args(&name, &directory)).ok();
        let held = self.run_directory().join("vms").join(&name);
        Vm::held(self.clone(), name, guest, directory, &held)
    }

    /// Starts a QEMU that Ebb knows nothing of and waits until its guest answers.
    pub fn qemu(&self, guest: Guest) -> Vm {
        self.start_qemu(guest, Guest::plain_args)
    }

    /// The same on the terms of [`Host::run`]: as `ebb run --privileged` would start it.
    pub fn alike(&self, guest: Guest) -> Vm {
        self.start_qemu(guest, Guest::alike_line)
    }

    fn start_qemu(&self, guest: Guest, line: fn(&Guest, &str, &Path) -> Vec<String>) -> Vm {
        self.use_qemu(&guest);
        let (name, directory) = self.new_vm();
        let log = File::create(directory.join("qemu.log")).expect("a log");
        let mut command = Command::new("qemu-system-x86_64");
        command.args(line(&guest, &name, &directory)).env("PATH", self.path());
        command.envs(self.0.settings.lock().expect("settings").iter());
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        let mut child = command.spawn().expect("QEMU starts");
        let pid = child.id() as i32;
        // Whoever kills it asks /proc whether it is gone; this only takes the remains away.
        std::thread::spawn(move || child.wait());
        let socket = directory.join("console.sock");
        until(format_args!("QEMU's sockets, see {}", directory.display()), || {
            (socket.exists() && directory.join("test.sock").exists()).then_some(())
        });
        Vm::free(self.clone(), name, guest, directory, pid)
    }

    /// Starts a QEMU like that of `from`, which waits for its guest at `socket`, and which Ebb
    /// knows nothing of; with memory of its own, or with the same.
    ///
    /// # Panics
    /// It does not start.
    pub fn arriving(&self, from: &Vm, socket: &Path, shares: bool) -> Vm {
        let (name, directory) = self.new_vm();
        let log = File::create(directory.join("qemu.log")).expect("a log");
        let mut words = from.arguments_in(&directory, shares);
        words.extend(["-incoming".into(), format!("unix:{}", socket.display())]);
        let mut command = Command::new("qemu-system-x86_64");
        command.args(words).env("PATH", self.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        let mut child = command.spawn().expect("QEMU starts");
        let pid = child.id() as i32;
        // Whoever kills it asks /proc whether it is gone; this only takes the remains away.
        std::thread::spawn(move || child.wait());
        until(format_args!("a QEMU that waits, see {}", directory.display()), || {
            (socket.exists() && directory.join("test.sock").exists()).then_some(())
        });
        from.arriving(self.clone(), name, directory, pid)
    }

    /// The daemon's process.
    pub fn daemon(&self) -> Option<i32> {
        self.find("ebbd")
    }

    /// A process of this program that is told the daemon's directory.
    pub fn find(&self, program: &str) -> Option<i32> {
        let all = process::with_path(&self.run_directory());
        all.into_iter().find(|(_, found)| found == program).map(|(pid, _)| pid)
    }

    /// The daemon and its helpers: all that have to do with this host and are no QEMU.
    pub fn holders(&self) -> Vec<i32> {
        let all = process::with_path(self.directory()).into_iter();
        all.filter(|(_, name)| !name.starts_with("qemu-system")).map(|(pid, _)| pid).collect()
    }

    /// The daemon, and the processes of all VMs.
    pub fn ebbds(&self) -> Vec<i32> {
        self.daemon().into_iter().chain(self.servers()).collect()
    }

    /// The processes of all VMs.
    pub fn servers(&self) -> Vec<i32> {
        let all = process::with_path(&self.run_directory()).into_iter();
        all.filter(|(_, found)| found == SERVER).map(|(pid, _)| pid).collect()
    }

    /// The process of the VM of this name.
    pub fn server(&self, vm: &str) -> Option<i32> {
        let is_its = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|&byte| byte == 0).any(|word| word == vm.as_bytes())
        };
        self.servers().into_iter().find(is_its)
    }

    /// How many threads of VMs' processes have this name.
    pub fn threads(&self, name: &str) -> usize {
        let tasks = |pid: i32| fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        let tasks = self.servers().into_iter().flat_map(tasks).flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|found| found.trim_end() == name).count()
    }

    /// Kills the daemon and the processes of all VMs between two instructions.
    ///
    /// # Panics
    /// There is no daemon.
    pub fn kill9(&self) {
        self.kill_daemon();
        self.kill_servers();
    }

    /// Kills the processes of all VMs.
    pub fn kill_servers(&self) {
        self.servers().into_iter().for_each(process::kill);
    }

    /// Kills the daemon alone.
    ///
    /// # Panics
    /// There is none.
    pub fn kill_daemon(&self) {
        process::kill(self.daemon().expect("a daemon runs"));
    }

    /// Starts the daemon again, as any command does, and waits until it has taken up its VMs.
    pub fn start(&self) {
        until("the VMs to be taken up", || {
            self.list().iter().all(|vm| vm.state == State::Held).then_some(())
        });
        assert!(self.daemon().is_some(), "a daemon runs");
    }

    /// The VMs that are held.
    pub fn list(&self) -> Vec<VmSummary> {
        serde_json::from_str(&self.ebb("list --json").ok()).expect("a list")
    }

    /// Processes of this host, by the names of their programs.
    pub fn processes(&self) -> Vec<String> {
        process::with_path(self.directory()).into_iter().map(|(_, program)| program).collect()
    }

    /// The daemon's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.run_directory().join(ebb_api::route::LOG_FILE)).unwrap_or_default()
    }

    fn new_vm(&self) -> (String, PathBuf) {
        let name = format!("vm{}", self.0.vms.fetch_add(1, Ordering::Relaxed));
        let directory = self.directory().join(&name);
        fs::create_dir(&directory).expect("a directory");
        // QEMU makes the test's own control socket there.
        permit(&directory, 0o777);
        (name, directory)
    }

    /// The daemon finds QEMU where it was started to look.
    fn use_qemu(&self, guest: &Guest) {
        let wanted = guest.kernel.qemu_directory.as_deref().map(assets::for_all_users);
        let first = self.0.qemu_directory.get_or_init(|| wanted.clone());
        assert_eq!(first, &wanted, "one host has one QEMU");
    }

    fn path(&self) -> OsString {
        let path = env::var_os("PATH").unwrap_or_default();
        let first = self.0.qemu_directory.get().cloned().flatten();
        env::join_paths(first.into_iter().chain(env::split_paths(&path))).expect("PATH")
    }
}

fn is_in_memory(place: &Path) -> bool {
    rustix::fs::statfs(place).is_ok_and(|found| found.f_type as u64 == TMPFS)
}

/// Sets who may use a file, a directory or a socket.
///
/// # Panics
/// It is not there.
pub fn permit(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("it can be permitted");
}

/// Kills what has to do with this directory.
fn end_all(directory: &Path) {
    // The daemon first: it would note and mourn the others.
    let mut left = process::with_path(directory);
    left.sort_by_key(|(_, program)| program != "ebbd");
    left.into_iter().for_each(|(pid, _)| process::kill(pid));
}

/// Runs a program of this host's, by the words of its command.
pub(crate) fn call(words: &[&dyn AsRef<OsStr>]) {
    Ran::of(Command::new(words[0]).args(&words[1..])).ok();
}
