//! Requests to the daemon over its socket, without the time that a command takes to start.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ebb_api::{EvictReport, EvictRequest, ReclaimReport, ReclaimRequest, VmName, route};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmtest::Vm;

/// Reclaims `bytes` of free memory, or the rest of the block that exceeds them. Returns also how
/// long the caller waited.
///
/// # Errors
/// The daemon refuses.
pub fn reclaim(vm: &Vm, bytes: u64) -> anyhow::Result<(ReclaimReport, Duration)> {
    post(vm, route::RECLAIM, &ReclaimRequest { bytes: Some(bytes) })
}

/// Evicts `bytes`, used or not. Returns also how long the caller waited.
///
/// # Errors
/// The daemon refuses.
pub fn evict(vm: &Vm, bytes: u64) -> anyhow::Result<(EvictReport, Duration)> {
    post(vm, route::EVICT, &EvictRequest { bytes })
}

fn post<T: DeserializeOwned>(
    vm: &Vm,
    route: &str,
    request: &impl Serialize,
) -> anyhow::Result<(T, Duration)> {
    let name: VmName = vm.name().parse().context("a VM's name")?;
    let (path, body) = (route::of_vm(route, &name), serde_json::to_string(request)?);
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: ebbd\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let socket = vm.host().run_directory().join(route::SOCKET_FILE);
    let mut answer = String::new();
    let begun = Instant::now();
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(request.as_bytes())?;
    stream.read_to_string(&mut answer)?;
    let took = begun.elapsed();
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without an end")?;
    if !head.starts_with("HTTP/1.1 200") {
        bail!("{path}: {body}");
    }
    Ok((serde_json::from_str(body).with_context(|| body.to_owned())?, took))
}
