//! `ebb`: the command line of Ebb. `ebbd` does all work. This program speaks to it over the UNIX
//! socket of the run directory, and starts it if it does not run.
#![forbid(unsafe_code)]

mod args;
mod attach;
mod below;
mod client;
mod clock;
mod command;
mod config;
mod daemon;
mod detach;
mod doctor;
mod events;
mod heat;
mod interrupt;
mod interval;
mod jobs;
mod manual;
mod observe;
mod paths;
mod progress;
mod remote;
mod report;
mod show;
mod top;
mod trace;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Exit code: the command failed, or `doctor` found that something is missing.
const FAILED: u8 = 1;
/// Exit code: the command line makes no sense.
const USAGE: u8 = 2;

/// What a command prints, and the exit code of the program.
struct Outcome {
    text: String,
    code: u8,
}

impl From<String> for Outcome {
    fn from(text: String) -> Outcome {
        Outcome { text, code: 0 }
    }
}

fn main() -> ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse_usage(near_guesses_only(error)),
    };
    match command::run(args).and_then(print) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ebb: {}", one_line(&format!("{error:#}")));
            ExitCode::from(code(&error))
        }
    }
}

fn code(error: &anyhow::Error) -> u8 {
    if error.is::<ebb_api::BadRequest>() {
        USAGE
    } else if error.is::<jobs::Cancelled>() {
        ebb_api::route::EXIT_CANCELLED
    } else {
        FAILED
    }
}

fn print(outcome: Outcome) -> anyhow::Result<u8> {
    match io::stdout().lock().write_all(outcome.text.as_bytes()) {
        // The reader has all it wanted, as in `ebb list | head -1`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(outcome.code),
        result => Ok(result.map(|()| outcome.code)?),
    }
}

fn refuse_usage(error: clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked_for || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // Nothing can be done about a closed terminal.
        let _ = error.print();
        return ExitCode::from(if asked_for { 0 } else { USAGE });
    }
    let is_unknown = error.kind() == ErrorKind::InvalidSubcommand;
    let help = match is_unknown && error.get(ContextKind::SuggestedSubcommand).is_none() {
        true => ": ebb help shows all",
        false => "",
    };
    eprintln!("ebb: {}{help}", usage_line(&error.render().to_string()));
    ExitCode::from(USAGE)
}

/// Removes guesses that begin with another letter than the given command: clap takes `pool` for a
/// guess at `foo`.
fn near_guesses_only(mut error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return error;
    }
    let first = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(written)) => written.chars().next(),
        _ => None,
    };
    if let Some(ContextValue::Strings(mut guesses)) = error.remove(ContextKind::SuggestedSubcommand)
    {
        guesses.retain(|guess| guess.chars().next() == first);
        if !guesses.is_empty() {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(guesses));
        }
    }
    error
}

/// Returns clap's message without its headline word, usage and pointer to the help.
fn usage_line(rendered: &str) -> String {
    let parts = rendered
        .split("\n\n")
        .map(str::trim_start)
        .filter(|part| !part.is_empty())
        .filter(|part| !part.starts_with("Usage:") && !part.starts_with("For more information"))
        .map(one_line)
        .collect::<Vec<_>>();
    parts.join("; ").trim_start_matches("error: ").to_owned()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_errors_become_one_line() {
        let rendered = "error: unexpected argument '--nam' found\n\n  tip: a similar argument \
                        exists: '--name'\n\nUsage: ebb run --name <NAME>\n\nFor more information, \
                        try '--help'.\n";
        assert_eq!(
            usage_line(rendered),
            "unexpected argument '--nam' found; tip: a similar argument exists: '--name'"
        );
        let without_a_tip = "error: unrecognized subcommand 'foo'\n\n\nUsage: ebb <COMMAND>\n\nFor \
                             more information, try '--help'.\n";
        assert_eq!(usage_line(without_a_tip), "unrecognized subcommand 'foo'");
    }

    #[test]
    fn no_terminal_sequence_gets_through() {
        assert_eq!(one_line("a\x1b[2J\nb"), "a?[2J b");
    }
}
