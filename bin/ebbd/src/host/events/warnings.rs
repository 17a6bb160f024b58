//! Which warnings about a VM have appeared or vanished since its last figures.

use ebb_api::WarningFigures;

/// Most warnings of a VM that are followed.
const MOST: usize = 32;
/// A unit behind a figure.
const UNITS: [&str; 8] = ["B", "KiB", "MiB", "GiB", "TiB", "%", "s", "ms"];

/// The warnings about one VM.
#[derive(Default)]
pub struct Warnings(Vec<Known>);

struct Known {
    /// The text without its figures: a warning whose figures change is the same one.
    key: String,
    text: String,
}

impl Warnings {
    /// Takes the warnings of new figures. Returns what has changed: what has vanished first.
    pub fn update<'a>(&mut self, now: impl Iterator<Item = &'a str>) -> Vec<WarningFigures> {
        let mut before = std::mem::take(&mut self.0);
        let mut appeared = Vec::new();
        for text in now {
            let key = key(text);
            if self.0.len() == MOST || self.0.iter().any(|known| known.key == key) {
                continue;
            }
            match before.iter().position(|known| known.key == key) {
                Some(at) => drop(before.swap_remove(at)),
                None => appeared.push(WarningFigures { appeared: true, warning: text.into() }),
            }
            self.0.push(Known { key, text: text.into() });
        }
        let vanished = before.into_iter().map(|known| known.text);
        let vanished = vanished.map(|warning| WarningFigures { appeared: false, warning });
        vanished.chain(appeared).collect()
    }
}

/// The words of a text that are neither figures nor their units.
fn key(text: &str) -> String {
    let is_figure =
        |word: &str| word.trim_start_matches('(').starts_with(|c: char| c.is_ascii_digit());
    let is_unit = |word: &str| UNITS.contains(&word.trim_end_matches([',', ':', ';', ')', '.']));
    let words = text.split_whitespace().filter(|word| !is_figure(word) && !is_unit(word));
    words.collect::<Vec<_>>().join(" ")
}
