//! `ebb top`: the host and all VMs on one screen, as they change. The daemon answers from what VMs
//! have published: a request a second for all of them, and no VM is asked.

mod app;
mod column;
mod feed;
mod number;
mod past;
#[cfg(test)]
mod samples;
mod screen;
mod terminal;
mod theme;
mod trail;
mod trouble;

use std::env;
use std::io::{self, IsTerminal};

use anyhow::bail;
use ebb_api::{History, HistoryQuery, Top};
use ratatui::crossterm;

use self::app::{App, Message};
pub use self::feed::Source;
use self::past::Past;
use self::theme::Theme;
use crate::args;
use crate::clock::Clock;

/// Width of the text of `--once` where no terminal has one.
const WIDTH: u16 = 160;
/// Bounds of that width.
const WIDTHS: std::ops::RangeInclusive<u16> = 80..=400;

/// Returns the figures as text.
pub fn once(args: &args::Top, first: Vec<Top>) -> String {
    let mut app =
        App::new(Theme { is_coloured: false }, Clock::local(), args.filter.clone(), false);
    for message in messages(args, first) {
        app.on(message);
    }
    let of_terminal = || crossterm::terminal::size().ok().map(|(width, _)| width);
    let width = io::stdout().is_terminal().then(of_terminal).flatten().unwrap_or(WIDTH);
    screen::text(&app, width.clamp(*WIDTHS.start(), *WIDTHS.end()))
}

/// What the program shows first: figures of the past or of now.
fn messages(args: &args::Top, first: Vec<Top>) -> Vec<Message> {
    match args.at {
        Some(_) => vec![Message::Past(Ok(first))],
        None => first.into_iter().map(|top| Message::Figures(Ok(top))).collect(),
    }
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

/// The moments up to the one that `--at` names, which comes last. `ask`: asks the daemon for history.
///
/// # Errors
/// There is no history, or nothing is on record before.
pub fn past(at_s: u64, ask: impl Fn(&str) -> anyhow::Result<History>) -> anyhow::Result<Vec<Top>> {
    let ask = |query: &HistoryQuery| {
        let found = ask(&past::path_of(query)).map_err(|error| format!("{error:#}"))?;
        Ok(found.points)
    };
    let all = Past { ask }.until(at_s).map_err(anyhow::Error::msg)?;
    match all.is_empty() {
        true => {
            bail!(
                "nothing is on record up to {}: ebbd writes down what is from its start on",
                Clock::local().day_and_time(at_s.saturating_mul(1000))
            )
        }
        false => Ok(all),
    }
}

/// Shows the figures until a key ends it.
///
/// # Errors
/// The terminal cannot be used.
pub fn show(source: Source, args: &args::Top, first: Vec<Top>) -> anyhow::Result<()> {
    let is_coloured = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let theme = Theme { is_coloured };
    let mut app = App::new(theme, Clock::local(), args.filter.clone(), args.control);
    for message in messages(args, first) {
        app.on(message);
    }
    terminal::run(app, source)
}
