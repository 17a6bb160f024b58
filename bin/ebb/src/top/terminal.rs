//! The terminal: what is pressed goes into the program's state, and the state onto the screen.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use anyhow::Context;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use super::app::{App, Effect, Message};
use super::feed::{Feed, Source};
use super::screen;

/// Messages that may wait. Whoever has more waits with them.
const MESSAGES: usize = 64;

/// Shows the state, and what becomes of it, until it is to end. Puts the terminal back as it was,
/// also if this program panics.
///
/// # Errors
/// The terminal cannot be used, or no thread can be started.
pub fn run(app: App, source: Source) -> anyhow::Result<()> {
    let (to, messages) = mpsc::sync_channel(MESSAGES);
    let feed = Feed::new(source, to.clone());
    end_by_signal(to.clone())?;
    let mut terminal = ratatui::try_init().context("the terminal")?;
    let is_past = app.past_s.is_some();
    let shown =
        start(&feed, to, is_past).and_then(|()| drive(app, &feed, &messages, &mut terminal));
    ratatui::try_restore().context("the terminal")?;
    shown
}

fn start(feed: &Feed, to: SyncSender<Message>, is_past: bool) -> anyhow::Result<()> {
    if !is_past {
        feed.begin()?;
    }
    thread::Builder::new().name("keys".into()).spawn(move || read_keys(&to))?;
    Ok(())
}

/// Draws whenever something has happened, and only then.
fn drive(
    mut app: App,
    feed: &Feed,
    messages: &Receiver<Message>,
    terminal: &mut DefaultTerminal,
) -> anyhow::Result<()> {
    loop {
        let draw = |frame: &mut ratatui::Frame<'_>| {
            let area = frame.area();
            screen::draw(&app, area, frame.buffer_mut());
        };
        terminal.draw(draw).context("the terminal")?;
        let Ok(first) = messages.recv() else { return Ok(()) };
        // What came meanwhile needs no screen of its own.
        for message in std::iter::once(first).chain(messages.try_iter().take(MESSAGES)) {
            match app.on(message) {
                None => {}
                Some(Effect::Quit) => return Ok(()),
                Some(Effect::Do(change)) => feed.change(change),
                Some(Effect::Step { at_s, is_forward }) => feed.step(at_s, is_forward),
            }
        }
    }
}

/// Sends what is pressed, until the terminal is gone. The thread ends with the program.
fn read_keys(to: &SyncSender<Message>) {
    loop {
        let message = match event::read() {
            Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => Message::Key(key),
            Ok(Event::Resize(..)) => Message::Resized,
            Ok(_) => continue,
            Err(_) => Message::End,
        };
        let is_end = matches!(message, Message::End);
        if to.send(message).is_err() || is_end {
            return;
        }
    }
}

/// Ends the program in order if somebody asks for its end, or closes its terminal.
fn end_by_signal(to: SyncSender<Message>) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let (mut terminate, mut hang_up) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?)
    };
    thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
        });
        // Nobody receives it: the program ends already.
        let _ = to.send(Message::End);
    })?;
    Ok(())
}
