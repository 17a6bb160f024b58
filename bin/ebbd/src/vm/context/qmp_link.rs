//! The way to the VMM's monitor: connected again after it is lost, and lent to whoever asks QEMU.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_vm::qmp::{Ears, QmpError};
use ebb_vm::{Monitor, Qmp};
use serde_json::json;

use crate::support::retry::Retry;

/// A QEMU that does not greet within this time is busy, or serves another client.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between two attempts to connect.
const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between two attempts to connect.
const RETRY_MOST: Duration = Duration::from_secs(10);

/// A monitor by which resets may come late is asked so often whether it still tells of them.
const STILL_HEARS_EVERY: Duration = Duration::from_secs(1);
/// A monitor that does not answer that within this time does not tell of resets.
const STILL_HEARS_WITHIN: Duration = Duration::from_secs(1);

/// The monitor, while it answers.
pub struct QmpLink {
    monitor: Monitor,
    /// The VMM. A user who can change the path may put another VM's socket there.
    pid: i32,
    socket: Option<Qmp>,
    /// When it last answered whether it still tells of resets.
    heard: Instant,
    /// Why the monitor is not connected, or does not tell of resets.
    why: Option<String>,
    /// The socket was connected anew, and nobody has asked since: events may have been missed.
    is_anew: bool,
    retry: Retry,
    /// Set while the worker waits for QEMU, which may itself wait for a fault.
    is_silent: Arc<AtomicBool>,
}

impl QmpLink {
    /// Makes a link to the VMM `pid` from a socket, or from a monitor to connect to later.
    /// `is_silent` is set while the worker waits for QEMU.
    pub fn new(
        pid: i32,
        monitor: Monitor,
        mut socket: Option<Qmp>,
        is_silent: Arc<AtomicBool>,
    ) -> QmpLink {
        socket.iter_mut().for_each(|qmp| qmp.show_silence(Arc::clone(&is_silent)));
        let retry = Retry::new(RETRY_FIRST, RETRY_MOST);
        let (heard, why) = (Instant::now(), None);
        QmpLink { monitor, pid, socket, heard, why, is_anew: false, retry, is_silent }
    }

    /// Connects, if the socket is not connected and an attempt is due.
    pub fn reconnect(&mut self) {
        if self.socket.is_some() || !self.retry.is_due() {
            return;
        }
        self.is_silent.store(true, Relaxed);
        let connected = self.monitor.connect(self.pid, GREETING_TIMEOUT);
        self.is_silent.store(false, Relaxed);
        match connected {
            Ok(mut qmp) => {
                qmp.show_silence(Arc::clone(&self.is_silent));
                (self.socket, self.is_anew) = (Some(qmp), true);
                (self.heard, self.why) = (Instant::now(), None);
                self.retry.worked();
            }
            Err(error) => {
                tracing::debug!("its monitor: {error}");
                self.why = Some(error.to_string());
                self.retry.failed();
            }
        }
    }

    /// Whether resets are heard before the vCPUs go on. If not, the monitor is libvirt's: a reset
    /// may come late, but before the answer to whatever is asked after it.
    pub fn hears_at_once(&self) -> bool {
        matches!(self.monitor, Monitor::Socket(_))
    }

    /// Whether a reset may have been missed for more than a second, because who would tell of it is
    /// silent or gone. A monitor of QEMU's own cannot miss one. `may_ask`: QEMU can answer now.
    pub fn is_deaf(&mut self, may_ask: bool) -> bool {
        if self.hears_at_once() {
            return false;
        }
        let Some(qmp) = self.socket.as_mut() else { return true };
        if may_ask && self.heard.elapsed() >= STILL_HEARS_EVERY {
            let ask = |qmp: &mut Qmp| qmp.execute("query-status", json!({}));
            match qmp.in_a_hurry(STILL_HEARS_WITHIN, ask) {
                Ok(_) => self.heard = Instant::now(),
                Err(error) => {
                    self.lose(&error);
                    return true;
                }
            }
        }
        false
    }

    /// Returns why resets go unnoticed, if they do.
    pub fn why_unheard(&self) -> Option<String> {
        let why = self.why.as_deref().unwrap_or("it is yet to be connected");
        match &self.monitor {
            _ if self.is_connected() => None,
            Monitor::Socket(_) => Some("QEMU's QMP socket does not answer".into()),
            Monitor::Libvirt(_) => Some(format!("libvirt does not pass QEMU's answers on ({why})")),
        }
    }

    /// Drops a connection that fails. It may be connected again.
    fn lose(&mut self, error: &QmpError) {
        if !self.hears_at_once() {
            tracing::warn!("its monitor is lost: {error}");
        }
        self.why = Some(error.to_string());
        if let Some(qmp) = self.socket.take() {
            qmp.close();
        }
    }

    /// Returns the socket, if it is connected.
    pub fn socket(&mut self) -> Option<&mut Qmp> {
        self.socket.as_mut()
    }

    /// Whether the socket was connected anew since this was last asked.
    pub fn take_anew(&mut self) -> bool {
        std::mem::take(&mut self.is_anew)
    }

    /// Returns what hears of resets on this connection, if there is one.
    pub fn ears(&self) -> Option<Ears> {
        self.socket.as_ref()?.ears().ok()
    }

    /// Whether the socket is connected.
    pub fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// Whether QEMU reported a reset since the last look. A socket that fails is dropped and may be
    /// connected again.
    pub fn hears_reset(&mut self) -> bool {
        match self.socket.as_mut().map(Qmp::events) {
            Some(Ok(events)) => events.iter().any(|event| event == "RESET"),
            Some(Err(error)) => {
                self.lose(&error);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixListener;

    /// Connects to a socket of this process, which greets and answers once. Returns whether the
    /// link is connected, and what it sent.
    fn reconnect(pid: u32) -> (bool, String) {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let qemu = std::thread::spawn(move || {
            let (mut client, mut sent) =
                (BufReader::new(listener.accept().expect("Ebb").0), String::new());
            // Ebb may have closed the connection.
            let _ = client.get_mut().write_all(b"{\"QMP\":{}}\n");
            let _ = client.read_line(&mut sent);
            let _ = client.get_mut().write_all(b"{\"return\":{},\"id\":1}\n");
            let _ = client.read_to_string(&mut sent);
            sent
        });
        let monitor = Monitor::Socket(path);
        let mut link = QmpLink::new(pid as i32, monitor, None, Arc::default());
        link.reconnect();
        let is_connected = link.is_connected();
        drop(link);
        (is_connected, qemu.join().expect("QEMU"))
    }

    #[test]
    fn only_the_socket_of_the_vmm_is_used() {
        let (is_connected, sent) = reconnect(std::process::id());
        assert!(is_connected && sent.contains("qmp_capabilities"), "{sent}");
        let other = std::os::unix::process::parent_id();
        assert_eq!(reconnect(other), (false, String::new()));
    }
}
