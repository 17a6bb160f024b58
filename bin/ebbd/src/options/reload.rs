//! What the daemon takes over from its configuration file: at its start, and at each SIGHUP.

use std::io;
use std::sync::Arc;

use ebb_config::{File, Section};
use tokio::signal::unix::{SignalKind, signal};

use super::Source;
use crate::host::apart::apart;
use crate::host::pilot;
use crate::host::registry::Daemon;
use crate::model::api_error::ApiError;

/// Takes over what the file says of the pilot, as the daemon starts.
///
/// # Errors
/// Says in one line what is wrong, and what to do.
pub fn begin(daemon: &Daemon, source: &Source) -> Result<(), String> {
    let file = source.began();
    let path = file.path().display();
    match pilot::follow(daemon, &file.pilot()) {
        Ok(changed) if changed.is_empty() => {}
        Ok(changed) => tracing::info!("{path}: {}", news(&changed, &[])),
        Err(error @ ApiError::NotAllowed(_)) => return Err(in_words(file, &error)),
        // Where the run directory is full, VMs are served all the same.
        Err(error) => tracing::warn!("{path}: the pilot keeps the settings on record: {error}"),
    }
    Ok(())
}

/// Reads the file again at each SIGHUP, from now on.
///
/// # Errors
/// The signal cannot be awaited.
pub fn keep(
    daemon: Daemon,
    source: Source,
) -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let (mut hangup, source) = (signal(SignalKind::hangup())?, Arc::new(source));
    Ok(async move {
        while hangup.recv().await.is_some() {
            let (daemon, source) = (daemon.clone(), Arc::clone(&source));
            match apart(move || reload(&daemon, &source)).await {
                Ok(Ok(news)) => tracing::info!("{news}"),
                Ok(Err(why)) => tracing::warn!("nothing is changed: {why}"),
                Err(error) => tracing::error!("the configuration file: {error}"),
            }
        }
    })
}

/// Reads the file again, and returns what is new.
pub(super) fn reload(daemon: &Daemon, source: &Source) -> Result<String, String> {
    let Some(file) = source.read().map_err(|error| error.to_string())? else {
        return Err("this daemon has no configuration file: --config names one".into());
    };
    let changed = pilot::follow(daemon, &file.pilot()).map_err(|error| in_words(&file, &error))?;
    let news = news(&changed, &source.waiting(&file));
    Ok(format!("{} is read again: {news}", file.path().display()))
}

/// Why the pilot cannot have the settings of the file, with the place of what is wrong.
fn in_words(file: &File, error: &ApiError) -> String {
    match (file.get(Section::Pilot, "reserve"), error) {
        // No other key of the pilot's depends on the host.
        (Some(reserve), ApiError::NotAllowed(why)) => file.wrong(reserve, why).to_string(),
        _ => error.to_string(),
    }
}

/// What has changed, and what waits for the next daemon.
fn news(changed: &[&str], waiting: &[&str]) -> String {
    let of = |names: &[&str], text: &str| {
        (!names.is_empty()).then(|| format!("{text} {}", names.join(", ")))
    };
    let changed = of(changed, "the pilot has a new");
    let waiting = of(waiting, "only a restart of ebbd, which no guest notices, changes");
    let all: Vec<String> = changed.into_iter().chain(waiting).collect();
    match all.is_empty() {
        true => "nothing is new".into(),
        false => all.join("; "),
    }
}
