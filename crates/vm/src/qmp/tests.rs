//! Tests of the QMP client against peers that say all kinds of things, too late or never.

use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

/// A peer that gives these answers, one for each request.
fn peer(answers: &'static [&'static str]) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut requests = BufReader::new(stream.try_clone().unwrap());
        for answer in answers {
            (&stream).write_all(answer.as_bytes()).unwrap();
            requests.read_line(&mut String::new()).unwrap();
        }
    });
    (dir, path)
}

/// Answers once so many requests have come.
fn answer_next(peer: &UnixStream, requests: usize, answer: &'static str) -> JoinHandle<()> {
    let peer = peer.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(&peer).lines();
        (0..requests).for_each(|_| assert!(lines.next().unwrap().is_ok()));
        (&peer).write_all(answer.as_bytes()).unwrap();
    })
}

#[test]
fn an_event_for_the_client_before_is_no_greeting() {
    let (_dir, path) =
        peer(&["{\"event\":\"BALLOON_CHANGE\"}\n{\"QMP\":{}}\n", "{\"return\":{}}\n"]);
    assert_eq!(Qmp::connect(&path).unwrap().events().unwrap(), [""; 0]);
}

#[test]
fn events_between_request_and_answer_are_kept() {
    let (_dir, path) = peer(&[
        "{\"QMP\":{}}\n",
        "{\"return\":{}}\n",
        "{\"event\":\"RESET\"}\n{\"return\":\"text\"}\n",
    ]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.human("info version").unwrap(), "text");
    assert_eq!(qmp.events().unwrap(), ["RESET"]);
}

#[test]
fn an_answer_that_came_too_late_is_not_the_next_ones() {
    let (_dir, path) = peer(&[
        "{\"QMP\":{}}\n",
        "{\"return\":{},\"id\":1}\n",
        "{\"return\":\"late\",\"id\":1}\n{\"return\":\"text\",\"id\":2}\n",
    ]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.human("info version").unwrap(), "text");
}

#[test]
fn an_answer_may_come_in_parts_and_too_late() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    (&theirs).write_all(b"{\"return\":\"la").unwrap();
    let most = Duration::from_millis(1);
    let late = qmp.in_a_hurry(most, |qmp| qmp.human("info version"));
    assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
    assert_eq!(qmp.events().unwrap(), [""; 0]);
    (&theirs).write_all(b"te\",\"id\":1}\n").unwrap();
    let answer = answer_next(&theirs, 2, "{\"return\":\"text\",\"id\":2}\n");
    assert_eq!(qmp.human("info version").unwrap(), "text");
    answer.join().unwrap();
    (&theirs).write_all(b"{\"event\":\"RE").unwrap();
    assert_eq!(qmp.events().unwrap(), [""; 0]);
    (&theirs).write_all(b"SET\"}\n{\"event\":\"STOP\"}\n{").unwrap();
    assert_eq!(qmp.events().unwrap(), ["RESET", "STOP"]);
    drop(theirs);
    assert!(matches!(qmp.events(), Err(QmpError::Io(_))));
}

#[test]
fn a_silent_qemu_is_reported_until_it_answers() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (mut qmp, silence) = (Qmp::over(ours), Arc::<AtomicBool>::default());
    qmp.show_silence(Arc::clone(&silence));
    let shown = Arc::clone(&silence);
    let answer = std::thread::spawn(move || {
        while !shown.load(Relaxed) {
            std::thread::yield_now();
        }
        theirs.write_all(b"{\"return\":\"text\",\"id\":1}\n").unwrap();
        theirs
    });
    assert_eq!(qmp.human("info version").unwrap(), "text");
    assert!(!silence.load(Relaxed));
    let _open = answer.join().unwrap();
    let late = qmp.in_a_hurry(3 * SILENT_AFTER, |qmp| qmp.human("info version"));
    assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
    assert!(!silence.load(Relaxed));
}

/// A connection whose other side says `what` again and again until it is closed.
fn babbler(what: &'static [u8]) -> (Qmp, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let talk = move || while theirs.write_all(what).is_ok() {};
    (Qmp::over(ours), std::thread::spawn(talk))
}

