//! `ebb top`: the host and all VMs on one screen, as they change. The daemon answers from what VMs
//! have published: a request a second for all of them, and no VM is asked.

mod app;
mod clock;
mod column;
mod feed;
mod number;
#[cfg(test)]
mod samples;
mod screen;
mod terminal;
mod theme;
mod trail;
mod trouble;

use std::env;
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::bail;
use ebb_api::Top;
use ratatui::crossterm;

use self::app::{App, Message};
use self::clock::Clock;
use self::theme::Theme;
use crate::args;

/// Width of the text of `--once` where no terminal has one.
const WIDTH: u16 = 160;
/// Bounds of that width.
const WIDTHS: std::ops::RangeInclusive<u16> = 80..=400;

/// Returns the figures as text.
pub fn once(args: &args::Top, top: Top) -> String {
    let mut app =
        App::new(Theme { is_coloured: false }, Clock::local(), args.filter.clone(), false);
    app.on(Message::Figures(Ok(top)));
    let of_terminal = || crossterm::terminal::size().ok().map(|(width, _)| width);
    let width = io::stdout().is_terminal().then(of_terminal).flatten().unwrap_or(WIDTH);
    screen::text(&app, width.clamp(*WIDTHS.start(), *WIDTHS.end()))
}

/// Checks that there is a terminal to show the figures on.
///
/// # Errors
/// There is none.
pub fn check_terminal() -> anyhow::Result<()> {
    match io::stdout().is_terminal() && io::stdin().is_terminal() {
        true => Ok(()),
        false => bail!("ebb top needs a terminal: use ebb list, or ebb top --once"),
    }
}

/// Shows the figures until a key ends it.
///
/// # Errors
/// The terminal cannot be used.
pub fn show(run_dir: &Path, args: &args::Top, first: Top) -> anyhow::Result<()> {
    let is_coloured = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let theme = Theme { is_coloured };
    let mut app = App::new(theme, Clock::local(), args.filter.clone(), args.control);
    app.on(Message::Figures(Ok(first)));
    terminal::run(app, run_dir)
}
