//! How long tasks of the host wait for memory: its pressure stall information (PSI), in
//! `/proc/pressure/memory` (Linux, `Documentation/accounting/psi.rst`).

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

const MEMORY: &str = "/proc/pressure/memory";
/// The window of a trigger, which needs CAP_SYS_RESOURCE.
const WINDOW: Duration = Duration::from_secs(1);
/// The window of a trigger that newer kernels give to any process: 2 s or a multiple of it.
const WINDOW_OF_ALL: Duration = Duration::from_secs(2);

/// How this process can see that tasks wait for memory.
#[derive(Debug)]
pub enum Access {
    /// The kernel tells it at once.
    Trigger(Trigger),
    /// The kernel gives no trigger, and why. [`some_stall`] can be read.
    Reading(io::Error),
    /// Not at all, and why.
    None(io::Error),
}

impl Access {
    /// Tries the best way first. `percent`: see [`Trigger::new`].
    pub fn open(percent: u32) -> Access {
        match (some_stall(), Trigger::new(percent)) {
            (Err(error), _) => Access::None(error),
            (Ok(_), Err(error)) => Access::Reading(error),
            (Ok(_), Ok(trigger)) => Access::Trigger(trigger),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Trigger(trigger) => {
                write!(f, "PSI by a trigger with a window of {} s", trigger.window.as_secs())
            }
            Access::Reading(error) => {
                write!(f, "PSI by reading it (the kernel refuses a trigger: {error})")
            }
            Access::None(error) => write!(f, "no PSI ({MEMORY}: {error})"),
        }
    }
}

/// The time since boot in which at least one task waited for memory.
///
/// # Errors
/// `NotFound`: the kernel has no PSI, or it is turned off. `InvalidData`: the file has another form.
pub fn some_stall() -> io::Result<Duration> {
    parse(&fs::read_to_string(MEMORY)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// In how many thousandths of the last 10 s at least one task waited for memory, by the kernel's own
/// average.
///
/// # Errors
/// As [`some_stall`].
pub fn some_permille() -> io::Result<u32> {
    average(&fs::read_to_string(MEMORY)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Parses the percentage of `some avg10=1.23 ...`, in tenths.
fn average(text: &str) -> Option<u32> {
    let percent: f64 = of_some(text, "avg10=")?.parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some((percent * 10.0) as u32)
}

/// Parses lines like `some avg10=0.00 avg60=0.00 avg300=0.00 total=520051535`, with a total in
/// microseconds.
fn parse(text: &str) -> Option<Duration> {
    of_some(text, "total=")?.parse().ok().map(Duration::from_micros)
}

/// The value behind `key` in the line about some tasks.
fn of_some<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_ascii_whitespace().find_map(|word| word.strip_prefix(key))
}

/// Has the kernel tell when tasks wait for memory. While none waits, it costs nothing.
#[derive(Debug)]
pub struct Trigger {
    file: File,
    window: Duration,
}

impl Trigger {
    /// A trigger that fires once at least one task waits for `percent` of the time of a window, and
    /// at most once in each window.
    ///
    /// # Errors
    /// As [`some_stall`]; or the kernel gives this process no trigger. `InvalidInput`: also if
    /// `percent` is not in 1 to 100.
    pub fn new(percent: u32) -> io::Result<Trigger> {
        let file = File::options().read(true).write(true).open(MEMORY)?;
        let make = |window| (&file).write_all(order(percent, window).as_bytes()).map(|()| window);
        let window = make(WINDOW).or_else(|_| make(WINDOW_OF_ALL))?;
        Ok(Trigger { file, window })
    }

    /// Waits until it fires, or `end` is readable or closed at its other side. Returns whether it
    /// has fired.
    ///
    /// # Errors
    /// Those of poll(2). `BrokenPipe`: the kernel has ended the trigger.
    pub fn wait(&self, end: BorrowedFd<'_>) -> io::Result<bool> {
        let mut events =
            [PollFd::new(&self.file, PollFlags::PRI), PollFd::from_borrowed_fd(end, PollFlags::IN)];
        retry_on_intr(|| poll(&mut events, None))?;
        let [fired, ended] = events.map(|event| event.revents());
        match fired.contains(PollFlags::ERR) {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => Ok(ended.is_empty()),
        }
    }
}

/// A trigger in the kernel's words, with a last byte that the kernel takes for the end of the text.
fn order(percent: u32, window: Duration) -> String {
    let window_us = window.as_micros();
    format!("some {} {window_us}\0", window_us * u128::from(percent) / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_some_tasks_counts() {
        let full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        let text = format!("{full}some avg10=1.00 avg60=0.00 avg300=0.00 total=520051535\n");
        assert_eq!(parse(&text), Some(Duration::from_micros(520_051_535)));
        assert_eq!(parse(full), None);
        assert_eq!((average(&text), average(full)), (Some(10), None));
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in [
            "",
            "some",
            "some ",
            "some total",
            "some total=",
            "some total=-1",
            "some total=1.5",
            "some avg10=0.00\ntotal=5",
            "some total=99999999999999999999",
            "something total=5",
            "\0some total=5",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        for text in ["some avg10=", "some avg10=-1.00", "some avg10=NaN", "some avg10=100.01"] {
            assert_eq!(average(text), None, "{text:?}");
        }
        assert_eq!(
            parse(&format!("some total={}", u64::MAX)),
            Some(Duration::from_micros(u64::MAX))
        );
    }

    #[test]
    fn a_trigger_is_ordered_in_the_kernels_words() {
        assert_eq!(order(15, WINDOW), "some 150000 1000000\0");
        assert_eq!(order(15, WINDOW_OF_ALL), "some 300000 2000000\0");
        assert_eq!(order(u32::MAX, WINDOW), "some 42949672950000 1000000\0");
    }

    #[test]
    fn the_form_of_this_kernels_psi_is_reported() {
        let told = Access::open(15).to_string();
        match some_stall() {
            Ok(before) => {
                assert!(told.starts_with("PSI by "), "{told}");
                assert!(some_stall().is_ok_and(|after| after >= before));
                assert!(Trigger::new(0).is_err() && Trigger::new(101).is_err());
            }
            Err(_) => assert!(told.starts_with("no PSI"), "{told}"),
        }
    }
}
