//! Which users and groups processes can be here: not all in a user namespace, as some containers
//! have one. user_namespaces(7).

use std::fs;
use std::io;

use crate::confine::{CapabilitySet, User};

/// Linux assigns PIDs below this.
pub const PIDS: u32 = 1 << 22;
/// The number of users where nothing is mapped: the last number is no user.
const ALL: u64 = u32::MAX as u64;
const WHOLE: &str = "0 0 4294967295";

/// What to do where a user is missing. The daemon and `ebb doctor` say it.
pub const ADVICE: &str = "pass --user UID:GID with one of those (for all VMs: ebbd --vm-user, or \
                          EBB_VM_USER), or --privileged";
/// What to do where groups cannot be given up.
pub const GROUPS_ADVICE: &str =
    "pass --privileged, or make the namespace with newuidmap(1), as podman and docker do";

/// Why this user, with these capabilities, cannot start processes as other users, and what to do.
/// `None`: it can.
pub fn missing_privilege(uid: u32, has: CapabilitySet) -> Option<(String, &'static str)> {
    if has.contains(CapabilitySet::SETUID | CapabilitySet::SETGID) {
        return None;
    }
    Some(match uid {
        0 => (
            "ebbd lacks CAP_SETUID or CAP_SETGID, to start QEMU as another user".into(),
            "start the container with --cap-add SETUID --cap-add SETGID, or pass --privileged",
        ),
        uid => (
            format!("only root can start QEMU as another user, and this is user {uid}"),
            "run ebb as root",
        ),
    })
}

/// The users and groups of a user namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UserNamespace {
    users: Numbers,
    groups: Numbers,
    /// Whether its processes may set the groups that they are in.
    sets_groups: bool,
}

impl UserNamespace {
    /// Returns the namespace that this process is in.
    ///
    /// # Errors
    /// As reading `/proc/self`. `InvalidData`: the text makes no sense.
    pub fn own() -> io::Result<UserNamespace> {
        let read = |file: &str| match fs::read_to_string(format!("/proc/self/{file}")) {
            // The kernel has no user namespaces.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(WHOLE.to_owned()),
            read => read,
        };
        let own = UserNamespace::parse(&read("uid_map")?, &read("gid_map")?, &read("setgroups")?);
        own.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses these texts of `/proc/PID/uid_map`, `gid_map` and `setgroups`.
    pub fn parse(users: &str, groups: &str, setgroups: &str) -> Option<UserNamespace> {
        let (users, groups) = (Numbers::parse(users)?, Numbers::parse(groups)?);
        Some(UserNamespace { users, groups, sets_groups: setgroups.trim() != "deny" })
    }

    /// Whether it has every user and group, as a host does.
    pub fn is_whole(&self) -> bool {
        [&self.users, &self.groups].iter().all(|numbers| numbers.has(0, u32::MAX - 1))
    }

    /// The users that it has, in words.
    pub fn users(&self) -> String {
        self.users.text()
    }

    /// Why no process here can give up its groups, as each process that changes its user does.
    /// `None`: it can.
    pub fn group_restriction(&self) -> Option<String> {
        let why = "its user namespace forbids setgroups(2), as one of unshare -r does";
        (!self.sets_groups).then(|| why.into())
    }

    /// Why no process here can be this user, and what to do. `None`: it can.
    pub fn user_restriction(&self, user: User) -> Option<String> {
        if let Some(why) = self.group_restriction() {
            return Some(format!("{why}, so QEMU cannot be another user: {GROUPS_ADVICE}"));
        }
        let ((uid, gid), (last_uid, last_gid)) = (user.of(0), user.of(PIDS - 1));
        let (kind, number, numbers) = match self.users.has(uid, last_uid) {
            false => ("user", uid, &self.users),
            true if self.groups.has(gid, last_gid) => return None,
            true => ("group", gid, &self.groups),
        };
        Some(format!(
            "its user namespace has no {kind} {number}, only {}: {ADVICE}",
            numbers.text()
        ))
    }
}

/// The numbers that exist, as extents: (first number, count).
#[derive(Clone, PartialEq, Eq, Debug)]
struct Numbers(Vec<(u32, u32)>);

impl Numbers {
    /// Parses lines such as `0 100000 65536`: number inside, number outside, count.
    fn parse(text: &str) -> Option<Numbers> {
        let extent = |line: &str| {
            let words: Vec<u32> = line
                .split_ascii_whitespace()
                .map(|word| word.parse().ok())
                .collect::<Option<_>>()?;
            match words[..] {
                [inside, _, count] if u64::from(inside) + u64::from(count) <= ALL => {
                    Some((inside, count))
                }
                _ => None,
            }
        };
        text.lines().map(extent).collect::<Option<_>>().map(Numbers)
    }

