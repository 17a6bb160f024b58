//! The page of keys, and what the columns mean.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::{line, put};
use crate::top::app::{App, KEYS};
use crate::top::column::Column;

/// Where the explanations begin.
const INDENT: u16 = 12;

pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    let keys = KEYS.into_iter().map(|(key, what)| (key, what, true));
    let columns = Column::ALL.map(|column| (column.heading(), column.meaning(), false));
    let blank = ("", "", false);
    let rows = keys.chain([blank]).chain(columns);
    for (number, (word, what, is_key)) in (0..).zip(rows) {
        let row = line(area, number);
        let style = if is_key { app.theme.heading() } else { Style::new() };
        let word = if word.len() > 10 { "BAR" } else { word };
        put(buffer, row, word, style);
        let x = row.x + INDENT.min(row.width);
        put(buffer, Rect { x, width: row.width.saturating_sub(INDENT), ..row }, what, Style::new());
    }
}
