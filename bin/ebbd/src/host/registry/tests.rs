//! Tests of names that are reserved, and of what ended VMs left.

use super::*;
use ebb_sys::confine::{self, Child as Settled};
use ebb_sys::private_dir;
use ebb_sys::process::Process;
use ebb_vm::handed;
use rustix::fs::{Mode, OFlags, open};
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::thread;

use ebb_api::VmChange;

use crate::host::events::{Asker, Filter};
use crate::host::testing::daemon;
use crate::system::starting::Qemu;

/// State during a VM's start: a script in place of QEMU, which has the directory of sockets
/// open and waits.
fn begun(directory: &Path) -> Child {
    handed::make_socket_directory(directory).unwrap();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let sockets = open(handed::socket_directory(directory), flags, Mode::empty()).unwrap();
    let mut settled = Settled::default();
    settled.inherit(sockets);
    let mut command = Command::new("sh");
    command.args(["-c", "read word", "qemu", "-name", "cut"]).stdin(Stdio::piped());
    command.args(["-chardev", "socket,id=ebb-qmp,fd=9,server=on,wait=off"]);
    confine::settle(&mut command, settled);
    command.spawn().unwrap()
}

/// How this QEMU is recognized: by its name.
fn cut() -> Qemu {
    Qemu::Named("cut".parse().unwrap())
}

#[test]
fn a_vm_whose_start_was_cut_off_is_ended() {
    for listens in [false, true] {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("vm");
        fs::create_dir(&directory).unwrap();
        let file = home.path().join("tier");
        fs::write(&file, "").unwrap();
        starting::mark(&directory, cut(), &[], Some(&file)).unwrap();
        let mut qemu = begun(&directory);
        let socket = UnixListener::bind(directory.join("qmp.sock")).unwrap();
        let listener = listens.then_some(socket);
        assert!(remove_if_dead(&directory));
        let ended = qemu.try_wait().unwrap();
        assert_eq!(ended.and_then(|status| status.signal()), Some(9));
        assert!(!directory.exists() && !file.exists());
        drop(listener);
    }
}

