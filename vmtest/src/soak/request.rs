//! Requests to a daemon that may be killed meanwhile.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_api::{ApiErrorBody, ErrorCode};
use serde_json::Value;

use crate::wait::deadline;

/// Time between two looks at whether the answer still matters.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// What became of a request.
pub enum Answer {
    /// It was carried out.
    Done,
    /// It was refused or failed.
    Refused(ErrorCode, String),
    /// Nobody answered to the end.
    Nobody,
    /// The daemon holds the connection, and says nothing.
    Silent,
}

/// Sends a request, and waits for its answer while `matters` is true.
pub fn send(
    socket: &Path,
    (method, path, body): (&str, &str, &Value),
    matters: impl Fn() -> bool,
) -> Answer {
    let body = body.to_string();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n");
    let of_body = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    let Ok(mut stream) = UnixStream::connect(socket) else { return Answer::Nobody };
    let sent = stream
        .set_read_timeout(Some(LOOK_EVERY))
        .and_then(|()| stream.write_all(format!("{head}{of_body}\r\n{body}").as_bytes()));
    if sent.is_err() {
        return Answer::Nobody;
    }
    let (mut text, mut bytes, end) = (Vec::new(), [0; 4096], Instant::now() + deadline());
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return parse(&String::from_utf8_lossy(&text)).unwrap_or(Answer::Nobody),
            Ok(count) => text.extend_from_slice(&bytes[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if !matters() {
                    return Answer::Nobody;
                }
                if Instant::now() > end {
                    return Answer::Silent;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Answer::Nobody,
        }
    }
}

/// Parses a whole answer.
fn parse(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status: u16 = head.split(' ').nth(1)?.parse().ok()?;
    let json: Value = serde_json::from_str(body).ok()?;
    if (200..300).contains(&status) {
        return Some(Answer::Done);
    }
    let body: ApiErrorBody = serde_json::from_value(json).ok()?;
    let code = body.code.unwrap_or_else(|| ErrorCode::of_status(status));
    Some(Answer::Refused(code, body.error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_answers_are_told_from_torn_ones() {
        let done = parse("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
        assert!(matches!(done, Some(Answer::Done)));
        let text = "HTTP/1.1 422 No\r\n\r\n{\"error\":\"no\",\"code\":\"not_allowed\"}";
        assert!(
            matches!(parse(text), Some(Answer::Refused(ErrorCode::NotAllowed, why)) if why == "no")
        );
        assert!(parse("HTTP/1.1 200 OK\r\n\r\n{\"a\":").is_none());
        assert!(parse("HTTP/1.1 200 OK").is_none());
    }
}
