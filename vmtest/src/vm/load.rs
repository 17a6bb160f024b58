//! What a guest does with its memory at a test's request: loads in the background, and what they use.

use std::collections::HashMap;

use super::Vm;

/// Result of a background load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Churn {
    /// Times that memory was allocated, checked and freed.
    pub cycles: u64,
    /// Bytes that differ from what the guest had written.
    pub wrong_bytes: u64,
}

/// How long the accesses of a guest take that `access NAME` has begun, 256 accesses at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessTimes {
    /// How many times were taken.
    pub count: u64,
    /// 99 of 100 times do not exceed this, in microseconds; within 9 %.
    pub p99_us: u64,
    /// The longest time in microseconds.
    pub longest_us: u64,
    /// Times of 100 ms and more.
    pub slow: u64,
}

impl Vm {
    /// Its `/proc/meminfo` in bytes, after each processor has added what it counted.
    pub fn meminfo(&self) -> HashMap<String, u64> {
        self.guest("write /proc/sys/vm/stat_refresh 1");
        let text = self.guest("cat /proc/meminfo");
        let fields = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
            Some((name.to_owned(), kib << 10))
        });
        fields.collect()
    }

    /// Starts a load that uses at most `size`, until it is stopped.
    pub fn churn(&self, size: &str) {
        self.guest(&format!("churn load 86400 {size}"));
    }

    /// Waits for this many more cycles of the load.
    pub fn churn_on(&self, cycles: u64) {
        self.guest(&format!("churnon load {cycles}"));
    }

    /// Ends the load.
    pub fn churn_stop(&self) -> Churn {
        let answer = self.guest("churnstop load");
        let mut words = answer.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(cycles)), Some(Ok(wrong_bytes))) => {
                if wrong_bytes > 0 {
                    eprintln!("{}: wrong bytes: {answer}", self.name);
                }
                Churn { cycles, wrong_bytes }
            }
            _ => panic!("churnstop answers {answer:?}"),
        }
    }

    /// How long accesses took since this was last asked.
    pub fn access_times(&self, name: &str) -> AccessTimes {
        let answer = self.guest(&format!("accesstimes {name}"));
        let figures: Vec<u64> =
            answer.split_whitespace().map_while(|word| word.parse().ok()).collect();
        match figures[..] {
            [count, p99_us, longest_us, slow] => AccessTimes { count, p99_us, longest_us, slow },
            _ => panic!("accesstimes answers {answer:?}"),
        }
    }

    /// The frames that a program of the guest uses, by `hotframes NAME` or `accessframes NAME`, in
    /// the order in which it reports them.
    pub fn frames(&self, request: &str) -> Vec<u64> {
        let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let answer = self.guest(request);
        let runs = answer.split_whitespace().map(|run| run.split_once('+').expect("a run"));
        runs.flat_map(|(first, count)| hex(first)..hex(first) + hex(count)).collect()
    }
}
