//! Moves the pages of another process between the nodes of a guest that has two. It does so as the
//! daemon on a host that has two: by `ebb-tier`, on a memfd that both have mapped.
//!
//! `tiers check SIZE` checks placement and every byte. `tiers full SIZE` moves more than the second
//! node has room for. `tiers killed SIZE` kills the movers. `tiers bench SIZE ROUNDS` measures.
//! `tiers peer FILE SIZE` is the other process, `tiers exchange PID ADDRESS FILE SIZE` the mover to
//! be killed.
#![forbid(unsafe_code)]

mod bench;
mod check;
mod killed;
mod peer;
mod rig;

use std::process::ExitCode;

use anyhow::{Context, bail};
use ebb_units::Bytes;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("tiers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> anyhow::Result<String> {
    match *words {
        ["peer", file, size] => peer::serve(file.as_ref(), bytes(size)?).map(|()| String::new()),
        ["check", size] => check::run(bytes(size)?),
        ["full", size] => check::full(bytes(size)?),
        ["killed", size] => killed::run(bytes(size)?),
        ["exchange", pid, address, file, size] => {
            let (pid, address) = (pid.parse()?, address.parse()?);
            killed::serve(pid, address, file, bytes(size)?).map(|()| String::new())
        }
        ["bench", size, rounds] => bench::run(bytes(size)?, rounds.parse().context("rounds")?),
        _ => bail!("no such task: {}", words.join(" ")),
    }
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    Ok(text.parse::<Bytes>()?.0.next_multiple_of(4096))
}
