//! Takes connections, and serves HTTP on them.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::guard::{Client, guard};
use super::tokens::Tokens;
use super::visitors::Visitors;
use crate::rest::{dashboard, http};

/// Time to wait where no connection can be taken, as for want of descriptors.
const PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of the headers of a request.
const HEAD_MOST_BYTES: usize = 16 << 10;

/// Threads for what takes long in requests. Those of this host have others.
const BLOCKING_THREADS: usize = 8;

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For the handshake of TLS.
    pub handshake: Duration,
    /// From the beginning of a connection, or the end of an answer, until the headers of a request
    /// have come.
    pub head: Duration,
    /// To read a part of an answer.
    pub write: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        let [handshake, head, write] = [10, 30, 30].map(Duration::from_secs);
        Patience { handshake, head, write }
    }
}

/// The listening socket, the certificate and the tokens.
pub struct Listener {
    /// Where clients connect.
    pub socket: TcpListener,
    /// Speaks TLS.
    pub tls: TlsAcceptor,
    /// Who may do what.
    pub tokens: Tokens,
    /// How long a client may take.
    pub patience: Patience,
}

impl Listener {
    /// Does what [`Listener::serve`] does, on a thread of its own: what clients have it compute, as
    /// for the handshakes of TLS, holds up no VM and nobody on this host.
    ///
    /// # Errors
    /// Those of [`Listener::serve`]; there is no thread.
    pub async fn serve_apart(
        self,
        router: Router,
        ended: impl Future<Output = ()> + Send + 'static,
        at_once: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("ebbd-tls")
            .enable_all()
            .build()?;
        let serving = runtime.spawn(self.serve(router, ended, at_once));
        let _runtime = Apart(Some(runtime));
        serving.await.map_err(io::Error::other)?
    }

    /// Serves until `ended`, and then until all requests under way are answered: as long as
    /// [`http::serve`] waits, and only until `at_once`.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub async fn serve(
        self,
        router: Router,
        ended: impl Future<Output = ()>,
        at_once: impl Future<Output = ()>,
    ) -> io::Result<()> {
        let Listener { socket, tls, tokens, patience } = self;
        socket.set_nonblocking(true)?;
        let socket = tokio::net::TcpListener::from_std(socket)?;
        tracing::info!("listening on https://{}", socket.local_addr()?);
        let router = dashboard::beside(guard(router, tokens));
        let visitors = Visitors::default();
        let (ending, is_ending) = watch::channel(());
        let mut connections = JoinSet::new();
        tokio::pin!(ended);
        loop {
            let (stream, peer) = tokio::select! {
                () = &mut ended => break,
                accepted = accept(&socket) => accepted,
                // Forgets connections that have ended.
                Some(_) = connections.join_next() => continue,
            };
            let Some(visit) = visitors.enter(peer.ip()) else {
                tracing::warn!("{}: too many connections: one was refused", peer.ip());
                continue;
            };
            let (tls, router, is_ending) = (tls.clone(), router.clone(), is_ending.clone());
            connections.spawn(async move {
                let _visit = visit;
                let served = serve(stream, peer, tls, router, patience, is_ending).await;
                if let Err(error) = served {
                    tracing::debug!("{}: {error}", peer.ip());
                }
            });
        }
        drop((socket, is_ending));
        // The end of the channel is the message.
        drop(ending);
        let all = async { while connections.join_next().await.is_some() {} };
        tokio::select! {
            () = all => {}
            () = sleep(http::GRACE) => {}
            () = at_once => {}
        }
        Ok(())
    }
}

/// A runtime that ends without waiting for its threads. Another one may not wait.
struct Apart(Option<Runtime>);

impl Drop for Apart {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// Waits for the next connection.
async fn accept(socket: &tokio::net::TcpListener) -> (TcpStream, SocketAddr) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    loop {
        match socket.accept().await {
            Ok(accepted) => return accepted,
            // That client is gone.
            Err(error) => match error.kind() {
                ConnectionAborted | ConnectionRefused | ConnectionReset => {}
                _ => {
                    tracing::warn!("no connection can be taken: {error}");
                    sleep(PAUSE).await;
                }
            },
        }
    }
}

/// Why a connection has ended early.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("no TLS: {0}")]
    Handshake(io::Error),
    #[error("no TLS: it took too long")]
    Late,
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    tls: TlsAcceptor,
    router: Router,
    patience: Patience,
    mut is_ending: watch::Receiver<()>,
) -> Result<(), Broken> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(patience.write));
    let handshake = timeout(patience.handshake, tls.accept(Box::pin(stream)));
    let stream = handshake.await.map_err(|_| Broken::Late)?.map_err(Broken::Handshake)?;
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(Client(peer.ip()));
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .max_buf_size(HEAD_MOST_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ending = async {
        // Nothing is sent.
        let _ = is_ending.changed().await;
    };
    tokio::select! {
        served = connection.as_mut() => return Ok(served?),
        () = ending => connection.as_mut().graceful_shutdown(),
    }
    Ok(connection.await?)
}
