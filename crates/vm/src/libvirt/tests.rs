//! Tests of the way through libvirt, against daemons that say all kinds of things, too late or
//! never.

use super::connection::{Kind, Message, Procedure, encoded};
use super::xdr::{Decoder, Encoder};
use super::*;
use crate::qmp::QmpError;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

const PID: i32 = 7;
const UUID: &str = "5f489973-8b5a-4cc5-be47-4d81e16fe1bd";
/// How long a test waits for what must come.
const LONG: Duration = Duration::from_secs(60);

/// The daemon's side of a connection.
struct Daemon(UnixStream);

/// What it was called for.
struct Call {
    message: Message,
    lent: Option<OwnedFd>,
}

impl Daemon {
    /// The next call. `None`: the client has gone.
    fn call(&mut self) -> Option<Call> {
        let mut word = [0; 4];
        self.0.read_exact(&mut word).ok()?;
        let mut rest = vec![0; u32::from_be_bytes(word) as usize - 4];
        self.0.read_exact(&mut rest).ok()?;
        let mut from = Decoder(&rest);
        let [program, _, number, kind, serial, status] =
            std::array::from_fn(|_| from.number().unwrap());
        let lent = (kind == Kind::CallWithFiles as u32).then(|| {
            assert_eq!(from.number(), Some(1));
            self.lent()
        });
        let (procedure, body) = (Procedure(program, number), from.0.to_vec());
        Some(Call { message: Message { procedure, kind, serial, status, body }, lent })
    }

    fn lent(&self) -> OwnedFd {
        let (mut byte, mut space) = ([0; 1], [MaybeUninit::uninit(); 64]);
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut byte)];
        recvmsg(&self.0, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let mut got = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        got.next().unwrap()
    }

    fn say(&self, procedure: Procedure, kind: Kind, of: (u32, u32), body: &Encoder) {
        let bytes = encoded(procedure, kind as u32, of, &[], &body.0).unwrap();
        // The client may have gone.
        let _ = (&self.0).write_all(&bytes);
    }

    fn reply(&self, to: &Call, body: &Encoder) {
        self.say(to.message.procedure, Kind::Reply, (to.message.serial, 0), body);
    }

    fn refuse(&self, to: &Call, why: &str) {
        let error = Encoder::default().number(55).number(10).some_text(why).number(2);
        self.say(to.message.procedure, Kind::Reply, (to.message.serial, 1), &error);
    }

    fn event(&self, name: &str) {
        let of = Encoder::default().number(0).text("web").fixed(&[0; 16]).number(1);
        let event = of.text(name).fixed(&[0; 12]).number(0);
        self.say(Procedure::EVENT, Kind::Event, (0, 0), &event);
    }

    /// Answers what every client asks first.
    fn welcome(&mut self, ways: &[u32]) -> Option<()> {
        for _ in 0..5 {
            let call = self.call()?;
            let answer = match call.message.procedure {
                Procedure::WAYS_TO_LOG_IN => {
                    let count = Encoder::default().number(ways.len() as u32);
                    ways.iter().fold(count, |all, &way| all.number(way))
                }
                Procedure::LOOK_UP_BY_UUID => {
                    assert_eq!(call.message.body, bytes_of(UUID).unwrap());
                    Encoder::default().text("web").fixed(&call.message.body).number(1)
                }
                _ => Encoder::default().number(0),
            };
            self.reply(&call, &answer);
        }
        Some(())
    }

    /// The next command for QEMU.
    fn command(&mut self) -> Option<(Call, Value)> {
        let call = self.call()?;
        let is_command = [Procedure::MONITOR_COMMAND, Procedure::MONITOR_COMMAND_WITH_FILES];
        assert!(is_command.contains(&call.message.procedure), "{:?}", call.message);
        let mut from = Decoder(&call.message.body);
        assert_eq!((from.text(), from.fixed::<16>().is_some()), (Some("web"), true));
        let _id = from.number().unwrap();
        let command = serde_json::from_str(from.text().unwrap()).unwrap();
        assert_eq!(from.number(), Some(0));
        Some((call, command))
    }

    fn answer(&self, to: &Call, answer: &Value) {
        self.reply(to, &Encoder::default().text(&answer.to_string()));
    }

    fn fence(&mut self) -> Call {
        let call = self.call().unwrap();
        assert_eq!(call.message.procedure, Procedure::LIBRARY_VERSION);
        call
    }

    /// Answers a command and what follows it.
    fn answer_all(&mut self, to: &Call, answer: &Value) {
        self.answer(to, answer);
        let fence = self.fence();
        self.reply(&fence, &Encoder::default().fixed(&[0; 8]));
    }
}

