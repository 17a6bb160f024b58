//! The head: what is wrong, the host's memory, and what the pilot does.

use ebb_api::{PilotMode, PilotStage, SeenBound, Top, TopHost};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};

use super::{line, put, put_right};
use crate::top::app::App;
use crate::top::number::{percent, size};
use crate::top::trouble::{self, Trouble};

/// Terminals with fewer lines have neither the gauge nor a blank line.
const HEIGHT_FOR_GAUGE: u16 = 14;

/// Lines that the head takes.
pub fn height(app: &App, screen: u16) -> u16 {
    let bounds = app.top.as_ref().is_some_and(|top| tightest(&top.host).is_some());
    let more = u16::from(bounds) + if screen >= HEIGHT_FOR_GAUGE { 2 } else { 0 };
    2 + more
}

pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    title(app, line(area, 0), buffer);
    let Some(top) = &app.top else { return };
    host(app, &top.host, line(area, 1), buffer);
    let mut next = 2;
    if let Some(bound) = tightest(&top.host) {
        let text = format!("{}: {}", trouble::clean(&bound.name), left_of(bound));
        put(buffer, line(area, next), &text, style_of(app, bound, &top.host));
        next += 1;
    }
    if area.height > next {
        gauge(app, &top.host, line(area, next), buffer);
    }
}

fn title(app: &App, area: Rect, buffer: &mut Buffer) {
    let theme = app.theme;
    let left = match &app.top {
        Some(top) => put_right(buffer, area, &pilot(&top.host), Style::new()),
        None => area,
    };
    let name = "ebb top  ";
    put(buffer, left, name, theme.heading());
    let rest = Rect { x: left.x + name.len() as u16, width: left.width.saturating_sub(9), ..left };
    match (&app.silence, &app.top) {
        (Some(why), top) => {
            let since =
                top.as_ref().map(|top| format!(", figures of {}", app.clock.time(top.at_unix_ms)));
            let text = format!("NO ANSWER{}: {}", since.unwrap_or_default(), trouble::clean(why));
            put(buffer, rest, &text, theme.trouble(Trouble::Waits));
        }
        (None, None) => put(buffer, rest, "asking the daemon", theme.quiet()),
        (None, Some(top)) => {
            let (worst, words) = summary(top);
            let time = match app.past_s {
                None => app.clock.time(top.at_unix_ms),
                Some(_) => format!("HISTORY {}", app.clock.day_and_time(top.at_unix_ms)),
            };
            let text = format!("{time}  {words}");
            put(buffer, rest, &text, theme.trouble(worst));
        }
    }
}

/// How many VMs there are, and how many are in trouble.
fn summary(top: &Top) -> (Trouble, String) {
    let count = |wanted: Trouble| top.vms.iter().filter(|vm| trouble::of(vm).0 == wanted).count();
    let (waits, slow) = (count(Trouble::Waits), count(Trouble::Slow));
    let all = match top.vms.len() {
        0 => "no VM is managed".to_owned(),
        1 => "1 VM".to_owned(),
        many => format!("{many} VMs"),
    };
    let some = |count: usize, one: &str, more: &str| match count {
        0 => String::new(),
        1 => format!(", 1 {one}"),
        many => format!(", {many} {more}"),
    };
    let worst = match (waits, slow) {
        (0, 0) => Trouble::None,
        (0, _) => Trouble::Slow,
        _ => Trouble::Waits,
    };
    (worst, all + &some(waits, "waits", "wait") + &some(slow, "is slow", "are slow"))
}

fn pilot(host: &TopHost) -> String {
    let mode = match host.pilot {
        PilotMode::On => "on",
        PilotMode::DryRun => "dry run",
        PilotMode::Off => return "pilot off".into(),
    };
    let stage = host.stage.map_or("looking", PilotStage::as_str);
    format!("pilot {mode}, host {stage}")
}

fn host(app: &App, host: &TopHost, area: Rect, buffer: &mut Buffer) {
    let whole = SeenBound {
        name: String::new(),
        total_bytes: host.total_bytes,
        available_bytes: host.available_bytes,
    };
    let stall = match host.stall_permille {
        Some(permille) => format!("tasks wait {}", percent(permille)),
        None => "no PSI".into(),
    };
    let text =
        format!("host     {}, reserve {}, {stall}", left_of(&whole), size(host.reserve_bytes));
    put(buffer, area, &text, style_of(app, &whole, host));
}

fn left_of(bound: &SeenBound) -> String {
    format!("{} of {} available", size(bound.available_bytes), size(bound.total_bytes))
}

/// The control group with the least available memory, if that is less than the host's.
fn tightest(host: &TopHost) -> Option<&SeenBound> {
    let least = host.bounds.iter().min_by_key(|bound| bound.available_bytes);
    least.filter(|bound| bound.available_bytes < host.available_bytes)
}

/// A bound that has less than the host's reserve, in parts of it, is worth a look.
fn style_of(app: &App, bound: &SeenBound, host: &TopHost) -> Style {
    let part = u128::from(host.reserve_bytes) * u128::from(bound.total_bytes);
    let reserve = part / u128::from(host.total_bytes.max(1));
    let stalled = host.stall_permille.is_some_and(|permille| permille >= 150);
    let available = u128::from(bound.available_bytes);
    app.theme.trouble(match () {
        () if available < reserve => Trouble::Waits,
        () if available < 2 * reserve || stalled => Trouble::Slow,
        () => Trouble::None,
    })
}

/// The host's memory as a line: what is taken, what is left, and where the reserve begins.
fn gauge(app: &App, host: &TopHost, area: Rect, buffer: &mut Buffer) {
    let label = "         ";
    let Some(width) = area.width.checked_sub(label.len() as u16 + 1).filter(|width| *width > 9)
    else {
        return;
    };
    let columns = |bytes: u64| {
        let total = u128::from(host.total_bytes.max(1));
        u16::try_from((u128::from(bytes) * u128::from(width) / total).min(u128::from(width)))
            .unwrap_or(width)
    };
    let taken = columns(host.total_bytes.saturating_sub(host.available_bytes));
    let reserve = columns(host.total_bytes.saturating_sub(host.reserve_bytes));
    for column in 0..width {
        let (symbol, style) = match column {
            _ if column == reserve => ("|", app.theme.heading()),
            _ if column < taken => ("█", app.theme.of(Color::Blue)),
            _ => ("░", app.theme.quiet()),
        };
        let x = area.x + label.len() as u16 + column;
        put(buffer, Rect { x, width: 1, ..area }, symbol, style);
    }
}
