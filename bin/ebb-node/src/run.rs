//! Looks at the host again and again, and publishes what matters.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_api::route;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use crate::args::Args;
use crate::node::Node;
use crate::published::Published;
use crate::{ebbd, reclaimable, tell};

/// Longest pause after failures.
const PAUSE_MOST: Duration = Duration::from_secs(300);

/// Publishes until a signal ends it. What was published is taken away then.
///
/// # Errors
/// Nothing can be published from the start on. Later failures are told, and it is tried again.
pub async fn run(args: &Args) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let socket = args.run_dir.join(route::SOCKET_FILE);
    let mut looks = Looks::new(Node::new(&args.node).await?, Duration::from_secs(args.every_s));
    loop {
        let pause = looks.look(&socket).await?;
        tokio::select! {
            () = sleep(pause) => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    looks.node.publish(None).await
}

/// What goes on from look to look.
struct Looks {
    node: Node,
    every: Duration,
    pause: Duration,
    published: Published,
    ebbd: Voice,
    server: Voice,
}

impl Looks {
    fn new(node: Node, every: Duration) -> Looks {
        let published = Published::default();
        Looks { node, every, pause: every, published, ebbd: Voice(None), server: Voice(None) }
    }

    /// Looks once. Returns the time until the next look.
    async fn look(&mut self, socket: &Path) -> anyhow::Result<Duration> {
        let bytes = match ebbd::ask(socket).await {
            Ok((top, pilot)) => {
                self.ebbd.ended("ebbd answers again");
                Some(reclaimable::bytes(&top, &pilot))
            }
            Err(error) => {
                self.ebbd.complain(&error);
                None
            }
        };
        if !self.published.is_due(Instant::now(), bytes) {
            return Ok(self.every);
        }
        match self.node.publish(bytes).await {
            Ok(()) => {
                self.server.ended("the API server takes the figure again");
                self.published.note(Instant::now(), bytes);
                self.pause = self.every;
            }
            // Whoever starts this program learns at once that it cannot work.
            Err(error) if !self.published.has_begun() => return Err(error),
            Err(error) => {
                self.server.complain(&error);
                self.pause = longer(self.pause);
            }
        }
        Ok(self.pause)
    }
}

/// The pause after another failure.
fn longer(pause: Duration) -> Duration {
    (pause * 2).min(PAUSE_MOST)
}

/// Tells of one kind of trouble, and of the same trouble only once. It has what it told last.
struct Voice(Option<String>);

impl Voice {
    fn complain(&mut self, error: &anyhow::Error) {
        let told = format!("{error:#}");
        if self.0.as_ref() != Some(&told) {
            tell(&told);
            self.0 = Some(told);
        }
    }

    fn ended(&mut self, good: &str) {
        if self.0.take().is_some() {
            tell(good);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = [15, 30, 60, 120, 240, 300, 300].map(Duration::from_secs);
        for pair in pauses.windows(2) {
            assert_eq!(longer(pair[0]), pair[1]);
        }
    }
}