/// A client of a daemon that does this after the welcome.
struct Peers {
    qmp: Result<Qmp, LibvirtError>,
    state: tempfile::TempDir,
    daemon: JoinHandle<()>,
}

fn peers(ways: &'static [u32], serve: impl FnOnce(Daemon) + Send + 'static) -> Peers {
    let state = tempfile::tempdir().unwrap();
    std::fs::write(state.path().join("web.pid"), "7\n").unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || {
        let mut daemon = Daemon(theirs);
        if daemon.welcome(ways).is_some() {
            serve(daemon);
        }
    });
    let qmp = over(ours, state.path(), PID, UUID, Instant::now() + LONG);
    Peers { qmp, state, daemon }
}

fn end(qmp: Qmp, daemon: JoinHandle<()>) {
    qmp.close();
    daemon.join().unwrap();
}

#[test]
fn a_question_is_answered() {
    let Peers { qmp, daemon, state: _state } = peers(&[2, 0], |mut daemon| {
        let (call, command) = daemon.command().unwrap();
        assert_eq!(command, json!({ "execute": "query-status", "arguments": {} }));
        daemon.answer_all(&call, &json!({ "return": { "running": true }, "id": "libvirt-9" }));
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "error": { "desc": "no such thing" } }));
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    assert!(!qmp.hears_at_once() && qmp.ears().is_err());
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!({ "running": true }));
    let refused = qmp.execute("x", json!({})).unwrap_err();
    assert!(matches!(refused, QmpError::Refused { .. }), "{refused}");
    end(qmp, daemon);
}

/// libvirt pushes events by another queue than answers.
#[test]
fn an_answer_that_overtakes_an_event_is_held_back() {
    let Peers { qmp, daemon, state: _state } = peers(&[0], |mut daemon| {
        let (call, _) = daemon.command().unwrap();
        daemon.answer(&call, &json!({ "return": "registers" }));
        let fence = daemon.fence();
        daemon.event("STOP");
        daemon.event("RESET");
        daemon.refuse(&fence, "even so, the events came before");
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    assert_eq!(qmp.human("info registers -a").unwrap(), "registers");
    assert_eq!(qmp.events().unwrap(), ["RESET"]);
    end(qmp, daemon);
}

/// Some questions take a refusal of QEMU's for a "no". libvirt's refusals say nothing.
#[test]
fn a_refusal_of_libvirts_is_no_answer_of_qemus() {
    let Peers { qmp, daemon, state: _state } = peers(&[0], |mut daemon| {
        let (call, _) = daemon.command().unwrap();
        daemon.event("RESET");
        daemon.refuse(&call, "domain is\nnot running");
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "return": 1, REFUSED: "by QEMU, which cannot" }));
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    let error = qmp.execute("query-migrate-parameters", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Libvirt(_)), "{error}");
    assert_eq!(error.to_string(), "libvirt refuses: domain is?not running");
    assert_eq!(qmp.events().unwrap(), ["RESET"], "what came before is here");
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(1), "it goes on");
    end(qmp, daemon);
}

