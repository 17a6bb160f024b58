//! How QEMU is told to connect again to the process of a disk.

use std::path::Path;

use ebb_sys::confine::Identity;

use super::ask;

/// First version, major and minor, that knows `reconnect-ms`. Later ones know nothing else.
const KNOWS_MILLISECONDS: (u32, u32) = (9, 2);

/// How soon QEMU connects again to a process that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reconnect {
    /// After a second: the least of older QEMUs.
    Second,
    /// After a tenth of a second.
    Tenth,
}

impl Reconnect {
    /// Asks this QEMU for its version.
    pub fn of(qemu: &Path, identity: Option<Identity>) -> Reconnect {
        // If something is wrong with this QEMU, starting it gives a better reason.
        let answer = ask(qemu, identity, &["-version"]).map(|asked| asked.stdout);
        Reconnect::of_version(&String::from_utf8_lossy(&answer.unwrap_or_default()))
    }

    fn of_version(text: &str) -> Reconnect {
        let number = text.split_once("version ").map_or("", |(_, number)| number);
        let mut parts = number.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < KNOWS_MILLISECONDS => {
                Reconnect::Second
            }
            _ => Reconnect::Tenth,
        }
    }

    /// The option of `-chardev socket`.
    pub(super) fn option(self) -> &'static str {
        match self {
            Reconnect::Second => "reconnect=1",
            Reconnect::Tenth => "reconnect-ms=100",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_is_told_in_words_that_it_knows() {
        for (text, reconnect) in [
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\n", Reconnect::Second),
            ("QEMU emulator version 9.1.2\n", Reconnect::Second),
            ("QEMU emulator version 9.2.0\n", Reconnect::Tenth),
            ("QEMU emulator version 10.0.2 (Debian)", Reconnect::Tenth),
            ("QEMU emulator version 11.1.3", Reconnect::Tenth),
            ("version 7", Reconnect::Tenth),
            ("", Reconnect::Tenth),
        ] {
            assert_eq!(Reconnect::of_version(text), reconnect, "{text}");
        }
    }
}
