//! The messages of this process on standard error, bounded in size and rate. A guest, a VMM or a
//! front end can cause some as often as it likes.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::VmName;
use tracing::Metadata;
use tracing::callsite::Identifier;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{self, DefaultFields, Format};
use tracing_subscriber::fmt::{FormatFields, MakeWriter, SubscriberBuilder};

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
/// is bounded if it is the `file`. Each message names the `vm`, if this is the process of one: its
/// messages are in the same file as those of other processes.
pub fn to_stderr(file: Option<&Path>, vm: Option<&VmName>) {
    builder(BoundedLog::stderr(file), vm)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("EBB_LOG")
                .unwrap_or_else(|_| "info".into()),
        )
        .init();
}

fn builder(
    log: BoundedLog,
    vm: Option<&VmName>,
) -> SubscriberBuilder<Prefix, Format, LevelFilter, Log> {
    let prefix = Prefix(vm.map(|name| format!("{name}: ")).unwrap_or_default());
    let out = Out { log, sources: Sources::default(), prefix: prefix.clone() };
    let log = Log(Arc::new(Mutex::new(out)));
    tracing_subscriber::fmt().with_ansi(false).fmt_fields(prefix).with_writer(log)
}

/// What stands before the text of each message: the VM's name, or nothing.
#[derive(Clone)]
struct Prefix(String);

impl<'writer> FormatFields<'writer> for Prefix {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: format::Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        writer.write_str(&self.0)?;
        DefaultFields::new().format_fields(writer, fields)
    }
}

#[derive(Clone)]
struct Log(Arc<Mutex<Out>>);

struct Out {
    log: BoundedLog,
    sources: Sources,
    prefix: Prefix,
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
            Some(place) => {
                let subject = subject(line, out.prefix.0.as_bytes()).to_owned();
                out.sources.admit(place, &subject, Instant::now())
            }
            None => Some(0),
        };
        match left_out {
            Some(0) => out.log.write(line),
            Some(count) => {
                let note = format!("  {}{count} more like this were left out\n", out.prefix.0);
                // At once: another process may write in between.
                out.log.write(&[line, note.as_bytes()].concat());
            }
            None => {}
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The subject of a line: the text between its target and the next colon, without the `prefix` that
/// all lines of this process have.
fn subject<'l>(line: &'l [u8], prefix: &[u8]) -> &'l [u8] {
    let mut parts =
        line.splitn(3, |&byte| byte == b' ').last().unwrap_or_default().split(|&b| b == b':');
    // The line has the form `crate::module: SUBJECT: text`.
    let mut subject = parts.by_ref().find(|part| part.starts_with(b" ")).unwrap_or_default();
    if !prefix.is_empty() {
        // The prefix is a subject for all lines that have no other one.
        subject = match (parts.next(), parts.next()) {
            (Some(second), Some(_)) => second,
            _ => subject,
        };
    }
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
    use std::fs;
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
    fn a_line_of_a_vms_process_names_the_vm() {
        let web: VmName = "web".parse().unwrap();
        for (vm, expected) in [
            (None, "  WARN ebb_pager::frames: wake: no\n"),
            (Some(&web), "  WARN ebb_pager::frames: web: wake: no\n"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("log");
            let say = || tracing::warn!(target: "ebb_pager::frames", "wake: no");
            let subscriber = builder(BoundedLog::open(&path), vm).finish();
            tracing::subscriber::with_default(subscriber, say);
            let line = fs::read_to_string(&path).unwrap();
            assert_eq!(line.split_once('Z').map(|(_, after)| after), Some(expected), "{line}");
        }
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
            assert_eq!(subject(line.as_bytes(), b""), about.as_bytes(), "{line}");
        }
        for (line, about) in [
            ("2026-01-01T00:00:00.000000Z  WARN ebb_block: web: /run/a: no", " /run/a"),
            // Else each of these messages would be a subject of its own.
            ("2026-01-01T00:00:00.000000Z  WARN ebb_block: web: it took 7 s", " web"),
        ] {
            assert_eq!(subject(line.as_bytes(), b"web: "), about.as_bytes(), "{line}");
        }
    }
}
