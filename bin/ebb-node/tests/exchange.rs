//! The program between an `ebbd` and an API server that the test serves: what it sends, and how it
//! refuses. `vmtest/tests/kubernetes` has both of them real.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::certificate::Certificate;
use testkit::deadline;

const MIB: u64 = 1 << 20;

/// A request.
struct Asked {
    /// Its method and path.
    line: String,
    body: Value,
}

/// Reads a request. `None`: the other side has closed the connection.
fn read(stream: impl Read) -> Option<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let line = line.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    Some(Asked { line, body: serde_json::from_slice(&body).unwrap_or_default() })
}

/// Answers a request. The connection is to end then.
fn write(mut stream: impl Write, status: u16, answer: &Value) {
    let text = answer.to_string();
    let head = format!(
        "HTTP/1.1 {status} Test\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        text.len()
    );
    // The program may have been ended meanwhile.
    let _ = stream.write_all((head + &text).as_bytes());
}

/// Serves an `ebbd` with one VM, which has so much free memory.
fn serve_ebbd(directory: &Path, free_bytes: u64) {
    let vm = json!({
        "name": "web", "state": "held", "state_reason": null, "age_ms": 1,
        "memory_bytes": 2 * free_bytes,
        "parts": {
            "in_use_bytes": free_bytes, "free_bytes": free_bytes, "empty_bytes": 0,
            "compressed_bytes": 0, "swapped_bytes": 0, "disk_backed_bytes": 0,
        },
        "compressed_in_bytes": 0, "limit_bytes": null, "limit_by_pilot": false,
        "working_bytes": null, "faults_per_s": null, "fault_ns": null,
        "refaulted_bytes_per_s": null, "misses_memory": false, "waits": false,
        "waiting_touches": 0, "class": "normal", "hold": false, "warnings": 0,
    });
    let host = json!({
        "total_bytes": 1, "available_bytes": 1, "reserve_bytes": 0, "bounds": [],
        "stall_permille": null, "pilot": "off", "stage": null,
    });
    let top = json!({ "at_unix_ms": 0, "host": host, "vms": [vm] });
    let pilot = json!({
        "mode": "off", "reserve_percent": 10, "reserve_bytes": null, "stage": null, "host": null,
        "vms": [], "decisions": [],
    });
    let listener = UnixListener::bind(directory.join("ebbd.sock")).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Some(asked) = read(&mut stream) else { continue };
            write(stream, 200, if asked.line == "GET /v1/top" { &top } else { &pilot });
        }
    });
}

/// Serves an API server that answers everything so. Returns what it is asked.
fn serve_api(directory: &Path, status: u16, answer: Value) -> Receiver<Asked> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    write_kubeconfig(directory, &format!("http://{}", listener.local_addr().unwrap()));
    let (sender, requests) = mpsc::channel();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Some(asked) = read(&mut stream) else { continue };
            if sender.send(asked).is_err() {
                return;
            }
            write(stream, status, &answer);
        }
    });
    requests
}

fn write_kubeconfig(directory: &Path, server: &str) {
    // Without one, the host's own authorities are looked for.
    let authority = Certificate::new(directory, "authority", &["localhost"]).certificate;
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": {
            "server": server, "certificate-authority": authority,
        } }],
        "users": [{ "name": "test", "user": { "token": "a-token" } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
    });
    fs::write(directory.join("kubeconfig"), config.to_string()).unwrap();
}

fn ebb_node(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebb-node"));
    command.args(["--node", "node1", "--every", "1", "--run-dir"]).arg(directory);
    command.env("KUBECONFIG", directory.join("kubeconfig")).env("HOME", directory);
    for name in ["KUBERNETES_SERVICE_HOST", "NODE_NAME", "HTTPS_PROXY", "https_proxy"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs the program to its end. Returns the one line with which it refuses.
fn refused(directory: &Path) -> String {
    let output = ebb_node(directory).output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    line
}

/// A program that is killed if the test fails.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // It usually has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_figure_is_published_and_taken_away_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    serve_ebbd(directory.path(), 300 * MIB);
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node1" } });
    let requests = serve_api(directory.path(), 200, node);
    let mut program = Program(ebb_node(directory.path()).spawn().unwrap());
    let next = || requests.recv_timeout(deadline()).expect("a request");
    // Reclaim leaves 64 MiB.
    for bytes in [Some((236 * MIB).to_string()), None] {
        if bytes.is_none() {
            kill_process(Pid::from_child(&program.0), Signal::TERM).unwrap();
        }
        let (first, second) = (next(), next());
        let begins = |asked: &Asked, with: &str| asked.line.starts_with(with);
        assert!(begins(&first, "PATCH /api/v1/nodes/node1?"), "{}", first.line);
        assert!(begins(&second, "PATCH /api/v1/nodes/node1/status?"), "{}", second.line);
        let annotations = json!({ "ebb.internal/reclaimable-bytes": bytes });
        assert_eq!(first.body, json!({ "metadata": { "annotations": annotations } }));
        let resource = json!({ "ebb.internal/reclaimable-memory": bytes });
        let status = json!({ "capacity": resource, "allocatable": resource });
        assert_eq!(second.body, json!({ "status": status }));
    }
    assert_eq!(program.0.wait().unwrap().code(), Some(0));
}

#[test]
fn what_the_api_server_refuses_becomes_one_line() {
    for (code, reason, why) in [
        (404, "NotFound", "the cluster has no node node1: "),
        (403, "Forbidden", "forbids to change node node1: "),
        (401, "Unauthorized", "does not know who asks: "),
        (500, "InternalError", "the API server refuses: its own words"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        serve_ebbd(directory.path(), 300 * MIB);
        let answer = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "message": "its own\nwords", "reason": reason, "code": code,
        });
        let requests = serve_api(directory.path(), code, answer);
        let line = refused(directory.path());
        assert!(line.contains(why), "{code}: {line}");
        assert_eq!(requests.try_iter().count(), 1, "{code}: it gives up");
    }
}

#[test]
fn an_api_server_that_is_not_there_becomes_one_line() {
    let directory = tempfile::tempdir().unwrap();
    serve_ebbd(directory.path(), 300 * MIB);
    let line = refused(directory.path());
    assert!(line.contains("no way to the API server: "), "{line}");
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    write_kubeconfig(directory.path(), &format!("http://{unused}"));
    let line = refused(directory.path());
    assert!(line.contains("the API server does not answer: Connection refused"), "{line}");
}
