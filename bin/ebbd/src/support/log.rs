//! The messages of this process on standard error, bounded in size and rate. A guest, a VMM or a
//! front end can cause some as often as it likes.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::Metadata;
use tracing::callsite::Identifier;
use tracing_subscriber::fmt::MakeWriter;

use crate::support::bounded_log::BoundedLog;

/// Most messages at once from one place in the code about one subject.
const AT_ONCE: u32 = 20;
/// Time for each further message from that place about that subject.
const EVERY: Duration = Duration::from_secs(3);
/// Most pairs of place and subject that are counted. Beyond that, all counts begin anew.
const SOURCES: usize = 1024;
/// Longest subject in bytes. The subject is the beginning of a message up to a colon: a VM's name,
/// a path.
const SUBJECT_MOST: usize = 128;

/// Sets up messages at the levels in `EBB_LOG`, `info` and above if it is not set. Standard error
/// is bounded if it is the `file`.
pub fn to_stderr(file: Option<&Path>) {
    let log = Log(Arc::new(Mutex::new(Out {
        log: BoundedLog::stderr(file),
        sources: Sources::default(),
    })));
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("EBB_LOG")
                .unwrap_or_else(|_| "info".into()),
        )
        .with_ansi(false)
        .with_writer(log)
        .init();
}

#[derive(Clone)]
struct Log(Arc<Mutex<Out>>);

struct Out {
    log: BoundedLog,
    sources: Sources,
}

/// Writes one message.
struct Writer {
    log: Log,
    place: Option<Identifier>,
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Writer;

    fn make_writer(&'a self) -> Writer {
        Writer { log: self.clone(), place: None }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Writer {
        let place = Some(metadata.callsite());
        Writer { log: self.clone(), place }
    }
}

impl io::Write for Writer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut out = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left_out = match &self.place {
            Some(place) => out.sources.admit(place, subject(line), Instant::now()),
            None => Some(0),
        };
        match left_out {
            Some(0) => out.log.write(line),
            Some(count) => {
                out.log.write(line);
                out.log.write(format!("  {count} more like this were left out\n").as_bytes());
            }
            None => {}
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The subject of a line: the text between its target and the next colon.
fn subject(line: &[u8]) -> &[u8] {
    let mut parts =
        line.splitn(3, |&byte| byte == b' ').last().unwrap_or_default().split(|&b| b == b':');
    // The line has the form `crate::module: SUBJECT: text`.
    let subject = parts.by_ref().find(|part| part.starts_with(b" ")).unwrap_or_default();
    &subject[..subject.len().min(SUBJECT_MOST)]
}

/// Counts messages by place and subject.
#[derive(Default)]
struct Sources(HashMap<(Identifier, Vec<u8>), Source>);

struct Source {
    /// Time up to which messages have been admitted, [`EVERY`] for each.
    next: Instant,
    left_out: u64,
}

impl Sources {
    /// Whether a message may be written now, and if so, how many were left out before it.
    fn admit(&mut self, place: &Identifier, subject: &[u8], now: Instant) -> Option<u64> {
        if self.0.len() >= SOURCES {
            self.0.clear();
        }
        let new = || Source { next: now, left_out: 0 };
        let source = self.0.entry((place.clone(), subject.into())).or_insert_with(new);
        let next = source.next.max(now) + EVERY;
        if next > now + EVERY * AT_ONCE {
            source.left_out += 1;
            return None;
        }
        source.next = next;
        Some(std::mem::take(&mut source.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Callsite;

    struct Place;

    impl Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            unreachable!("nobody asks")
        }
    }

    static PLACE: Place = Place;

    #[test]
    fn what_comes_too_often_is_counted_and_others_are_not_held_up() {
        let (mut sources, start, place) = (Sources::default(), Instant::now(), Identifier(&PLACE));
        let admitted = (0..1000).filter(|_| sources.admit(&place, b"a", start).is_some()).count();
        assert_eq!(admitted, AT_ONCE as usize);
        assert_eq!(sources.admit(&place, b"b", start), Some(0));
        assert_eq!(sources.admit(&place, b"a", start + EVERY), Some(1000 - u64::from(AT_ONCE)));
        assert_eq!(sources.admit(&place, b"a", start + EVERY), None);
        assert_eq!(sources.admit(&place, b"a", start + 100 * EVERY), Some(1));
        for n in 0..10_000_u32 {
            let _ = sources.admit(&place, &n.to_le_bytes(), start);
        }
        assert!(sources.0.len() <= SOURCES);
    }

    #[test]
    fn a_line_says_what_it_is_about() {
        for (line, about) in [
            (
                "2026-01-01T00:00:00.000000Z  WARN ebb_block::queue: /run/a: makes no sense: 7",
                " /run/a",
            ),
            ("2026-01-01T00:00:00.000000Z ERROR ebbd::worker: web: its record: no", " web"),
            ("2026-01-01T00:00:00.000000Z  INFO ebbd: listening on x", " listening on x"),
            ("", ""),
        ] {
            assert_eq!(subject(line.as_bytes()), about.as_bytes(), "{line}");
        }
    }
}
