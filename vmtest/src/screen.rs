//! A program on a terminal of its own.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use testkit::{until, until_or};

/// A program, and the screen that it draws.
pub struct Screen {
    child: Child,
    terminal: File,
    drawn: Arc<Mutex<vt100::Parser>>,
}

impl Screen {
    /// Starts a program on a terminal of this size.
    ///
    /// # Panics
    /// The host gives no terminal, or the program does not start.
    pub fn of(command: &mut Command, (rows, columns): (u16, u16)) -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = openpt(flags).expect("a terminal");
        grantpt(&terminal).and_then(|()| unlockpt(&terminal)).expect("a terminal");
        let name = ptsname(&terminal, Vec::new()).expect("the terminal's name");
        let name = name.to_str().expect("a name of ASCII").to_owned();
        let terminal = File::from(terminal);
        let drawn = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        set_size(&terminal, rows, columns);
        let its = File::options().read(true).write(true).open(name).expect("the terminal");
        let its = || Stdio::from(its.try_clone().expect("the terminal"));
        command.stdin(its()).stdout(its()).stderr(its()).env("TERM", "xterm-256color");
        let child = command.spawn().expect("the program starts");
        let (mut output, to) = (terminal.try_clone().expect("the terminal"), Arc::clone(&drawn));
        // It ends when the program has ended, which closes its side.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = output.read(&mut bytes) {
                to.lock().expect("no thread has died").process(&bytes[..count]);
            }
        });
        Screen { child, terminal, drawn }
    }

    /// Changes the size of the terminal.
    pub fn resize(&self, rows: u16, columns: u16) {
        self.drawn.lock().expect("no thread has died").screen_mut().set_size(rows, columns);
        set_size(&self.terminal, rows, columns);
        let pid = rustix::process::Pid::from_child(&self.child);
        // It is not the program's controlling terminal, so the kernel does not send this.
        rustix::process::kill_process(pid, rustix::process::Signal::WINCH).expect("it runs");
    }

    /// Presses keys.
    pub fn press(&self, keys: &str) {
        (&self.terminal).write_all(keys.as_bytes()).expect("the terminal");
    }

    /// What is on the screen.
    pub fn text(&self) -> String {
        self.drawn.lock().expect("no thread has died").screen().contents()
    }

    /// Waits until the screen has a text, or until it has not.
    pub fn wait(&self, text: &str, is_there: bool) {
        until_or(|| (self.text().contains(text) == is_there).then_some(()))
            .unwrap_or_else(|| panic!("{text:?} there: {is_there}? {}", self.text()));
    }

    /// Waits until the program has ended. Returns its exit code, and whether it left the terminal
    /// as it was.
    pub fn end(mut self) -> (Option<i32>, bool) {
        let ended = until("the program's end", || self.child.try_wait().expect("a child"));
        let is_left =
            || !self.drawn.lock().expect("no thread has died").screen().alternate_screen();
        (ended.code(), until_or(|| is_left().then_some(())).is_some())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn set_size(terminal: &File, ws_row: u16, ws_col: u16) {
    let size = Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("a terminal");
}