#[test]
fn a_server_that_drips_bytes_is_waited_for_no_longer() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    let drip = std::thread::spawn(move || {
        while theirs.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    // Each byte comes within the time that the whole answer has.
    let most = Duration::from_millis(200);
    let answer = qmp.in_a_hurry(most, |qmp| qmp.human("info version"));
    assert!(matches!(answer, Err(QmpError::Io(error)) if error.kind() == ErrorKind::TimedOut));
    assert_eq!(qmp.events().unwrap(), [""; 0]);
    drop(qmp);
    drip.join().unwrap();
}

#[test]
fn a_flood_of_events_ends_the_call_and_not_the_daemon() {
    let (mut qmp, flood) = babbler(b"{\"event\":\"STOP\"}\n");
    assert!(matches!(qmp.human("info version"), Err(QmpError::Protocol(_))));
    // However often it waits for more, a call reads a bounded number of bytes.
    let mut room = EVENTS_BYTES;
    let all = std::iter::repeat_with(|| qmp.message_now(&mut room)).find(Result::is_err);
    assert!(matches!(all, Some(Err(QmpError::Protocol(_)))), "{all:?}");
    assert!(qmp.events.len() <= 1 && qmp.come.len() <= EVENT_BYTES + PIECE_BYTES);
    drop(qmp);
    flood.join().unwrap();
}

#[test]
fn no_event_is_lost_among_many() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    theirs.write_all(b"{\"event\":\"RESET\"}\n").unwrap();
    for _ in 0..2000 {
        theirs.write_all(b"{\"event\":\"STOP\"}\n{\"event\":\"RESUME\"}\n").unwrap();
        // As in a wait for an answer: nobody asks for events.
        while let Some(message) = qmp.message_now(&mut EVENT_BYTES.clone()).unwrap() {
            qmp.take(&message).unwrap();
        }
    }
    assert_eq!(qmp.events().unwrap(), ["RESET", "STOP", "RESUME"]);
}

#[test]
fn ears_hear_a_reset_before_and_after_it_was_read() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    let ears = qmp.ears().unwrap();
    assert!(!ears.may_have_heard_reset());
    theirs.write_all(b"{\"event\":\"STOP\"}\n").unwrap();
    assert!(ears.may_have_heard_reset(), "nobody knows yet what it says");
    qmp.events().unwrap();
    assert!(!ears.may_have_heard_reset());
    theirs.write_all(b"{\"event\":\"RESET\"}\n").unwrap();
    assert!(ears.may_have_heard_reset());
    qmp.events().unwrap();
    assert!(ears.may_have_heard_reset());
    let next = qmp.ears().unwrap();
    assert!(!next.may_have_heard_reset());
    qmp.close();
    assert!(next.may_have_heard_reset());
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "QEMU sees that its client has gone");
}

#[test]
fn names_that_are_none_are_not_kept() {
    let (mut qmp, theirs) = UnixStream::pair().map(|(a, b)| (Qmp::over(a), b)).unwrap();
    let name = "X".repeat(EVENT_NAME_BYTES + 1);
    (&theirs).write_all(format!("{{\"event\":\"{name}\"}}\n").as_bytes()).unwrap();
    assert!(matches!(qmp.events(), Err(QmpError::Protocol(_))));
    let names = (0..=EVENT_NAMES).map(|number| format!("{{\"event\":\"{number}\"}}\n"));
    (&theirs).write_all(names.collect::<String>().as_bytes()).unwrap();
    assert!(matches!(qmp.events(), Err(QmpError::Protocol(_))));
    assert!(qmp.events.len() <= EVENT_NAMES);
}

#[test]
fn a_line_without_an_end_is_not_kept() {
    let (mut qmp, flood) = babbler(&[b'x'; 4096]);
    let all = std::iter::repeat_with(|| qmp.events()).take(100_000).find(Result::is_err);
    assert!(matches!(all, Some(Err(QmpError::Protocol(_)))), "{all:?}");
    assert!(qmp.come.len() <= EVENT_BYTES + PIECE_BYTES);
    drop(qmp);
    flood.join().unwrap();
}

#[test]
fn a_server_that_does_not_answer_is_asked_nothing_more() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    let most = Duration::from_millis(1);
    for _ in 0..3 {
        let late = qmp.in_a_hurry(most, |qmp| qmp.execute("query-status", json!({})));
        assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
    }
    let mut asked = BufReader::new(&theirs);
    asked.read_line(&mut String::new()).unwrap();
    assert!(asked.buffer().is_empty(), "{:?}", asked.buffer());
    (&theirs).write_all(b"{\"return\":1,\"id\":1}\n").unwrap();
    let answer = answer_next(&theirs, 1, "{\"return\":2,\"id\":2}\n");
    assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(2));
    answer.join().unwrap();
}

#[test]
fn a_qemu_that_shuts_down_is_asked_nothing() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp::over(ours);
    (&theirs).write_all(b"{\"event\":\"SHUTDOWN\"}\n").unwrap();
    let refused = qmp.execute("query-status", json!({}));
    assert!(matches!(refused, Err(QmpError::Io(_))), "{refused:?}");
    theirs.set_nonblocking(true).unwrap();
    let asked = (&theirs).read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(asked, Err(ErrorKind::WouldBlock));
    assert_eq!(qmp.events().unwrap(), ["SHUTDOWN"]);
}

#[test]
fn a_socket_without_a_server_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Qmp::connect_within(&path, Duration::from_millis(20)).err().unwrap();
    assert!(matches!(error, QmpError::Io(_)), "{error}");
}

#[test]
fn a_socket_for_which_others_wait_already_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    // Room for one connection that waits.
    rustix::net::listen(&listener, 0).unwrap();
    let _waits = dial(&path, Instant::now()).unwrap();
    let error = Qmp::connect_within(&path, Duration::from_millis(20)).err().unwrap();
    assert!(matches!(error, QmpError::Taken), "{error}");
    assert!(error.to_string().contains("second monitor"), "{error}");
}

