//! `ebb-node`: tells Kubernetes what the VMs of this node could give back, as an annotation and an
//! extended resource of the node. It asks `ebbd` over the UNIX socket of the run directory, and
//! changes no VM.
#![forbid(unsafe_code)]

mod args;
mod ebbd;
mod node;
mod published;
mod reclaimable;
mod run;

use std::process::ExitCode;

use clap::Parser;
use tokio::runtime::Builder;

use args::Args;

/// Exit code: the command line makes no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if !error.use_stderr() => {
            // Nothing can be done about a closed terminal.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            tell(&usage_line(&error.render().to_string()));
            return ExitCode::from(USAGE);
        }
    };
    match start(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> anyhow::Result<()> {
    // kube uses what the process has; it fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Builder::new_current_thread().enable_all().build()?.block_on(run::run(args))
}

/// Writes a message, as one line whatever is in it.
fn tell(message: &str) {
    eprintln!("ebb-node: {}", one_line(message));
}

/// Returns clap's message without its headline word, usage and pointer to the help.
fn usage_line(rendered: &str) -> String {
    let parts = rendered
        .split("\n\n")
        .filter(|part| !part.starts_with("Usage:") && !part.starts_with("For more information"));
    let line = one_line(&parts.collect::<Vec<_>>().join("; "));
    line.trim_start_matches("error: ").to_owned()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_errors_become_one_line() {
        for (words, why) in
            [("--node a/b", "'a/b'"), ("--node a --every 0", "'0'"), ("--node a --nod", "'--nod'")]
        {
            let given = ["ebb-node"].into_iter().chain(words.split_whitespace());
            let Err(error) = Args::try_parse_from(given) else { panic!("{words} makes sense") };
            let line = usage_line(&error.render().to_string());
            assert!(line.contains(why) && !line.contains('\n'), "{line}");
            assert!(!line.contains("Usage") && !line.starts_with("error"), "{line}");
        }
    }
}
