//! `ebb`: the command line of Ebb. All work is done by `ebbd`; this speaks to it
//! over the UNIX socket of the run directory and starts it where it does not run.
#![forbid(unsafe_code)]

mod args;
mod client;
mod command;
mod daemon;
mod doctor;
mod heat;
mod interval;
mod manual;
mod progress;
mod show;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// The command line makes no sense.
const USAGE: u8 = 2;

/// What a command prints, and whether all is well.
struct Outcome {
    text: String,
    good: bool,
}

impl From<String> for Outcome {
    fn from(text: String) -> Outcome {
        Outcome { text, good: true }
    }
}

fn main() -> ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse_usage(&error),
    };
    match command::run(args).and_then(print) {
        Ok(good) => ExitCode::from(u8::from(!good)),
        Err(error) => {
            eprintln!("ebb: {}", one_line(&format!("{error:#}")));
            ExitCode::from(if error.is::<ebb_api::BadRequest>() { USAGE } else { 1 })
        }
    }
}

fn print(outcome: Outcome) -> anyhow::Result<bool> {
    match io::stdout().lock().write_all(outcome.text.as_bytes()) {
        // As in `ebb list | head -1`: the reader has all it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(outcome.good),
        result => Ok(result.map(|()| outcome.good)?),
    }
}

fn refuse_usage(error: &clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked_for || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // Nothing to be done about a closed terminal.
        let _ = error.print();
        return ExitCode::from(if asked_for { 0 } else { USAGE });
    }
    eprintln!("ebb: {}", usage_line(&error.render().to_string()));
    ExitCode::from(USAGE)
}

/// clap's message without its headline word, usage and pointer to the help.
fn usage_line(rendered: &str) -> String {
    let told = rendered
        .split("\n\n")
        .filter(|part| !part.starts_with("Usage:") && !part.starts_with("For more information"))
        .map(one_line)
        .collect::<Vec<_>>();
    told.join("; ").trim_start_matches("error: ").to_owned()
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
    }

    #[test]
    fn no_terminal_sequence_gets_through() {
        assert_eq!(one_line("a\x1b[2J\nb"), "a?[2J b");
    }
}
