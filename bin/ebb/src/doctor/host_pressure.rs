//! Does the kernel tell when tasks of the host wait for memory?

use ebb_sys::psi::Access;

use super::finding::Finding;

const CHECK: &str = "host pressure";
/// Percent of the time in which tasks wait, for a trigger that is only tried.
const PERCENT: u32 = 15;

pub fn check(as_root: bool) -> Finding {
    judge(&Access::open(PERCENT), as_root)
}

fn judge(access: &Access, as_root: bool) -> Finding {
    let found = format!("available memory; {access}");
    match access {
        Access::Trigger(_) => Finding::ok(CHECK, found),
        Access::Reading(_) if !as_root => Finding::unknown(CHECK, found),
        Access::Reading(_) => Finding::degraded(
            CHECK,
            found,
            "ebb auto --when pressure notices up to a second late that tasks wait for memory",
            "run ebbd with CAP_SYS_RESOURCE",
        ),
        Access::None(_) => Finding::degraded(
            CHECK,
            found,
            "ebb auto --when pressure goes by available memory alone",
            "boot a kernel built with CONFIG_PSI, with psi=1 on its command line",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_kernel_without_psi_is_reported_with_the_remedy() {
        let none = judge(&Access::None(io::ErrorKind::NotFound.into()), false);
        assert_eq!(none.verdict, Verdict::Degraded);
        assert!(none.found.starts_with("available memory; no PSI"), "{}", none.found);
        assert!(none.mend.is_some_and(|mend| mend.contains("psi=1")));
        let refused =
            |as_root| judge(&Access::Reading(io::ErrorKind::PermissionDenied.into()), as_root);
        assert_eq!(refused(true).verdict, Verdict::Degraded);
        assert_eq!(refused(false).verdict, Verdict::Unknown);
    }
}
