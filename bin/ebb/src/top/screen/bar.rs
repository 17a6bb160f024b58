//! A VM's memory as a bar, with a letter or a shade for each part.

use ebb_api::TopVm;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};

use super::put;
use crate::top::theme::Theme;

/// A part of a bar.
pub struct Part {
    pub name: &'static str,
    pub bytes: u64,
    pub symbol: &'static str,
    pub style: Style,
}

/// The parts of a VM's memory; none: they are not known.
pub fn parts(theme: Theme, vm: &TopVm) -> Option<[Part; 6]> {
    let parts = vm.parts?;
    let part = |name, bytes, symbol, style| Part { name, bytes, symbol, style };
    let free = parts.free_bytes.unwrap_or(0);
    Some([
        part("in use", parts.in_use_bytes, "█", theme.of(Color::Green)),
        part("free", free, "▒", theme.of(Color::Cyan)),
        part("compressed", parts.compressed_bytes, "c", theme.of(Color::Magenta)),
        part("swapped", parts.swapped_bytes, "s", theme.of(Color::Yellow)),
        part("disk-backed", parts.disk_backed_bytes, "d", theme.of(Color::Blue)),
        part("empty", parts.empty_bytes, "·", theme.quiet()),
    ])
}

/// Draws a bar that fills a line.
pub fn draw(theme: Theme, vm: &TopVm, area: Rect, buffer: &mut Buffer) {
    let Some(parts) = parts(theme, vm) else { return };
    let total = u128::from(vm.memory_bytes.max(1));
    let (mut at, mut bytes) = (0, 0u128);
    for part in parts {
        bytes += u128::from(part.bytes);
        let end = u16::try_from(bytes * u128::from(area.width) / total).unwrap_or(u16::MAX);
        for column in at..end.min(area.width) {
            let cell = Rect { x: area.x + column, width: 1, ..area };
            put(buffer, cell, part.symbol, part.style);
        }
        at = end.max(at);
    }
}
