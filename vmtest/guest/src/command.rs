//! The commands of the host.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_units::Bytes;

use crate::access::{Access, Law};
use crate::buffer::Buffer;
use crate::churn::Churn;
use crate::disk;
use crate::files::{self, Files};
use crate::hot::Hot;
use crate::{Context, Result, boot, measure, network, power, samples, shell};

/// Memory that is left to the kernel whatever is requested: init must not run short of it.
const RESERVE_BYTES: u64 = 24 << 20;
const BENCH_BYTES: u64 = 64 << 20;

/// What the commands have made and not yet undone.
#[derive(Default)]
pub struct Guest {
    buffers: HashMap<String, Buffer>,
    files: HashMap<String, Files>,
    churns: HashMap<String, Churn>,
    hot: HashMap<String, Hot>,
    accesses: HashMap<String, Access>,
    generation: u64,
}

impl Guest {
    /// Carries out one request.
    pub fn obey(&mut self, request: &str) -> Result<String> {
        let words: Vec<&str> = request.split_whitespace().collect();
        match *words {
            ["ping"] => done(),
            ["cat", path] => fs::read_to_string(path).context(path),
            ["write", path, ..] => write(path, request),
            ["dropcaches"] => {
                fs::write("/proc/sys/vm/drop_caches", "3").context("drop").and(done())
            }
            ["compact"] => {
                fs::write("/proc/sys/vm/compact_memory", "1").context("compact").and(done())
            }
            ["load", name] => boot::load_for(name).and(done()),
            ["boot", kind, device] => boot::system(kind, device).map(|never| match never {}),
            ["reboot"] => power::restart().map(|never| match never {}),
            ["kexec", kernel, initrd] => power::kexec(kernel, initrd).map(|never| match never {}),
            ["poweroff"] => power::off().map(|never| match never {}),
            ["panic"] => power::panic().map(|never| match never {}),
            ["bench", "mem", seconds] => bench(number(seconds)?),
            ["bench", "stream", threads, seconds] => {
                samples::stream(number(threads)? as usize, number(seconds)?)
            }
            ["bench", "quanta", threads, seconds] => {
                samples::quanta(number(threads)? as usize, number(seconds)?)
            }
            ["disk", path, size] => disk::round_trip(path, bytes(size)?, self.next()),
            ["mount", kind, device, at] => boot::mount_disk(kind, device, at).and(done()),
            ["umount", at] => boot::unmount(at).and(done()),
            ["fsync", path] => fsync(path),
            ["network", address, gateway] => network::begin(address, gateway).and(done()),
            ["serve", port, path] => network::serve_file(port, path).and(done()),
            ["udp", port, size] => network::answer_udp(port, bytes(size)?).and(done()),
            ["exchange", server, size] => network::exchange(server, bytes(size)?, self.next()),
            ["diskchurn", name, directory, size] => {
                self.new_churn(name, || Churn::start_on_disk(name, directory, bytes(size)?))
            }
            ["churn", name, seconds, size] => self.churn(name, number(seconds)?, bytes(size)?),
            ["churnon", name, cycles] => find(&mut self.churns, name)?.wait(number(cycles)?),
            ["churnstop", name] => take(&mut self.churns, name)?.stop(),
            ["hot", name, size, unit, part] => {
                let bytes = bytes(size)?;
                affordable(bytes)?;
                let hot = Hot::start(name, bytes, number(unit)?, number(part)?)?;
                self.hot.insert(name.into(), hot);
                done()
            }
            ["hoton", name, passes] => find(&mut self.hot, name)?.wait(number(passes)?),
            ["hotframes", name] => Ok(find(&mut self.hot, name)?.frames()),
            ["hotstop", name] => take(&mut self.hot, name)?.stop(),
            ["access", name, size, ref law @ ..] => {
                self.access(name, bytes(size)?, Law::parse(law)?)
            }
            ["accesslaw", name, ref law @ ..] => {
                find(&mut self.accesses, name)?.change(Law::parse(law)?);
                done()
            }
            ["accesson", name, more] => find(&mut self.accesses, name)?.wait(number(more)?),
            ["accesstimes", name] => Ok(find(&mut self.accesses, name)?.times()),
            ["accessframes", name] => Ok(find(&mut self.accesses, name)?.frames()),
            ["accessstop", name] => take(&mut self.accesses, name)?.stop(),
            ["timed", what, ..] => timed(what, request),
            ["sh", ..] => shell::run(request.trim_start_matches("sh ")),
            _ => self.obey_on_memory(&words),
        }
    }

