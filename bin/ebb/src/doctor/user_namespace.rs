//! Can a QEMU be a user of its own?

use std::io;

use ebb_sys::confine::CapabilitySet;
use ebb_sys::user_namespace::{ADVICE, GROUPS_ADVICE, UserNamespace, missing_privilege};
use rustix::process::geteuid;

use super::finding::Finding;

const CHECK: &str = "users";
const COST: &str = "ebb run cannot give a QEMU a user that no other process has";

pub fn check() -> Finding {
    let has =
        rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |has| has.effective);
    judge(UserNamespace::own(), missing_privilege(geteuid().as_raw(), has))
}

fn judge(namespace: io::Result<UserNamespace>, missing: Option<(String, &str)>) -> Finding {
    let namespace = match namespace {
        Ok(namespace) => namespace,
        Err(error) => return Finding::missing(CHECK, error.to_string(), COST, "mount /proc"),
    };
    if let Some(why) = namespace.group_restriction() {
        return Finding::degraded(CHECK, why, COST, GROUPS_ADVICE);
    }
    if let Some((why, advice)) = missing {
        return Finding::degraded(CHECK, why, COST, advice);
    }
    match namespace.is_whole() {
        true => Finding::ok(CHECK, "a QEMU can be any user"),
        false => {
            let found = format!("its user namespace has only users {}", namespace.users());
            Finding::degraded(CHECK, found, COST, ADVICE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    fn judged(users: &str, setgroups: &str) -> Finding {
        judge(
            UserNamespace::parse(users, users, setgroups).ok_or(io::ErrorKind::InvalidData.into()),
            None,
        )
    }

    #[test]
    fn users_that_are_not_mapped_are_reported() {
        assert_eq!(judged("0 0 4294967295", "allow").verdict, Verdict::Ok);
        let container = judged("0 100000 65536", "allow");
        assert_eq!(container.verdict, Verdict::Degraded);
        assert!(container.found.ends_with("only users 0 to 65535"), "{}", container.found);
        assert!(container.mend.is_some_and(|mend| mend.contains("--user UID:GID")));
        let unshared = judged("0 1000 1", "deny");
        assert!(unshared.found.contains("setgroups"), "{}", unshared.found);
        assert!(unshared.mend.is_some_and(|mend| mend.contains("--privileged")));
        assert_eq!(judged("0", "allow").verdict, Verdict::Missing);
    }

    #[test]
    fn a_missing_privilege_is_found() {
        let whole = UserNamespace::parse("0 0 4294967295", "0 0 4294967295", "allow").unwrap();
        let finding = judge(Ok(whole), missing_privilege(1000, CapabilitySet::empty()));
        assert_eq!(finding.verdict, Verdict::Degraded);
        assert!(finding.found.contains("user 1000"), "{}", finding.found);
    }
}
