//! Tests of control groups, and of their removal.

use ebb_sys::process::Process;

use super::hierarchy::parse;
use super::processes::{end_members, has_only};
use super::*;

#[test]
fn a_lack_is_reported_once() {
    let why = || "no way".to_owned();
    assert_eq!(lacks(&[]), [""; 0]);
    assert_eq!(
        lacks(&[("memory", why()), ("threads", why())]),
        ["no control group limits QEMU's memory and threads: no way"]
    );
    assert_eq!(lacks(&[("memory", why()), ("threads", "other".into())]).len(), 2);
}

#[test]
fn nothing_of_a_limited_memory_is_swapped() {
    let directory = tempfile::tempdir().unwrap();
    let read = |file: &str| fs::read_to_string(directory.path().join(file)).unwrap();
    fs::write(directory.path().join(SWAP), "max").unwrap();
    set(directory.path(), "pids.max", Some(7)).unwrap();
    assert_eq!((read("pids.max").as_str(), read(SWAP).as_str()), ("7", "max"));
    set(directory.path(), "memory.max", Some(8)).unwrap();
    assert_eq!((read("memory.max").as_str(), read(SWAP).as_str()), ("8", "0"));
    // Memory that is not limited stays out of the swap, too.
    fs::write(directory.path().join(SWAP), "max").unwrap();
    set(directory.path(), "memory.max", None).unwrap();
    assert_eq!((read("memory.max").as_str(), read(SWAP).as_str()), ("8", "0"));
}

#[test]
fn a_group_that_cannot_stay_out_of_the_swap_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let (group, swaps) = (directory.path(), directory.path().join("swaps"));
    assert_eq!(unlimited_swap(group, &swaps), None, "there is no swap");
    fs::write(&swaps, "").unwrap();
    let warning = unlimited_swap(group, &swaps).unwrap();
    assert!(warning.contains(SWAP) && warning.contains("swapaccount") && !warning.contains('\n'));
    fs::write(group.join(SWAP), "0").unwrap();
    assert_eq!(unlimited_swap(group, &swaps), None);
}

/// Number of a process that no longer exists.
fn ended() -> u32 {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    child.id()
}

#[test]
fn empty_groups_of_daemons_that_ended_go() {
    let dead = ended();
    let parent = tempfile::tempdir().unwrap();
    let (own, init) = (format!("a.{}", std::process::id()), "a.1".to_owned());
    let used = format!("used.{dead}");
    let left = [format!("a.{dead}"), format!("a.b-c.{dead}")];
    let others = ["a".to_owned(), "a.b".into(), format!("A b.{dead}"), init, used.clone()];
    for name in left.iter().chain(&others).chain([&own]) {
        fs::create_dir(parent.path().join(name)).unwrap();
    }
    // Like a group with a process in it, it cannot be removed.
    fs::create_dir(parent.path().join(used).join("below")).unwrap();
    let is_there = |name: &String| parent.path().join(name).exists();
    clear_below(parent.path(), false);
    assert!(!left.iter().any(is_there) && others.iter().all(is_there) && is_there(&own));
    clear_below(parent.path(), true);
    assert!(others.iter().all(is_there) && !is_there(&own));
}

/// A group in a hierarchy of version 2; none: it cannot be made here.
fn real_group(name: &str) -> Option<PathBuf> {
    let mounts = fs::read_to_string(MOUNTS).unwrap();
    let mut roots = mounts.lines().filter_map(parse);
    let root = roots.find_map(|(root, kind, _)| (kind == "cgroup2").then_some(root))?;
    let directory = root.join(format!("ebb-test-{name}.{}", std::process::id()));
    fs::create_dir(&directory).ok().map(|()| directory)
}

fn sleeper_in(group: &Path) -> std::process::Child {
    let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    fs::write(group.join(MEMBERS), child.id().to_string()).unwrap();
    child
}

#[test]
fn what_an_ended_qemu_left_in_its_group_is_ended() {
    let Some(group) = real_group("left") else { return };
    let mut child = sleeper_in(&group);
    let pid = child.id() as i32;
    let uid = Process::own().unwrap().user().unwrap();
    assert_eq!(members(&group).unwrap(), [pid]);
    let only = |uid| has_only(&group, |other| other == uid).unwrap();
    assert!(only(uid) && !only(uid + 1));
    let group_of = |uid| Group {
        directories: vec![group.clone()],
        user: Some(User::Fixed { uid, gid: 0 }),
        kept: false,
    };
    drop(group_of(uid + 1));
    assert_eq!(members(&group).unwrap(), [pid], "it is of another user");
    assert!(child.try_wait().unwrap().is_none());
    let (kept, removed) = (group_of(uid), group_of(uid));
    assert_eq!(kept.around(pid), (vec![group.clone()], vec![]));
    assert_eq!(kept.around(1), (vec![], vec![group.clone()]));
    kept.keep();
    assert!(group.exists(), "somebody is in it");
    drop(removed);
    assert!(!group.exists());
    assert_eq!(child.wait().unwrap().code(), None);
}

#[test]
fn a_process_that_ended_since_it_was_listed_has_no_user() {
    let dead = ended();
    let directory = tempfile::tempdir().unwrap();
    let uid = Process::own().unwrap().user().unwrap();
    let has_only = |pids: &[u32]| {
        let text: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
        fs::write(directory.path().join(MEMBERS), text).unwrap();
        has_only(directory.path(), |user| user == uid)
    };
    assert!(has_only(&[dead, std::process::id()]).unwrap());
    assert!(has_only(&[0]).is_err(), "one of another container's");
}

/// A group, and a controller that it enabled: dropping this empties and removes the group.
struct Given<'a>(&'a Path, &'a str);

impl Drop for Given<'_> {
    fn drop(&mut self) {
        end_members(self.0);
        remove(&[self.0.to_owned()]);
        let above = self.0.parent().unwrap();
        let _ = fs::write(above.join("cgroup.subtree_control"), format!("-{}", self.1));
    }
}

#[test]
fn a_group_with_processes_is_reported_with_advice() {
    let Some(group) = real_group("full") else { return };
    let above = group.parent().unwrap();
    let read = |file: &str| fs::read_to_string(above.join(file)).unwrap();
    let (all, given) = (read("cgroup.controllers"), read("cgroup.subtree_control"));
    let free = all.split_ascii_whitespace().find(|&word| !given.contains(word));
    let _put_back = Given(&group, free.unwrap_or("none"));
    let Some(controller) = free.or(given.split_ascii_whitespace().next()) else { return };
    enable(above, controller).unwrap();
    let mut child = sleeper_in(&group);
    let why = enable(&group, controller).unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(why.contains("has processes in it") && why.contains("/init"), "{why}");
    assert!(!why.contains("os error"), "{why}");
}
