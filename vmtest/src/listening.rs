//! A daemon that serves other machines.

use std::path::PathBuf;
use std::process::Command;

use rustix::rand::{GetRandomFlags, getrandom};
use testkit::certificate::{Certificate, write_private};

use crate::host::{Host, Ran};
use crate::wait::until;

/// Where the daemon listens, and what a client shows there.
pub struct Listening {
    /// Where the daemon listens now.
    pub url: String,
    /// The daemon's certificate, which is its own authority.
    pub certificate: PathBuf,
    /// A file with a token that may only look.
    pub read: PathBuf,
    /// A file with a token that may change what other machines may change.
    pub control: PathBuf,
}

impl Listening {
    /// Starts the daemon of a host that has none yet.
    ///
    /// # Panics
    /// It does not start.
    pub fn new(host: &Host) -> Listening {
        let directory = host.directory();
        let made = Certificate::new(directory, "ebbd", &["localhost"]);
        let file = |name: &str, text: &str| {
            let path = directory.join(name);
            write_private(&path, text);
            path
        };
        let (read, control) = (token(), token());
        let tokens = file("tokens", &format!("read {read}\ncontrol {control}\n"));
        host.set("EBB_LISTEN", "127.0.0.1:0");
        host.set("EBB_TLS_CERT", &made.certificate);
        host.set("EBB_TLS_KEY", &made.key);
        host.set("EBB_TOKENS", tokens);
        host.start();
        Listening {
            url: url(host),
            certificate: made.certificate,
            read: file("read.token", &read),
            control: file("control.token", &format!("{control}\n")),
        }
    }

    /// A program's environment in which it asks this daemon, with the token that may change things
    /// if it is to `control`.
    pub fn tell<'a>(&self, command: &'a mut Command, control: bool) -> &'a mut Command {
        let token = if control { &self.control } else { &self.read };
        command
            .env("EBB_HOST", &self.url)
            .env("EBB_TOKEN_FILE", token)
            .env("EBB_CA", &self.certificate)
    }

    /// Runs `ebb` with the words of `line` as another machine would.
    pub fn ebb(&self, host: &Host, control: bool, line: &str) -> Ran {
        let mut command = host.command("ebb");
        Ran::of(self.tell(&mut command, control).args(line.split_whitespace()))
    }
}

/// A new token: the port is open to all users of this machine, also while a demo runs.
fn token() -> String {
    let mut bytes = [0u8; 16];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).expect("random bytes");
    assert_eq!(got, bytes.len(), "all of them");
    format!("{:032x}", u128::from_ne_bytes(bytes))
}

/// Where the daemon says that it listens.
fn url(host: &Host) -> String {
    until("the daemon to say where it listens", || {
        let log = host.log();
        let (_, url) = log.rsplit_once("listening on https://")?;
        let port = url.split_once('\n')?.0.trim().rsplit_once(':')?.1;
        Some(format!("https://localhost:{port}"))
    })
}
