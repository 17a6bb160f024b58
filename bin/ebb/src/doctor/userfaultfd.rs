//! Does the kernel hand out page faults, and of the kinds that Ebb needs?

use std::io;

use ebb_sys::uffd::{self, feature};
use ebb_sys::uffd_node::{self, Node};
use ebb_sys::user_namespace::UserNamespace;

use super::finding::Finding;

const CHECK: &str = "userfaultfd";
const COST: &str = "no VM can be managed";

pub fn check(as_root: bool) -> Finding {
    match uffd::probe() {
        Ok(features) => judge(features),
        Err(error) if !as_root && error.kind() == io::ErrorKind::PermissionDenied => {
            Finding::unknown(CHECK, "the kernel gives it to root alone")
        }
        Err(error) => {
            let is_host = UserNamespace::own().is_ok_and(|namespace| namespace.is_whole());
            unavailable(&error, is_host)
        }
    }
}

fn judge(features: u64) -> Finding {
    let lacking = feature::NEEDED.iter().filter(|(bit, _)| features & bit == 0);
    let lacking: Vec<&str> = lacking.map(|&(_, name)| name).collect();
    if lacking.is_empty() {
        return Finding::ok(CHECK, format!("has all that is needed (features {features:#x})"));
    }
    let mend = "boot a newer kernel (mainline has all of them since 5.19) for x86-64";
    Finding::missing(CHECK, format!("lacks {}", lacking.join(", ")), COST, mend)
}

fn unavailable(error: &io::Error, is_host: bool) -> Finding {
    let mend = match error.kind() {
        io::ErrorKind::PermissionDenied if !is_host => uffd_node::NAMESPACE_ADVICE,
        io::ErrorKind::PermissionDenied => "run as root, in a container with --privileged",
        _ => "boot a kernel built with CONFIG_USERFAULTFD",
    };
    Finding::missing(CHECK, error.to_string(), COST, mend)
}

/// Checks whether a QEMU without privilege can get a userfaultfd: it needs a node of the device.
pub fn check_device(as_root: bool) -> Finding {
    const CHECK: &str = "device node";
    if uffd_node::is_needless() {
        return Finding::ok(CHECK, "not needed: vm.unprivileged_userfaultfd is 1");
    }
    if !as_root {
        return Finding::unknown(CHECK, "only root can make a node of /dev/userfaultfd");
    }
    let opened = Node::make(rustix::process::geteuid().as_raw()).and_then(|node| node.open());
    match opened {
        Ok(_) => Finding::ok(CHECK, "one of /dev/userfaultfd can be made and opened"),
        Err(error) => {
            let (why, advice) = uffd_node::why_closed(&error);
            let cost = "no QEMU that is not root can be managed: no VM of ebb run";
            Finding::missing(CHECK, why, cost, advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn names_the_features_that_are_lacking() {
        assert_eq!(judge(feature::needed()).verdict, Verdict::Ok);
        assert_eq!(judge(u64::MAX).verdict, Verdict::Ok);
        let finding = judge(feature::needed() & !feature::WP_HUGETLBFS_SHMEM);
        assert_eq!(finding.verdict, Verdict::Missing);
        assert_eq!(finding.found, "lacks WP_HUGETLBFS_SHMEM");
    }

    #[test]
    fn a_user_namespace_has_advice_of_its_own() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let mend = |is_host| unavailable(&denied(), is_host).mend.unwrap();
        assert!(mend(false).contains("vm.unprivileged_userfaultfd=1"), "{}", mend(false));
        assert!(mend(true).contains("--privileged"), "{}", mend(true));
    }
}
