//! A QEMU for tests of controllers: it answers by QMP what it was told to, and notes what it is
//! asked.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::mem;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use ebb_units::Gpa;
use ebb_vm::Qmp;
use serde_json::{Value, json};

use crate::vm::context::VmContext;
use crate::vm::context::qmp_link::QmpLink;

/// How the lines begin that change nothing.
const QUESTIONS: [&str; 6] = ["query-", "x-query-", "qom-list ", "qom-get ", "info ", "gpa2hva "];
/// Where QEMU has the devices that have a name.
const DEVICES: &str = "qom-list /machine/peripheral";
/// Seconds since 1970 at which the guest reported its figures: in the future, so that they are newer
/// than whatever the figures are compared with.
const REPORTED_S: u64 = 1 << 40;

/// A QEMU that answers until the VM's context is dropped.
pub struct Qemu {
    stream: UnixStream,
    talk: Arc<Mutex<Talk>>,
}

/// What somebody does before an answer.
type Before = Box<dyn FnOnce() + Send>;

/// What is said by QMP. A request is named by its command and what it is about, as in
/// `qom-get guest-stats`; one to the human monitor is named by its line.
#[derive(Default)]
struct Talk {
    answers: HashMap<String, Value>,
    asked: Vec<String>,
    /// The marks of the VM's room as each of these requests came.
    marks: Vec<(u64, u64)>,
    /// What is done before the next answer.
    before: Option<Before>,
}

impl Qemu {
    /// Connects a VM to a QEMU whose guest runs, and which has no devices.
    pub fn of(cx: &mut VmContext) -> Qemu {
        let (ours, stream) = UnixStream::pair().expect("a pair of sockets");
        let silence = cx.pager.room().evictor_waits();
        cx.qmp =
            QmpLink::new(cx.process.pid(), cx.record.monitor(), Some(Qmp::over(ours)), silence);
        let qemu = Qemu { stream, talk: Arc::default() };
        qemu.is("running");
        qemu.answers("query-memory-devices", json!([]));
        let memory = json!({ "base-memory": cx.pager.ram().bytes() });
        qemu.answers("query-memory-size-summary", memory);
        let (stream, talk) = (qemu.stream.try_clone(), Arc::clone(&qemu.talk));
        let room = Arc::clone(cx.pager.room());
        let stream = stream.expect("a descriptor");
        thread::spawn(move || {
            for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                let request: Value = serde_json::from_str(&line).expect("a request");
                let lock = || talk.lock().expect("no panic");
                lock().marks.push(room.marks());
                let before = lock().before.take();
                before.into_iter().for_each(|before| before());
                let answer = lock().answer(&request);
                // Nobody may wait for it any more.
                let _ = (&stream).write_all(format!("{answer}\n").as_bytes());
            }
        });
        qemu
    }

    /// Says that its guest is in this state.
    pub fn is(&self, state: &str) {
        self.answers("query-status", json!({ "status": state }));
    }

    /// Answers so from now on to requests of this name.
    pub fn answers(&self, name: &str, answer: Value) {
        self.talk().answers.insert(name.into(), answer);
    }

    /// Calls this before the next answer.
    pub fn waits_for(&self, before: impl FnOnce() + Send + 'static) {
        self.talk().before = Some(Box::new(before));
    }

    /// Says that its only processor runs in these page tables.
    pub fn runs(&self, root: Gpa) {
        let registers = format!("CPU#0\nRIP=1000 HLT=0\nCR0=80050033 CR3={:x} CR4=6f0\n", root.0);
        self.answers("info registers -a", json!(registers));
    }

    /// Says that its only processor runs in these page tables with an enabled breakpoint, if there
    /// is one. `controls` is its CR4.
    pub fn runs_with(&self, root: Gpa, breakpoint: Option<u64>, controls: u64) {
        let (at, enabled) = breakpoint.map_or((0, 0x400), |at| (at, 0x402));
        let registers = format!(
            "CPU#0\nRIP=1000 HLT=0\nCR0=80050033 CR3={:x} CR4={controls:x}\n\
             DR0={at:x} DR1=0 DR2=0 DR3=0\nDR7={enabled:x}\nEFER=d01\n",
            root.0
        );
        self.answers("info registers -a", json!(registers));
    }

    /// Has one device with a name, `x`, of this type.
    pub fn plugs(&self, device_type: &str) {
        let device = json!({ "name": "x", "type": format!("child<{device_type}>") });
        self.answers(DEVICES, json!([device]));
    }

    /// Has a balloon that leaves the guest `left_bytes`, and whose driver reports that
    /// `available_bytes` are available.
    pub fn balloons(&self, left_bytes: u64, available_bytes: u64) {
        self.plugs("virtio-balloon-pci");
        let driver = json!({ "status": { "statuses": ["VIRTIO_CONFIG_S_DRIVER_OK: x"] } });
        self.answers("x-query-virtio-status", driver);
        self.answers("query-balloon", json!({ "actual": left_bytes }));
        let stats = json!({
            "stat-total-memory": 1 << 30,
            "stat-available-memory": available_bytes,
        });
        let stats = json!({ "last-update": REPORTED_S, "stats": stats });
        self.answers("qom-get guest-stats", stats);
    }

    /// Returns what reports an event from another thread.
    pub fn reporter(&self) -> impl Fn(&str) + Send + 'static {
        let stream = self.stream.try_clone().expect("a descriptor");
        move |event| {
            let line = format!("{}\n", json!({ "event": event }));
            (&stream).write_all(line.as_bytes()).expect("a listener");
        }
    }

    /// Reports an event.
    pub fn reports(&self, event: &str) {
        let line = format!("{}\n", json!({ "event": event }));
        (&self.stream).write_all(line.as_bytes()).expect("a listener");
    }

    /// Returns the names of the requests that came since the last call, each with the value that it
    /// sets.
    pub fn asked(&self) -> Vec<String> {
        mem::take(&mut self.talk().asked)
    }

    /// Returns the marks of the VM's room as each request came since the last call.
    pub fn saw_marks(&self) -> Vec<(u64, u64)> {
        mem::take(&mut self.talk().marks)
    }

    /// Returns those of these requests that change something.
    pub fn told(&self) -> Vec<String> {
        let is_question = |line: &String| QUESTIONS.iter().any(|word| line.starts_with(word));
        self.asked().into_iter().filter(|line| !is_question(line)).collect()
    }

    fn talk(&self) -> MutexGuard<'_, Talk> {
        self.talk.lock().expect("no panic")
    }
}

impl Talk {
    fn answer(&mut self, request: &Value) -> Value {
        let command = text(&request["execute"]);
        let arguments = &request["arguments"];
        let (name, default) = match command {
            "human-monitor-command" => (text(&arguments["command-line"]).to_owned(), json!("")),
            "qom-list" => (format!("{command} {}", text(&arguments["path"])), json!([])),
            "qom-get" | "qom-set" => {
                (format!("{command} {}", text(&arguments["property"])), json!({}))
            }
            _ => (command.to_owned(), json!({})),
        };
        let state = match command {
            "stop" => Some("paused"),
            "cont" => Some("running"),
            _ => None,
        };
        if let Some(state) = state {
            self.answers.insert("query-status".into(), json!({ "status": state }));
        }
        let answer = self.answers.get(&name).unwrap_or(&default);
        let answer = json!({ "return": answer, "id": request["id"] });
        self.asked.push(match arguments.get("value") {
            Some(value) => format!("{name} {value}"),
            None => name,
        });
        answer
    }
}

fn text(value: &Value) -> &str {
    value.as_str().expect("text")
}
