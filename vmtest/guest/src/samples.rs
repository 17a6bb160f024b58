//! Loops whose speed is reported piece by piece: a short disturbance of the guest shows in one of
//! the pieces.

use std::hint::black_box;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

/// Bytes that all threads together copy for one sample: more than processors cache.
const COPY_BYTES: usize = 64 << 20;
/// As in the paper: about 2^28 cycles.
const QUANTUM: Duration = Duration::from_millis(125);
/// Steps between two looks at the clock.
const STEPS: u64 = 256;
/// Most samples to report, since a console carries them.
const SAMPLES_MAX: usize = 4000;

/// When a sample was taken, since the beginning, and its figure.
type Sample = (Duration, f64);

/// The copy of McCalpin's STREAM: MiB a second, copy by copy.
pub fn stream(threads: usize, seconds: u64) -> Result<String> {
    let threads = threads.clamp(1, 64);
    let bytes = COPY_BYTES / threads;
    let (barrier, all) = (Barrier::new(threads), Mutex::new(Copies::default()));
    let copies = || all.lock().unwrap_or_else(PoisonError::into_inner);
    on_threads(threads, |_| {
        let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
        if barrier.wait().is_leader() {
            copies().clock = Some((Instant::now(), Duration::ZERO));
        }
        while !copies().are_enough(seconds) {
            barrier.wait();
            to.copy_from_slice(black_box(&from));
            black_box(&to);
            // One thread decides for all whether it was the last copy.
            if barrier.wait().is_leader() {
                copies().add((bytes * threads) as f64 / f64::from(1 << 20));
            }
            barrier.wait();
        }
    })?;
    let samples = std::mem::take(&mut copies().samples);
    Ok(format_samples(samples))
}

/// What all threads together have copied.
#[derive(Default)]
struct Copies {
    /// The beginning, and the end of the last copy since then.
    clock: Option<(Instant, Duration)>,
    samples: Vec<Sample>,
}

impl Copies {
    fn add(&mut self, mib: f64) {
        if let Some((began, last)) = &mut self.clock {
            let now = began.elapsed();
            self.samples.push((now, mib / (now - *last).as_secs_f64()));
            *last = now;
        }
    }

    fn are_enough(&self, seconds: u64) -> bool {
        let is_late = self.samples.last().is_some_and(|(at, _)| at.as_secs() >= seconds);
        is_late || self.samples.len() >= SAMPLES_MAX
    }
}

/// The fixed time quantum: steps of a computation in each 125 ms, of all threads together.
pub fn quanta(threads: usize, seconds: u64) -> Result<String> {
    let count = (seconds * 1000 / QUANTUM.as_millis() as u64).min(SAMPLES_MAX as u64) as u32;
    let began = Instant::now();
    let all = on_threads(threads.clamp(1, 64), |thread| {
        let mut value = thread as u64;
        (1..=count).map(|number| steps_until(began + QUANTUM * number, &mut value)).collect()
    })?;
    let sum = |number: usize| all.iter().filter_map(|steps: &Vec<u64>| steps.get(number)).sum();
    let sums = (0..count as usize).map(|number| -> u64 { sum(number) });
    Ok(format_samples(
        (1..).zip(sums).map(|(number, steps)| (QUANTUM * number, steps as f64)).collect(),
    ))
}

fn steps_until(end: Instant, value: &mut u64) -> u64 {
    let mut steps = 0;
    while Instant::now() < end {
        for _ in 0..STEPS {
            *value = black_box(value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7));
        }
        steps += STEPS;
    }
    steps
}

fn on_threads<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = (0..count).map(|thread| scope.spawn(move || work(thread))).collect();
        all.into_iter().map(|one| one.join().map_err(|_| "a thread died".to_owned())).collect()
    })
}

/// Samples as `MILLISECONDS:FIGURE`, in order.
fn format_samples(samples: Vec<Sample>) -> String {
    let words = samples.iter().map(|(at, figure)| format!("{}:{figure:.0}", at.as_millis()));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(text: &str) -> Vec<f64> {
        let figure = |word: &str| word.split_once(':').unwrap().1.parse().unwrap();
        text.split(' ').map(figure).collect()
    }

    #[test]
    fn copies_and_steps_are_reported_one_by_one() {
        assert!(figures(&stream(2, 0).unwrap())[0] > 0.0);
        assert!(figures(&quanta(2, 1).unwrap()).len() == 8);
    }
}
