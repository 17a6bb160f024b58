//! The past: which moments of the history are shown, and what comes before and after them.

use ebb_api::{HISTORY_LONG_S, HISTORY_S, HISTORY_STEP_S, HistoryQuery, Top, route};

/// How much is shown of a VM, in seconds.
const SHOWN_S: u64 = 20 * 60;
/// Where the next moment is looked for: first nearby.
const SPANS_S: [u64; 3] = [SHOWN_S, HISTORY_S, HISTORY_LONG_S];
/// Most moments that the daemon is asked for at once.
const MOMENTS: u64 = 90;

/// Asks the daemon.
pub trait Ask {
    /// The moments of a query.
    fn history(&self, query: &HistoryQuery) -> Result<Vec<Top>, String>;
}

impl<F: Fn(&HistoryQuery) -> Result<Vec<Top>, String>> Ask for F {
    fn history(&self, query: &HistoryQuery) -> Result<Vec<Top>, String> {
        self(query)
    }
}

/// The history, through what the daemon is asked.
pub struct Past<A> {
    pub ask: A,
}

impl<A: Ask> Past<A> {
    /// The moment after another one, or the one before; with it come those before it. Empty: there
    /// is none.
    pub fn step(&self, at_s: u64, is_forward: bool) -> Result<Vec<Top>, String> {
        match is_forward {
            false => self.until(at_s.saturating_sub(1)),
            true => match self.first_after(at_s)? {
                Some(second) => self.until(second),
                None => Ok(Vec::new()),
            },
        }
    }

    /// The last moment up to a second; with it come those before it. Empty: there is none.
    pub fn until(&self, second: u64) -> Result<Vec<Top>, String> {
        for span in SPANS_S {
            let all = self.between(second.saturating_sub(span), second)?;
            match all.last().map(|top| top.at_unix_ms / 1000) {
                None => {}
                Some(_) if span == SHOWN_S => return Ok(all),
                // These moments lie far apart.
                Some(last) => return self.between(last.saturating_sub(SHOWN_S), last),
            }
        }
        Ok(Vec::new())
    }

    /// The second of the first moment after another one.
    fn first_after(&self, second: u64) -> Result<Option<u64>, String> {
        let begin = second.saturating_add(1);
        for span in SPANS_S {
            let (mut from, mut to) = (begin, begin.saturating_add(span));
            // A step's moments are one here, with the time of the last of them.
            while let Some(top) = self.between(from, to)?.first() {
                let (found, step) = (top.at_unix_ms / 1000, step_s(from, to));
                if step == HISTORY_STEP_S {
                    return Ok(Some(found));
                }
                (from, to) = (from + found.saturating_sub(from) / step * step, found);
            }
        }
        Ok(None)
    }

    fn between(&self, from: u64, to: u64) -> Result<Vec<Top>, String> {
        let step = Some(step_s(from, to));
        self.ask.history(&HistoryQuery { vm: None, from, to, step })
    }
}

fn step_s(from: u64, to: u64) -> u64 {
    (to.saturating_sub(from) / MOMENTS + 1).max(HISTORY_STEP_S)
}

/// The path with the query.
pub fn path_of(query: &HistoryQuery) -> String {
    let HistoryQuery { vm, from, to, step } = query;
    let vm = vm.as_ref().map_or(String::new(), |vm| format!("&vm={vm}"));
    let step = step.map_or(String::new(), |step| format!("&step={step}"));
    format!("{}?from={from}&to={to}{step}{vm}", route::HISTORY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::top;

    /// A daemon with moments at these seconds.
    fn past(seconds: &'static [u64]) -> Past<impl Ask> {
        let ask = move |query: &HistoryQuery| {
            query.check().map_err(|error| error.to_string())?;
            let is_asked = |second: &&u64| (query.from..=query.to).contains(second);
            let mut all: Vec<Top> = Vec::new();
            let step = |ms: u64| (ms / 1000 - query.from) / query.step_s();
            for second in seconds.iter().filter(is_asked) {
                let moment = Top { at_unix_ms: second * 1000, ..top(vec![]) };
                if all.last().is_some_and(|last| step(last.at_unix_ms) == step(second * 1000)) {
                    all.pop();
                }
                all.push(moment);
            }
            Ok(all)
        };
        Past { ask }
    }

    fn last(all: Result<Vec<Top>, String>) -> Option<u64> {
        all.unwrap().last().map(|top| top.at_unix_ms / 1000)
    }

    #[test]
    fn each_moment_is_found_from_its_neighbours() {
        const DAY: u64 = 86_400;
        const ALL: [u64; 8] = [
            9 * DAY,
            9 * DAY + 15,
            9 * DAY + 30,
            50 * DAY,
            51 * DAY,
            51 * DAY + 300,
            52 * DAY,
            53 * DAY,
        ];
        let past = past(&ALL);
        for pair in ALL.windows(2) {
            assert_eq!(last(past.step(pair[0], true)), Some(pair[1]));
            assert_eq!(last(past.step(pair[1], false)), Some(pair[0]));
            assert_eq!(last(past.until(pair[1] - 1)), Some(pair[0]));
        }
        assert_eq!(last(past.step(ALL[0], false)), None);
        assert_eq!(last(past.step(ALL[7], true)), None);
        assert_eq!(last(past.until(ALL[7])), Some(ALL[7]));
        assert_eq!(past.until(9 * DAY + 40).unwrap().len(), 3);
        assert_eq!(last(past.until(u64::MAX)), None);
        assert_eq!(last(past.step(u64::MAX, true)), None);
    }

    #[test]
    fn a_query_is_written_as_the_daemon_reads_it() {
        let query = HistoryQuery { vm: Some("web".parse().unwrap()), from: 1, to: 2, step: None };
        assert_eq!(path_of(&query), "/v1/history?from=1&to=2&vm=web");
    }
}
