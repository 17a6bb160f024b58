//! The REST interface over TCP, for other machines: only with TLS, and with a token.
//!
//! A client is hostile until it has shown a token: what it can have the daemon hold is bounded in
//! number, size and time.

mod guard;
mod listener;
mod options;
#[cfg(test)]
mod tests;
mod tls;
mod tokens;
mod visitors;

pub use guard::Client;
pub use listener::Listener;
pub use options::Options;