/// A mark of an earlier daemon, and a file that is no mark.
#[test]
fn a_mark_of_an_earlier_daemon_is_understood() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("vm");
    fs::create_dir(&directory).unwrap();
    let mark = directory.join("start.json");
    fs::write(&mark, r#"{"qemu":{"Program":"/qemu"},"cgroups":[],"file":null}"#).unwrap();
    let mut qemu = begun(&directory);
    assert!(remove_if_dead(&directory));
    assert_eq!(qemu.try_wait().unwrap().and_then(|status| status.signal()), Some(9));
    fs::create_dir(&directory).unwrap();
    fs::write(&mark, r#"{"qemu":{"Later":1}}"#).unwrap();
    assert!(!remove_if_dead(&directory));
    let message = starting::check(&directory).unwrap_err().to_string();
    let mark = mark.to_str().unwrap();
    assert!(message.contains(mark) && message.contains("end the QEMU"), "{message}");
}

/// QEMU may have handed the directory of its sockets to anybody.
#[test]
fn whoever_else_has_its_sockets_open_is_not_ended() {
    let other = Qemu::Named("other".parse().unwrap());
    for qemu in [Qemu::User(4711), Qemu::UserFrom(0x7000_0000), other] {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("vm");
        fs::create_dir(&directory).unwrap();
        starting::mark(&directory, qemu, &[], None).unwrap();
        let mut other = begun(&directory);
        // Until it has executed another program, it runs this one.
        while Process::open(other.id() as i32).unwrap().program().unwrap()
            == Process::own().unwrap().program().unwrap()
        {
            thread::yield_now();
        }
        assert!(remove_if_dead(&directory));
        assert!(!directory.exists() && other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

#[test]
fn a_detached_vm_runs_on() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().to_owned();
    starting::mark(&directory, cut(), &[], None).unwrap();
    let mut qemu = begun(&directory);
    let listener = UnixListener::bind(directory.join("qmp.sock")).unwrap();
    starting::unmark(&directory).unwrap();
    assert!(!remove_if_dead(&directory));
    assert!(directory.exists() && qemu.try_wait().unwrap().is_none());
    drop(listener);
    qemu.kill().unwrap();
    qemu.wait().unwrap();
}

/// `ebb` starts the daemon, so an option of the daemon alone would help few.
#[test]
fn a_refused_key_names_what_to_set() {
    let message = keys_refused(Path::new("/var/ebb"));
    assert!(message.contains("/var/ebb") && !message.contains('\n'), "{message}");
    assert!(message.contains(&format!("kill {}", std::process::id())), "{message}");
    // The names that clap knows.
    use clap::CommandFactory;
    let known = crate::Arguments::command();
    for id in ["run_dir", "allow_keys_on_disk"] {
        let argument = known.get_arguments().find(|argument| argument.get_id() == id).unwrap();
        let variable = argument.get_env().unwrap().to_str().unwrap();
        let option = format!("--{}", argument.get_long().unwrap());
        assert!(message.contains(variable) && message.contains(&option), "{message}");
    }
}

/// The disk may be mounted while the daemon runs.
#[test]
fn no_vm_begins_without_the_swap_directory() {
    let home = tempfile::tempdir().unwrap();
    let (run, swap) = (home.path(), home.path().join("swap"));
    private_dir::make(&run.join("vms")).unwrap();
    let daemon = daemon(run, SwapDir::new(run, Some(&swap)).unwrap());
    let name: VmName = "a".parse().unwrap();
    let refused = daemon.reserve(&name, false).err().unwrap().to_string();
    let (why, advice) = advice::no_swap_dir(&swap);
    assert_eq!(refused, format!("{why}: {advice}"));
    assert!(daemon.vms().is_empty() && !swap.exists());
    private_dir::make(&swap).unwrap();
    assert!(daemon.reserve(&name, false).is_ok());
}

/// A look that takes long, here at a record that is a FIFO, delays nobody else.
#[test]
fn others_do_not_wait_for_what_one_vm_left() {
    let home = tempfile::tempdir().unwrap();
    let run = home.path();
    let directory = run.join("vms/slow");
    fs::create_dir_all(&directory).unwrap();
    let fifo = directory.join("vm.json");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR).unwrap();
    let daemon = daemon(run, SwapDir::new(run, Some(run)).unwrap());
    let name: VmName = "slow".parse().unwrap();
    thread::scope(|scope| {
        let reserving = scope.spawn(|| daemon.reserve(&name, true).is_ok());
        // This opens once the FIFO has a reader.
        let mut all_free = true;
        while !reserving.is_finished() {
            let Ok(writer) = open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) else {
                continue;
            };
            // The lock is held only for moments.
            all_free &= (0..1000).any(|_| {
                thread::yield_now();
                daemon.vms.try_lock().is_ok()
            });
            drop(writer);
        }
        assert!(all_free, "the VMs are locked");
        assert!(!reserving.join().unwrap(), "an empty record is none");
    });
    assert!(daemon.vms().is_empty());
}

/// Else the end of a VM could be told after the start of the next one of its name.
#[tokio::test]
async fn the_end_of_a_vm_is_told_when_its_name_is_free() {
    let home = tempfile::tempdir().unwrap();
    let daemon = daemon(home.path(), SwapDir::new(home.path(), None).unwrap());
    let web: VmName = "web".parse().unwrap();
    let all = Filter::new(None, &[]);
    let mut reader = daemon.events().read(all, None, true, Asker::Host).unwrap();
    for _ in 0..100 {
        daemon.vms().insert(web.clone(), None);
        let (of, name) = (daemon.clone(), web.clone());
        let forgetting = thread::spawn(move || {
            let ended = News::State(VmChange::Ended, None);
            of.forget(&name, &of.site.directory(&name), Some(ended));
        });
        assert_eq!(reader.next().await.unwrap().vm.as_ref().unwrap(), &web);
        assert!(!daemon.is_known(&web));
        daemon.events().publish(Some(&web), News::State(VmChange::Started, None));
        forgetting.join().unwrap();
        reader.next().await.unwrap();
    }
}