#[test]
fn a_refusal_is_one_short_line_whatever_it_says() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let answer = json!({ "error": { "desc": "no\n".repeat(1 << 16) } });
    let answer: &'static str = format!("{answer}\n").leak();
    let said = answer_next(&theirs, 1, answer);
    let error = Qmp::over(ours).execute("cont", json!({})).unwrap_err().to_string();
    assert!(error.starts_with("QEMU refused cont: no?no?") && error.len() < 300, "{error}");
    said.join().unwrap();
}

#[test]
fn a_refusal_carries_qemus_words() {
    let (_dir, path) = peer(&[
        "{\"QMP\":{}}\n",
        "{\"return\":{}}\n",
        "{\"error\":{\"class\":\"X\",\"desc\":\"no such thing\"}}\n",
    ]);
    let error = Qmp::connect(&path).unwrap().human("x").unwrap_err();
    assert!(error.to_string().contains("no such thing"), "{error}");
}

#[test]
fn something_else_than_qmp_is_an_error() {
    for greeting in [
        &["SSH-2.0-OpenSSH\n"],
        &["QEMU 7.2.22 monitor - type 'help' for more information\r\n(qemu) "],
        &["{\"return\":{}}\n"],
    ] {
        let (_dir, path) = peer(greeting);
        let error = Qmp::connect(&path).err().unwrap();
        assert!(matches!(error, QmpError::NoGreeting), "{error}");
        assert!(error.to_string().contains("-qmp"), "{error}");
    }
}

/// The events may have been meant for the client before. This client is not greeted.
#[test]
fn a_server_that_sends_events_and_no_greeting_is_no_qmp() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let stream = dial(&path, deadline).unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.write_all(b"{\"event\":\"RESET\"}\n").unwrap();
    let error = Qmp::over(stream).await_greeting(Duration::ZERO, deadline).unwrap_err();
    assert!(matches!(error, QmpError::Silent(_)), "{error}");
    assert!(error.to_string().contains("-qmp"), "{error}");
}

/// Ends long before the deadline: an owner that has accepted somebody is not busy.
#[test]
fn a_server_that_accepts_and_is_silent_is_no_qmp() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let greeted = |stream: UnixStream| Qmp::over(stream).await_greeting(Duration::ZERO, deadline);
    let stream = dial(&path, deadline).unwrap();
    let _accepted = listener.accept().unwrap();
    let waits = dial(&path, deadline).unwrap();
    let other = greeted(waits);
    assert!(matches!(other, Err(QmpError::Taken)), "{other:?}");
    // Nobody else waits any more.
    let error = loop {
        match greeted(stream.try_clone().unwrap()).unwrap_err() {
            QmpError::Taken => drop(listener.accept().unwrap()),
            error => break error,
        }
    };
    assert!(matches!(error, QmpError::Silent(_)), "{error}");
}

#[test]
fn an_owner_that_is_late_to_accept_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut qmp = Qmp::over(dial(&path, deadline).unwrap());
    assert_eq!(turn(&qmp.stream).unwrap(), Turn::Next);
    let (begin, begun) = std::sync::mpsc::channel();
    let late = std::thread::spawn(move || {
        // Answers as soon as the client is known to wait.
        begun.recv().unwrap();
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"{\"QMP\":{}}\n").unwrap();
    });
    let error = qmp.await_greeting(Duration::ZERO, Instant::now()).unwrap_err();
    assert!(matches!(error, QmpError::Io(_)), "{error}");
    begin.send(()).unwrap();
    qmp.await_greeting(Duration::from_secs(60), deadline).unwrap();
    late.join().unwrap();
}

#[test]
fn a_descriptor_is_lent_with_its_request() {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, recvmsg};
    use std::io::IoSliceMut;
    use std::os::fd::AsFd;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let (mut line, mut space) = ([0; 512], [MaybeUninit::uninit(); 128]);
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut line)];
        recvmsg(&theirs, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let got = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (&theirs).write_all(b"{\"return\":{\"fdset-id\":3,\"fd\":9},\"id\":1}\n").unwrap();
        let mut said = [0; 512];
        let bytes = (&theirs).read(&mut said).unwrap();
        (&theirs).write_all(b"{\"return\":{},\"id\":2}\n").unwrap();
        let mut text = String::new();
        std::fs::File::from(got.unwrap()).read_to_string(&mut text).unwrap();
        (text, String::from_utf8_lossy(&said[..bytes]).into_owned())
    });
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"lent").unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    let mut qmp = Qmp::over(ours);
    let lent = qmp.lend(file.as_fd()).unwrap();
    assert_eq!(lent.number, 9);
    qmp.end_loan(&lent).unwrap();
    let (text, said) = qemu.join().unwrap();
    assert_eq!(text, "lent");
    assert!(said.contains("remove-fd") && said.contains("\"fd\":9"), "{said}");
}