    /// Whether all numbers from `first` to `last` exist, within one extent.
    fn has(&self, first: u32, last: u32) -> bool {
        let is_in = |&(start, count): &(u32, u32)| start <= first && last - start < count;
        self.0.iter().any(is_in)
    }

    fn text(&self) -> String {
        let extent = |&(start, count): &(u32, u32)| match count {
            0 | 1 => start.to_string(),
            count => format!("{start} to {}", start + (count - 1)),
        };
        match self.0.is_empty() {
            true => "none".into(),
            false => self.0.iter().map(extent).collect::<Vec<_>>().join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(map: &str, setgroups: &str) -> UserNamespace {
        UserNamespace::parse(map, map, setgroups).unwrap()
    }

    const ROOT: User = User::Fixed { uid: 0, gid: 0 };
    const OWN: User = User::PerProcess(0x7000_0000);

    #[test]
    fn a_host_has_every_user() {
        let host = namespace("         0          0 4294967295\n", "allow\n");
        assert!(host.is_whole());
        for user in [ROOT, OWN, User::Fixed { uid: u32::MAX - 1, gid: 7 }] {
            assert_eq!(host.user_restriction(user), None);
        }
    }

    #[test]
    fn a_namespace_has_the_users_that_are_mapped() {
        let two = namespace("0 1000 1\n1 100000 65536\n", "allow\n");
        assert!(!two.is_whole());
        assert_eq!(two.users(), "0, 1 to 65536");
        assert_eq!(two.user_restriction(ROOT), None);
        assert_eq!(two.user_restriction(User::Fixed { uid: 65536, gid: 1 }), None);
        let why = two.user_restriction(OWN).unwrap();
        for word in ["user namespace", "1879048192", "1 to 65536", "--user", "--privileged"] {
            assert!(why.contains(word), "{word}: {why}");
        }
        let why = two.user_restriction(User::Fixed { uid: 5, gid: 65537 }).unwrap();
        assert!(why.contains("no group 65537"), "{why}");
        // A part of the numbers that it may get is not enough.
        let part = namespace("1879048192 0 1000\n", "allow\n");
        assert!(part.user_restriction(OWN).is_some());
    }

    #[test]
    fn groups_that_cannot_be_given_up_are_reported() {
        let why = namespace("0 0 1\n", "deny\n").user_restriction(ROOT).unwrap();
        assert!(why.contains("setgroups") && why.contains("--privileged"), "{why}");
        assert!(!why.contains("--user"), "{why}");
    }

    #[test]
    fn a_missing_privilege_comes_with_advice() {
        let both = CapabilitySet::SETUID | CapabilitySet::SETGID;
        assert_eq!(missing_privilege(1000, both), None);
        let (why, advice) = missing_privilege(1000, CapabilitySet::empty()).unwrap();
        assert!(why.contains("user 1000") && advice.contains("as root"), "{why}: {advice}");
        let (why, advice) = missing_privilege(0, CapabilitySet::SETUID).unwrap();
        assert!(why.contains("CAP_SETGID") && advice.contains("--cap-add"), "{why}: {advice}");
    }

    #[test]
    fn malformed_maps_are_refused() {
        assert_eq!(Numbers::parse("").unwrap().text(), "none");
        for wrong in ["0 0", "0 0 1 1", "a 0 1", "4294967295 0 2", "0 0 4294967296"] {
            assert_eq!(Numbers::parse(wrong), None, "{wrong}");
        }
        assert!(UserNamespace::own().is_ok());
    }
}
