//! Huge pages for guest RAM: transparent ones in shared memory, and reserved ones.

use std::fs;

use ebb_api::advice;
use ebb_units::{Bytes, HUGE_BYTES};

use super::finding::{Finding, Fix};

const SHMEM: &str = "shmem THP";
/// Cost for a VM that starts with the settings as they are.
const SHMEM_COST: &str = advice::SMALL_PAGES_COST;
const GLOBAL: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Setting by size, only on kernels that know huge pages of several sizes.
const OF_2_MIB: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled";

const HUGETLB: &str = "hugetlb";
const HUGETLB_TOTAL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const HUGETLB_FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

pub fn check_shmem() -> Finding {
    let read = |path| fs::read_to_string(path).ok();
    judge_shmem(read(GLOBAL).as_deref(), read(OF_2_MIB).as_deref())
}

fn judge_shmem(global: Option<&str>, of_2_mib: Option<&str>) -> Finding {
    let Some(global) = global.and_then(chosen) else {
        let mend = "boot a kernel built with CONFIG_TRANSPARENT_HUGEPAGE";
        return Finding::degraded(SHMEM, "this kernel has none", SHMEM_COST, mend);
    };
    let of_2_mib = of_2_mib.and_then(chosen).unwrap_or("inherit");
    let found = match of_2_mib {
        "inherit" => format!("shmem_enabled is {global}"),
        own => format!("shmem_enabled is {global}, for 2 MiB {own}"),
    };
    let fixes = shmem_fixes(global, of_2_mib);
    match fixes.is_empty() {
        true => Finding::ok(SHMEM, found),
        false => Finding::fixable(SHMEM, found, SHMEM_COST, fixes),
    }
}

/// Returns what makes huge pages available. `deny` and `force` override the setting by size.
/// Otherwise that setting decides, unless it defers to the global one.
fn shmem_fixes(global: &str, of_2_mib: &str) -> Vec<Fix> {
    let allows = |setting: &str| matches!(setting, "always" | "within_size" | "advise");
    let advise = Fix::Write { path: GLOBAL.into(), text: "advise" };
    let inherit = Fix::Write { path: OF_2_MIB.into(), text: "inherit" };
    match (global, of_2_mib) {
        ("force", _) => vec![],
        ("deny", "never") => vec![advise, inherit],
        ("deny", _) => vec![advise],
        (_, own) if allows(own) => vec![],
        (global, "inherit") if allows(global) => vec![],
        (_, "inherit") => vec![advise],
        (global, _) if allows(global) => vec![inherit],
        _ => vec![advise, inherit],
    }
}

/// Returns the word in brackets.
fn chosen(setting: &str) -> Option<&str> {
    let (_, rest) = setting.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word)
}

pub fn check_hugetlb() -> Finding {
    judge_hugetlb(count(HUGETLB_TOTAL), count(HUGETLB_FREE))
}

fn count(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn judge_hugetlb(total: Option<u64>, free: Option<u64>) -> Finding {
    let cost = "no VM can run with --backing hugetlb; all others can";
    match (total, free.unwrap_or(0)) {
        (None, _) => {
            let mend = "boot a kernel built with CONFIG_HUGETLBFS";
            Finding::degraded(HUGETLB, "this kernel has no 2 MiB pages", cost, mend)
        }
        (Some(0), _) => Finding::degraded(HUGETLB, "none reserved", cost, reserve()),
        (Some(_), 0) => {
            Finding::degraded(HUGETLB, "all reserved pages are in use", cost, reserve())
        }
        (Some(total), free) => {
            let size = |pages: u64| Bytes(pages.saturating_mul(HUGE_BYTES));
            Finding::ok(HUGETLB, format!("{} of {} free", size(free), size(total)))
        }
    }
}

fn reserve() -> String {
    "only if you want it: sysctl vm.nr_hugepages=COUNT, each 2 MiB of the host's memory".into()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn reads_the_word_in_brackets() {
        assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
        assert_eq!(chosen("always never"), None);
        assert_eq!(chosen("[never"), None);
    }

    fn fixes(global: &str, of_2_mib: Option<&str>) -> Vec<String> {
        let bracket = |word: &str| format!("x [{word}] y");
        let finding = judge_shmem(Some(&bracket(global)), of_2_mib.map(bracket).as_deref());
        assert_eq!(finding.fixes.is_empty(), finding.verdict == Verdict::Ok);
        finding.fixes.iter().map(Fix::to_string).collect()
    }

    #[test]
    fn any_setting_that_allows_huge_pages_is_fine() {
        for global in ["always", "within_size", "advise", "force"] {
            assert!(fixes(global, None).is_empty(), "{global}");
            assert!(fixes(global, Some("inherit")).is_empty(), "{global}");
        }
        assert!(fixes("never", Some("advise")).is_empty());
        assert!(fixes("force", Some("never")).is_empty());
    }

    #[test]
    fn the_setting_that_forbids_is_the_one_to_mend() {
        let advise = format!("echo advise > {GLOBAL}");
        let inherit = format!("echo inherit > {OF_2_MIB}");
        for (global, of_2_mib, expected) in [
            ("never", None, vec![&advise]),
            ("never", Some("inherit"), vec![&advise]),
            ("deny", Some("always"), vec![&advise]),
            ("advise", Some("never"), vec![&inherit]),
            ("never", Some("never"), vec![&advise, &inherit]),
        ] {
            assert_eq!(fixes(global, of_2_mib).iter().collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn reserved_pages_are_counted_in_bytes() {
        assert_eq!(judge_hugetlb(Some(512), Some(256)).found, "512 MiB of 1 GiB free");
        assert_eq!(judge_hugetlb(Some(0), Some(0)).verdict, Verdict::Degraded);
        assert_eq!(judge_hugetlb(Some(4), Some(0)).verdict, Verdict::Degraded);
        assert_eq!(judge_hugetlb(None, None).verdict, Verdict::Degraded);
    }
}
