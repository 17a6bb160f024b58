//! Figures of the host, of its VMs and of their guests in OpenMetrics' text format, for Prometheus
//! and what reads like it: `docs/metrics.md`. No VM is asked.

mod of_guests;
mod of_host;
mod of_swap;
mod of_times;
mod of_vms;

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeLabelSet, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use self::of_host::Host;
use self::of_swap::{Swap, SwapDisk};
use self::of_vms::Vm;
use super::guests::{Guest, Guests};
use super::registry::Daemon;
use crate::model::api_error::{Answer, failed};
use crate::model::times::Durations;

/// Begins each name.
const PREFIX: &str = "ebb";
/// Most letters of a label.
const WORD_LETTERS_MOST: usize = 128;

/// What is kept between two questions.
#[derive(Default)]
pub struct Metrics {
    guests: Arc<Guests>,
    swap_disk: SwapDisk,
}

impl Metrics {
    /// Whoever else needs the guests shares them, so that nobody looks twice.
    pub fn new(guests: Arc<Guests>) -> Metrics {
        Metrics { guests, swap_disk: SwapDisk::default() }
    }

    /// Returns all figures as they are now. Looks at the guests of the host, unless that was done a
    /// few seconds ago.
    ///
    /// # Errors
    /// The host's memory cannot be read.
    pub fn text(&self, daemon: &Daemon) -> Answer<String> {
        let vms = Vm::all(daemon);
        let managed: Vec<i32> = vms.iter().filter_map(Vm::pid).collect();
        let guests = self.guests.look(&managed).map_or_else(Vec::new, |(_, guests)| guests);
        let taken_bytes = vms.iter().filter_map(Vm::all_swap_files_bytes).max().unwrap_or(0);
        let swap = self.swap_disk.look(daemon, taken_bytes);
        let seen = Snapshot { host: Host::of(daemon)?, swap, vms, guests };
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(seen));
        let mut text = String::new();
        encode(&mut text, &registry).map_err(failed("the figures"))?;
        Ok(text)
    }
}

/// All figures at one moment.
#[derive(Debug)]
struct Snapshot {
    host: Host,
    /// None: it is not known.
    swap: Option<Swap>,
    vms: Vec<Vm>,
    guests: Vec<Guest>,
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut sheet = Sheet(encoder);
        self.host.tell(&mut sheet)?;
        of_swap::tell(self.swap.as_ref(), &mut sheet)?;
        of_vms::tell(&self.vms, &mut sheet)?;
        of_times::tell(&self.vms, &mut sheet)?;
        of_guests::tell(&self.guests, &mut sheet)
    }
}

/// What a figure means.
struct Meaning {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
}

/// A figure in bytes.
const fn bytes(name: &'static str, help: &'static str) -> Meaning {
    Meaning { name, help, unit: Some(Unit::Bytes) }
}

/// A figure in seconds.
const fn seconds(name: &'static str, help: &'static str) -> Meaning {
    Meaning { name, help, unit: Some(Unit::Seconds) }
}

/// A figure without a unit.
const fn plain(name: &'static str, help: &'static str) -> Meaning {
    Meaning { name, help, unit: None }
}

/// Where figures are written.
struct Sheet<'a>(DescriptorEncoder<'a>);

impl Sheet<'_> {
    /// Writes what a figure means. Its values follow.
    fn head<'s>(
        &'s mut self,
        Meaning { name, help, unit }: &'s Meaning,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, unit.as_ref(), kind)
    }

    /// Writes a figure of which there is one, if it is known.
    fn gauge(&mut self, meaning: &Meaning, value: Option<f64>) -> fmt::Result {
        let mut figure = self.head(meaning, MetricType::Gauge)?;
        value.map_or(Ok(()), |value| figure.encode_gauge(&value))
    }

    /// Writes figures that may go up and down, each with its labels.
    fn gauges<L: EncodeLabelSet>(
        &mut self,
        meaning: &Meaning,
        values: impl Iterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut family = self.head(meaning, MetricType::Gauge)?;
        for (labels, value) in values {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// Writes totals, each with its labels. They begin at 0 with each process of a VM.
    fn counters<L: EncodeLabelSet, V: EncodeCounterValue>(
        &mut self,
        meaning: &Meaning,
        values: impl Iterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut family = self.head(meaning, MetricType::Counter)?;
        for (labels, value) in values {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }

    /// Writes how long things took, each with its labels.
    fn histograms<'d, L: EncodeLabelSet>(
        &mut self,
        meaning: &Meaning,
        values: impl Iterator<Item = (L, &'d Durations)>,
    ) -> fmt::Result {
        let mut family = self.head(meaning, MetricType::Histogram)?;
        for (labels, durations) in values {
            let Some(count) = durations.count() else { continue };
            let (sum, groups) = (durations.sum_seconds(), durations.groups());
            let mut figure = family.encode_family(&labels)?;
            figure.encode_histogram::<NoLabelSet>(sum, count, &groups, None)?;
        }
        Ok(())
    }
}

/// Returns the text as a label may have it. Others than Ebb may have chosen it, and nothing quotes it.
fn word(text: &str) -> String {
    let plain = |letter: char| match letter {
        '"' | '\\' => '_',
        letter if letter.is_control() => '_',
        letter => letter,
    };
    text.chars().take(WORD_LETTERS_MOST).map(plain).collect()
}

/// A figure that says yes or no.
fn is(it_is: bool) -> f64 {
    f64::from(u8::from(it_is))
}

#[cfg(test)]
mod tests;
