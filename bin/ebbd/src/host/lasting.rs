//! Tasks that last as long as the daemon, or as long as a VM. If one panics, nobody would do its
//! work any more, so it begins anew.

use std::fmt::Display;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use ebb_sys::panics::panic_text;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::registry::Daemon;

/// First pause after a panic. Each further one is twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// After a task that has lasted for this long, the first pause comes again.
const GOOD_TIME: Duration = Duration::from_secs(30);

/// Spawns a task of the daemon, which begins anew if it panics.
pub fn spawn<F: Future<Output = ()> + Send + 'static>(
    what: &'static str,
    daemon: &Daemon,
    task: impl Fn(Daemon) -> F + Send + 'static,
) -> JoinHandle<()> {
    let daemon = daemon.clone();
    tokio::spawn(lasting(what, move || task(daemon.clone())))
}

/// Runs the task that `make` returns, to its end. If it panics, the log says so, and after a pause
/// the next one runs.
pub async fn lasting<F: Future<Output = ()>>(what: impl Display, mut make: impl FnMut() -> F) {
    let mut pause = PAUSE_FIRST;
    loop {
        let began = Instant::now();
        let Err(why) = caught(make()).await else { return };
        if began.elapsed() >= GOOD_TIME {
            pause = PAUSE_FIRST;
        }
        tracing::error!("{what} has panicked, and begins anew in {} s: {why}", pause.as_secs());
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MOST);
    }
}

/// Runs a task. If it panics, returns the panic's text.
async fn caught(task: impl Future<Output = ()>) -> Result<(), String> {
    let mut task = pin!(task);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic_text(&*panic))),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_begins_anew() {
        let begun = Cell::new(0);
        let make = || {
            begun.set(begun.get() + 1);
            let number = begun.get();
            async move {
                tokio::task::yield_now().await;
                assert_ne!(number, 1, "on purpose");
            }
        };
        lasting("a task", make).await;
        assert_eq!(begun.get(), 2);
    }
}
