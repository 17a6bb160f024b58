//! The dashboard of the demo's last VMs, for whoever sits at a terminal.

use std::fs;
use std::io::{self, IsTerminal};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::termios::{QueueSelector, tcflush, tcgetpgrp};
use vmtest::{Host, Listening};

use crate::interrupt;

/// Time from one look for an interruption to the next: 200 ms.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A dashboard that only this machine reaches.
pub struct Dashboard {
    url: String,
    token: String,
}

impl Dashboard {
    /// Starts the daemon of a host that has none yet, with a dashboard. Does nothing unless the demo
    /// can ask somebody at a terminal.
    ///
    /// # Errors
    /// The token cannot be read.
    ///
    /// # Panics
    /// The daemon does not start.
    pub fn at_terminal(host: &Host) -> anyhow::Result<Option<Dashboard>> {
        // A job in the background would be stopped as it asks.
        let is_in_front = tcgetpgrp(io::stdin()).is_ok_and(|group| group == getpgrp());
        if !is_in_front || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let listening = Listening::new(host);
        let token = fs::read_to_string(&listening.control).context("the dashboard's token")?;
        Ok(Some(Dashboard { url: listening.url, token: token.trim_end().to_owned() }))
    }

    /// Says where it is, and waits until somebody presses Enter.
    ///
    /// # Errors
    /// The user interrupts, or the terminal cannot be read.
    pub fn show(&self) -> anyhow::Result<()> {
        println!("{}", self.text());
        // What was typed before is no answer.
        tcflush(io::stdin(), QueueSelector::IFlush).context("the terminal")?;
        loop {
            interrupt::check()?;
            match poll(&mut [PollFd::new(&io::stdin(), PollFlags::IN)], Some(&LOOK_EVERY)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(error).context("the terminal"),
            }
        }
        io::stdin().read_line(&mut String::new()).context("the terminal")?;
        Ok(())
    }

    fn text(&self) -> String {
        let Dashboard { url, token } = self;
        let port = url.rsplit_once(':').map_or("", |(_, port)| port);
        format!(
            "The three VMs run on. Their dashboard is at {url}/\n  \
             token    {token}\n  \
             warning  the browser does not know the demo's certificate: go on all the same\n  \
             by SSH   ssh -L {port}:127.0.0.1:{port} THIS_HOST, and then the same address\n\
             Press Enter to end the VMs and the demo."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_the_token_and_the_port_are_said() {
        let (url, token) = ("https://localhost:4711".to_owned(), "abc".to_owned());
        let text = Dashboard { url, token }.text();
        assert!(text.contains("https://localhost:4711/\n  token    abc\n"), "{text}");
        assert!(text.contains("ssh -L 4711:127.0.0.1:4711 "), "{text}");
    }
}
