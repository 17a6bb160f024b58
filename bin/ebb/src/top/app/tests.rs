//! Keys, and what they change.

use super::*;
use crate::top::column::Column;
use crate::top::samples::{MIB, top, vm};

fn app(may_control: bool) -> App {
    let theme = Theme { is_coloured: false };
    let mut app = App::new(theme, Clock::utc(), String::new(), may_control);
    let vms = ["db", "mail", "web-1", "web-2"].map(vm).to_vec();
    app.on(Message::Figures(Ok(top(vms))));
    app
}

fn press(app: &mut App, keys: &str) -> Vec<Effect> {
    let key = |letter| match letter {
        '\n' => KeyCode::Enter,
        '\x1b' => KeyCode::Esc,
        '\x08' => KeyCode::Backspace,
        'D' => KeyCode::Down,
        'U' => KeyCode::Up,
        letter => KeyCode::Char(letter),
    };
    keys.chars().filter_map(|letter| app.on(Message::Key(key(letter).into()))).collect()
}

fn shown(app: &App) -> String {
    app.shown().iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_filter_shows_some_and_escape_all() {
    let mut app = app(false);
    assert_eq!(press(&mut app, "/WEBq"), []);
    assert_eq!((shown(&app).as_str(), app.filter.as_str()), ("", "WEBq"), "q is a letter here");
    assert_eq!(press(&mut app, "\x08"), []);
    assert_eq!(shown(&app), "web-1 web-2");
    press(&mut app, "\nD");
    assert_eq!(app.subject().unwrap().name.as_str(), "web-2");
    press(&mut app, "\x1b");
    assert_eq!(shown(&app), "db mail web-1 web-2");
    assert_eq!(app.subject().unwrap().name.as_str(), "web-2", "it stays chosen");
    press(&mut app, &("/".to_owned() + &"x".repeat(1000)));
    assert_eq!(app.filter.len(), FILTER_MOST);
}

#[test]
fn the_choice_stays_within_what_is_shown() {
    let mut app = app(false);
    press(&mut app, "UU");
    assert_eq!(app.subject().unwrap().name.as_str(), "db");
    press(&mut app, "DDDDDDDD");
    assert_eq!(app.subject().unwrap().name.as_str(), "web-2");
    app.on(Message::Key(KeyCode::Home.into()));
    app.on(Message::Key(KeyCode::PageDown.into()));
    assert_eq!(app.subject().unwrap().name.as_str(), "web-2");
    // The chosen one ends.
    app.on(Message::Figures(Ok(top(vec![vm("db")]))));
    assert_eq!(app.subject().unwrap().name.as_str(), "db");
    app.on(Message::Figures(Ok(top(vec![]))));
    press(&mut app, "DU\n");
    assert!(app.subject().is_none() && app.page == Page::Table);
}

#[test]
fn enter_shows_one_vm_and_escape_all_again() {
    let mut app = app(false);
    press(&mut app, "D\n");
    assert_eq!(app.page, Page::Vm("mail".parse().unwrap()));
    press(&mut app, "D");
    assert_eq!(app.page, Page::Vm("web-1".parse().unwrap()), "the next one");
    press(&mut app, "\x1b");
    assert_eq!((app.page.clone(), app.chosen_at(&app.shown())), (Page::Table, 2));
}

#[test]
fn keys_end_and_explain() {
    assert_eq!(press(&mut app(false), "?x/\n\nsSr q"), [Effect::Quit]);
    assert_eq!(press(&mut app(false), "?q"), [Effect::Quit]);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    let mut filtering = app(false);
    press(&mut filtering, "/");
    assert_eq!(filtering.on(Message::Key(interrupt)), Some(Effect::Quit));
    assert_eq!(app(false).on(Message::End), Some(Effect::Quit));
    let mut help = app(false);
    press(&mut help, "?");
    assert_eq!(help.input, Input::Help);
    press(&mut help, "?");
    assert_eq!(help.input, Input::Page);
}

#[test]
fn columns_sort_and_turn_round() {
    let mut app = app(false);
    press(&mut app, "s");
    assert_eq!(app.sort.by, Some(Column::Name));
    press(&mut app, "r");
    assert_eq!(shown(&app), "web-2 web-1 mail db");
    press(&mut app, "S");
    assert_eq!(app.sort, Sort { by: None, is_reversed: false });
}

#[test]
fn nothing_changes_without_leave_and_a_question() {
    let mut looking = app(false);
    assert_eq!(press(&mut looking, "hyl1G\ny"), []);
    press(&mut looking, "h");
    assert!(looking.message.as_ref().unwrap().contains("ebb top --control"));

    let mut app = app(true);
    assert_eq!(press(&mut app, "hn"), []);
    assert_eq!(app.message.as_deref(), Some("nothing is changed"));
    let vm: VmName = "db".parse().unwrap();
    let hold = Effect::Do(Change::Hold { vm: vm.clone(), hold: true });
    assert_eq!(press(&mut app, "hy"), [hold]);
    assert_eq!(press(&mut app, "hyly"), [], "one change at a time");
    app.on(Message::Done(Ok("db is held".into())));
    assert_eq!(app.message.as_deref(), Some("db is held"));

    press(&mut app, "l5X\n");
    assert_eq!(app.input, Input::Limit(vm.clone(), "5X".into()));
    assert!(app.message.as_ref().unwrap().contains("or `off`"), "{:?}", app.message);
    let limit = |bytes| Effect::Do(Change::Limit { vm: vm.clone(), bytes });
    assert_eq!(press(&mut app, "\x08\x08900M\ny"), [limit(Some(900 * MIB))]);
    app.on(Message::Done(Err("it is too low".into())));
    assert_eq!(app.message.as_deref(), Some("not done: it is too low"));
    assert_eq!(press(&mut app, "loff\ny"), [limit(None)]);
}

#[test]
fn history_goes_back_and_forward() {
    let mut present = app(false);
    present.on(Message::Key(KeyCode::Left.into()));
    assert!(!present.is_busy, "there is no past here");
    let theme = Theme { is_coloured: false };
    let mut app = App::new(theme, Clock::utc(), String::new(), false);
    let mut earlier = top(vec![vm("web")]);
    earlier.at_unix_ms -= 45_000;
    app.on(Message::Past(Ok(vec![earlier.clone(), top(vec![vm("web")])])));
    assert_eq!((app.past_s, shown(&app).as_str()), (Some(45), "web"));
    let back = Effect::Step { at_s: 1_795_874_703, is_forward: false };
    assert_eq!(app.on(Message::Key(KeyCode::Left.into())), Some(back));
    assert_eq!(app.on(Message::Key(KeyCode::Left.into())), None, "one step at a time");
    app.on(Message::Past(Ok(vec![earlier])));
    let forward = Effect::Step { at_s: 1_795_874_658, is_forward: true };
    assert_eq!(app.on(Message::Key(KeyCode::Right.into())), Some(forward));
    app.on(Message::Past(Ok(vec![])));
    assert_eq!(app.message.as_deref(), Some("nothing is on record there"));
    assert_eq!(shown(&app), "web", "the last moment stays");
}

#[test]
fn a_daemon_that_is_away_is_told_and_comes_back() {
    let mut app = app(true);
    app.on(Message::Figures(Err("no answer".into())));
    assert_eq!(app.silence.as_deref(), Some("no answer"));
    assert_eq!(shown(&app), "db mail web-1 web-2", "the last figures stay");
    assert_eq!(press(&mut app, "hy"), []);
    app.on(Message::Figures(Ok(top(vec![vm("new")]))));
    assert!(app.silence.is_none() && shown(&app) == "new");
}
