//! The init program of test guests: carries out the host's requests over `ttyS0`.
//!
//! A request is a line `#NUMBER COMMAND ARGUMENTS`. Its answer is one line
//! `@NUMBER ok "TEXT" $LENGTH` or `@NUMBER error "TEXT" $LENGTH`. The text is a JSON string with
//! LENGTH characters between its quotes: by that, it differs from what the kernel prints in
//! between. `again` repeats an answer that was torn.
#![forbid(unsafe_code)]

mod access;
mod boot;
mod buffer;
mod churn;
mod command;
mod disk;
mod files;
mod hot;
mod line;
mod loaded_file;
mod measure;
mod network;
mod power;
mod samples;
mod shell;
mod times;

use std::convert::Infallible;
use std::fmt::Display;

use command::Guest;
use line::Line;

/// Why a request failed, in words.
type Result<T, E = String> = std::result::Result<T, E>;

/// Adds the name of what failed to an error.
trait Context<T> {
    fn context(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Context<T> for Result<T, E> {
    fn context(self, what: impl Display) -> Result<T> {
        self.map_err(|error| format!("{what}: {error}"))
    }
}

fn main() {
    let Err(error) = serve();
    eprintln!("the test guest's init fails: {error}");
    power::halt();
}

fn serve() -> Result<Infallible> {
    boot::mount()?;
    let loaded = boot::load_modules();
    let mut line = Line::open()?;
    let mut guest = Guest::default();
    line.answer(0, &loaded.map(|()| format!("ready {}", boot::id())))?;
    loop {
        let (number, request) = line.request()?;
        match request.as_str() {
            "again" => line.repeat()?,
            request => line.answer(number, &guest.obey(request))?,
        }
    }
}
