//! The system of `guest/other` in a VM.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use ebb_api::VmStatus;
use ebb_sys::process::Process;
use ebb_vm::layout::discover;
use ebb_vm::{Qmp, Ram};
use serde_json::json;
use testkit::target::target_directory;
use vmtest::{Host, Ran, deadline, permit, until};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/other");
/// Its line once it obeys.
const READY: &str = "ok ready";
const NAME: &str = "other";

/// The system, and the VM that it runs in. Dropping the last [`Host`] ends it.
pub struct Other {
    pub vm: OtherVm,
    serial: Serial,
}

/// A VM with one processor.
pub struct OtherVm {
    pub host: Host,
    pid: i32,
    directory: PathBuf,
}

/// Its serial console.
pub struct Serial {
    input: UnixStream,
    output: BufReader<UnixStream>,
}

/// What kind of VM is to be started.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Bytes of one frame's metadata, 40 or 96.
    pub frame_bytes: u64,
    /// Memory of the VM.
    pub memory_mib: u64,
    /// Further arguments of QEMU.
    pub arguments: &'static [&'static str],
}

/// Builds the system. Returns the file that QEMU boots.
pub fn kernel(frame_bytes: u64) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().expect("another build failed");
    let out = target_directory().join("guest-other");
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "-C", SOURCE, "kernel"]);
    make.arg(format!("OUT={}", out.display())).arg(format!("FRAME_BYTES={frame_bytes}"));
    Ran::of(&mut make).ok();
    out.join(format!("other-{frame_bytes}"))
}

impl Other {
    /// Starts it in a QEMU that Ebb does not know.
    pub fn start(shape: Shape) -> Other {
        let host = Host::new();
        let directory = directory(&host);
        let log = File::create(directory.join("qemu.log")).expect("a log");
        let mut command = Command::new("qemu-system-x86_64");
        command.args(plain_arguments(shape, &directory)).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        let mut child = command.spawn().expect("QEMU starts");
        let pid = child.id() as i32;
        // Only reaps the process: whoever kills it looks into /proc for its end.
        thread::spawn(move || child.wait());
        let serial = Serial::connect(&directory);
        Other { vm: OtherVm { host, pid, directory }, serial }
    }

    /// Has Ebb start it.
    pub fn run(shape: Shape) -> Other {
        let host = Host::new();
        let directory = directory(&host);
        let mut words: Vec<String> = ["run", "--name", NAME, "--cpus", "1"].map(Into::into).into();
        words.extend(["--memory".into(), format!("{}M", shape.memory_mib)]);
        words.extend(["--kernel".into(), kernel(shape.frame_bytes).display().to_string()]);
        words.extend(["--".into(), "-qmp".into(), control(&directory, "test.sock")]);
        words.extend(shape.arguments.iter().map(ToString::to_string));
        host.ebb_words(&words).ok();
        let status = host.ebb(&format!("status {NAME} --json")).ok();
        let VmStatus { pid, .. } = serde_json::from_str(&status).expect("a status");
        let serial = Serial::connect(&host.run_directory().join("vms").join(NAME));
        Other { vm: OtherVm { host, pid, directory }, serial }
    }

    /// Sends a command. Returns its lines, of which the last one begins with `ok`.
    pub fn ask(&mut self, line: &str) -> Vec<String> {
        self.begin(line);
        self.end(line)
    }

    /// Sends a command. [`Other::end`] waits for its end.
    pub fn begin(&mut self, line: &str) {
        self.serial.tell(line);
    }

    /// Returns the lines of the command that was sent last.
    pub fn end(&mut self, line: &str) -> Vec<String> {
        let lines = self.serial.lines_to(|line| line.starts_with("ok") || is_error(line));
        assert!(!lines.last().is_some_and(|last| is_error(last)), "{line}: {lines:#?}");
        lines
    }

    /// The number behind `name` in the last line of a command's answer.
    pub fn number(&mut self, line: &str, name: &str) -> u64 {
        let lines = self.ask(line);
        field(lines.last().expect("an answer"), name)
    }

    /// Resets the VM, and waits until the system has started again.
    pub fn reset(&mut self) {
        self.vm.qmp().execute("system_reset", json!({})).expect("a reset");
        self.serial.lines_to(|line| line == READY);
    }
}

impl OtherVm {
    /// Has Ebb manage a VM of [`Other::start`], with further options.
    pub fn attach(&self, options: &str) {
        let (socket, pid) = (self.directory.join("qmp.sock"), self.pid);
        let line = format!("attach --name {NAME} --pid {pid} --qmp {}", socket.display());
        self.host.ebb(&format!("{line} {options}")).ok();
    }

    /// What Ebb tells of it.
    pub fn status(&self) -> VmStatus {
        serde_json::from_str(&self.ebb("status --json").ok()).expect("a status")
    }

