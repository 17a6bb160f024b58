//! A run directory with its daemon and its VMs.

mod libvirt;

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
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
pub use libvirt::{Domain, Libvirt, Monitors};

/// Name of the process of a VM.
const SERVER: &str = "ebbd-vm";
/// `TMPFS_MAGIC` in Linux's `include/uapi/linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;

/// An Ebb of its own. Clones share it. Dropping the last one kills what runs and removes the
/// directory.
#[derive(Clone)]
pub struct Host(Arc<Inner>);

struct Inner {
    // The fields are dropped in this order.
    _processes: Undo,
    directory: Scratch,
    /// Environment of the daemon and of QEMUs.
    settings: Mutex<BTreeMap<String, OsString>>,
    programs: PathBuf,
    /// Directory of the first guest's QEMU.
    qemu_directory: OnceLock<Option<PathBuf>>,
    vms: AtomicUsize,
}

/// Result of a command.
#[derive(Debug)]
pub struct Ran {
    /// Its arguments.
    pub line: String,
    /// Its exit code; none: a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
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

    /// The output of a command that must succeed.
    ///
    /// # Panics
    /// The command failed.
    pub fn ok(self) -> String {
        let Ran { line, code, stdout, stderr } = self;
        assert_eq!(code, Some(0), "{line}: {stderr}{stdout}");
        stdout
    }

    /// The output of a resize, which may have stopped short of the target.
    ///
    /// # Panics
    /// The command failed.
    pub fn ok_or_short(self) -> String {
        match self.code == Some(i32::from(route::EXIT_SHORT)) {
            true => self.stdout,
            false => self.ok(),
        }
    }

    /// The one line with which the command refused.
    ///
    /// # Panics
    /// The command succeeded, or printed no line or several.
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
    /// A host with a run directory of its own, without a daemon.
    ///
    /// # Panics
    /// `ebb` is not built.
    pub fn new() -> Host {
        Host::at(&env::temp_dir())
    }

    /// A host on tmpfs, where a run directory belongs.
    ///
    /// # Errors
    /// There is no tmpfs.
    pub fn in_memory() -> Result<Host, String> {
        let place = Path::new("/dev/shm");
        match is_in_memory(place) {
            true => Ok(Host::at(place)),
            false => Err(format!("{} is no tmpfs", place.display())),
        }
    }

    /// A host in an existing directory.
    ///
    /// # Panics
    /// `ebb` is not built, or the directory does not exist.
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

    /// Sets an environment variable for the daemon, from its next start on, and for each QEMU that
    /// is not confined.
    ///
    /// # Panics
    /// Another thread panicked while it set one.
    pub fn set(&self, name: &str, value: impl Into<OsString>) {
        self.0.settings.lock().expect("settings").insert(name.into(), value.into());
    }

    /// Directory of all files of this host.
    pub fn directory(&self) -> &Path {
        self.0.directory.path()
    }

    /// Whether this directory is on a disk.
    pub fn is_on_disk(&self) -> bool {
        !is_in_memory(self.directory())
    }

    /// The daemon's run directory.
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

    /// The command `ebb` or `ebbd` with this host's run directory.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.0.programs.join(program));
        command.arg("--run-dir").arg(self.run_directory());
        command.env("PATH", self.path()).env_remove("EBB_RUN_DIR").env_remove("EBB_HOST");
        command.stdin(Stdio::null());
        command.envs(self.0.settings.lock().expect("settings").iter());
        command
    }

    /// Has Ebb start a VM, and waits until its guest answers.
    pub fn run(&self, guest: Guest) -> Vm {
        self.use_qemu(&guest);
        let (name, directory) = self.new_vm();
        self.ebb_words(&guest.run_args(&name, &directory)).ok();
        let vm_directory = self.run_directory().join("vms").join(&name);
        Vm::managed(self.clone(), name, guest, directory, &vm_directory)
    }

    /// Starts a QEMU that Ebb does not know, and waits until its guest answers.
    pub fn qemu(&self, guest: Guest) -> Vm {
        self.start_qemu(guest, Guest::plain_args)
    }

    /// Does the same with a QEMU like that of [`Host::run`], as `ebb run --privileged` would start
    /// it.
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
        // Only reaps the process: whoever kills it looks into /proc for its end.
        std::thread::spawn(move || child.wait());
        wait_sockets(pid, &directory, &directory.join("console.sock"));
        Vm::free(self.clone(), name, guest, directory, pid)
    }

    /// Starts a QEMU like that of `from` that Ebb does not know and that waits for its guest at
    /// `socket`, with memory of its own or with the same memory.
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
        // Only reaps the process: whoever kills it looks into /proc for its end.
        std::thread::spawn(move || child.wait());
        wait_sockets(pid, &directory, socket);
        from.arriving(self.clone(), name, directory, pid)
    }

    /// Process number of the daemon.
    pub fn daemon(&self) -> Option<i32> {
        self.find("ebbd")
    }

    /// A process with this program name and the daemon's directory in its arguments.
    pub fn find(&self, program: &str) -> Option<i32> {
        let all = process::executed(&self.run_directory());
        all.into_iter().find(|(_, found)| found == program).map(|(pid, _)| pid)
    }

    /// The daemon and its helpers: all processes of this host except QEMUs.
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
        let all = process::executed(&self.run_directory()).into_iter();
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

    /// Number of threads with this name in the processes of all VMs.
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

    /// Kills only the daemon.
    ///
    /// # Panics
    /// There is no daemon.
    pub fn kill_daemon(&self) {
        process::kill(self.daemon().expect("a daemon runs"));
    }

    /// Starts the daemon, also again, as any command does where there is a run directory, and waits
    /// until it has recovered its VMs.
    ///
    /// # Panics
    /// There is no daemon then, or no run directory can be made.
    pub fn start(&self) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(self.run_directory());
        made.expect("a run directory");
        until("the VMs to be recovered", || {
            self.list().iter().all(|vm| vm.state == State::Managed).then_some(())
        });
        assert!(self.daemon().is_some(), "a daemon runs");
    }

    /// The VMs that Ebb manages.
    pub fn list(&self) -> Vec<VmSummary> {
        serde_json::from_str(&self.ebb("list --json").ok()).expect("a list")
    }

    /// Program names of this host's processes.
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

    /// Sets the QEMU of the first guest, which the daemon finds by its PATH. Every other guest must
    /// use the same.
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

/// Sets the permissions of a file, a directory or a socket.
///
/// # Panics
/// It does not exist.
pub fn permit(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("it can be permitted");
}

/// Waits until a QEMU with its files in `directory` has this socket and that of the test.
///
/// # Panics
/// It has ended.
fn wait_sockets(pid: i32, directory: &Path, socket: &Path) {
    let log = || fs::read_to_string(directory.join("qemu.log")).unwrap_or_default();
    until("QEMU's sockets", || {
        assert!(process::runs(pid), "QEMU has ended before it had its sockets: {}", log());
        (socket.exists() && directory.join("test.sock").exists()).then_some(())
    });
}

/// Kills all processes that use this directory.
fn end_all(directory: &Path) {
    // The daemon comes first: otherwise it would recover the others.
    let mut left = process::with_path(directory);
    left.sort_by_key(|(_, program)| program != "ebbd");
    left.into_iter().for_each(|(pid, _)| process::kill(pid));
}

/// Runs a program of this host, and requires success.
pub(crate) fn call(words: &[&dyn AsRef<OsStr>]) {
    Ran::of(Command::new(words[0]).args(&words[1..])).ok();
}
