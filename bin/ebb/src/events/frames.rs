//! Server-sent events, cut into the data of each.

use anyhow::ensure;

/// Longest event: the longest text, and its figures.
const MOST_BYTES: usize = 1 << 20;

/// What has come of a stream and makes no whole line yet, and the data of the event under way.
#[derive(Default)]
pub struct Frames {
    line: Vec<u8>,
    data: Vec<u8>,
}

impl Frames {
    /// Takes what has come, and returns the data of each event that is whole now.
    ///
    /// # Errors
    /// An event is longer than any is, or is no text.
    pub fn take(&mut self, bytes: &[u8]) -> anyhow::Result<Vec<String>> {
        let mut all = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                let length = self.line.len().saturating_add(self.data.len());
                ensure!(length <= MOST_BYTES, "ebbd tells an event of more than 1 MiB");
                continue;
            }
            let line = std::mem::take(&mut self.line);
            match line.strip_suffix(b"\r").unwrap_or(&line) {
                [] if self.data.is_empty() => {}
                [] => all.push(String::from_utf8(std::mem::take(&mut self.data))?),
                line => self.add(line),
            }
        }
        Ok(all)
    }

    /// Adds a line of an event. All but data is left out: the data says it, too.
    fn add(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else { return };
        if !self.data.is_empty() {
            self.data.push(b'\n');
        }
        self.data.extend(data.strip_prefix(b" ").unwrap_or(data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_they_are_cut() {
        let stream =
            b": alive\n\nid: 7\ndata: {\"a\":\ndata: 1}\n\nid: 8\r\ndata:{}\r\n\r\nid: 9\n";
        for cut in 1..stream.len() {
            let mut frames = Frames::default();
            let found = stream.chunks(cut).flat_map(|part| frames.take(part).unwrap());
            assert_eq!(found.collect::<Vec<_>>(), ["{\"a\":\n1}", "{}"], "pieces of {cut}");
        }
    }

    #[test]
    fn what_never_ends_is_given_up() {
        let mut frames = Frames::default();
        let endless = vec![b'x'; MOST_BYTES];
        assert!(frames.take(&endless).unwrap().is_empty());
        assert!(frames.take(b"x").is_err());
        let mut frames = Frames::default();
        let line = [&b"data:"[..], &[b'x'; 1000], b"\n"].concat();
        assert!((0..2000).any(|_| frames.take(&line).is_err()));
    }

    #[test]
    fn what_is_no_text_is_refused() {
        assert!(Frames::default().take(b"data: \xff\n\n").is_err());
    }
}
