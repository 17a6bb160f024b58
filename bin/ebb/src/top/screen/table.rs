//! The table of all VMs.

use ebb_api::TopVm;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

use super::{bar, line, line_range, put, put_right};
use crate::top::app::App;
use crate::top::column::{Column, fitting};
use crate::top::trouble;

/// Text over some columns.
const GROUPS: [(&str, Column, Column); 2] = [
    ("resident", Column::InUse, Column::Free),
    ("evicted", Column::Compressed, Column::DiskBacked),
];

/// A column, and where it is on a line.
struct Place {
    column: Column,
    x: u16,
    width: u16,
}

pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    let shown = app.shown();
    let longest = shown.iter().map(|vm| vm.name.as_str().len() + 2).max().unwrap_or(0);
    let places = places(area, u16::try_from(longest).unwrap_or(u16::MAX));
    let has_groups = area.height >= 8;
    if has_groups {
        groups(app, &places, line(area, 0), buffer);
    }
    let area = line_range(area, u16::from(has_groups), area.height);
    headings(app, &places, line(area, 0), buffer);
    let body = line_range(area, 1, area.height);
    if shown.is_empty() {
        return put(buffer, body, &why_empty(app), app.theme.quiet());
    }
    let sums = u16::from(shown.len() > 1 && body.height > 3);
    let room = usize::from(body.height - sums);
    let chosen = app.chosen_at(&shown);
    let first = (chosen + 1).saturating_sub(room);
    let visible = shown.iter().enumerate().skip(first).take(room);
    let mut next = 0;
    for (at, vm) in visible {
        row(app, vm, &places, (line(body, next), at == chosen), buffer);
        next += 1;
    }
    if sums > 0 {
        sum(app, &shown, &places, line(body, next), buffer);
    }
}

fn places(area: Rect, longest_name: u16) -> Vec<Place> {
    let mut x = area.x;
    let place = |(column, width)| {
        let place = Place { column, x, width };
        x += width + 1;
        place
    };
    fitting(area.width, longest_name).into_iter().map(place).collect()
}

impl Place {
    fn on(&self, line: Rect) -> Rect {
        Rect { x: self.x, width: self.width, ..line }
    }

    fn put(&self, line: Rect, text: &str, style: Style, buffer: &mut Buffer) {
        match self.column.is_text() {
            true => {
                put(buffer, self.on(line), text, style);
                if self.column == Column::Name && text.chars().count() > usize::from(self.width) {
                    let x = self.x + self.width - 1;
                    put(buffer, Rect { x, width: 1, ..line }, "…", style);
                }
            }
            false => drop(put_right(buffer, self.on(line), text, style)),
        }
    }
}

fn groups(app: &App, places: &[Place], area: Rect, buffer: &mut Buffer) {
    for (name, from, to) in GROUPS {
        let find = |column| places.iter().find(|place| place.column == column);
        let (Some(from), Some(to)) = (find(from), find(to)) else { continue };
        let width = to.x + to.width - from.x;
        let dashes = usize::from(width).saturating_sub(name.len() + 2);
        let (left, right) = (dashes / 2, dashes - dashes / 2);
        let text = format!("{} {name} {}", "─".repeat(left), "─".repeat(right));
        put(buffer, Rect { x: from.x, width, ..area }, &text, app.theme.quiet());
    }
}

fn headings(app: &App, places: &[Place], area: Rect, buffer: &mut Buffer) {
    for place in places {
        let text = match place.column {
            Column::Name => "  NAME",
            other => other.heading(),
        };
        let style = match app.sort.by == Some(place.column) {
            true => app.theme.heading().add_modifier(Modifier::UNDERLINED),
            false => app.theme.heading(),
        };
        place.put(area, text, style, buffer);
    }
}

fn why_empty(app: &App) -> String {
    let has_vms = app.top.as_ref().map(|top| !top.vms.is_empty());
    match has_vms {
        None => String::new(),
        Some(true) => format!("  no VM has {:?} in its name (Esc shows all)", app.filter),
        Some(false) => "  no VM is managed: ebb run starts one, ebb attach takes one".into(),
    }
}

fn row(
    app: &App,
    vm: &TopVm,
    places: &[Place],
    (line, is_chosen): (Rect, bool),
    buffer: &mut Buffer,
) {
    let style = app.theme.trouble(trouble::of(vm).0);
    for place in places {
        let text = place.column.cell(vm);
        let is_quiet = matches!(text.trim(), "0" | "-" | "?");
        let style = match place.column {
            Column::Name | Column::Note => style,
            Column::Refaults if vm.misses_memory => style,
            Column::Limit if exceeds(vm) => app.theme.trouble(trouble::Trouble::Slow),
            _ if is_quiet => app.theme.quiet(),
            _ => Style::new(),
        };
        match place.column {
            Column::Bar => bar::draw(app.theme, vm, place.on(line), buffer),
            _ => place.put(line, &text, style, buffer),
        }
    }
    if is_chosen {
        buffer.set_style(line, app.theme.chosen());
    }
}

/// Whether a VM takes more than its limit.
fn exceeds(vm: &TopVm) -> bool {
    let resident = vm.parts.unwrap_or_default().resident_bytes();
    let taken = resident.saturating_add(vm.compressed_in_bytes);
    vm.limit_bytes.is_some_and(|limit| taken > limit)
}

fn sum(app: &App, shown: &[&TopVm], places: &[Place], area: Rect, buffer: &mut Buffer) {
    for place in places {
        let text = match place.column {
            Column::Name => Some("  all".into()),
            other => other.sum(shown),
        };
        if let Some(text) = text {
            place.put(area, &text, app.theme.heading(), buffer);
        }
    }
}
