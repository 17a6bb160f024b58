//! All that the OpenAPI document allows, and much that it forbids, is asked of a real daemon with a
//! real VM: no answer is a failure of the daemon's, and each is as the document says. That takes
//! minutes, and a program from PyPI: `cargo xtask soak api`.

use std::fs;
use std::process::Command;

use ebb_api::{Job, JobKind, JobState};
use vmtest::{Guest, Host, Listening, Ran, has_time, require, until};

/// How `scripts/schemathesis` ends where it cannot be installed.
const EXIT_UNAVAILABLE: i32 = 69;
/// Settings of schemathesis. What is off is what the document cannot say: which VMs there are, and
/// what they and their guests allow at the moment. OpenAPI 3.1 has no word for the data of
/// server-sent events; the document has its shape in the place of theirs.
const SETTINGS: &str = "
[checks]
ensure_resource_availability.enabled = false
ignored_auth.enabled = false
missing_required_header.enabled = false
negative_data_rejection.enabled = false
positive_data_acceptance.enabled = false
unsupported_method.enabled = false
use_after_free.enabled = false

[[operations]]
include-operation-id = \"events\"
checks.response_schema_conformance.enabled = false
";

/// Asks all that `options` and `settings` leave.
///
/// # Errors
/// That is not possible here.
fn ask(host: &Host, listening: &Listening, settings: &str, options: &[&str]) -> Result<(), String> {
    let file = host.directory().join("schemathesis.toml");
    fs::write(&file, format!("{SETTINGS}{settings}")).expect("a file");
    let token = fs::read_to_string(&listening.control).expect("a token");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/schemathesis");
    let mut command = Command::new(script);
    command.arg("--config-file").arg(file).args(["--no-color", "run", "--max-examples", "100"]);
    command.args(["--header", &format!("Authorization: Bearer {}", token.trim())]);
    command.arg("--tls-verify").arg(&listening.certificate).args(options);
    command.arg(format!("{}/v1/openapi.json", listening.url)).current_dir(host.directory());
    let asked = Ran::of(&mut command);
    if asked.code == Some(EXIT_UNAVAILABLE) {
        return Err(asked.stderr);
    }
    assert_eq!(asked.code, Some(0), "{}{}", asked.stdout, asked.stderr);
    println!("{}", asked.stdout);
    Ok(())
}

fn jobs(host: &Host) -> Vec<Job> {
    serde_json::from_str(&host.ebb("jobs --json").ok()).expect("jobs")
}

/// Ends all jobs, and returns them. Those that wait leave other machines no room for more.
fn end_jobs(host: &Host) -> Vec<Job> {
    // The last one first: then none of them begins meanwhile.
    for job in jobs(host).iter().rev().filter(|job| !job.state.is_over()) {
        // It may have ended, and a calibration that has begun cannot be cancelled.
        drop(host.ebb(&format!("jobs cancel {}", job.id)));
    }
    until("the end of all jobs", || {
        Some(jobs(host)).filter(|all| all.iter().all(|job| job.state.is_over()))
    })
}

/// Asks for a job that exists, and cancels it. It waits for so many others that it is under way.
fn ask_for_a_job(host: &Host, listening: &Listening) -> Result<(), String> {
    let begin = |_| host.ebb("calibrate --background").ok();
    let begun: Vec<String> = (0..16).map(begin).collect();
    let last: u64 = begun[15].trim_end().parse().expect("a number alone");
    let id = format!("[parameters]\n\"path.id\" = {last}\n");
    ask(host, listening, &id, &["--include-path-regex", "^/v1/jobs"])?;
    let ended = until("the end of the job that was asked for", || {
        jobs(host).into_iter().find(|job| job.id == last && job.state.is_over())
    });
    assert_eq!(ended.state, JobState::Cancelled, "{ended:?}");
    end_jobs(host);
    Ok(())
}

#[test]
fn each_answer_is_as_the_document_says() {
    require!(has_time("minutes of requests, and schemathesis from PyPI: cargo xtask soak api"));
    let host = Host::new();
    let listening = Listening::new(&host);
    let vm = host.run(Guest::debian("6.1-cloud").memory("256M").cpus(1));
    vm.wait_trusted();
    vm.guest("fill kept 50M");
    let daemon = host.daemon();
    // Made-up names are those of no VM.
    require!(ask(&host, &listening, "", &[]));
    let of_the_host = end_jobs(&host);
    assert!(of_the_host.iter().any(|job| job.kind == JobKind::Calibrate), "{of_the_host:?}");
    let name = format!("[parameters]\n\"path.name\" = \"{}\"\n", vm.name());
    let of_vm = ["--include-path-regex", r"\{name\}", "--exclude-operation-id", "detach"];
    require!(ask(&host, &listening, &name, &of_vm));
    let of_vm = end_jobs(&host);
    assert!(of_vm.iter().any(|job| job.vm.is_some()), "{of_vm:?}");
    require!(ask_for_a_job(&host, &listening));
    assert_eq!(host.daemon(), daemon, "the daemon has not ended");
    assert_eq!(vm.guest("check kept"), "0");
}
