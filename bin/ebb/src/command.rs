//! One function for each command: check, ask the daemon, show.

mod long;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context, bail};
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use ebb_api::{
    AttachRequest, AutoRequest, AutoStatus, LimitRequest, LimitStatus, PilotMode, PilotRequest,
    PilotSight, PilotStatus, PoolRequest, PoolStatus, ResizeRequest, RuleRequest, RunRequest,
    ShareRequest, Top, VmStatus, VmSummary, route,
};
use ebb_policy::pilot::HostRule;
use ebb_units::Bytes;

use self::long::doing;
use crate::args::{
    self, Args, Attach, Auto, Begins, Command, ConfigCommand, Events, Run, SizeOrOff, Switch, Vm,
};
use crate::below::Below;
use crate::interval::Interval;
use crate::paths::{absolute, absolute_disk, existing_file};
use crate::progress::{self, Progress};
use crate::remote::Remote;
use crate::report::Written;
use crate::{
    Outcome, attach, client, config, daemon, doctor, events, manual, observe, report, show, top,
    trace,
};

/// The pilot looks each second.
const RECORD_EVERY: Duration = Duration::from_millis(500);

/// Does what the command line says, and returns the text to print.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    let remote = args.remote.remote(&args.command)?.map(Arc::new);
    let host = Host { run_dir: args.run_dir, remote, begins: args.command.begins() };
    let text = match args.command {
        Command::Observe(args) => observe::observe(&args)?,
        Command::Discover { output } => {
            render(&observe::discover(&host.managed())?, output.json, |all| show::discovered(all))?
        }
        Command::Run(run) => host.run(run)?,
        Command::Attach(attach) if attach.all => return host.attach_all(&attach),
        Command::Attach(attach) => host.attach(attach)?,
        Command::Detach(detach) => return host.detach(&detach),
        Command::List { output } => host.list(output.json)?,
        Command::Status { vm, verbose } => host.status(&vm, verbose)?,
        Command::Top(args) => host.top(&args)?,
        Command::Reclaim { vm, bytes, background } => return host.reclaim(&vm, bytes, background),
        Command::Auto(auto) => host.auto(&auto)?,
        Command::Limit { vm, limit, low, high } => {
            let bytes = |size: Option<Bytes>| size.map(|size| size.0);
            let (bytes, low_bytes, high_bytes) = (bytes(limit.0), bytes(low), bytes(high));
            host.limit(&vm, &LimitRequest { bytes, low_bytes, high_bytes })?
        }
        Command::Resize { vm, size, node, by, on_violation, background } => {
            let bytes = size.0.map(|size| size.0);
            let request = ResizeRequest { bytes, node, by, on_violation };
            return host.resize(&vm, &request, background);
        }
        Command::Heat { vm, fresh, background: true, .. } => host.begin_heat(&vm, fresh)?,
        Command::Heat { vm, fresh, svg, .. } => host.heat(&vm, fresh, svg.as_deref())?,
        Command::Tier { vm } => host.tier(&vm)?,
        Command::Pool { size, output } => host.pool(size, output.json)?,
        Command::Share { vm, share, lower, upper } => {
            let bytes = share.0.map(|share| share.0);
            let (lower_percent, upper_percent) = (lower, upper);
            host.share(&vm, &ShareRequest { bytes, lower_percent, upper_percent })?
        }
        Command::Pilot { mode, reserve, attach, stall, swap_max, output } => {
            let request = pilot_request((mode, reserve, stall), attach, swap_max);
            host.pilot(&request, output.json)?
        }
        Command::Rule { vm, class, min, max, weight, hold } => {
            let bytes = |size: Option<Bytes>| size.map(|size| size.0);
            let (min_bytes, max_bytes) = (bytes(min), bytes(max));
            let hold = hold.map(|hold| hold == Switch::On);
            host.rule(&vm, &RuleRequest { class, min_bytes, max_bytes, weight, hold })?
        }
        Command::Record { file, time } => host.record(&file, time)?,
        Command::Simulate { file, reserve, stall, swap_max } => {
            show::simulated(&trace::simulate(&file, host_rule(reserve, stall, swap_max))?)
        }
        Command::Events(events) => host.events(events)?,
        Command::Calibrate { output, background } => host.calibrate(output.json, background)?,
        Command::Evict { vm, bytes, background } => return host.evict(&vm, bytes, background),
        Command::Jobs(jobs) => host.jobs(&jobs)?,
        Command::Config(args) => configuration(args.command)?,
        Command::Doctor { fix, output } => return doctor::run(&host.run_dir, fix, output.json),
        Command::Report { file, output } => {
            let written = report::write(&host.run_dir, file, output.json)?;
            render(&written, output.json, Written::text)?
        }
        Command::Completions { shell } => manual::completions(shell)?,
        Command::Man { dir } => manual::write_pages(&dir)?,
    };
    Ok(text.into())
}

