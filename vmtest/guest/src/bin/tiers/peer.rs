//! The process whose pages are moved: it has them mapped, and works on them.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;

use anyhow::{Context, anyhow, bail, ensure};
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_units::{FRAME_BYTES, Hva};
use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE, Wrong};

const PAGE: u64 = FRAME_BYTES;
/// Distance in words between the word read in one page and that read in the next.
const STRIDE_WORDS: u64 = 8;

/// The other process, as seen from this one.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Where it has the file mapped.
    pub address: Hva,
}

impl Peer {
    /// Starts it. It maps the whole file, and touches nothing.
    pub fn start(file: &RamFile, bytes: u64) -> anyhow::Result<Peer> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_fd().as_raw_fd());
        let mut command = Command::new("/proc/self/exe");
        command.args(["peer", &path, &bytes.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let mut peer = Peer { child, input, output, address: Hva(0) };
        peer.address = Hva(peer.answer()?.first().copied().context("its address")?);
        Ok(peer)
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends it a request. Returns the numbers that it answers.
    pub fn ask(&mut self, request: &str) -> anyhow::Result<Vec<u64>> {
        let input = self.input.as_mut().context("it is ending")?;
        writeln!(input, "{request}")?;
        self.answer().with_context(|| request.to_owned())
    }

    fn answer(&mut self) -> anyhow::Result<Vec<u64>> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "the other process has ended");
        line.split_whitespace().map(|word| Ok(word.parse()?)).collect()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.input = None;
        // It ends by itself, unless it is stuck.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Carries out requests in the other process until there are no more.
///
/// - `read`: reads a word of each page; answers with the number of faults that this took.
/// - `work`: begins to count in pages at random; `so-far`: answers with the counts so far; `stop`:
///   answers with the counts, and the faults since it began.
/// - `check`: answers with the number of wrong bytes, counters included.
pub fn serve(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mapping = Mapping::new(RamFile::from(OwnedFd::from(file)), 0, bytes)?;
    let mut own = Own {
        mapping: Arc::new(mapping),
        pages: bytes / PAGE,
        counts: vec![0; (bytes / PAGE) as usize],
        working: None,
    };
    faults()?;
    println!("{}", own.mapping.address().0);
    for line in std::io::stdin().lines() {
        let numbers = own.obey(line?.trim())?;
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        println!("{}", words.join(" "));
    }
    Ok(())
}

struct Own {
    mapping: Arc<Mapping>,
    pages: u64,
    /// How often it counted in each page.
    counts: Vec<u32>,
    working: Option<Working>,
}

struct Working {
    thread: JoinHandle<Vec<u32>>,
    shared: Arc<Shared>,
    faults_before: u64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    ops: AtomicU64,
}

impl Own {
    fn obey(&mut self, request: &str) -> anyhow::Result<Vec<u64>> {
        match request {
            "read" => {
                let before = faults()?;
                for page in 0..self.pages {
                    black_box(word(&self.mapping, page, STRIDE_WORDS).load(Relaxed));
                }
                Ok(vec![faults()? - before])
            }
            "work" => {
                let (mapping, shared) = (Arc::clone(&self.mapping), Arc::new(Shared::default()));
                let (counts, for_thread) = (std::mem::take(&mut self.counts), Arc::clone(&shared));
                let thread = std::thread::spawn(move || work(&mapping, counts, &for_thread));
                // The thread's own stack is touched by then.
                while shared.ops.load(Relaxed) == 0 {
                    std::thread::yield_now();
                }
                self.working = Some(Working { thread, shared, faults_before: faults()? });
                Ok(vec![0])
            }
            "so-far" => {
                let working = self.working.as_ref().context("nothing works")?;
                Ok(vec![working.shared.ops.load(Relaxed)])
            }
            "stop" => {
                let working = self.working.take().context("nothing works")?;
                working.shared.stop.store(true, Relaxed);
                self.counts =
                    working.thread.join().map_err(|_| anyhow!("the working thread died"))?;
                let faults = faults()?.saturating_sub(working.faults_before);
                Ok(vec![working.shared.ops.load(Relaxed), faults])
            }
            "check" => Ok(vec![check(&self.mapping, &self.counts)]),
            _ => bail!("no such request: {request}"),
        }
    }
}

/// Counts in the first word of pages at random, and reads another word.
fn work(mapping: &Mapping, mut counts: Vec<u32>, shared: &Shared) -> Vec<u32> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    while !shared.stop.load(Relaxed) {
        for _ in 0..64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let page = random % counts.len() as u64;
            // Nobody else writes this word.
            let counter = word(mapping, page, 0);
            counter.store(counter.load(Relaxed) + 1, Relaxed);
            counts[page as usize] += 1;
            black_box(word(mapping, page, 1 + random % (WORDS_PER_PAGE as u64 - 1)).load(Relaxed));
        }
        shared.ops.fetch_add(64, Relaxed);
    }
    counts
}

/// Writes the pattern into every page; its first word is a counter.
pub fn fill(mapping: &Mapping, pages: u64) {
    let mut content = [0; WORDS_PER_PAGE];
    for page in 0..pages {
        pattern().write(page, &mut content);
        content[0] = 0;
        let words = mapping.words(page * PAGE, WORDS_PER_PAGE).expect("a page of the file");
        words.iter().zip(content).for_each(|(to, word)| to.store(word, Relaxed));
    }
}

/// Number of wrong bytes, if the pages' counters should be these.
pub fn check(mapping: &Mapping, counts: &[u32]) -> u64 {
    let (mut wrong, mut expected) = (Wrong::default(), [0; WORDS_PER_PAGE]);
    for (page, &count) in (0..).zip(counts) {
        let words = mapping.words(page * PAGE, WORDS_PER_PAGE).expect("a page of the file");
        let mut content: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
        if content[0] == u64::from(count) {
            pattern().write(page, &mut expected);
            content[0] = expected[0];
        }
        let mut here = Wrong::default();
        pattern().check(page, &content, &mut here);
        wrong.merge(here);
    }
    if wrong.bytes > 0 {
        eprintln!("{wrong}");
    }
    wrong.bytes
}

fn pattern() -> Pattern {
    Pattern::new("tiers", 0)
}

fn word(mapping: &Mapping, page: u64, word: u64) -> &AtomicU64 {
    &mapping.words(page * PAGE + word * 8, 1).expect("a page of the file")[0]
}

/// Faults of this process so far that needed no disk: field 10 of `/proc/self/stat`.
fn faults() -> anyhow::Result<u64> {
    let mut buffer = [0; 1024];
    let length = File::open("/proc/self/stat")?.read(&mut buffer)?;
    let text = std::str::from_utf8(&buffer[..length])?;
    let rest = text.rsplit_once(')').context("stat")?.1;
    Ok(rest.split_ascii_whitespace().nth(7).context("stat")?.parse()?)
}
