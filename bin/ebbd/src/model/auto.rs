//! Automatic reclaim of a VM, as it is on record.

use ebb_api::{AutoRequest, BELOW_PERCENT_DEFAULT, BadRequest, ReclaimWhen};
use serde::{Deserialize, Serialize};

/// Automatic reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Auto {
    /// Whether it runs.
    pub on: bool,
    /// What begins a round. A record of an older daemon has intervals.
    #[serde(default)]
    pub when: ReclaimWhen,
    /// Time between two rounds, in milliseconds.
    pub interval_ms: u64,
    /// Available memory of the host below which there is pressure, in percent.
    #[serde(default)]
    pub below_percent: Option<u32>,
    /// The same in bytes, in place of the percentage; neither: the default percentage.
    #[serde(default)]
    pub below_bytes: Option<u64>,
    /// Free memory to leave to the guest. V-Probe leaves 64 MiB if this is less.
    pub keep_bytes: u64,
}

impl Default for Auto {
    fn default() -> Auto {
        Auto {
            on: false,
            when: ReclaimWhen::Interval,
            interval_ms: 5000,
            below_percent: None,
            below_bytes: None,
            keep_bytes: 0,
        }
    }
}

impl Auto {
    /// Checks a request together with what stays.
    ///
    /// # Errors
    /// Those of [`AutoRequest::check`].
    pub fn check(&self, request: AutoRequest) -> Result<(), BadRequest> {
        AutoRequest { when: request.when.or(Some(self.when)), ..request }.check()
    }

    /// Sets what the request names; the rest stays.
    pub fn set(&mut self, request: AutoRequest) {
        let AutoRequest { on, when, interval_ms, below_percent, below_bytes, keep_bytes } = request;
        self.on = on;
        self.when = when.unwrap_or(self.when);
        self.interval_ms = interval_ms.unwrap_or(self.interval_ms);
        self.keep_bytes = keep_bytes.unwrap_or(self.keep_bytes);
        if below_percent.is_some() || below_bytes.is_some() {
            (self.below_percent, self.below_bytes) = (below_percent, below_bytes);
        }
    }

    /// The percentage below which there is pressure; none: the bytes count.
    pub fn percent(&self) -> Option<u32> {
        match self.below_bytes {
            Some(_) => None,
            None => self.below_percent.or(Some(BELOW_PERCENT_DEFAULT)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_record_has_intervals() {
        let text = r#"{"on": true, "interval_ms": 700, "keep_bytes": 9}"#;
        let auto: Auto = serde_json::from_str(text).expect("a record");
        let expected = Auto { on: true, interval_ms: 700, keep_bytes: 9, ..Auto::default() };
        assert_eq!(auto, expected);
        assert_eq!((auto.when, auto.percent()), (ReclaimWhen::Interval, Some(10)));
    }

    #[test]
    fn what_a_request_leaves_out_stays() {
        let mut auto = Auto::default();
        let nothing = AutoRequest { on: true, ..AutoRequest::default() };
        let pressure = Some(ReclaimWhen::Pressure);
        let below = AutoRequest { below_bytes: Some(7), ..nothing };
        let refused = auto.check(below).unwrap_err().to_string();
        assert!(refused.contains("belongs to --when pressure"), "{refused}");
        assert_eq!(auto.check(AutoRequest { when: pressure, ..below }), Ok(()));
        auto.set(AutoRequest { when: pressure, below_bytes: Some(7), ..nothing });
        auto.set(AutoRequest { keep_bytes: Some(3), ..nothing });
        assert_eq!(
            (auto.when, auto.below_bytes, auto.percent()),
            (ReclaimWhen::Pressure, Some(7), None)
        );
        assert_eq!(auto.check(below), Ok(()));
        auto.set(AutoRequest { below_percent: Some(5), ..nothing });
        assert_eq!((auto.below_bytes, auto.percent(), auto.keep_bytes), (None, Some(5), 3));
        let text = serde_json::to_string(&auto).expect("text");
        assert_eq!(serde_json::from_str::<Auto>(&text).expect("a record"), auto);
    }
}
