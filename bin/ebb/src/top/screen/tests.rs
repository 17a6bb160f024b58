//! What is on the screen.

use ebb_api::{PilotMode, SeenBound, State, Top};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::KeyCode;
use ratatui::style::{Color, Modifier};

use super::*;
use crate::clock::Clock;
use crate::top::app::Message;
use crate::top::samples::{GIB, MIB, top, vm};
use crate::top::theme::Theme;

fn app_of(top: Top, is_coloured: bool) -> App {
    let mut app = App::new(Theme { is_coloured }, Clock::utc(), String::new(), true);
    app.on(Message::Figures(Ok(top)));
    app
}

fn drawn(app: &App, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(app, frame.area(), frame.buffer_mut())).unwrap();
    terminal
}

/// The lines of the screen, without blanks at their ends.
fn lines(app: &App, width: u16, height: u16) -> Vec<String> {
    let terminal = drawn(app, width, height);
    let symbols = terminal.backend().buffer().content().chunks(usize::from(width));
    let line = |cells: &[ratatui::buffer::Cell]| {
        cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
    };
    symbols.map(line).collect()
}

fn press(app: &mut App, key: KeyCode) {
    app.on(Message::Key(key.into()));
}

#[test]
fn the_screen_of_two_vms() {
    let (mut web, db) = (vm("web"), vm("db"));
    web.refaulted_bytes_per_s = Some(40 * MIB);
    web.misses_memory = true;
    let app = app_of(top(vec![db, web]), false);
    let lines = lines(&app, 100, 18);
    let wanted = [
        "ebb top  14:05:03  2 VMs, 1 is slow                                             pilot on, host ample",
        "host     20.0G of 64.0G available, reserve 6.00G, tasks wait 0.4 %",
        "         █████████████████████████████████████████████████████████████░░░░░░░░░░░░░░░░░░░░|░░░░░░░░",
        "",
        "                ─ resident ──        ───── evicted ──────",
        "  NAME   LIMIT  IN USE   FREE  EMPTY  COMPR   SWAP   DISK   SIZE BACK/s FAULTS/s CLASS   HOLD",
        "~ web    1.17G*  1000M   100M   448M   250M   200M  50.0M  2.00G  40.0M       12 normal",
        "  db     1.17G*  1000M   100M   448M   250M   200M  50.0M  2.00G      0       12 normal",
        "  all            1.95G   200M   896M   500M   400M   100M  4.00G  40.0M       24",
    ];
    assert_eq!(lines[..wanted.len()], wanted, "{}", lines.join("\n"));
    assert_eq!(lines[16], "web: misses memory: its limit is too low");
    assert_eq!(
        lines[17],
        "/ filter  s sort: by trouble  Enter one VM  h hold  l limit  ? keys  q end"
    );
}

#[test]
fn all_parts_fit_on_a_usual_terminal() {
    let app = app_of(top(vec![vm("a-name-that-is-long")]), false);
    let lines = lines(&app, 80, 24);
    let row = lines.iter().find(|line| line.contains("a-name")).unwrap();
    assert!(row.ends_with("1000M   100M   448M   250M   200M  50.0M  2.00G      0"), "{row}");
    assert!(row.starts_with("  a-name-that-is… 1.17G*"), "{row}");
}

#[test]
fn what_is_not_known_is_no_number() {
    let mut new = vm("new");
    (new.parts, new.age_ms, new.faults_per_s) = (None, None, None);
    (new.refaulted_bytes_per_s, new.limit_bytes, new.state) = (None, None, State::Recovering);
    let mut odd = vm("odd");
    odd.parts.as_mut().unwrap().free_bytes = None;
    let app = app_of(top(vec![new, odd]), false);
    let all = lines(&app, 140, 18).join("\n");
    assert!(
        all.contains("~ new        -       ?      ?      ?      ?      ?      ?  2.00G      ?"),
        "{all}"
    );
    assert!(all.contains("  odd    1.17G*  1000M      ?   448M"), "{all}");
    assert!(all.contains("guest not trusted") && all.contains("being recovered"), "{all}");
}

#[test]
fn any_size_of_terminal_is_drawn() {
    let mut apps = [app_of(top(vec![vm("web"), vm("db")]), true), app_of(top(vec![]), true)];
    apps[0].top.as_mut().unwrap().host.bounds =
        vec![SeenBound { name: "group".into(), total_bytes: 0, available_bytes: 0 }];
    for keys in ["", "/", "?", "\n", "\nl", "h"] {
        for app in &mut apps {
            press(app, KeyCode::Esc);
            press(app, KeyCode::Esc);
            for letter in keys.chars() {
                press(app, if letter == '\n' { KeyCode::Enter } else { KeyCode::Char(letter) });
            }
            for width in (0..30).step_by(2).chain([31, 53, 80, 132, 300]) {
                for height in (0..12).chain([14, 24, 60]) {
                    drawn(app, width, height);
                }
            }
        }
    }
    assert_eq!(lines(&apps[0], 19, 24)[0], "too small");
    let unknown = App::new(Theme { is_coloured: true }, Clock::utc(), String::new(), false);
    assert!(lines(&unknown, 80, 24)[0].contains("asking the daemon"));
}

