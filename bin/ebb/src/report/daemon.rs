//! What the daemon knows, and what its log says. It is asked, and never started.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use ebb_api::{VmName, VmSummary, route};
use hyper::Method;
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::bundle::{Bundle, PART_MOST_BYTES};
use super::host::is_setting;
use crate::{client, daemon};

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// The end of the log that is taken along.
const LOG_BYTES: u64 = 512 << 10;
/// Most VMs whose status is taken along.
const VMS_MOST: usize = 64;
/// The history that is taken along, in seconds, and the time between two moments.
const HISTORY_S: [i64; 2] = [3600, 60];
const PARTS: [(&str, &str, &str); 7] = [
    ("daemon/top.json", route::TOP, "the host and all VMs, as `ebb top` shows them"),
    ("daemon/jobs.json", route::JOBS, "jobs"),
    ("daemon/pilot.json", route::PILOT, "the pilot, and what it decided last"),
    ("daemon/sight.json", route::PILOT_SIGHT, "what the pilot saw last"),
    ("daemon/pool.json", route::POOL, "the pool"),
    ("daemon/calibration.json", route::CALIBRATION, "how fast the host's tiers are"),
    ("daemon/vms.json", route::VMS, "all VMs"),
];

/// Adds what the daemon says, if one runs, and the end of its log.
pub fn add(bundle: &mut Bundle, run_dir: &Path) {
    bundle.found("ebbd.log", "the end of the daemon's log", log(run_dir));
    let socket = run_dir.join(route::SOCKET_FILE);
    let version = ask::<Value>(&socket, route::VERSION).and_then(|value| pretty(&value));
    let answers = version.is_ok();
    bundle.found("daemon/version.json", "the daemon's release", version);
    // One that hangs would be waited for again and again.
    if !answers {
        return;
    }
    bundle.found("daemon/started-with.txt", "how the daemon was started", started_with(run_dir));
    for (name, path, what) in PARTS {
        let answer = ask::<Value>(&socket, path).and_then(|value| pretty(&value));
        bundle.found(name, what, answer);
    }
    add_vms(bundle, &socket);
    let history = ask::<Value>(&socket, &history_path()).and_then(|value| pretty(&value));
    bundle.found("daemon/history.json", "the last hour, a moment each minute", history);
    bundle.found("daemon/events.json", "events, a line each", events(&socket));
}

fn add_vms(bundle: &mut Bundle, socket: &Path) {
    let vms: Vec<VmSummary> = match ask(socket, route::VMS) {
        Ok(vms) => vms,
        Err(why) => return bundle.miss("daemon/vms", format!("{why:#}")),
    };
    let names: Vec<VmName> = vms.into_iter().map(|vm| vm.name).collect();
    for name in names.iter().take(VMS_MOST) {
        let status = ask::<Value>(socket, &route::of_vm(route::VM, name));
        let status = status.and_then(|value| pretty(&value));
        bundle.found(&format!("daemon/vms/{name}.json"), "a VM's status", status);
    }
    if names.len() > VMS_MOST {
        bundle.miss("daemon/vms", format!("the status of {} more VMs", names.len() - VMS_MOST));
    }
}

fn ask<A: DeserializeOwned>(socket: &Path, path: &str) -> anyhow::Result<A> {
    client::call_within(socket, PATIENCE, Method::GET, path, Vec::new())
}

fn pretty(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn history_path() -> String {
    let (now, [length, step]) = (Timestamp::now().as_second(), HISTORY_S);
    format!("{}?from={}&to={now}&step={step}", route::HISTORY, now - length)
}

/// What the daemon still has of events. Where that is too much, the last of it.
fn events(socket: &Path) -> anyhow::Result<String> {
    let stream = UnixStream::connect(socket)?;
    let (mut lines, mut bytes) = (std::collections::VecDeque::new(), 0);
    let path = format!("{}?follow=false", route::EVENTS);
    client::follow((stream, None), &path, |event| {
        bytes += event.len() + 1;
        lines.push_back(format!("{event}\n"));
        while bytes > PART_MOST_BYTES {
            bytes -= lines.pop_front().map_or(bytes, |line: String| line.len());
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(lines.into_iter().collect())
}

/// The daemon's command line, and its settings.
fn started_with(run_dir: &Path) -> anyhow::Result<String> {
    let pid = daemon::pid(run_dir).context("its process is not known")?;
    let its = |file: &str| {
        fs::read(format!("/proc/{pid}/{file}")).with_context(|| format!("process {pid}"))
    };
    let words = |content: Vec<u8>| -> Vec<String> {
        let words = content.split(|&byte| byte == 0).map(String::from_utf8_lossy);
        words.filter(|word| !word.is_empty()).map(|word| word.into_owned()).collect()
    };
    let mut lines = vec![words(its("cmdline")?).join(" ")];
    lines.extend(words(its("environ")?).into_iter().filter(|word| is_setting(word)));
    Ok(lines.join("\n") + "\n")
}

/// The end of the daemon's log, from the beginning of a line on.
fn log(run_dir: &Path) -> anyhow::Result<String> {
    let path = daemon::log(run_dir).context("no ebb has started a daemon that writes one")?;
    let end = || -> std::io::Result<(u64, Vec<u8>)> {
        let mut file = File::open(&path)?;
        let from = file.metadata()?.len().saturating_sub(LOG_BYTES);
        file.seek(SeekFrom::Start(from))?;
        let mut end = Vec::new();
        file.take(LOG_BYTES).read_to_end(&mut end)?;
        Ok((from, end))
    };
    let (from, end) = end().with_context(|| path.display().to_string())?;
    let text = String::from_utf8_lossy(&end);
    let whole = match from {
        0 => &text,
        _ => text.split_once('\n').map_or("", |(_, rest)| rest),
    };
    Ok(format!("== the end of {}\n{whole}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_has_whole_lines() {
        let home = tempfile::tempdir().unwrap();
        assert!(log(home.path()).is_err());
        let path = home.path().join(route::LOG_FILE);
        fs::write(&path, "one\ntwo\n").unwrap();
        let text = log(home.path()).unwrap();
        assert!(text.ends_with("ebbd.log\none\ntwo\n"), "{text}");
        fs::write(&path, "a line that is not short\n".repeat(LOG_BYTES as usize / 16)).unwrap();
        let text = log(home.path()).unwrap();
        assert!(text.lines().skip(1).all(|line| line == "a line that is not short"));
        assert!(text.len() as u64 <= LOG_BYTES + 200);
    }

    #[test]
    fn without_a_daemon_there_is_a_word_about_that() {
        let home = tempfile::tempdir().unwrap();
        let mut bundle = Bundle::default();
        add(&mut bundle, home.path());
        let (parts, missing) = bundle.finish("ebb\n");
        assert_eq!((parts.len(), missing.len()), (1, 2), "{missing:?}");
        assert!(missing[1].starts_with("daemon/version.json: no ebbd listens"), "{missing:?}");
    }
}
