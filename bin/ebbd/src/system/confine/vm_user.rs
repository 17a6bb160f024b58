//! The user that a QEMU runs as: one that is named, or one of its own.

use std::fs;
use std::io;
use std::ops::Range;
use std::str::FromStr;

use ebb_sys::confine::User;
use ebb_sys::user_namespace::PIDS;
use rustix::rand::{GetRandomFlags, getrandom};

/// Range of users for QEMUs. Nobody else uses these: what distributions, containers and systemd use
/// ends below 2^31 - 2^28, and begins again at 2^31 - 2^17.
pub(super) const USERS: Range<u32> = 0x7000_0000..0x7ffe_0000;
const OWN: &str = "own";
const GROUPS: &str = "/etc/group";
/// Most groups of a process in Linux.
pub(super) const GROUPS_MAX: usize = 1 << 16;

/// A user as requested, with its name resolved.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct VmUser {
    /// The user; none: one of its own for each QEMU.
    user: Option<User>,
    /// Its other groups.
    pub(super) groups: Vec<u32>,
}

impl VmUser {
    /// The user for one QEMU.
    pub(super) fn user(&self) -> io::Result<User> {
        self.user.map_or_else(own_user, Ok)
    }
}

/// A new user. A random number tells it from QEMUs that had its process number before, or that have
/// it in another container.
fn own_user() -> io::Result<User> {
    let mut random = [0; 4];
    getrandom(&mut random, GetRandomFlags::empty())?;
    let bases = USERS.end - PIDS - USERS.start;
    Ok(User::PerProcess(USERS.start + u32::from_ne_bytes(random) % bases))
}

impl FromStr for VmUser {
    type Err = String;

    fn from_str(text: &str) -> Result<VmUser, String> {
        if text == OWN {
            return Ok(VmUser::default());
        }
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let number = |text: &str| text.parse().ok().filter(|&number| number != u32::MAX);
        let (uid, own_gid) = match number(user) {
            Some(uid) => (uid, uid),
            None => named(user)?,
        };
        let (gid, groups) = match group {
            Some(group) => {
                let wrong = || format!("{group:?} is no group's number: write UID:GID");
                (number(group).ok_or_else(wrong)?, Vec::new())
            }
            None => (own_gid, groups_of(&fs::read_to_string(GROUPS).unwrap_or_default(), user)),
        };
        Ok(VmUser { user: Some(User::Fixed { uid, gid }), groups })
    }
}

/// Numbers of a user on this host and of its group.
fn named(name: &str) -> Result<(u32, u32), String> {
    let all = fs::read_to_string("/etc/passwd").unwrap_or_default();
    numbers_of(&all, name)
        .ok_or_else(|| format!("there is no user {name:?} in /etc/passwd: give its number"))
}

/// Parses lines like `www-data:x:33:33:...`.
fn numbers_of(passwd: &str, name: &str) -> Option<(u32, u32)> {
    passwd.lines().find_map(|line| {
        let mut words = line.split(':');
        words.next().filter(|&found| found == name)?;
        Some((words.nth(1)?.parse().ok()?, words.next()?.parse().ok()?))
    })
}

/// The groups in lines like `kvm:x:106:alice,bob` that the user is a member of.
fn groups_of(all: &str, name: &str) -> Vec<u32> {
    let group = |line: &str| {
        let mut words = line.split(':');
        let number = words.nth(2)?.parse().ok()?;
        words.next()?.split(',').any(|member| member.trim() == name).then_some(number)
    };
    all.lines().filter_map(group).take(GROUPS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn users_are_names_numbers_and_their_own() {
        let fixed = |uid, gid| Ok((Some(User::Fixed { uid, gid }), Vec::new()));
        let parse = |text: &str| text.parse().map(|VmUser { user, groups }| (user, groups));
        assert_eq!(parse("own"), Ok((None, Vec::new())));
        assert_eq!(parse("1000"), fixed(1000, 1000));
        assert_eq!(parse("1000:44"), fixed(1000, 44));
        assert_eq!(parse("root:0"), fixed(0, 0));
        assert_eq!(parse("root").unwrap().0, Some(User::Fixed { uid: 0, gid: 0 }));
        for wrong in ["4294967295", "1:x", "no such user", ""] {
            assert!(wrong.parse::<VmUser>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_user_has_its_group() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nqemu:x:64055:994::/:/bin/false\n";
        assert_eq!(numbers_of(passwd, "qemu"), Some((64055, 994)));
        assert_eq!(numbers_of(passwd, "qem"), None);
        assert_eq!(numbers_of("qemu:x", "qemu"), None);
    }

    #[test]
    fn a_named_user_is_in_its_groups() {
        let all = "kvm:x:106:alice,bob\ndisk:x:6:bob\nbob:x:1001:\nwrong:x:y:bob\nshort:x\n";
        assert_eq!(groups_of(all, "bob"), [106, 6]);
        assert_eq!(groups_of(all, "alice"), [106]);
        assert_eq!(groups_of(all, "ali"), [0; 0]);
    }

    #[test]
    fn the_own_users_stay_below_what_others_use() {
        for _ in 0..1000 {
            let user = own_user().unwrap();
            for pid in [1, PIDS - 1] {
                assert!(USERS.contains(&user.of(pid).0), "{user:?}");
            }
        }
        assert_eq!(USERS, (1_u32 << 31) - (1 << 28)..(1 << 31) - (1 << 17));
    }

    #[test]
    fn debians_package_reserves_the_own_users() {
        let script = include_str!("../../../../../deploy/debian/postinst");
        for line in [format!("\nfirst={}\n", USERS.start), format!("\nlast={}\n", USERS.end - 1)] {
            assert!(script.contains(&line), "{line}");
        }
    }

    #[test]
    fn a_process_number_that_comes_again_is_another_user() {
        let users: HashSet<u32> = (0..100).map(|_| own_user().unwrap().of(7).0).collect();
        // One of these users comes twice in one of 50,000 runs, two of them practically never.
        assert!(users.len() >= 99, "{users:?}");
    }
}
