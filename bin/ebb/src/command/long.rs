//! Commands that take long: they show how far they are, or begin a job and leave it alone.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;
use std::{env, fs, io, thread};

use anyhow::{Context, bail};
use ebb_api::{
    Calibration, DetachReport, EvictReport, EvictRequest, HeatReport, HeatRequest, Job,
    ReclaimReport, ReclaimRequest, ResizeReport, ResizeRequest, SizeState, VmName, VmStatus, route,
};
use ebb_units::Bytes;
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Host, render};
use crate::args::{Detach, Jobs, JobsCommand, Vm};
use crate::jobs::{Begun, Ended};
use crate::paths::writable_place;
use crate::progress::{self, Progress};
use crate::{Outcome, client, detach, heat, interrupt, jobs, show};

/// Time from one question to the daemon about its progress to the next.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

impl Host {
    pub(super) fn detach(&self, asked: &Detach) -> anyhow::Result<Outcome> {
        let json = asked.output.json;
        let Some(name) = &asked.name else {
            let vms = self.vms()?;
            interrupt::say("interrupted; a detach that has begun goes on: see `ebb list`".into())?;
            return detach::all(vms, json, |name| self.detached(name, json));
        };
        if asked.background {
            let path = route::of_vm(route::VM, name);
            return self.begin((Method::DELETE, &path), &(), json).map(Outcome::from);
        }
        interrupt::say(format!(
            "interrupted; a detach that has begun goes on: see `ebb status {name}`"
        ))?;
        let report = self.detached(name, json)?;
        render(&report, json, |report| show::detached(name, report)).map(Outcome::from)
    }

    /// Detaches a VM, and shows meanwhile how much of it is back.
    fn detached(&self, name: &VmName, json: bool) -> anyhow::Result<DetachReport> {
        let path = route::of_vm(route::VM, name);
        let ask = || self.ask::<DetachReport>(Method::DELETE, &path);
        let (mut left_bytes, mut most_bytes) = (0, 0);
        let line = |time| {
            if let Ok(VmStatus { limit, .. }) = self.ask(Method::GET, &path) {
                left_bytes = limit.saved_bytes.saturating_add(limit.on_disk_bytes);
                most_bytes = left_bytes.max(most_bytes);
            }
            show::detaching(name, most_bytes - left_bytes, most_bytes, time)
        };
        progress::during(json, line, ask)
    }

    pub(super) fn reclaim(
        &self,
        vm: &Vm,
        bytes: Option<Bytes>,
        background: bool,
    ) -> anyhow::Result<Outcome> {
        let path = route::of_vm(route::RECLAIM, &vm.name);
        let request = ReclaimRequest { bytes: bytes.map(|bytes| bytes.0) };
        let json = vm.output.json;
        if background {
            return self.begin((Method::POST, &path), &request, json).map(Outcome::from);
        }
        let ended: Ended<ReclaimReport> =
            self.watched(vm, "reclaiming", &path, &request, |job| job.reclaim)?;
        let text = render(&ended.report, json, |report| show::reclaimed(&vm.name, report))?;
        Ok(ended.outcome(text))
    }

    pub(super) fn resize(
        &self,
        vm: &Vm,
        request: &ResizeRequest,
        background: bool,
    ) -> anyhow::Result<Outcome> {
        request.check()?;
        let (path, name) = (route::of_vm(route::SIZE, &vm.name), &vm.name);
        if background {
            return self.begin((Method::PUT, &path), request, vm.output.json).map(Outcome::from);
        }
        interrupt::say(format!(
            "interrupted; a resize that has begun goes on: see `ebb status {name}`"
        ))?;
        let mut report: ResizeReport = self.send(Method::PUT, &path, request)?;
        let (mut progress, first) = (Progress::new(vm.output.json), report.clone());
        while report.state == SizeState::Moving {
            progress.show(&show::resizing(name, &first, &report));
            thread::sleep(PROGRESS_EVERY);
            report = self.ask(Method::GET, &path)?;
        }
        drop(progress);
        let text = render(&report, vm.output.json, |report| show::resized(name, report))?;
        let is_short = report.state == SizeState::Waiting;
        Ok(Outcome { text, code: if is_short { route::EXIT_SHORT } else { 0 } })
    }

    pub(super) fn calibrate(&self, json: bool, background: bool) -> anyhow::Result<String> {
        if background {
            return self.begin((Method::POST, route::CALIBRATION), &(), json);
        }
        let line = |time: Duration| show::doing("measuring", None, nanoseconds(time));
        let ask = || self.ask(Method::POST, route::CALIBRATION);
        let found: Calibration = progress::during(json, line, ask)?;
        render(&found, json, show::calibration)
    }

