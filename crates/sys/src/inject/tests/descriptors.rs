//! Tests of the userfaultfds that a process is made to open and close.

use std::os::fd::AsRawFd;

use rustix::process::Pid;

use super::*;

/// A helper that is killed at the end. Before that, nobody sees the end of a process that it
/// traces.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn descriptors_come_and_go() {
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    for _ in 0..50 {
        let fd = userfaultfd(&target, Door::Call).unwrap();
        let there = process.descriptors().unwrap();
        assert!(there.contains(&(fd, "anon_inode:[userfaultfd]".to_owned())), "{there:?}");
        close(&target, fd).unwrap();
    }
    victim.ends_well();
}

#[test]
fn the_numbers_that_a_process_uses_stay_its_own() {
    use rustix::process::{Resource, Rlimit, prlimit};
    if !may_trace() {
        return;
    }
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let before = process.descriptors().unwrap();
    let fd = userfaultfd(&target, Door::Call).unwrap();
    assert!(fd as u64 >= process.descriptors_max().unwrap().min(NUMBER_MAX) / 2, "{fd}");
    assert_eq!(process.descriptors().unwrap().len(), before.len() + 1);
    close(&target, fd).unwrap();
    assert_eq!(process.descriptors().unwrap(), before);
    // The process has room for one more descriptor.
    let next = (0..).find(|number| before.iter().all(|(used, _)| used != number)).unwrap();
    let limit = Rlimit { current: Some(next as u64 + 1), maximum: Some(next as u64 + 1) };
    prlimit(Some(Pid::from_child(&victim.child)), Resource::Nofile, limit).unwrap();
    assert_eq!(userfaultfd(&target, Door::Call).unwrap(), next);
    close(&target, next).unwrap();
    // A descriptor that is not a userfaultfd is not closed.
    assert_eq!(close(&target, 0).unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(process.descriptors().unwrap(), before);
    victim.ends_well();
}

#[test]
fn a_close_that_is_still_to_come_is_the_only_one() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("read");
    let (process, pid) = (victim.process(), Pid::from_child(&victim.child));
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let fd = userfaultfd(&target, Door::Call).unwrap();
    let words = format!("close-userfaultfd {} {fd}", victim.pid());
    let first = Killed(paused_at(helper_for(words.clone()), INTO_A_CALL));
    let refused = |why: &str| {
        for words in [words.clone(), format!("make {}", victim.child.id())] {
            let output = helper_for(words).env("EBB_TIMEOUT_MS", "50").output().unwrap();
            assert!(said(&output).contains(why), "{output:?}");
        }
        assert_eq!(process.userfaultfds().unwrap(), [fd]);
    };
    refused("traces thread");
    // The victim is stopped before the call, and nobody traces it any more.
    kill_process(pid, Signal::STOP).unwrap();
    drop(first);
    let status = format!("/proc/{}/status", victim.pid());
    wait_until(&status, |status| is_in_state(status, "T"));
    refused("has not ended an earlier call");
    kill_process(pid, Signal::CONT).unwrap();
    victim.goes_on();
    assert!(process.userfaultfds().unwrap().is_empty());
    victim.ends_well();
}

#[test]
fn a_userfaultfd_comes_from_a_device_that_the_process_has() {
    if !may_trace() {
        return;
    }
    let device = match crate::uffd_node::open_device() {
        Ok(device) => device,
        Err(error) => return eprintln!("SKIPPED: /dev/userfaultfd: {error}"),
    };
    // A child inherits what is not closed at its start.
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::empty()).unwrap();
    let victim = Victim::of("read");
    let process = victim.process();
    let target = Target::new(&process, process.start_ticks().unwrap()).unwrap();
    let fd = userfaultfd(&target, Door::Descriptor(device.as_raw_fd())).unwrap();
    assert!(process.is_userfaultfd(fd).unwrap());
    close(&target, fd).unwrap();
    // What is no such device makes none.
    let error = userfaultfd(&target, Door::Descriptor(0)).unwrap_err();
    assert!(error.raw_os_error().is_some(), "{error}");
    victim.ends_well();
}