    fn obey_on_memory(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["fill", name, size] => self.fill(name, bytes(size)?),
            ["check", name] => Ok(find(&mut self.buffers, name)?.check().to_string()),
            ["refill", name] => {
                find(&mut self.buffers, name)?.refill();
                done()
            }
            ["touch", name] => Ok(touch(find(&mut self.buffers, name)?)),
            ["free", name] => take(&mut self.buffers, name).map(drop).and(done()),
            ["files", name, size] => self.write_files(files::DIRECTORY, name, bytes(size)?),
            ["files", name, size, directory] => self.write_files(directory, name, bytes(size)?),
            ["checkfiles", name] => Ok(find(&mut self.files, name)?.check()?.to_string()),
            ["rmfiles", name] => take(&mut self.files, name).map(drop).and(done()),
            _ => Err(format!("no such command: {}", words.join(" "))),
        }
    }

    fn fill(&mut self, name: &str, bytes: u64) -> Result<String> {
        // The old one is removed first: both at once may be more than there is.
        self.buffers.remove(name);
        affordable(bytes)?;
        let buffer = Buffer::new(name, self.next(), bytes);
        self.buffers.insert(name.into(), buffer);
        done()
    }

    fn write_files(&mut self, directory: &str, name: &str, bytes: u64) -> Result<String> {
        self.files.remove(name);
        affordable(bytes)?;
        let files = Files::write_in(Path::new(directory), name, self.next(), bytes)?;
        self.files.insert(name.into(), files);
        done()
    }

    fn access(&mut self, name: &str, bytes: u64, law: Law) -> Result<String> {
        affordable(bytes)?;
        let access = Access::start(name, bytes, law)?;
        self.accesses.insert(name.into(), access);
        done()
    }

    fn churn(&mut self, name: &str, seconds: u64, bytes: u64) -> Result<String> {
        self.new_churn(name, || {
            affordable(bytes)?;
            Churn::start(name, seconds, bytes)
        })
    }

    fn new_churn(&mut self, name: &str, start: impl FnOnce() -> Result<Churn>) -> Result<String> {
        if self.churns.contains_key(name) {
            return Err(format!("{name} runs already"));
        }
        self.churns.insert(name.into(), start()?);
        done()
    }

    /// The next generation, far from all others: no old content passes for new.
    fn next(&mut self) -> u64 {
        self.generation += 1_000_000;
        self.generation
    }
}

/// Runs `timed READ PATH` and the like. The answer is in microseconds.
fn timed(what: &str, request: &str) -> Result<String> {
    let words: Vec<&str> = request.split_whitespace().skip(2).collect();
    match (what, &words[..]) {
        ("read", [path]) => measure::read(path),
        ("allocate", [size]) => measure::allocate(bytes(size)?),
        ("disk", [path, access, size, at_once, threads]) => {
            measure::disk(path, access, bytes(size)?, bytes(at_once)?, number(threads)?)
        }
        ("program", [root, ..]) => {
            measure::program(root, request.split_once(root).map_or("", |(_, line)| line))
        }
        _ => Err(format!("nothing to time: {request}")),
    }
}

fn done() -> Result<String> {
    Ok("done".into())
}

fn find<'a, T>(map: &'a mut HashMap<String, T>, name: &str) -> Result<&'a mut T> {
    map.get_mut(name).ok_or_else(|| format!("there is no {name}"))
}

fn take<T>(map: &mut HashMap<String, T>, name: &str) -> Result<T> {
    map.remove(name).ok_or_else(|| format!("there is no {name}"))
}

fn number(text: &str) -> Result<u64> {
    text.parse().context(text)
}

fn bytes(text: &str) -> Result<u64> {
    Ok(text.parse::<Bytes>().context("size")?.0.next_multiple_of(4096))
}

fn affordable(bytes: u64) -> Result<()> {
    let table = fs::read_to_string("/proc/meminfo").context("meminfo")?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).unwrap_or("0");
    let available = number(kib)? << 10;
    match bytes + RESERVE_BYTES <= available {
        true => Ok(()),
        false => Err(format!("{} asked for, {} available", Bytes(bytes), Bytes(available))),
    }
}

/// Runs `write PATH TEXT`, with the text as it is in the request.
fn write(path: &str, request: &str) -> Result<String> {
    let text = request.split_once(path).map_or("", |(_, rest)| rest.trim_start());
    fs::write(path, text).context(path).and(done())
}

fn fsync(path: &str) -> Result<String> {
    fs::File::open(path).and_then(|file| file.sync_all()).context(path).and(done())
}

/// Touches all pages. Returns pages a second.
fn touch(buffer: &mut Buffer) -> String {
    let start = Instant::now();
    let pages = buffer.touch();
    rate(pages, start.elapsed())
}

/// Fills and checks a buffer repeatedly. Returns pages written or read a second.
fn bench(seconds: u64) -> Result<String> {
    affordable(BENCH_BYTES)?;
    let limit = Duration::from_secs(seconds);
    let mut buffer = Buffer::new("bench", 0, BENCH_BYTES);
    let (start, mut pages) = (Instant::now(), 0);
    while start.elapsed() < limit {
        buffer.refill();
        let wrong = buffer.check();
        if wrong.bytes > 0 {
            return Err(format!("wrong bytes: {wrong}"));
        }
        pages += 2 * BENCH_BYTES / 4096;
    }
    Ok(rate(pages, start.elapsed()))
}

fn rate(pages: u64, time: Duration) -> String {
    format!("{:.0}", pages as f64 / time.as_secs_f64())
}