    pub(super) fn heat(&self, vm: &Vm, fresh: bool, svg: Option<&Path>) -> anyhow::Result<String> {
        svg.map(writable_place).transpose()?;
        let path = route::of_vm(route::HEAT, &vm.name);
        let mut report: HeatReport = self.send(Method::POST, &path, &HeatRequest { fresh })?;
        let mut progress = Progress::new(vm.output.json);
        // Known figures are shown at once, also while the next monitoring runs.
        while report.monitoring && (fresh || report.figures.is_none()) {
            progress.show(&show::monitoring(&vm.name, &report));
            thread::sleep(PROGRESS_EVERY);
            report = self.ask(Method::GET, &path)?;
        }
        drop(progress);
        let why = report.failed.as_ref().filter(|_| fresh || report.figures.is_none());
        let figures = match (&report.figures, why) {
            (Some(figures), None) => figures,
            (_, why) => bail!(
                "{} was not monitored: {}",
                vm.name,
                why.map_or("the monitoring ended without figures, try again", String::as_str)
            ),
        };
        if let Some(file) = svg {
            let picture = heat::svg(&vm.name, figures);
            fs::write(file, picture).with_context(|| file.display().to_string())?;
        }
        let colour = io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none();
        render(&report, vm.output.json, |_| heat::text(&vm.name, figures, colour))
    }

    pub(super) fn evict(&self, vm: &Vm, bytes: Bytes, background: bool) -> anyhow::Result<Outcome> {
        let path = route::of_vm(route::EVICT, &vm.name);
        let request = EvictRequest { bytes: bytes.0 };
        let json = vm.output.json;
        if background {
            return self.begin((Method::POST, &path), &request, json).map(Outcome::from);
        }
        let ended: Ended<EvictReport> =
            self.watched(vm, "evicting", &path, &request, |job| job.evict)?;
        let text = render(&ended.report, json, |report| show::evicted(&vm.name, report))?;
        Ok(ended.outcome(text))
    }

    /// Begins to monitor a VM, and prints the number of the job.
    pub(super) fn begin_heat(&self, vm: &Vm, fresh: bool) -> anyhow::Result<String> {
        let path = route::of_vm(route::HEAT, &vm.name);
        self.begin((Method::POST, &path), &HeatRequest { fresh }, vm.output.json)
    }

    /// Lists jobs, or cancels one.
    pub(super) fn jobs(&self, asked: &Jobs) -> anyhow::Result<String> {
        if let Some(JobsCommand::Cancel { id, output }) = &asked.command {
            return self.cancel(*id, output.json);
        }
        let all: Vec<Job> = self.ask(Method::GET, route::JOBS)?;
        render(&all, asked.output.json, |all| show::jobs(all))
    }

    /// Begins a long operation, and prints the number of its job.
    fn begin(
        &self,
        (method, path): (Method, &str),
        request: &impl Serialize,
        json: bool,
    ) -> anyhow::Result<String> {
        match self.send(method, &route::as_job(path), request)? {
            Begun::Job(job) => render(&*job, json, show::begun),
            // A daemon of an earlier release has done all of it.
            Begun::<serde_json::Value>::Report(_) => {
                bail!("ebbd is of an earlier release and knows no jobs: all is done already")
            }
        }
    }

    /// Posts a request that takes long. On a terminal it is a job, whose progress is shown.
    fn watched<R: DeserializeOwned>(
        &self,
        vm: &Vm,
        what: &str,
        path: &str,
        request: &impl Serialize,
        of: impl FnOnce(Job) -> Option<R>,
    ) -> anyhow::Result<Ended<R>> {
        let (name, mut progress) = (&vm.name, Progress::new(vm.output.json));
        if !progress.is_shown() {
            return self.send(Method::POST, path, request).map(Ended::whole);
        }
        let job = match self.send(Method::POST, &route::as_job(path), request) {
            Ok(Begun::Job(job)) => *job,
            Ok(Begun::Report(report)) => return Ok(Ended::whole(report)),
            Err(why) if client::is_too_many(&why) => {
                return self.without_a_job(name, what, path, request).map(Ended::whole);
            }
            Err(why) => return Err(why),
        };
        let id = job.id;
        interrupt::say(format!(
            "interrupted; it goes on as job {id}: `ebb jobs` shows it, `ebb jobs cancel {id}` ends it"
        ))?;
        let look = || self.ask(Method::GET, &route::of_job(id));
        let job = jobs::follow(job, &format!("{name}: {what}"), &mut progress, look)?;
        drop(progress);
        jobs::ended(job, of)
    }

    /// Posts a request that takes long, and shows for how long: for a job there is no room.
    fn without_a_job<R: DeserializeOwned>(
        &self,
        name: &VmName,
        what: &str,
        path: &str,
        request: &impl Serialize,
    ) -> anyhow::Result<R> {
        interrupt::say(format!("interrupted; what has begun goes on: see `ebb status {name}`"))?;
        let line = |time| doing(name, what, time);
        progress::during(false, line, || self.send(Method::POST, path, request))
    }

    /// Cancels a job, and waits for its end.
    fn cancel(&self, id: u64, json: bool) -> anyhow::Result<String> {
        let path = route::of_job(id);
        let job: Job = self.ask(Method::DELETE, &path)?;
        let mut progress = Progress::new(json);
        let look = || self.ask(Method::GET, &path);
        let job = jobs::follow(job, &format!("job {id}: cancelling"), &mut progress, look)?;
        drop(progress);
        render(&job, json, show::ended)
    }
}

/// Returns one line about a VM with which something is being done.
pub(super) fn doing(name: &VmName, what: &str, time: Duration) -> String {
    show::doing(&format!("{name}: {what}"), None, nanoseconds(time))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
