//! The messages of this process on standard error, bounded in size and rate. A guest, a VMM or a
//! front end can cause some as often as it likes, and can choose a part of their text. No thread
//! waits until a message is written.

mod queue;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ebb_api::VmName;
use tracing::Metadata;
use tracing::callsite::Identifier;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{self, DefaultFields, Format};
use tracing_subscriber::fmt::{FormatFields, MakeWriter, SubscriberBuilder};

use self::queue::Queue;
use crate::support::bounded_log::BoundedLog;

/// Most messages at once from one place in the code about one subject.
const AT_ONCE: u32 = 20;
/// Time for each further message from that place about that subject.
const EVERY: Duration = Duration::from_secs(3);
/// Most pairs of place and subject that are counted. Beyond that, all messages from one place are
/// counted together.
const SOURCES: usize = 1024;
/// Longest subject in bytes. The subject is the beginning of a message up to a colon: a VM's name,
/// a path.
const SUBJECT_MOST: usize = 128;
/// Most bytes of a message. The rest is left out.
const MESSAGE_MOST: usize = 16 << 10;
/// Longest wait, at the end of the process, until all messages are written.
const END_LIMIT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The messages of this process, since [`to_stderr`].
static LOG: OnceLock<Log> = OnceLock::new();

/// Sets up messages at the levels in `EBB_LOG`, `info` and above if it is not set. Standard error
/// is bounded if it is the `file`. Each message names the `vm`, if this is the process of one: its
/// messages are in the same file as those of other processes.
pub fn to_stderr(file: Option<&Path>, vm: Option<&VmName>) {
    builder(LOG.get_or_init(|| Log::new(BoundedLog::stderr(file), vm)))
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("EBB_LOG")
                .unwrap_or_else(|_| "info".into()),
        )
        .init();
}

fn builder(log: &Log) -> SubscriberBuilder<Prefix, Format, LevelFilter, Log> {
    let prefix = log.out().prefix.clone();
    tracing_subscriber::fmt().with_ansi(false).fmt_fields(prefix).with_writer(log.clone())
}

/// Waits until all messages are written, but not for long: nobody may be reading. Later messages
/// are lost.
pub fn end() {
    let (thread, began) = (LOG.get().and_then(Log::close), Instant::now());
    let is_writing = || thread.as_ref().is_some_and(|thread| !thread.is_finished());
    while is_writing() && began.elapsed() < END_LIMIT {
        thread::sleep(LOOK_EVERY);
    }
}

/// Does [`end`] when it is dropped, also by a panic.
pub struct AtEnd;

impl Drop for AtEnd {
    fn drop(&mut self) {
        end();
    }
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
    queue: Queue,
    sources: Sources,
    prefix: Prefix,
}

impl Log {
    fn new(log: BoundedLog, vm: Option<&VmName>) -> Log {
        let prefix = Prefix(vm.map(|name| format!("{name}: ")).unwrap_or_default());
        let (queue, sources) = (Queue::new(log), Sources::default());
        Log(Arc::new(Mutex::new(Out { queue, sources, prefix })))
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more messages. Returns the thread that writes the last ones.
    fn close(&self) -> Option<JoinHandle<()>> {
        self.out().queue.close()
    }
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
        let mut out = self.log.out();
        let Out { queue, sources, prefix: Prefix(prefix) } = &mut *out;
        let left_out = match &self.place {
            Some(place) => sources.admit(place, subject(line, prefix.as_bytes()), Instant::now()),
            None => Some(0),
        };
        if let Some(count) = left_out {
            let mut text = one_message(line);
            if count > 0 {
                // At once: another process may write in between.
                text += &format!("  {prefix}{count} more like this were left out\n");
            }
            queue.push(text, |lost| {
                format!("  {prefix}{lost} messages were lost here: they were not read in time\n")
            });
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The text of a message, which may contain what a VMM chose. None of its further lines begins as a
/// message does.
fn one_message(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
    let mut shown = String::new();
    for character in text.chars() {
        if shown.len() >= MESSAGE_MOST {
            break;
        }
        match character {
            '\n' => shown.push_str("\n    "),
            character if character.is_control() => shown.push('?'),
            character => shown.push(character),
        }
    }
    shown.push('\n');
    shown
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
            // The others count as new ones do.
            self.0.retain(|_, source| source.next > now);
        }
        let mut key = (place.clone(), subject.to_vec());
        if self.0.len() >= SOURCES && !self.0.contains_key(&key) {
            key.1.clear();
        }
        let source = self.0.entry(key).or_insert(Source { next: now, left_out: 0 });
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
    }

    #[test]
    fn many_subjects_are_counted_together_and_end_no_count() {
        let (mut sources, start, place) = (Sources::default(), Instant::now(), Identifier(&PLACE));
        while sources.admit(&place, b"a", start).is_some() {}
        let admitted =
            (0..10_000_u32).filter(|n| sources.admit(&place, &n.to_le_bytes(), start).is_some());
        assert!(admitted.count() <= SOURCES + AT_ONCE as usize);
        assert!(sources.0.len() <= SOURCES + 1);
        assert_eq!(sources.admit(&place, b"a", start), None);
        assert_eq!(sources.admit(&place, b"b", start + 100 * EVERY), Some(0));
        assert_eq!(sources.0.len(), 1, "what is not counted any more takes no room");
    }

    #[test]
    fn no_text_passes_for_a_message_of_its_own() {
        let forged = "  WARN ebbd: web: no\n2026-01-01T00:00:00Z ERROR ebbd: \u{9b}2J\r\n";
        let shown = "  WARN ebbd: web: no\n    2026-01-01T00:00:00Z ERROR ebbd: ?2J?\n";
        assert_eq!(one_message(forged.as_bytes()), shown);
        assert!(one_message(&[b'\n'; 1 << 20]).len() < 2 * MESSAGE_MOST);
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
            let log = Log::new(BoundedLog::open(&path), vm);
            tracing::subscriber::with_default(builder(&log).finish(), say);
            log.close().expect("a thread").join().expect("all is written");
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