/// A refusal that comes too late is not the next question's.
#[test]
fn a_late_refusal_of_libvirts_is_dropped() {
    let (late, is_late) = std::sync::mpsc::channel();
    let Peers { qmp, daemon, state: _state } = peers(&[0], move |mut daemon| {
        let (call, _) = daemon.command().unwrap();
        is_late.recv().unwrap();
        daemon.refuse(&call, "it took too long");
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "return": 1 }));
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    let most = Duration::from_millis(1);
    let first = qmp.in_a_hurry(most, |qmp| qmp.execute("query-status", json!({})));
    assert!(matches!(first, Err(QmpError::Io(_))), "{first:?}");
    late.send(()).unwrap();
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(1));
    end(qmp, daemon);
}

#[test]
fn a_login_is_reported() {
    let Peers { qmp, daemon, state: _state } = peers(&[2, 1], |_| unreachable!());
    let error = qmp.err().unwrap();
    assert!(matches!(error, LibvirtError::Login), "{error}");
    assert!(error.to_string().contains("run ebbd as root"), "{error}");
    daemon.join().unwrap();
}

#[test]
fn only_the_vmm_is_asked() {
    let wait = |mut daemon: Daemon| {
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "return": 1 }));
        assert!(daemon.call().is_none(), "the next domain of this name is asked nothing");
    };
    let Peers { qmp, state, daemon } = peers(&[0], wait);
    let mut qmp = qmp.unwrap();
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(1));
    std::fs::write(state.path().join("web.pid"), "8").unwrap();
    let error = qmp.execute("query-status", json!({})).unwrap_err();
    let expected = "process 7 is not the QEMU of libvirt's domain web, or no longer";
    assert_eq!(error.to_string(), expected);
    daemon.join().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || Daemon(theirs).welcome(&[0]));
    let other = over(ours, state.path(), PID, UUID, Instant::now() + LONG).err().unwrap();
    assert!(matches!(other, LibvirtError::OtherProcess { .. }), "{other}");
    daemon.join().unwrap();
}

#[test]
fn a_daemon_that_hangs_or_ends_is_reported() {
    let (hang, hung) = std::sync::mpsc::channel();
    let Peers { qmp, daemon, state: _state } = peers(&[0], move |mut daemon| {
        let _call = daemon.command().unwrap();
        hung.recv().unwrap();
    });
    let mut qmp = qmp.unwrap();
    let most = Duration::from_millis(10);
    let late = qmp.in_a_hurry(most, |qmp| qmp.execute("query-status", json!({})));
    assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
    assert_eq!(qmp.events().unwrap(), [""; 0], "it is still connected");
    hang.send(()).unwrap();
    daemon.join().unwrap();
    let ended = qmp.execute("query-status", json!({})).unwrap_err();
    assert!(ended.to_string().starts_with("libvirt has closed the connection"), "{ended}");
}

#[test]
fn a_client_that_goes_is_waited_for_no_longer() {
    let Peers { qmp, daemon, state: _state } = peers(&[0], |mut daemon| {
        let _call = daemon.command().unwrap();
        assert!(daemon.call().is_none(), "the connection ends with the client");
    });
    let mut qmp = qmp.unwrap();
    let most = Duration::from_millis(1);
    drop(qmp.in_a_hurry(most, |qmp| qmp.execute("query-status", json!({}))));
    end(qmp, daemon);
}