fn configuration(command: ConfigCommand) -> anyhow::Result<String> {
    match command {
        ConfigCommand::Check { file } => config::check(file.as_deref()),
        ConfigCommand::Show { file, output } => {
            render(&config::settings(file.as_deref())?, output.json, |all| show::config(all))
        }
    }
}

fn pilot_request(
    (mode, reserve, stall_percent): (Option<PilotMode>, Option<Below>, Option<u32>),
    attach: Option<Switch>,
    swap_max: Option<Bytes>,
) -> PilotRequest {
    PilotRequest {
        mode,
        reserve_percent: reserve.and_then(Below::percent),
        reserve_bytes: reserve.and_then(Below::bytes),
        attach: attach.map(|attach| attach == Switch::On),
        stall_percent,
        swap_max_bytes: swap_max.map(|size| size.0),
    }
}

fn host_rule(reserve: Below, stall: u32, swap_max: Option<Bytes>) -> HostRule {
    HostRule {
        reserve: reserve.into(),
        stall_permille: Some(stall * 10).filter(|permille| *permille > 0),
        swap_max_bytes: swap_max.map(|size| size.0).filter(|bytes| *bytes > 0),
    }
}

struct Host {
    run_dir: PathBuf,
    /// The daemon of another host, if that one is asked.
    remote: Option<Arc<Remote>>,
    /// What the command may begin there.
    begins: Begins,
}

impl Host {
    fn ask<A: DeserializeOwned>(&self, method: Method, path: &str) -> anyhow::Result<A> {
        self.call(method, path, Vec::new())
    }

