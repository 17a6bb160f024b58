//! Is there a QEMU to start?

use std::io;
use std::process::Command;

use super::finding::Finding;

const CHECK: &str = "QEMU";
const PROGRAM: &str = "qemu-system-x86_64";
const COST: &str = "ebb run cannot start VMs";

pub fn check() -> Finding {
    match Command::new(PROGRAM).arg("--version").output() {
        Ok(output) => judge(output.status.success(), &String::from_utf8_lossy(&output.stdout)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Finding::missing(
            CHECK,
            format!("no {PROGRAM} in PATH"),
            COST,
            "apt-get install qemu-system-x86, or your system's package of it",
        ),
        Err(error) => broken(&error.to_string()),
    }
}

fn judge(succeeded: bool, output: &str) -> Finding {
    match version(output).filter(|_| succeeded) {
        Some(version) => Finding::ok(CHECK, format!("{PROGRAM} {version}")),
        None => broken("--version does not tell one"),
    }
}

fn broken(why: &str) -> Finding {
    Finding::missing(CHECK, format!("{PROGRAM} does not run: {why}"), COST, "reinstall QEMU")
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
        assert_eq!(judge(true, "QEMU emulator version 9.0.0").verdict, Verdict::Ok);
        assert_eq!(judge(false, "QEMU emulator version 9.0.0").verdict, Verdict::Missing);
    }
}
