//! VMs that libvirt starts, with Debian's configuration as it is: a user of their own, a /dev and a
//! device control group in which little can be opened.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::Host;
use crate::guest::Guest;
use crate::host::{Ran, permit};
use crate::vm::Vm;
use crate::wait::until;

/// Where virsh looks for libvirt.
const SYSTEM: &str = "qemu:///system";
/// Daemons of libvirt, in the order of their start.
const DAEMONS: [&str; 2] = ["virtlogd", "libvirtd"];

/// libvirt's daemons. Those that this has started end with it.
pub struct Libvirt(Vec<Child>);

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
            return Ok(Libvirt(Vec::new()));
        }
        let mut children = Vec::new();
        for daemon in DAEMONS {
            let program = Path::new("/usr/sbin").join(daemon);
            if !program.exists() {
                return Err(format!("{} is missing (libvirt-daemon-system)", program.display()));
            }
            let quiet = Command::new(program)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            children.push(quiet.map_err(|error| format!("{daemon}: {error}"))?);
        }
        let libvirt = Libvirt(children);
        until("libvirt to answer", || answers().then_some(()));
        Ok(libvirt)
    }
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
        for child in self.0.iter_mut().rev() {
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
    pub fn domain<'l>(&self, libvirt: &'l Libvirt, mut guest: Guest, memory: &str) -> Domain<'l> {
        let (name, directory) = self.new_vm();
        permit(self.directory(), 0o711);
        guest.own_boot_files(&directory, 0o644);
        let domain = format!("ebb-test-{}-{name}", std::process::id());
        let xml = directory.join("domain.xml");
        fs::write(&xml, guest.domain(&domain, memory, &directory)).expect("the domain's XML");
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
}

impl Drop for Domain<'_> {
    fn drop(&mut self) {
        // It may have ended.
        let _ =
            virsh(&["destroy", &self.name]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

impl Guest {
    /// libvirt's XML for the guest, with a monitor for Ebb, one for the test, and the console.
    fn domain(&self, name: &str, memory: &str, directory: &Path) -> String {
        let socket = |file: &str| directory.join(file).display().to_string();
        let monitor = |file| format!("unix:{},server=on,wait=off", socket(file));
        let console = format!(
            "socket,id=console,path={},server=on,wait=off,logfile={}",
            socket("console.sock"),
            socket("console.log")
        );
        let words = [
            ("-qmp", monitor("qmp.sock")),
            ("-qmp", monitor("test.sock")),
            ("-chardev", console),
            ("-serial", "chardev:console".into()),
        ];
        let words = words.iter().flat_map(|(key, value)| [*key, value.as_str()]);
        let words: String =
            words.map(|word| format!("<qemu:arg value='{}'/>", escaped(word))).collect();
        format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>{name}</name><memory unit='b'>{}</memory>{memory}<vcpu>{}</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel>\
             <initrd>{}</initrd><cmdline>{}</cmdline></os>\
             <features><acpi/></features><devices/>\
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
