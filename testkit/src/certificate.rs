//! A certificate that vouches for itself, for tests of TLS.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Files of a certificate and its key, PEM.
pub struct Certificate {
    /// The certificate. It is its own authority, too.
    pub certificate: PathBuf,
    /// Its key, for this user alone.
    pub key: PathBuf,
}

impl Certificate {
    /// Makes a certificate for these names and addresses, and writes the files `NAME.crt` and
    /// `NAME.key` to a directory.
    ///
    /// # Panics
    /// The files cannot be written.
    pub fn new(directory: &Path, name: &str, names: &[&str]) -> Certificate {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).expect("names of hosts");
        let file = |ending: &str, pem: String| {
            let path = directory.join(format!("{name}.{ending}"));
            write_private(&path, &pem);
            path
        };
        Certificate {
            certificate: file("crt", made.cert.pem()),
            key: file("key", made.signing_key.serialize_pem()),
        }
    }
}

/// Writes a new file that only this user can read.
///
/// # Panics
/// The file exists, or cannot be written.
pub fn write_private(path: &Path, text: &str) {
    let mut options = fs::File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(path).expect("a new file");
    std::io::Write::write_all(&mut &file, text.as_bytes()).expect("it is written");
}