#[test]
fn what_is_too_long_or_no_message_ends_the_connection() {
    let lies: [&[u8]; 4] = [&[0xff; 64], &[0; 64], &[0, 0, 0, 27], &[0x7f, 0xff, 0xff, 0xff]];
    for lie in lies {
        let Peers { qmp, daemon, state: _state } = peers(&[0], move |mut daemon| {
            let _call = daemon.command().unwrap();
            daemon.0.write_all(lie).unwrap();
            assert!(daemon.call().is_none(), "the connection ends");
        });
        let error = qmp.unwrap().execute("query-status", json!({})).unwrap_err();
        assert!(matches!(&error, QmpError::Libvirt(why) if why.contains("understand")), "{error}");
        daemon.join().unwrap();
    }
    for answer in ["", "{", "[1]", "\"text\""] {
        let Peers { qmp, daemon, state: _state } = peers(&[0], move |mut daemon| {
            let (call, _) = daemon.command().unwrap();
            daemon.reply(&call, &Encoder::default().text(answer));
            let fence = daemon.fence();
            daemon.reply(&fence, &Encoder::default());
            assert!(daemon.call().is_none());
        });
        let error = qmp.unwrap().execute("query-status", json!({})).unwrap_err();
        assert!(matches!(error, QmpError::Libvirt(_)), "{error}");
        daemon.join().unwrap();
    }
}

/// A guest may reset itself again and again, and nobody may read of it for long.
#[test]
fn resets_that_nobody_reads_are_kept_once() {
    let Peers { qmp, daemon, state: _state } = peers(&[0], |mut daemon| {
        (0..100_000).for_each(|_| daemon.event("RESET"));
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "return": 1 }));
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(1));
    assert_eq!(qmp.events().unwrap(), ["RESET"]);
    end(qmp, daemon);
}

#[test]
fn a_descriptor_follows_its_message() {
    let Peers { qmp, daemon, state: _state } = peers(&[0], |mut daemon| {
        let (call, command) = daemon.command().unwrap();
        assert_eq!(command, json!({ "execute": "add-fd", "arguments": {} }));
        let mut text = String::new();
        File::from(call.lent.as_ref().unwrap().try_clone().unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "lent");
        daemon.answer_all(&call, &json!({ "return": { "fdset-id": 3, "fd": 9 } }));
        let (call, command) = daemon.command().unwrap();
        assert!(call.lent.is_none(), "{command}");
        daemon.answer_all(&call, &json!({ "return": {} }));
        assert!(daemon.call().is_none());
    });
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"lent").unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    let mut qmp = qmp.unwrap();
    let lent = qmp.lend(file.as_fd()).unwrap();
    assert_eq!(lent.number, 9);
    qmp.end_loan(&lent).unwrap();
    end(qmp, daemon);
}

#[test]
fn an_answer_may_be_as_long_as_libvirt_allows() {
    let text = "x".repeat((4 << 20) - 64);
    let (said, wanted) = (text.clone(), text);
    let Peers { qmp, daemon, state: _state } = peers(&[0], move |mut daemon| {
        let (call, _) = daemon.command().unwrap();
        daemon.answer_all(&call, &json!({ "return": said }));
        assert!(daemon.call().is_none());
    });
    let mut qmp = qmp.unwrap();
    assert!(qmp.human("info registers -a").unwrap() == wanted);
    end(qmp, daemon);
}

#[test]
fn only_a_uuid_is_one() {
    let state = tempfile::tempdir().unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let none = over(ours, state.path(), PID, "web", Instant::now() + LONG).err().unwrap();
    assert_eq!(none.to_string(), "Ebb cannot ask libvirt: its domain's UUID is none");
    assert_eq!(bytes_of(UUID).unwrap()[..2], [0x5f, 0x48]);
    for other in ["", "5f489973", &UUID.replace('5', "x"), &format!("{UUID}00")] {
        assert_eq!(bytes_of(other), None, "{other}");
    }
}

#[test]
fn a_domains_process_is_read_from_its_own_file() {
    let state = tempfile::tempdir().unwrap();
    std::fs::write(state.path().join("web.pid"), "12\n").unwrap();
    std::fs::write(state.path().join("odd.pid"), "twelve").unwrap();
    std::fs::create_dir(state.path().join("in")).unwrap();
    let of = |name| qemu_of(&state.path().join("in"), name);
    assert_eq!(qemu_of(state.path(), "web"), Some(12));
    assert_eq!((qemu_of(state.path(), "odd"), of("web"), of("../web")), (None, None, None));
}
