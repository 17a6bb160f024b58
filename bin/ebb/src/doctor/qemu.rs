//! Is there a QEMU to start?

use std::env;
use std::ffi::OsStr;
use std::io;
use std::process::Command;

use super::finding::Finding;

const CHECK: &str = "QEMU";
const PROGRAM: &str = "qemu-system-x86_64";
const COST: &str = "ebb run cannot start VMs";

/// Looks at the QEMU that a daemon started from here would use.
pub fn check() -> Finding {
    match env::var_os("EBB_QEMU") {
        Some(named) => of(&named, "set EBB_QEMU to a QEMU, or unset it to use the one in PATH"),
        None => of(PROGRAM.as_ref(), "apt-get install qemu-system-x86, or your system's package"),
    }
}

fn of(program: &OsStr, mend: &str) -> Finding {
    let shown = program.display();
    match Command::new(program).arg("--version").output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            judge(&shown.to_string(), output.status.success(), &text, mend)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Finding::missing(CHECK, format!("there is no {shown}"), COST, mend)
        }
        Err(error) => broken(&shown.to_string(), &error.to_string(), mend),
    }
}

fn judge(program: &str, succeeded: bool, output: &str, mend: &str) -> Finding {
    match version(output).filter(|_| succeeded) {
        Some(version) => Finding::ok(CHECK, format!("{program} {version}")),
        None => broken(program, "--version does not tell one", mend),
    }
}

fn broken(program: &str, why: &str, mend: &str) -> Finding {
    Finding::missing(CHECK, format!("{program} does not run: {why}"), COST, mend)
}

/// Returns `7.2.22` of `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b2)`.
fn version(output: &str) -> Option<&str> {
    let rest = output.split_once("version ")?.1;
    rest.split_whitespace().next().filter(|word| word.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn finds_the_version_in_the_headline() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        assert_eq!(version(debian), Some("7.2.22"));
        assert_eq!(version("QEMU emulator version 11.1.0\n"), Some("11.1.0"));
        assert_eq!(version("qemu: version unknown"), None);
        assert_eq!(version(""), None);
    }

    #[test]
    fn a_qemu_that_fails_is_no_qemu() {
        let said = "QEMU emulator version 9.0.0";
        assert_eq!(judge("qemu", true, said, "").verdict, Verdict::Ok);
        assert_eq!(judge("qemu", false, said, "").verdict, Verdict::Missing);
        let named = of("/nowhere/qemu".as_ref(), "set EBB_QEMU");
        assert_eq!(named.verdict, Verdict::Missing);
        assert!(named.found.contains("/nowhere/qemu"), "{}", named.found);
    }
}
