//! The screen: a head with the host, a page, and a foot with what is said and asked.

mod bar;
mod foot;
mod head;
mod help;
mod one_vm;
mod table;
#[cfg(test)]
mod tests;

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;

use super::app::{App, Input, Page};

/// Smallest terminal on which anything can be read.
const WIDTH_LEAST: u16 = 20;
const HEIGHT_LEAST: u16 = 5;

/// Draws all of it.
pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    if area.width < WIDTH_LEAST || area.height < HEIGHT_LEAST {
        return put(buffer, area, "too small", Style::new());
    }
    let head = head::height(app, area.height);
    let rows = [Constraint::Length(head), Constraint::Fill(1), Constraint::Length(2)];
    let [head, body, foot] = Layout::vertical(rows).areas(area);
    head::draw(app, head, buffer);
    match (&app.input, &app.page) {
        (Input::Help, _) => help::draw(app, body, buffer),
        (_, Page::Table) => table::draw(app, body, buffer),
        (_, Page::Vm(name)) => one_vm::draw(app, name, body, buffer),
    }
    foot::draw(app, foot, buffer);
}

/// Returns all of it as plain text, as high as it has to be.
pub fn text(app: &App, width: u16) -> String {
    let vms = u16::try_from(app.shown().len()).unwrap_or(u16::MAX);
    // The head, the headings, the sum, and the foot.
    let area = Rect::new(0, 0, width, vms.min(10_000) + 14);
    let mut buffer = Buffer::empty(area);
    let head = line_range(area, 0, head::height(app, area.height));
    head::draw(app, head, &mut buffer);
    table::draw(app, line_range(area, head.height, area.height), &mut buffer);
    let lines = (0..area.height).map(|y| {
        let cells = (0..area.width).filter_map(|x| buffer.cell((x, y)));
        cells.map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
    });
    let lines: Vec<String> = lines.collect();
    lines.join("\n").trim_end().to_owned() + "\n"
}

/// The lines of an area from one on to before another.
fn line_range(area: Rect, from: u16, to: u16) -> Rect {
    let (from, to) = (from.min(area.height), to.min(area.height));
    Rect { y: area.y + from, height: to.saturating_sub(from), ..area }
}

/// One line of an area; empty if it has fewer.
fn line(area: Rect, number: u16) -> Rect {
    line_range(area, number, number.saturating_add(1))
}

/// Writes text at the left of an area's first line, as far as it fits.
fn put(buffer: &mut Buffer, area: Rect, text: &str, style: Style) {
    let area = area.intersection(buffer.area);
    if !area.is_empty() {
        buffer.set_stringn(area.x, area.y, text, usize::from(area.width), style);
    }
}

/// Writes text at the right of an area's first line, as far as it fits. Returns what is left of the
/// area.
fn put_right(buffer: &mut Buffer, area: Rect, text: &str, style: Style) -> Rect {
    let length = u16::try_from(text.chars().count()).unwrap_or(u16::MAX).min(area.width);
    let left = area.width - length;
    put(buffer, Rect { x: area.x + left, width: length, ..area }, text, style);
    Rect { width: left.saturating_sub(1), ..area }
}
