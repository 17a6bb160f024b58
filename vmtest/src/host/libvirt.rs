//! VMs that libvirt starts, with Debian's configuration as it is: a user of their own, a /dev and a
//! device control group in which little can be opened.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::Host;
use crate::guest::Guest;
use crate::host::{Ran, permit};
use crate::process;
use crate::vm::Vm;
use crate::wait::until;

/// Where virsh looks for libvirt.
const SYSTEM: &str = "qemu:///system";
/// Daemons of libvirt, in the order of their start.
const DAEMONS: [&str; 2] = ["virtlogd", "libvirtd"];

/// libvirt's daemons. Those that this has started end with it.
pub struct Libvirt(Mutex<Vec<Child>>);

/// Who may ask a domain's QEMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Monitors {
    /// libvirt alone, as it starts a domain by itself.
    Libvirts,
    /// Ebb and the test have one each, beside libvirt's.
    Own,
}

/// A domain, which ends when this is dropped.
pub struct Domain<'l> {
    name: String,
    _libvirt: &'l Libvirt,
    /// Its VM.
    pub vm: Vm,
}

impl Libvirt {
    /// Uses the libvirt that runs, or starts it.
    ///
    /// # Errors
    /// It is not installed.
    pub fn new() -> Result<Libvirt, String> {
        if answers() {
            return Ok(Libvirt(Mutex::default()));
        }
        let children = DAEMONS.iter().map(|daemon| start(daemon)).collect::<Result<_, _>>()?;
        let libvirt = Libvirt(Mutex::new(children));
        until("libvirt to answer", || answers().then_some(()));
        Ok(libvirt)
    }

    /// Ends libvirt's daemon, and starts it again. Its domains go on. Does nothing if the host's own
    /// libvirt is used.
    ///
    /// # Panics
    /// It does not start.
    pub fn restart(&self) {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut daemon) = children.pop() else { return };
        daemon.kill().and_then(|()| daemon.wait()).expect("libvirt's end");
        children.push(start(DAEMONS[1]).expect("libvirt"));
        drop(children);
        until("libvirt to answer", || answers().then_some(()));
    }

    /// Runs `action` while libvirt's daemon hangs. Only runs it if the host's own libvirt is used.
    pub fn hung<T>(&self, action: impl FnOnce(bool) -> T) -> T {
        let children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = children.last().map(|daemon| daemon.id() as i32);
        pid.inspect(|&pid| process::freeze(pid, true));
        let result = action(pid.is_some());
        pid.inspect(|&pid| process::freeze(pid, false));
        result
    }
}

fn start(daemon: &str) -> Result<Child, String> {
    let program = Path::new("/usr/sbin").join(daemon);
    if !program.exists() {
        return Err(format!("{} is missing (libvirt-daemon-system)", program.display()));
    }
    let mut quiet = Command::new(program);
    quiet.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.spawn().map_err(|error| format!("{daemon}: {error}"))
}

fn answers() -> bool {
    let mut command = virsh(&["uri"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn virsh(words: &[&str]) -> Command {
    let mut command = Command::new("virsh");
    command.args(["-c", SYSTEM]).args(words);
    command
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let children = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        for child in children.iter_mut().rev() {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Host {
    /// Has libvirt start a domain, and waits until its guest answers. `memory`: what its XML says of
    /// the memory beside its size.
    ///
    /// # Panics
    /// libvirt does not start it.
    pub fn domain<'l>(
        &self,
        libvirt: &'l Libvirt,
        mut guest: Guest,
        memory: &str,
        monitors: Monitors,
    ) -> Domain<'l> {
        let (name, directory) = self.new_vm();
        permit(self.directory(), 0o711);
        guest.own_boot_files(&directory, 0o644);
        let domain = format!("ebb-test-{}-{name}", std::process::id());
        let xml = directory.join("domain.xml");
        let text = guest.domain(&domain, memory, monitors, &directory);
        fs::write(&xml, text).expect("the domain's XML");
        File::create(directory.join("console.log")).expect("the console's log");
        permit(&directory.join("console.log"), 0o666);
        Ran::of(&mut virsh(&["create", &xml.display().to_string()])).ok();
        let pid = pid_of(&domain).expect("the domain runs");
        let vm = Vm::free(self.clone(), name, guest, directory, pid);
        Domain { name: domain, _libvirt: libvirt, vm }
    }
}

fn pid_of(domain: &str) -> Option<i32> {
    fs::read_to_string(format!("/run/libvirt/qemu/{domain}.pid")).ok()?.trim().parse().ok()
}

impl Domain<'_> {
    /// Its name in libvirt.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs virsh with this command on the domain, and more words behind its name.
    pub fn virsh(&self, command: &str, words: &[&str]) -> String {
        let words = [&[command, self.name.as_str()], words].concat();
        Ran::of(&mut virsh(&words)).ok()
    }

    /// Has libvirt save the domain to a file, which ends its QEMU, and start it again from there, in
    /// another QEMU.
    ///
    /// # Panics
    /// libvirt does not do so.
    pub fn save_and_restore(&mut self) {
        let file = self.vm.directory().join("saved").display().to_string();
        self.virsh("save", &[&file]);
        self.vm.wait_end();
        Ran::of(&mut virsh(&["restore", &file])).ok();
        self.vm.go_on_in(pid_of(&self.name).expect("the domain runs"));
    }
}

impl Drop for Domain<'_> {
    fn drop(&mut self) {
        // It may have ended.
        let _ =
            virsh(&["destroy", &self.name]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

impl Guest {
    /// libvirt's XML for the guest, with its console.
    fn domain(&self, name: &str, memory: &str, monitors: Monitors, directory: &Path) -> String {
        let path = |file: &str| escaped(&directory.join(file).display().to_string());
        let serial = format!(
            "<serial type='unix'><source mode='bind' path='{}'/>\
             <log file='{}' append='on'/></serial>",
            path("console.sock"),
            path("console.log")
        );
        let own = |file| format!("unix:{},server=on,wait=off", path(file));
        let words = match monitors {
            Monitors::Libvirts => Vec::new(),
            Monitors::Own => vec!["-qmp".into(), own("qmp.sock"), "-qmp".into(), own("test.sock")],
        };
        let words: String =
            words.iter().map(|word| format!("<qemu:arg value='{word}'/>")).collect();
        format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>{name}</name><memory unit='b'>{}</memory>{memory}<vcpu>{}</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel>\
             <initrd>{}</initrd><cmdline>{}</cmdline></os>\
             <features><acpi/></features><devices>{serial}</devices>\
             <qemu:commandline>{words}</qemu:commandline></domain>",
            self.memory.0,
            self.cpus,
            escaped(&self.kernel.vmlinuz.display().to_string()),
            escaped(&self.kernel.initrd.display().to_string()),
            escaped(&self.command_line()),
        )
    }
}

/// Text as it stands in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}