#[test]
fn hostile_text_stays_text() {
    let mut web = vm("web");
    web.waits = true;
    web.state_reason = Some("\x1b[2J\x1b]0;owned\x07 \u{202e}本".into());
    let mut figures = top(vec![web]);
    figures.host.available_bytes = 2;
    figures.host.bounds =
        vec![SeenBound { name: "a\nb\x1b[31m".into(), total_bytes: 1, available_bytes: 1 }];
    let mut app = app_of(figures, false);
    app.on(Message::Figures(Err("line\r\none".into())));
    for (width, height) in [(160, 24), (80, 24), (30, 8)] {
        let text = lines(&app, width, height).concat();
        assert!(!text.contains(char::is_control), "{text:?}");
    }
    assert!(!super::text(&app, 160).replace('\n', "").contains(char::is_control));
}

#[test]
fn figures_that_cannot_be_harm_nobody() {
    let mut odd = vm("odd");
    odd.memory_bytes = 0;
    let parts = odd.parts.as_mut().unwrap();
    (parts.in_use_bytes, parts.empty_bytes, parts.free_bytes) =
        (u64::MAX, u64::MAX, Some(u64::MAX));
    (odd.faults_per_s, odd.limit_bytes) = (Some(u64::MAX), Some(0));
    let mut figures = top(vec![odd.clone(), odd]);
    figures.host.total_bytes = 0;
    (figures.host.available_bytes, figures.host.reserve_bytes) = (u64::MAX, u64::MAX);
    figures.at_unix_ms = u64::MAX;
    let mut app = app_of(figures, true);
    drawn(&app, 200, 24);
    press(&mut app, KeyCode::Enter);
    drawn(&app, 200, 24);
}

#[test]
fn colours_say_what_is_wrong_and_can_be_turned_off() {
    let mut web = vm("web");
    web.waits = true;
    let mut figures = top(vec![web]);
    figures.host.available_bytes = GIB;
    let colours = |app: &App| {
        let terminal = drawn(app, 120, 20);
        let cells = terminal.backend().buffer().content();
        let coloured: Vec<Color> =
            cells.iter().map(|cell| cell.fg).filter(|colour| *colour != Color::Reset).collect();
        let bold = cells.iter().any(|cell| cell.modifier.contains(Modifier::BOLD));
        assert!(bold);
        coloured
    };
    assert!(colours(&app_of(figures.clone(), true)).contains(&Color::Red));
    assert_eq!(colours(&app_of(figures, false)), []);
}

#[test]
fn a_daemon_that_is_away_is_the_first_thing_to_see() {
    let mut app = app_of(top(vec![vm("web")]), false);
    app.on(Message::Figures(Err("no ebbd listens at /run/ebb/ebbd.sock".into())));
    let first = &lines(&app, 120, 20)[0];
    assert!(
        first.starts_with("ebb top  NO ANSWER, figures of 14:05:03: no ebbd listens"),
        "{first}"
    );
}

#[test]
fn one_vm_shows_its_parts_and_its_last_minutes() {
    let mut app = app_of(top(vec![vm("web")]), false);
    for faults in [1, 2, 3, 80] {
        let mut figures = top(vec![vm("web")]);
        figures.vms[0].faults_per_s = Some(faults);
        app.on(Message::Figures(Ok(figures)));
    }
    press(&mut app, KeyCode::Enter);
    let all = lines(&app, 90, 24).join("\n");
    assert!(all.contains("web  2.00G of memory, limit 1.17G by the pilot, class normal"), "{all}");
    assert!(all.contains("class normal, faults p50 8 us, p99 16 us"), "{all}");
    assert!(all.contains("█ in use 1000M   ▒ free 100M   c compressed 250M"), "{all}");
    assert!(all.contains("resident  1.07G") && all.contains("faults/s     80"), "{all}");
    assert!(all.contains("  most       80") && all.contains('▂'), "{all}");
    // It ends meanwhile.
    app.on(Message::Figures(Ok(top(vec![]))));
    assert!(lines(&app, 90, 24).join("\n").contains("web is no longer managed"));
}

#[test]
fn the_page_of_keys_explains_all_columns() {
    let mut app = app_of(top(vec![]), false);
    press(&mut app, KeyCode::Char('?'));
    let all = lines(&app, 100, 40).join("\n");
    for word in ["EMPTY", "BACK/s", "BAR", "Enter", "ebb status".split(' ').next().unwrap()] {
        assert!(all.contains(word), "{word}: {all}");
    }
    assert!(all.contains("the sum of the six columns before"), "{all}");
}

#[test]
fn text_has_all_vms_and_no_keys() {
    let vms = (0..100).map(|number| vm(&format!("vm{number}"))).collect();
    let mut figures = top(vms);
    figures.host.pilot = PilotMode::Off;
    figures.vms[99].hold = true;
    let text = super::text(&app_of(figures, false), 160);
    assert!(text.lines().next().unwrap().ends_with("pilot off"), "{text}");
    assert!(text.contains("  vm99") && text.contains(" held") && !text.contains("q end"), "{text}");
    let empty = super::text(&app_of(top(vec![]), false), 80);
    assert!(empty.ends_with("no VM is managed: ebb run starts one, ebb attach takes one\n"));
}