    fn send<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: &impl Serialize,
    ) -> anyhow::Result<A> {
        let body = serde_json::to_vec(request)?;
        self.call(method, path, body)
    }

    fn call<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> anyhow::Result<A> {
        if let Some(remote) = &self.remote {
            return remote.call(method, path, body);
        }
        if self.begins == Begins::Nothing {
            self.check_used()?;
        }
        let stream = daemon::connect(&self.run_dir)?;
        if self.begins == Begins::Vms
            && let Some(why) = daemon::other_settings(&stream)
        {
            eprintln!("ebb: warning: {why}");
        }
        client::call((stream, daemon::log(&self.run_dir).as_deref()), method, path, body)
    }

    /// Checks that somebody has used this run directory: a command that only looks makes none.
    ///
    /// # Errors
    /// Nobody has.
    fn check_used(&self) -> anyhow::Result<()> {
        match self.run_dir.try_exists() {
            Ok(false) if self.remote.is_none() => bail!(
                "no VM is managed in {0}: there is no {0} (EBB_RUN_DIR, or --run-dir)",
                self.run_dir.display()
            ),
            // What cannot be looked at is named when it is used.
            _ => Ok(()),
        }
    }

    fn run(&self, run: Run) -> anyhow::Result<String> {
        let json = run.output.json;
        let request = run_request(run)?;
        let line = |time| doing(&request.name, "starting", time);
        let ask = || self.send(Method::POST, route::RUN, &request);
        let status: VmStatus = progress::during(json, line, ask)?;
        render(&status, json, show::started)
    }

    fn attach(&self, attach: Attach) -> anyhow::Result<String> {
        let json = attach.output.json;
        let request = attach::request(attach)?;
        let status = self.attached(&request, json)?;
        render(&status, json, show::started)
    }

    fn attached(&self, request: &AttachRequest, json: bool) -> anyhow::Result<VmStatus> {
        let line = |time| doing(&request.name, "attaching", time);
        progress::during(json, line, || self.send(Method::POST, route::ATTACH, request))
    }

    fn attach_all(&self, attach: &Attach) -> anyhow::Result<Outcome> {
        let managed: Vec<VmSummary> = self.ask(Method::GET, route::VMS)?;
        let has_directory =
            |name: &ebb_api::VmName| self.run_dir.join("vms").join(name.as_str()).exists();
        let send = |request: &_| self.attached(request, attach.output.json);
        attach::all(attach, &managed, has_directory, send)
    }

    /// The VMs that a daemon manages, if one runs.
    fn managed(&self) -> Vec<VmSummary> {
        let runs = daemon::pid(&self.run_dir).is_some();
        let asked = runs.then(|| self.ask(Method::GET, route::VMS));
        asked.and_then(Result::ok).unwrap_or_default()
    }

    /// All managed VMs. In a run directory that nobody has used there is none.
    fn vms(&self) -> anyhow::Result<Vec<VmSummary>> {
        match self.check_used() {
            Ok(()) => self.ask(Method::GET, route::VMS),
            Err(why) => {
                eprintln!("ebb: {why}");
                Ok(Vec::new())
            }
        }
    }

    fn list(&self, json: bool) -> anyhow::Result<String> {
        render(&self.vms()?, json, |vms| show::list(vms))
    }

    fn status(&self, vm: &Vm, verbose: bool) -> anyhow::Result<String> {
        let status: VmStatus = self.ask(Method::GET, &route::full_status(&vm.name))?;
        render(&status, vm.output.json, if verbose { show::status } else { show::brief })
    }

    fn top(&self, args: &args::Top) -> anyhow::Result<String> {
        let shows = !args.once && !args.json;
        if shows {
            top::check_terminal()?;
        }
        let first: Vec<Top> = match args.at {
            Some(at) => top::past(at, |path| self.ask(Method::GET, path))?,
            None => vec![self.ask(Method::GET, route::TOP)?],
        };
        if shows {
            let source = match &self.remote {
                Some(remote) => top::Source::Remote(Arc::clone(remote)),
                None => top::Source::Socket(self.run_dir.join(route::SOCKET_FILE)),
            };
            return top::show(source, args, first).map(|()| String::new());
        }
        render(&first.last(), args.json, |_| top::once(args, first.clone()))
    }

    fn auto(&self, auto: &Auto) -> anyhow::Result<String> {
        let status = match auto.switch {
            Some(switch) => self.set_auto(auto, switch)?,
            None => self.ask::<VmStatus>(Method::GET, &route::of_vm(route::VM, &auto.name))?.auto,
        };
        render(&status, auto.output.json, |status| show::auto(&auto.name, status))
    }

    fn set_auto(&self, auto: &Auto, switch: Switch) -> anyhow::Result<AutoStatus> {
        let request = AutoRequest {
            on: switch == Switch::On,
            when: auto.when,
            interval_ms: auto.interval.map(|interval| interval.ms),
            below_percent: auto.below.and_then(Below::percent),
            below_bytes: auto.below.and_then(Below::bytes),
            keep_bytes: auto.keep.map(|keep| keep.0),
        };
        request.check()?;
        self.send(Method::PUT, &route::of_vm(route::AUTO, &auto.name), &request)
    }

    fn limit(&self, vm: &Vm, request: &LimitRequest) -> anyhow::Result<String> {
        request.check()?;
        let path = route::of_vm(route::LIMIT, &vm.name);
        let status: LimitStatus = self.send(Method::PUT, &path, request)?;
        render(&status, vm.output.json, |status| show::limit(&vm.name, status))
    }

    fn tier(&self, vm: &Vm) -> anyhow::Result<String> {
        let status: VmStatus = self.ask(Method::GET, &route::of_vm(route::VM, &vm.name))?;
        let Some(tier) = &status.tier else {
            bail!("{} has one tier, the host's memory: `ebb run --tier` gives a VM more", vm.name);
        };
        render(tier, vm.output.json, |tier| show::tier(&vm.name, tier))
    }

    fn pool(&self, size: Option<SizeOrOff>, json: bool) -> anyhow::Result<String> {
        let status: PoolStatus = match size {
            None => self.ask(Method::GET, route::POOL)?,
            Some(size) => {
                let request = PoolRequest { bytes: size.0.map(|size| size.0) };
                self.send(Method::PUT, route::POOL, &request)?
            }
        };
        render(&status, json, show::pool)
    }

    fn share(&self, vm: &Vm, request: &ShareRequest) -> anyhow::Result<String> {
        request.check()?;
        let path = route::of_vm(route::SHARE, &vm.name);
        let status: PoolStatus = self.send(Method::PUT, &path, request)?;
        render(&status, vm.output.json, show::pool)
    }

    fn pilot(&self, request: &PilotRequest, json: bool) -> anyhow::Result<String> {
        request.check()?;
        let status: PilotStatus = match *request == PilotRequest::default() {
            true => self.ask(Method::GET, route::PILOT)?,
            false => self.send(Method::PUT, route::PILOT, request)?,
        };
        render(&status, json, show::pilot)
    }

    fn rule(&self, vm: &Vm, request: &RuleRequest) -> anyhow::Result<String> {
        request.check()?;
        let path = route::of_vm(route::RULE, &vm.name);
        let status: PilotStatus = self.send(Method::PUT, &path, request)?;
        render(&status, vm.output.json, show::pilot)
    }

    fn record(&self, file: &Path, time: Option<Interval>) -> anyhow::Result<String> {
        let first: PilotSight = self.ask(Method::GET, route::PILOT_SIGHT)?;
        let mut writer = trace::Writer::new(file)?;
        writer.add(&first)?;
        let until = time.map(|time| Instant::now() + Duration::from_millis(time.ms));
        let mut progress = Progress::new(false);
        while until.is_none_or(|until| Instant::now() < until) {
            thread::sleep(RECORD_EVERY);
            writer.add(&self.ask(Method::GET, route::PILOT_SIGHT)?)?;
            progress.show(&format!("{}: {} looks", file.display(), writer.looks));
        }
        drop(progress);
        Ok(format!("{}: {} looks\n", file.display(), writer.looks))
    }

    /// Prints events as they come. With `-f`, only the end of the daemon ends that, or Ctrl-C.
    fn events(&self, asked: Events) -> anyhow::Result<String> {
        self.check_used()?;
        let (json, follows) = (asked.output.json, asked.follow);
        let (path, print) =
            (events::path(&asked.query()), |event: &str| events::print(event, json));
        let is_over = match &self.remote {
            Some(remote) => remote.follow(&path, print)?,
            None => {
                let connected = (daemon::connect(&self.run_dir)?, daemon::log(&self.run_dir));
                client::follow(connected, &path, print)?
            }
        };
        if is_over && follows {
            bail!("ebbd has ended, and tells no more");
        }
        Ok(String::new())
    }
}