    /// Runs `ebb VERB other REST`, where `line` is `VERB REST`.
    pub fn ebb(&self, line: &str) -> Ran {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        self.host.ebb(&format!("{verb} {NAME} {rest}"))
    }

    /// Connects to the test's own control socket.
    pub fn qmp(&self) -> Qmp {
        Qmp::connect(&self.directory.join("test.sock")).expect("QMP")
    }

    /// Finds its RAM, and maps it.
    pub fn ram(&self) -> Ram {
        let process = Process::open(self.pid).expect("QEMU runs");
        discover(&process, &mut self.qmp()).expect("the VM's RAM")
    }

    /// A register of its only processor.
    pub fn register(&self, name: &str) -> u64 {
        let text = self.qmp().human("info registers -a").expect("registers");
        let mut words = text.split_whitespace().filter_map(|word| word.split_once('='));
        let (_, value) = words.find(|(found, _)| *found == name).expect("a register");
        u64::from_str_radix(value, 16).expect("a number")
    }

    /// Does something while its processor stands still.
    pub fn stopped<T>(&self, action: impl FnOnce() -> T) -> T {
        self.qmp().execute("stop", json!({})).expect("QEMU obeys");
        let result = action();
        self.qmp().execute("cont", json!({})).expect("QEMU obeys");
        result
    }

    /// Waits until QEMU has ended.
    pub fn wait_end(&self) {
        let is_over = || Process::open(self.pid).map_or(true, |qemu| qemu.start_ticks().is_err());
        until("QEMU's end", || is_over().then_some(()));
    }
}

impl Serial {
    /// Connects to `console.sock` in the directory once the system is ready, as `console.log` says.
    fn connect(directory: &Path) -> Serial {
        let log = directory.join("console.log");
        until(format_args!("`{READY}` in {}", log.display()), || {
            fs::read_to_string(&log).ok().filter(|text| text.contains(READY))
        });
        let input = UnixStream::connect(directory.join("console.sock")).expect("a console");
        input.set_read_timeout(Some(deadline())).expect("a timeout");
        let output = BufReader::new(input.try_clone().expect("a descriptor"));
        let mut serial = Serial { input, output };
        // What it printed at its start may come first.
        serial.tell("about");
        serial.lines_to(|line| line == "ok about");
        serial
    }

    fn tell(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).expect("the system listens");
    }

    /// Reads up to a line.
    fn lines_to(&mut self, is_last: impl Fn(&str) -> bool) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            match self.output.read_line(&mut line) {
                Ok(0) => panic!("the console is closed after {lines:#?}"),
                Ok(_) => (),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    panic!("waited {:?} in vain for an answer after {lines:#?}", deadline())
                }
                Err(error) => panic!("the console: {error} after {lines:#?}"),
            }
            lines.push(line.trim_end().to_owned());
            if is_last(line.trim_end()) {
                return lines;
            }
        }
    }
}

fn is_error(line: &str) -> bool {
    line.starts_with("error")
}

/// The number behind a word of a line.
pub fn field(line: &str, name: &str) -> u64 {
    let mut words = line.split_whitespace().skip_while(|&word| word != name).skip(1);
    words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{name} in {line}"))
}

fn directory(host: &Host) -> PathBuf {
    let directory = host.directory().join(NAME);
    fs::create_dir(&directory).expect("a directory");
    // QEMU makes the test's own control socket there.
    permit(&directory, 0o777);
    directory
}

fn control(directory: &Path, file: &str) -> String {
    format!("unix:{},server=on,wait=off", directory.join(file).display())
}

fn plain_arguments(shape: Shape, directory: &Path) -> Vec<String> {
    let memory = format!("{}M", shape.memory_mib);
    let at = |file: &str| directory.join(file).display().to_string();
    let (socket, log) = (at("console.sock"), at("console.log"));
    let options = [
        ("-accel", "tcg".into()),
        ("-smp", "1".into()),
        ("-m", memory.clone()),
        ("-object", format!("memory-backend-memfd,id=ram0,size={memory},share=on")),
        ("-machine", "q35,memory-backend=ram0".into()),
        ("-display", "none".into()),
        ("-qmp", control(directory, "qmp.sock")),
        ("-qmp", control(directory, "test.sock")),
        ("-chardev", format!("socket,id=console,path={socket},server=on,wait=off,logfile={log}")),
        ("-serial", "chardev:console".into()),
        ("-kernel", kernel(shape.frame_bytes).display().to_string()),
    ];
    let mut words = vec!["-nodefaults".to_owned(), "-no-user-config".to_owned()];
    words.extend(options.into_iter().flat_map(|(key, value)| [key.to_owned(), value]));
    words.extend(shape.arguments.iter().map(ToString::to_string));
    words
}
