//! Settings of monitorings, as `ebbd` got them at its start.

use std::time::Duration;

use ebb_api::Backing;
use ebb_heat::ScheduleSettings;
use serde::{Deserialize, Serialize};

/// Shortest window in milliseconds: a window ends at a tick of the VM's worker.
const WINDOW_MS_MIN: u64 = 200;

/// The schedule of monitorings (vTMM, section 3.2.3), and what counts as hot.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MonitoringSettings {
    /// Length of a window of a monitoring, in milliseconds, 200 at least.
    #[arg(long, env = "EBB_HEAT_WINDOW_MS", value_name = "MS", default_value_t = 600)]
    heat_window_ms: u64,
    /// Windows of a monitoring.
    #[arg(long, env = "EBB_HEAT_WINDOWS", value_name = "COUNT", default_value_t = 8)]
    heat_windows: u8,
    /// Seconds from the beginning of one monitoring to the next [default: 60; 120 for a VM in huge
    /// pages].
    #[arg(long, env = "EBB_HEAT_PERIOD_S", value_name = "S")]
    heat_period_s: Option<u64>,
    /// For comparison only: pages that were used in so many windows are hot, all others cold,
    /// in place of their degrees.
    #[arg(long, env = "EBB_HEAT_THRESHOLD", value_name = "COUNT", hide = true)]
    heat_threshold: Option<u8>,
}

impl Default for MonitoringSettings {
    fn default() -> MonitoringSettings {
        let ScheduleSettings { window, rounds, .. } = ScheduleSettings::default();
        MonitoringSettings {
            heat_window_ms: u64::try_from(window.as_millis()).unwrap_or(u64::MAX),
            heat_windows: rounds,
            heat_period_s: None,
            heat_threshold: None,
        }
    }
}

impl MonitoringSettings {
    /// The schedule of a VM whose memory has this backing.
    pub fn schedule(&self, backing: Backing) -> ScheduleSettings {
        let settings = match backing {
            Backing::Small => ScheduleSettings::default(),
            _ => ScheduleSettings::huge(),
        };
        ScheduleSettings {
            window: Duration::from_millis(self.heat_window_ms),
            rounds: self.heat_windows,
            period: self.heat_period_s.map_or(settings.period, Duration::from_secs),
            ..settings
        }
    }

    /// Number of windows with a use from which a page is hot; none: its degree decides.
    pub fn threshold(&self) -> Option<u8> {
        self.heat_threshold
    }

    /// Checks the options.
    ///
    /// # Errors
    /// Says what is wrong, and what to do.
    pub fn check(&self) -> Result<(), String> {
        if self.heat_window_ms < WINDOW_MS_MIN {
            return Err(format!(
                "--heat-window-ms {} is too short to see what a VM uses: give {WINDOW_MS_MIN} or \
                 more",
                self.heat_window_ms
            ));
        }
        if let Some(threshold) = self.heat_threshold
            && !(1..=self.heat_windows).contains(&threshold)
        {
            return Err(format!(
                "--heat-threshold {threshold}: give 1 to {} windows",
                self.heat_windows
            ));
        }
        let settings = self.schedule(Backing::Small);
        settings.check().map_err(|why| {
            format!("{why}: see --heat-window-ms, --heat-windows and --heat-period-s")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_is_as_in_the_paper() {
        let monitoring = MonitoringSettings::default();
        assert_eq!(monitoring.schedule(Backing::Small), ScheduleSettings::default());
        assert_eq!(monitoring.schedule(Backing::Thp), ScheduleSettings::huge());
        let every_hour = MonitoringSettings { heat_period_s: Some(3600), ..monitoring };
        assert_eq!(every_hour.schedule(Backing::Thp).period, Duration::from_secs(3600));
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let good = MonitoringSettings::default();
        assert_eq!(good.check(), Ok(()));
        for (bad, why) in [
            (MonitoringSettings { heat_window_ms: 199, ..good }, "give 200 or more"),
            (MonitoringSettings { heat_windows: 0, ..good }, "needs 1 to 250 windows"),
            (MonitoringSettings { heat_windows: 101, ..good }, "101 windows of 600ms do not fit"),
            (MonitoringSettings { heat_period_s: Some(4), ..good }, "period of 4s"),
            (MonitoringSettings { heat_threshold: Some(9), ..good }, "give 1 to 8 windows"),
        ] {
            let said = bad.check().unwrap_err();
            assert!(said.contains(why) && !said.contains('\n'), "{said}");
        }
    }
}