fn render<T: Serialize>(
    value: &T,
    json: bool,
    human: impl FnOnce(&T) -> String,
) -> anyhow::Result<String> {
    if json { Ok(serde_json::to_string_pretty(value)? + "\n") } else { Ok(human(value)) }
}

fn run_request(run: Run) -> anyhow::Result<RunRequest> {
    let request = RunRequest {
        name: run.name,
        memory_bytes: run.memory.map_or(0, |memory| memory.0),
        tier: run.tier,
        grow_to_bytes: run.grow_to.map(|size| size.0),
        grow_prealloc: run.grow_prealloc,
        nodes: run.nodes,
        cpus: run.cpus,
        kernel: run.kernel.map(absolute).transpose()?,
        initrd: run.initrd.map(absolute).transpose()?,
        append: run.append,
        backing: run.backing,
        mode: run.watch.mode,
        min_order: run.watch.min_order,
        disks: run.disks.into_iter().map(absolute_disk).collect::<Result<_, _>>()?,
        qemu_args: run.qemu_args,
        cwd: Some(env::current_dir().context("the working directory")?),
        user: run.user,
        privileged: run.privileged,
    };
    request.check()?;
    for (option, file) in [("--kernel", &request.kernel), ("--initrd", &request.initrd)] {
        file.iter().try_for_each(|file| existing_file(file)).context(option)?;
    }
    Ok(request)
}
