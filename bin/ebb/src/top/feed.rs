//! Asks the daemon for figures, and has it change VMs. It starts no daemon: one that ends may come
//! back.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;

use ebb_api::{
    History, HistoryQuery, LimitRequest, LimitStatus, PilotStatus, RuleRequest, Top, route,
};
use hyper::Method;

use super::app::{Change, Message};
use super::past::{Ask, Past, path_of};
use crate::client;
use crate::remote::Remote;

/// Time from one question to the next.
const EVERY: Duration = Duration::from_secs(1);
/// Longest wait for figures. The daemon has them at hand.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a change. The daemon itself waits 60 s for a VM.
const PATIENCE_FOR_CHANGE: Duration = Duration::from_secs(90);

/// Longest wait for history, which the daemon may have to search.
const PATIENCE_FOR_HISTORY: Duration = Duration::from_secs(30);

/// Which daemon is asked.
#[derive(Clone)]
pub enum Source {
    /// That of this host which listens at this socket.
    Socket(PathBuf),
    /// That of another host.
    Remote(Arc<Remote>),
}

/// A daemon, and who gets its figures.
#[derive(Clone)]
pub struct Feed {
    source: Source,
    to: SyncSender<Message>,
}

impl Feed {
    pub fn new(source: Source, to: SyncSender<Message>) -> Feed {
        Feed { source, to }
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

    /// Sends the moment before another one, or the one after.
    pub fn step(&self, at_s: u64, is_forward: bool) {
        let past = Past { ask: self.clone() };
        self.apart(Message::Past, move || past.step(at_s, is_forward));
    }

    /// Has the daemon change something, and tells what came of it.
    pub fn change(&self, change: Change) {
        let feed = self.clone();
        self.apart(Message::Done, move || feed.carry_out(&change).map(|()| change.done()));
    }

    /// Does work that takes long, and sends what came of it.
    fn apart<T: 'static>(
        &self,
        message: fn(Result<T, String>) -> Message,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) {
        let to = self.to.clone();
        // If nobody receives it any more, the program ends.
        let spawned = thread::Builder::new().spawn(move || drop(to.send(message(work()))));
        if let Err(error) = spawned {
            let _ = self.to.try_send(message(Err(error.to_string())));
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
        let answer = match &self.source {
            Source::Socket(socket) => client::call_within(socket, patience, method, path, body),
            Source::Remote(remote) => remote.call_within(patience, method, path, body),
        };
        answer.map_err(|error| format!("{error:#}"))
    }
}

impl Ask for Feed {
    fn history(&self, query: &HistoryQuery) -> Result<Vec<Top>, String> {
        let answer =
            self.ask::<History>(PATIENCE_FOR_HISTORY, Method::GET, &path_of(query), Vec::new());
        answer.map(|history| history.points)
    }
}
