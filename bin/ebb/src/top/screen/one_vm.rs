//! One VM: its parts, and its last minutes.

use ebb_api::{TopVm, VmName};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::widgets::{Sparkline, Widget};

use super::{bar, line, line_range, put, put_right};
use crate::interval::readable;
use crate::top::app::App;
use crate::top::number::{count, size};
use crate::top::trail::Point;
use crate::top::trouble;

/// Width of the text left of a chart.
const LABEL: u16 = 22;

/// A chart: its name, its figure of a moment, how that is written, and its colour.
struct Chart {
    name: &'static str,
    of: fn(&Point) -> u64,
    text: fn(u64) -> String,
    colour: Color,
}

const CHARTS: [Chart; 4] = [
    Chart { name: "resident", of: |at| at.resident_bytes, text: size, colour: Color::Green },
    Chart { name: "evicted", of: |at| at.evicted_bytes, text: size, colour: Color::Magenta },
    Chart { name: "back/s", of: |at| at.refaulted_bytes, text: size, colour: Color::Yellow },
    Chart { name: "faults/s", of: |at| at.faults, text: count, colour: Color::Cyan },
];

pub fn draw(app: &App, name: &VmName, area: Rect, buffer: &mut Buffer) {
    let Some(vm) = app.vm(name) else {
        let text = format!("{name} is no longer managed (Esc goes back)");
        return put(buffer, area, &text, app.theme.quiet());
    };
    put(buffer, line(area, 0), name.as_str(), app.theme.heading());
    let x = area.x + (name.as_str().len() as u16 + 2).min(area.width);
    let rest = Rect { x, width: area.right().saturating_sub(x), ..line(area, 0) };
    put(buffer, rest, &about(vm), app.theme.trouble(trouble::of(vm).0));
    bar::draw(app.theme, vm, line(area, 1), buffer);
    let parts = line_range(area, 2, area.height);
    let used = legend(app, vm, parts, buffer);
    charts(app, name, line_range(parts, used, parts.height), buffer);
}

fn about(vm: &TopVm) -> String {
    let limit = match (vm.limit_bytes, vm.limit_by_pilot) {
        (None, _) => "no limit".into(),
        (Some(bytes), false) => format!("limit {}", size(bytes)),
        (Some(bytes), true) => format!("limit {} by the pilot", size(bytes)),
    };
    let works =
        vm.working_bytes.map_or(String::new(), |bytes| format!(", works with {}", size(bytes)));
    let hold = if vm.hold { ", held" } else { "" };
    let faults = match vm.fault_ns.as_ref().map(|ns| (ns.p50, ns.p99)) {
        Some((Some(p50), Some(p99))) => {
            format!(", faults p50 {}, p99 {}", readable(p50), readable(p99))
        }
        _ => String::new(),
    };
    let memory = size(vm.memory_bytes);
    format!("{memory} of memory, {limit}{works}, class {}{hold}{faults}", vm.class)
}

/// Names the parts of the bar, as many on a line as fit. Returns the lines it took.
fn legend(app: &App, vm: &TopVm, area: Rect, buffer: &mut Buffer) -> u16 {
    let Some(parts) = bar::parts(app.theme, vm) else { return 0 };
    let is_known = vm.parts.is_some_and(|parts| parts.free_bytes.is_some());
    let (mut row, mut x) = (0, area.x);
    for part in parts {
        let bytes = if part.name == "free" && !is_known { "?".into() } else { size(part.bytes) };
        let text = format!("{} {} {bytes}", part.symbol, part.name);
        let width = text.chars().count() as u16;
        if x > area.x && x + width > area.right() {
            (row, x) = (row + 1, area.x);
        }
        let place = Rect { x, width: area.right().saturating_sub(x), ..line(area, row) };
        put(buffer, place, &text, Style::new());
        put(buffer, place, part.symbol, part.style);
        x = x.saturating_add(width + 3);
    }
    row + 1
}

fn charts(app: &App, name: &VmName, area: Rect, buffer: &mut Buffer) {
    let count = CHARTS.len() as u16;
    // Each has a blank line below, if there is room.
    let each = area.height.saturating_sub(1) / count;
    let height = each.saturating_sub(1).clamp(1, 6);
    let width = area.width.saturating_sub(LABEL);
    let points = app.trails.of(name, usize::from(width));
    let seconds = app.past_s.unwrap_or(points.len() as u64);
    let seconds = format!("the last {seconds} s");
    put_right(buffer, line(area, 0), &seconds, app.theme.quiet());
    let area = line_range(area, 1, area.height);
    for (number, chart) in (0..).zip(CHARTS) {
        let top = number * each.max(1);
        let area = line_range(area, top, top + height);
        if area.is_empty() {
            return;
        }
        draw_chart(app, &chart, &points, area, buffer);
    }
}

fn draw_chart(app: &App, chart: &Chart, points: &[Point], area: Rect, buffer: &mut Buffer) {
    let figures: Vec<u64> = points.iter().map(chart.of).collect();
    let (now, most) = (figures.last().copied(), figures.iter().copied().max().unwrap_or(0));
    let label = format!("{:<9}{:>6}", chart.name, now.map_or("?".into(), chart.text));
    put(buffer, Rect { width: LABEL.min(area.width), ..area }, &label, Style::new());
    if area.height > 1 {
        let text = format!("{:<9}{:>6}", "  most", (chart.text)(most));
        put(
            buffer,
            Rect { width: LABEL.min(area.width), ..line(area, 1) },
            &text,
            app.theme.quiet(),
        );
    }
    let x = area.x + LABEL.min(area.width);
    let place = Rect { x, width: area.right().saturating_sub(x), ..area };
    // The latest moment stands at the right.
    let missing = usize::from(place.width).saturating_sub(figures.len());
    let padded = std::iter::repeat_n(0, missing).chain(figures).collect::<Vec<u64>>();
    let line = Sparkline::default().data(padded).max(most.max(1)).style(app.theme.of(chart.colour));
    line.render(place.intersection(buffer.area), buffer);
}
