//! The foot: what is asked or said, and the keys.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::{line, put};
use crate::top::app::{App, Input, Page};
use crate::top::trouble::{self, Trouble};

pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    let (text, style) = said(app);
    put(buffer, line(area, 0), &text, style);
    put(buffer, line(area, 1), &keys(app), app.theme.quiet());
}

/// What is asked, what is said about the last key, or what is wrong with the chosen VM.
fn said(app: &App) -> (String, Style) {
    let asked = match &app.input {
        Input::Filter => Some(format!("names with: {}_", app.filter)),
        Input::Limit(vm, text) => {
            let wrong = app.message.as_ref().map(|why| format!("   {}", trouble::clean(why)));
            Some(format!("limit of {vm}, a size or off: {text}_{}", wrong.unwrap_or_default()))
        }
        Input::Confirm(change) => {
            Some(format!("{}?  y: yes, any other key: no", change.question()))
        }
        Input::Page | Input::Help => app.message.as_deref().map(trouble::clean),
    };
    if let Some(asked) = asked {
        return (asked, app.theme.heading());
    }
    match app.subject() {
        Some(vm) => match trouble::of(vm) {
            (Trouble::None, note) if note.is_empty() => (String::new(), Style::new()),
            (worst, note) => (format!("{}: {note}", vm.name), app.theme.trouble(worst)),
        },
        None => (String::new(), Style::new()),
    }
}

fn keys(app: &App) -> String {
    let control = match (app.may_control, app.past_s) {
        (_, Some(_)) => "Left, Right time  ",
        (true, None) => "h hold  l limit  ",
        (false, None) => "",
    };
    match (&app.input, &app.page) {
        (Input::Help, _) => "any key goes back, q ends".into(),
        (Input::Filter, _) => "Enter keeps it, Esc shows all VMs".into(),
        (Input::Limit(..), _) => "Enter goes on, Esc changes nothing".into(),
        (Input::Confirm(_), _) => String::new(),
        (Input::Page, Page::Vm(_)) => {
            format!("Esc all VMs  Up, Down another VM  {control}? keys  q end")
        }
        (Input::Page, Page::Table) => {
            let filter = match app.filter.as_str() {
                "" => "/ filter".to_owned(),
                text => format!("/ filter: {text}"),
            };
            format!("{filter}  s sort: {}  Enter one VM  {control}? keys  q end", app.sort.words())
        }
    }
}
