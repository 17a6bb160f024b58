//! Asks the daemon for figures, and has it change VMs. It starts no daemon: one that ends may come
//! back.

use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;

use ebb_api::{LimitRequest, LimitStatus, PilotStatus, RuleRequest, route};
use hyper::Method;

use super::app::{Change, Message};
use crate::client;

/// Time from one question to the next.
const EVERY: Duration = Duration::from_secs(1);
/// Longest wait for figures. The daemon has them at hand.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a change. The daemon itself waits 60 s for a VM.
const PATIENCE_FOR_CHANGE: Duration = Duration::from_secs(90);

/// The daemon of a run directory.
#[derive(Clone)]
pub struct Feed {
    socket: PathBuf,
    to: SyncSender<Message>,
}

impl Feed {
    pub fn new(run_dir: &Path, to: SyncSender<Message>) -> Feed {
        Feed { socket: run_dir.join(route::SOCKET_FILE), to }
    }

    /// Sends figures from now on, until nobody receives them.
    pub fn begin(&self) -> std::io::Result<()> {
        let feed = self.clone();
        thread::Builder::new().name("figures".into()).spawn(move || feed.follow()).map(drop)
    }

    fn follow(&self) {
        loop {
            thread::sleep(EVERY);
            let figures = self.ask(PATIENCE, Method::GET, route::TOP, Vec::new());
            if self.to.send(Message::Figures(figures)).is_err() {
                return;
            }
        }
    }

    /// Has the daemon change something, and tells what came of it.
    pub fn change(&self, change: Change) {
        let feed = self.clone();
        let spawned = thread::Builder::new().name("change".into()).spawn(move || {
            let done = feed.carry_out(&change).map(|()| change.done());
            // Nobody wants to know any more: the program ends.
            let _ = feed.to.send(Message::Done(done));
        });
        if let Err(error) = spawned {
            let _ = self.to.try_send(Message::Done(Err(error.to_string())));
        }
    }

    fn carry_out(&self, change: &Change) -> Result<(), String> {
        match change {
            Change::Hold { vm, hold } => {
                let request = RuleRequest { hold: Some(*hold), ..RuleRequest::default() };
                let path = route::of_vm(route::RULE, vm);
                self.put::<PilotStatus>(&path, &request).map(drop)
            }
            Change::Limit { vm, bytes } => {
                let request = LimitRequest { bytes: *bytes, low_bytes: None, high_bytes: None };
                let path = route::of_vm(route::LIMIT, vm);
                self.put::<LimitStatus>(&path, &request).map(drop)
            }
        }
    }

    fn put<A: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        request: &impl serde::Serialize,
    ) -> Result<A, String> {
        let body = serde_json::to_vec(request).map_err(|error| error.to_string())?;
        self.ask(PATIENCE_FOR_CHANGE, Method::PUT, path, body)
    }

    fn ask<A: serde::de::DeserializeOwned>(
        &self,
        patience: Duration,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<A, String> {
        client::call_within(&self.socket, patience, method, path, body)
            .map_err(|error| format!("{error:#}"))
    }
}
