//! Does the kernel hand out page faults, and of the kinds that Ebb needs?

use std::io;

use ebb_sys::uffd::{self, feature};

use super::finding::Finding;

const CHECK: &str = "userfaultfd";
const COST: &str = "no VM can be held";

pub fn check() -> Finding {
    match uffd::probe() {
        Ok(features) => judge(features),
        Err(error) => unavailable(&error),
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

fn unavailable(error: &io::Error) -> Finding {
    let mend = match error.kind() {
        io::ErrorKind::PermissionDenied => "run as root, in no container",
        _ => "boot a kernel built with CONFIG_USERFAULTFD",
    };
    Finding::missing(CHECK, error.to_string(), COST, mend)
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
}
