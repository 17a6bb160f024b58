//! The serial line to the host.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::{Context, Result};

const PATH: &str = "/dev/ttyS0";

/// The line, and the last answer sent on it.
pub struct Line {
    input: BufReader<File>,
    last: String,
}

impl Line {
    /// Opens it without echo or any other processing of characters.
    pub fn open() -> Result<Line> {
        let file = File::options().read(true).write(true).open(PATH).context(PATH)?;
        let mut settings = tcgetattr(&file).context(PATH)?;
        settings.make_raw();
        tcsetattr(&file, OptionalActions::Now, &settings).context(PATH)?;
        Ok(Line { input: BufReader::new(file), last: String::new() })
    }

    /// Waits for the next request. Skips everything else.
    pub fn request(&mut self) -> Result<(u64, String)> {
        loop {
            let mut line = String::new();
            if self.input.read_line(&mut line).context(PATH)? == 0 {
                return Err(format!("{PATH} is closed"));
            }
            if let Some(request) = parse(line.trim()) {
                return Ok(request);
            }
        }
    }

    /// Answers request `number`.
    pub fn answer(&mut self, number: u64, outcome: &Result<String>) -> Result<()> {
        let (word, text) = match outcome {
            Ok(text) => ("ok", text),
            Err(text) => ("error", text),
        };
        let text = escape(text);
        self.last = format!("\n@{number} {word} \"{text}\" ${}\n", text.len());
        self.repeat()
    }

    /// Sends the last answer again.
    pub fn repeat(&mut self) -> Result<()> {
        self.input.get_mut().write_all(self.last.as_bytes()).context(PATH)
    }
}

/// Parses `#17 cat /proc/meminfo`.
fn parse(line: &str) -> Option<(u64, String)> {
    let (number, request) = line.strip_prefix('#')?.split_once(' ')?;
    Some((number.parse().ok()?, request.trim().to_owned()))
}

/// Escapes text for the inside of a JSON string, in ASCII.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for unit in text.encode_utf16() {
        match char::from_u32(unit.into()) {
            Some('\n') => out.push_str("\\n"),
            Some(c @ ('"' | '\\')) => out.extend(['\\', c]),
            Some(c @ ' '..='~') => out.push(c),
            _ => write!(out, "\\u{unit:04x}").expect("a String takes all"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_differ_from_noise() {
        assert_eq!(parse("#17 fill a 600M"), Some((17, "fill a 600M".into())));
        for noise in ["", "fill a 600M", "#x ping", "#17"] {
            assert_eq!(parse(noise), None, "{noise}");
        }
    }

    #[test]
    fn answers_are_json_on_one_line() {
        assert_eq!(escape("a\tb\n\"\\\u{e9}"), r#"a\u0009b\n\"\\\u00e9"#);
    }
}
