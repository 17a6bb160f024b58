//! Jobs, and how far they are.

use ebb_api::{Job, JobProgress, JobUnit};
use ebb_units::Bytes;

use super::table;
use crate::interval::readable;
use crate::progress::bar;

/// Returns the number of a job that was begun, alone: for scripts.
pub fn begun(job: &Job) -> String {
    format!("{}\n", job.id)
}

/// Returns one line: how a job ended.
pub fn ended(job: &Job) -> String {
    format!("job {}: {}{}\n", job.id, job.state, behind(": ", &job.text))
}

/// Returns one line about what is being done. `doing`: what it is; `time_ns`: since it began.
pub fn doing(doing: &str, progress: Option<JobProgress>, time_ns: u64) -> String {
    let time = readable(time_ns);
    let Some(JobProgress { done, total, unit }) = progress else {
        return format!("{doing}, {time}");
    };
    match total {
        Some(total) if total > 0 => {
            format!("{doing} {}  {}, {time}", bar(done, total), amount(done, Some(total), unit))
        }
        _ => format!("{doing}, {}, {time}", amount(done, None, unit)),
    }
}

fn amount(done: u64, total: Option<u64>, unit: JobUnit) -> String {
    let one = |count: u64| match unit {
        JobUnit::Bytes => Bytes(count).to_string(),
        JobUnit::Windows => count.to_string(),
    };
    let of = total.map(|total| format!(" of {}", one(total))).unwrap_or_default();
    let what = if unit == JobUnit::Windows { " windows" } else { "" };
    format!("{}{of}{what}", one(done))
}

/// Returns a line for each job.
pub fn jobs(jobs: &[Job]) -> String {
    if jobs.is_empty() {
        return "no job is known\n".into();
    }
    let names = ["JOB", "VM", "KIND", "STATE", "DONE", ""];
    let lines: Vec<[String; 6]> =
        std::iter::once(names.map(String::from)).chain(jobs.iter().map(line)).collect();
    table(&lines)
}

fn line(job: &Job) -> [String; 6] {
    let vm = job.vm.as_ref().map_or("-".into(), ToString::to_string);
    let done = job
        .progress
        .map_or("-".into(), |progress| amount(progress.done, progress.total, progress.unit));
    let state = match job.cancelling && !job.state.is_over() {
        true => "cancelling".into(),
        false => job.state.to_string(),
    };
    // Some of the text is a guest's or QEMU's own.
    let text = job.text.replace(char::is_control, "?");
    [job.id.to_string(), vm, job.kind.to_string(), state, done, text]
}

fn behind(separator: &str, text: &str) -> String {
    let text = text.replace(char::is_control, "?");
    if text.is_empty() { text } else { format!("{separator}{text}") }
}

#[cfg(test)]
mod tests {
    use ebb_api::JobState;
    use serde_json::json;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn a_job() -> Job {
        serde_json::from_value(json!({ "id": 17, "kind": "evict", "vm": "web", "state": "running",
            "can_cancel": true, "cancelling": false, "begun": "2026-11-28T14:05:12.345Z",
            "ended": null, "progress": { "done": 3 * MIB, "total": 12 * MIB, "unit": "bytes" },
            "text": "", "error": null }))
        .expect("a job")
    }

    #[test]
    fn a_line_says_what_is_done_of_what() {
        let text = doing("web: evicting", a_job().progress, 1_500_000_000);
        assert_eq!(text, "web: evicting █████░░░░░░░░░░░░░░░  25 %  3 MiB of 12 MiB, 1.5 s");
        let windows = JobProgress { done: 3, total: None, unit: JobUnit::Windows };
        assert_eq!(doing("web: heat", Some(windows), 2_000_000), "web: heat, 3 windows, 2 ms");
        assert_eq!(doing("web: starting", None, 2_000_000), "web: starting, 2 ms");
    }

    #[test]
    fn a_list_has_a_line_for_each_and_no_terminal_sequence() {
        let text = "evicted 3 MiB: \u{1b}[2J".into();
        let over = Job { state: JobState::Cancelled, text, vm: None, ..a_job() };
        let list = jobs(&[a_job(), Job { cancelling: true, ..a_job() }, over]);
        let lines: Vec<&str> = list.lines().collect();
        assert_eq!(lines[1], "17   web  evict  running     3 MiB of 12 MiB");
        assert_eq!(lines[2], "17   web  evict  cancelling  3 MiB of 12 MiB");
        assert!(lines[3].ends_with("evicted 3 MiB: ?[2J"), "{list}");
        assert_eq!(jobs(&[]), "no job is known\n");
    }
}
