//! Serves HTTP on a socket, up to an end that no client can put off.

use std::io;
use std::time::Duration;

use axum::Router;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Longest wait, at the end, for requests under way. A client may send only a part of one.
pub const GRACE: Duration = Duration::from_secs(5);

/// Serves until `ended`, and then until all requests under way are answered: 5 s at most, and only
/// until `at_once`.
///
/// # Errors
/// Those of accept(2).
pub async fn serve(
    listener: UnixListener,
    router: Router,
    ended: impl Future<Output = ()> + Send + 'static,
    at_once: impl Future<Output = ()>,
) -> io::Result<()> {
    let (ending, has_ended) = oneshot::channel::<()>();
    let ended = async move {
        ended.await;
        // The end of the channel is the message.
        drop(ending);
    };
    let late = async {
        let _ = has_ended.await;
        tokio::select! {
            () = sleep(GRACE) => {}
            () = at_once => {}
        }
    };
    let served = axum::serve(listener, router).with_graceful_shutdown(ended).into_future();
    tokio::select! {
        served = served => served,
        () = late => {
            tracing::warn!("requests under way are not waited for any more");
            Ok(())
        }
    }
}
