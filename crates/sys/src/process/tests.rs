//! Tests of a process seen from outside: this one, and ones with deep paths, odd names or very many
//! descriptors.

use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags, mkdirat, open, openat};

use super::descriptors::DESCRIPTORS_MAX;
use super::*;

/// Any user can make such a path, step by step.
#[test]
fn a_descriptor_whose_path_is_longer_than_a_page_is_passed_over() {
    let home = tempfile::tempdir().unwrap();
    let wanted = home.path().join("wanted");
    fs::write(&wanted, "").unwrap();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut deep = open(home.path(), flags, Mode::empty()).unwrap();
    let name = "a".repeat(255);
    for _ in 0..17 {
        mkdirat(&deep, name.as_str(), Mode::RWXU).unwrap();
        deep = openat(&deep, name.as_str(), flags, Mode::empty()).unwrap();
    }
    let link = format!("/proc/self/fd/{}", deep.as_raw_fd());
    let error = fs::read_link(link).unwrap_err();
    assert!(is(&error, rustix::io::Errno::NAMETOOLONG), "{error}");
    let (own, id) = (Process::own().unwrap(), file_of(&wanted).unwrap());
    assert!(!own.has_open(("wanted", id)).unwrap());
    let _opened = File::open(&wanted).unwrap();
    assert!(own.has_open(("wanted", id)).unwrap());
    assert_eq!(own.open_inodes("/no such").unwrap(), [0; 0]);
}

/// Any user can make both.
#[test]
fn a_name_of_any_bytes_and_a_deep_program_are_no_error() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let home = tempfile::tempdir().unwrap();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut deep = open(home.path(), flags, Mode::empty()).unwrap();
    for _ in 0..17 {
        let name = "a".repeat(255);
        mkdirat(&deep, name.as_str(), Mode::RWXU).unwrap();
        deep = openat(&deep, name.as_str(), flags, Mode::empty()).unwrap();
    }
    let program = PathBuf::from(format!("/proc/self/fd/{}", deep.as_raw_fd()))
        .join(OsStr::from_bytes(b"\xff\xfe"));
    // Another process makes the copy: a program that another test starts meanwhile would
    // inherit the open file, and a file that is open for writing cannot be executed (ETXTBSY).
    let cat = home.path().join("cat");
    assert!(Command::new("cp").arg("/bin/cat").arg(&cat).status().unwrap().success());
    fs::rename(&cat, &program).unwrap();
    let piped = Stdio::piped;
    let mut child = Command::new(&program).stdin(piped()).stdout(piped()).spawn().unwrap();
    // execve(2) lets the parent go on before the process has its new name. Output of the
    // program shows that it has.
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let process = Process::open(child.id() as i32).unwrap();
    let status = fs::read(process.proc("status")).unwrap();
    let found = (process.user(), process.program());
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(std::str::from_utf8(&status).is_err());
    assert_eq!(found.0.unwrap(), Process::own().unwrap().user().unwrap());
    assert_eq!(found.1.unwrap(), PathBuf::new());
}

/// The bound is lower in tests: not every user may open that many.
#[test]
fn other_users_processes_may_have_any_number_of_descriptors() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let home = tempfile::tempdir().unwrap();
    let me = std::env::current_exe().unwrap();
    let test = "process::tests::opens_more_than_any_vmm";
    let mut child = Command::new(me)
        .args([test, "--exact", "--ignored", "--nocapture"])
        .current_dir(home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("all are open")));
    let pid = child.id() as i32;
    let others = Process::all_with(home.path(), |process| Ok(process.pid() != pid)).unwrap();
    assert!(others.is_empty());
    let error = Process::all_with(home.path(), |process| Ok(process.pid() == pid));
    let error = error.err().expect("too many to look at");
    assert!(error.to_string().contains("too many"), "{error}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
#[ignore = "other_users_processes_may_have_any_number_of_descriptors runs it in a process of its own"]
fn opens_more_than_any_vmm() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let one = File::open("/dev/null").unwrap();
    let copy = |_| one.try_clone().unwrap();
    let mut all: Vec<File> = (0..DESCRIPTORS_MAX).map(copy).collect();
    all.push(File::open(".").unwrap());
    println!("all are open");
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_mount_is_known_by_its_number_and_type() {
    let line = "36 35 98:0 / /a\\040-\\040b rw,noatime master:1 - fuse.sshfs host: rw";
    assert_eq!(parse_mount(line), Some((36, "fuse.sshfs".into())));
    assert_eq!(parse_mount("36 35 98:0 / /a rw"), None);
}

#[test]
fn sees_this_very_process() {
    let me = Process::open(std::process::id() as i32).unwrap();
    assert!(!me.has_ended().unwrap());
    assert!(me.start_ticks().unwrap() > 0);
    assert!(me.mappings().unwrap().len() > 3);
    let counted = me.descriptor_count().unwrap();
    assert!(counted.is_none_or(|count| count >= 3), "{counted:?}");
    let file = crate::ram_file::RamFile::create("process-test", 4096).unwrap();
    let (inode, fd) = (file.identity().unwrap().1, file.as_fd().as_raw_fd());
    assert!(me.open_inodes("/memfd:process-test").unwrap().contains(&inode));
    assert_eq!(me.descriptor_inode(fd).unwrap(), Some(inode));
    assert_eq!(me.descriptor_inode(i32::MAX).unwrap(), None);
    let copy = me.descriptor(0);
    assert!(copy.is_ok(), "{copy:?}");
}

#[test]
fn descriptors_of_one_open_file_are_known_as_such() {
    let (one, other) = (File::open("/dev/null").unwrap(), File::open("/dev/null").unwrap());
    let copy = one.try_clone().unwrap();
    let own = Process::own().unwrap();
    assert!(own.shares(copy.as_raw_fd(), &one).unwrap());
    assert!(!own.shares(other.as_raw_fd(), &one).unwrap());
    assert!(!own.shares(i32::MAX, &one).unwrap());
}
