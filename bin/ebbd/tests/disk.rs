//! `ebbd disk` killed while its queue is full: every request ends once, in order, and no confirmed
//! write is lost.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};

use testkit::disk::{IN, OK, OUT, Ring, connect, shared_memory};

const SLOTS: u64 = 32;
const SLOT_BYTES: u64 = 256 << 10;
const BUFFERS: u64 = 1 << 20;
const ROUNDS: u64 = 40;

/// A request in flight.
struct Flight {
    slot: u64,
    bytes: u64,
    status: u64,
    writes: Option<u8>,
}

struct Load {
    ring: Ring,
    flights: VecDeque<Flight>,
    /// Expected content of the image's slots, byte by byte.
    model: Vec<u8>,
    seen: u16,
    random: u64,
}

impl Load {
    fn new() -> Load {
        Load {
            ring: Ring::new(shared_memory(BUFFERS + SLOTS * SLOT_BYTES)),
            flights: VecDeque::new(),
            model: vec![0; (SLOTS * SLOT_BYTES) as usize],
            seen: 0,
            random: 1,
        }
    }

    /// xorshift64.
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % below
    }

    /// Fills the queue with requests for slots that have none in flight. Short ones are mixed with
    /// long ones, and end first.
    fn fill(&mut self) {
        while self.flights.len() < SLOTS as usize / 2 {
            let slot = self.random(SLOTS);
            if self.flights.iter().any(|flight| flight.slot == slot) {
                continue;
            }
            let bytes = if self.random(2) == 0 { 4096 } else { SLOT_BYTES };
            let (sector, at) = (slot * SLOT_BYTES / 512, BUFFERS + slot * SLOT_BYTES);
            let piece = [(at, bytes as u32)];
            let writes = (self.random(3) > 0).then(|| 1 + self.random(255) as u8);
            let status = match writes {
                Some(value) => {
                    self.ring.put(at, &vec![value; bytes as usize]);
                    self.ring.prepare(OUT, sector, &piece, &[])
                }
                None => self.ring.prepare(IN, sector, &[], &piece),
            };
            self.flights.push_back(Flight { slot, bytes, status, writes });
        }
    }

    /// Takes the requests that have ended since the last call. Returns their number.
    fn reap(&mut self) -> u64 {
        let mut count = 0;
        while self.seen != self.ring.used() {
            let flight = self.flights.pop_front().expect("only what was asked for ends");
            assert_eq!(self.ring.get(flight.status, 1), [OK], "the oldest ends first");
            let start = (flight.slot * SLOT_BYTES) as usize;
            let part = &mut self.model[start..start + flight.bytes as usize];
            let held = self.ring.get(BUFFERS + flight.slot * SLOT_BYTES, flight.bytes as usize);
            match flight.writes {
                Some(value) => part.fill(value),
                None => assert!(part == held, "a read brings what was written"),
            }
            self.seen = self.seen.wrapping_add(1);
            count += 1;
        }
        count
    }
}

/// Killed when this is dropped, also if the test fails.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().expect("it can be killed");
        self.0.wait().expect("it has ended");
    }
}

fn serve(directory: &Path) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    command.arg("disk").arg("--socket").arg(directory.join("socket"));
    command.arg("--image").arg(directory.join("image"));
    Server(command.env("EBB_LOG", "warn").spawn().unwrap())
}

#[test]
fn a_killed_disk_ends_each_request_once_and_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let image = File::create_new(directory.path().join("image")).unwrap();
    image.set_len(SLOTS * SLOT_BYTES).unwrap();
    let mut load = Load::new();
    for _ in 0..ROUNDS {
        let server = serve(directory.path());
        let front_end = connect(&directory.path().join("socket"), &load.ring, load.ring.used());
        let mut left = 1 + load.random(200);
        while left > 0 {
            load.fill();
            front_end.kick();
            front_end.wait();
            left = left.saturating_sub(load.reap());
        }
        load.fill();
        front_end.kick();
        drop(server);
        load.reap();
    }
    let server = serve(directory.path());
    let front_end = connect(&directory.path().join("socket"), &load.ring, load.ring.used());
    while !load.flights.is_empty() {
        front_end.wait();
        load.reap();
    }
    drop(server);
    let mut content = vec![1; load.model.len()];
    File::open(directory.path().join("image")).unwrap().read_exact_at(&mut content, 0).unwrap();
    assert!(content == load.model);
}
