//! Text that a VMM chose, as messages and answers show it.

/// Most characters of a reason that is shown.
pub(crate) const REASON_MAX: usize = 200;

/// The first `most` characters of a text, on one line.
pub(crate) fn shown(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { '?' } else { c }).collect()
}
