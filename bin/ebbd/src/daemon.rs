//! All VMs of the host: starting, taking over, taking up, letting go.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, DirBuilder};
use std::io::{self, PipeReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ebb_api::{
    Accelerator as ApiAccelerator, AttachRequest, Backing, Calibration, MIN_ORDER_DEFAULT,
    OnViolation, RunRequest, VmName, advice,
};
use ebb_reclaim::vprobe::MIN_ORDER_LOWEST;
use ebb_sys::private_dir;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_vm::launch::{self, Accelerator, Launch, Memory, Node};
use ebb_vm::{Qmp, Ram, handed, layout, takeover};
use serde_json::json;

use crate::calibrate::Calibrated;
use crate::confine::{self, Plan, VmUser};
use crate::console;
use crate::devices;
use crate::disks::{self, Disks, Shared};
use crate::growth::{self, Growth, GrowthRecord};
use crate::held::{self, Held};
use crate::host::{self, Chosen};
use crate::life::{self, Life};
use crate::listing::{Listing, Stage};
use crate::origin;
use crate::pool;
use crate::problem::{Answer, Refused, failed, not_allowed, unsaved};
use crate::record::{Auto, Record, Settings, Totals};
use crate::starting;
use crate::supervisor::Supervisor;
use crate::swap_dir::SwapDir;
use crate::tiers::{self, Claimed};
use crate::worker::{Command, Ready};

const QEMU: &str = "qemu-system-x86_64";
/// A QEMU that does not open its control socket within this time is given up.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Of so many it is remembered that their filters ended them.
const FILTERED_MAX: usize = 64;

/// The VMs by name. `None`: one that is just being taken hold of, or whose record cannot be read.
type Vms = BTreeMap<VmName, Option<Arc<Listing>>>;

/// The daemon's state.
#[derive(Clone)]
pub struct Daemon {
    run_dir: PathBuf,
    swap_dir: SwapDir,
    log_dir: PathBuf,
    settings: Settings,
    vms: Arc<Mutex<Vms>>,
    /// VMs on record for which there was no thread yet.
    left: Arc<Mutex<Vec<Supervisor>>>,
    /// Clears away what is on no record, at the start.
    clearing: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// Why VMs ended whose QEMUs their filters of system calls ended.
    filtered: Arc<Mutex<BTreeMap<VmName, String>>>,
    /// The memory that VMs share.
    pub(crate) pool: Arc<pool::Shared>,
    /// How fast its tiers are.
    pub(crate) calibrated: Arc<Calibrated>,
    /// Who QEMUs are, unless told otherwise.
    vm_user: VmUser,
    /// The keys of swap files may be on a disk.
    keys_on_disk: bool,
}

impl Daemon {
    /// A daemon over a run directory that nobody else uses.
    pub fn new(
        run_dir: &Path,
        swap_dir: SwapDir,
        log_dir: &Path,
        settings: Settings,
        (pool, calibrated): (Arc<pool::Shared>, Arc<Calibrated>),
    ) -> Daemon {
        let [run_dir, log_dir] = [run_dir, log_dir].map(Path::to_owned);
        let (vms, left) = (Arc::default(), Arc::default());
        let vm_user = VmUser::default();
        Daemon {
            run_dir,
            swap_dir,
            log_dir,
            settings,
            vms,
            left,
            clearing: Arc::default(),
            filtered: Arc::default(),
            pool,
            calibrated,
            vm_user,
            keys_on_disk: false,
        }
    }

    /// The same, whose QEMUs run as this user unless told otherwise, and whose keys may be on a
    /// disk.
    pub fn with_rules(self, vm_user: VmUser, keys_on_disk: bool) -> Daemon {
        Daemon { vm_user, keys_on_disk, ..self }
    }

    /// A key on a disk may outlive its VM there, whatever is done to remove it. VMs that are held
    /// already have theirs.
    fn check_keys(&self) -> Answer<()> {
        match ebb_store::is_in_memory(&self.run_dir).map_err(failed("the run directory"))? {
            false if !self.keys_on_disk => Err(not_allowed(keys_refused(&self.run_dir))),
            _ => Ok(()),
        }
    }

    /// Where a VM's swap file goes. The process's number tells it from that of a
    /// VM of the same name under another run directory.
    fn swap_path(&self, name: &VmName, pid: i32) -> PathBuf {
        self.swap_dir.path().join(format!("{name}.{pid}.swap"))
    }

    /// Where a VM's logs go; none: in its directory.
    fn logs(&self, name: &VmName) -> Option<PathBuf> {
        (self.log_dir != self.run_dir).then(|| self.log_dir.join(name.as_str()))
    }

    /// The directory.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Measures how fast this host's tiers are.
    ///
    /// # Errors
    /// A tier cannot be measured.
    pub fn calibrate(&self) -> Answer<Calibration> {
        self.calibrated.measure(&self.run_dir, self.swap_dir.path())
    }

    /// What VMs are to be taken up with.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// What is known of each VM.
    pub fn listings(&self) -> Vec<(VmName, Arc<Listing>)> {
        let vms = self.vms();
        let listed = |(name, vm): (&VmName, &Option<_>)| Some((name.clone(), vm.clone()?));
        vms.iter().filter_map(listed).collect()
    }

    /// What is known of a VM.
    pub fn listed(&self, name: &VmName) -> Option<Arc<Listing>> {
        self.vms().get(name).cloned().flatten()
    }

    /// The same; of one that nothing is known of it is made.
    pub fn listing(&self, name: &VmName, make: impl FnOnce() -> Listing) -> Arc<Listing> {
        let mut vms = self.vms();
        let vm = vms.entry(name.clone()).or_default();
        Arc::clone(vm.get_or_insert_with(|| Arc::new(make())))
    }

    /// Where a VM takes its commands.
    ///
    /// # Errors
    /// [`Refused::Unknown`]; [`Refused::Unavailable`]: it is not held now.
    pub fn commands(&self, name: &VmName) -> Answer<Sender<Command>> {
        self.listed(name).ok_or_else(|| self.unknown(name))?.commands()
    }

    /// What is said of a VM that is not there.
    pub fn unknown(&self, name: &VmName) -> Refused {
        let filtered = self.filtered().get(name).cloned();
        filtered.map_or_else(|| Refused::Unknown(name.clone()), Refused::Over)
    }

    /// Has who asks for a VM hear that its QEMU was ended by its filter, if it was.
    fn note_end(&self, name: &VmName, pid: i32, ended: ExitStatus) {
        let Some(told) = confine::filtered(name, pid, ended.signal()) else { return };
        tracing::error!("{told}");
        let mut filtered = self.filtered();
        if filtered.len() == FILTERED_MAX {
            filtered.pop_first();
        }
        filtered.insert(name.clone(), told);
    }

    fn filtered(&self) -> MutexGuard<'_, BTreeMap<VmName, String>> {
        self.filtered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to take up every VM that a daemon before this one held, each in a thread of its
    /// own, and clears away what VMs that ended since have left.
    ///
    /// # Errors
    /// As reading the run directory.
    pub fn take_up_all(&self) -> io::Result<()> {
        let vms = self.run_dir.join("vms");
        private_dir::make(&vms).map_err(io::Error::other)?;
        let (mut all, mut without) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(vms)? {
            let directory = entry?.path();
            let named = directory.file_name().and_then(|name| name.to_str()?.parse().ok());
            let Some(name) = named else { continue };
            let listing = match Record::load(&directory) {
                Ok(Some(record)) => Some(Arc::new(Listing::new(&record, Stage::TakingUp))),
                Ok(None) => {
                    without.push((name, directory));
                    continue;
                }
                Err(error) => {
                    tracing::error!("{}: its record: {error}", directory.display());
                    None
                }
            };
            self.vms().insert(VmName::clone(&name), listing);
            all.push(Supervisor { name, directory, daemon: self.clone() });
        }
        *self.left() = all;
        self.take_up_left();
        self.clear_later(without);
        Ok(())
    }

    /// Clears away what VMs left that are on no record. It may take long, so no guest waits for it;
    /// a VM that is started or attached does.
    fn clear_later(&self, without: Vec<(VmName, PathBuf)>) {
        if without.is_empty() {
            return;
        }
        let daemon = self.clone();
        let clear = move || without.iter().for_each(|(name, at)| daemon.clear_away(name, at));
        match thread::Builder::new().name("clearing".into()).spawn(clear) {
            Ok(thread) => *self.clearing() = Some(thread),
            Err(error) => tracing::error!("no thread to clear away what VMs left: {error}"),
        }
    }

    fn clearing(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.clearing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to take up those for which there was no thread before.
    pub fn take_up_left(&self) {
        let all = std::mem::take(&mut *self.left());
        for supervisor in all {
            let (give, take) = channel();
            let run = move || take.recv().map_or((), |supervisor: Supervisor| supervisor.run(None));
            let thread = thread::Builder::new().name(format!("vm {}", supervisor.name));
            match thread.spawn(run) {
                Ok(_) => drop(give.send(supervisor)),
                Err(error) => {
                    tracing::error!("{}: no thread to take it up: {error}", supervisor.name);
                    self.left().push(supervisor);
                }
            }
        }
    }

    /// A VM is not held any more.
    pub fn forget(&self, name: &VmName, directory: &Path) {
        self.clear_away(name, directory);
        self.vms().remove(name);
    }

    /// Starts a VM and holds it.
    ///
    /// # Errors
    /// [`Refused`]; nothing is left behind then.
    pub fn run(&self, request: &RunRequest) -> Answer<()> {
        let mut request = request.clone();
        let tiers = tiers::resolve(&mut request)?;
        let request = &request;
        request.check()?;
        let min_order = min_order(request.min_order)?;
        let reserved = self.reserve(&request.name, false)?;
        let claimed = Claimed::file_of(tiers.as_ref())?;
        let backing = host::backing(request.backing, request.memory_bytes)?;
        let plan = self.confine(request, &reserved.directory, &claimed)?;
        let images = disks::open(&request.disks).map_err(not_allowed)?;
        disks::check(&images).map_err(not_allowed)?;
        let shared = Shared::new(&images, &request.disks, request.max_bytes())
            .map_err(failed("a random key"))?;
        let served = Disks::start(images, &shared, &reserved.directory, request.cpus);
        let served = served.map_err(failed("its disks"))?;
        let records = growth::plan(request, &qemu(), plan.identity.clone());
        let devices = Growth::start(&records, &reserved.directory, None);
        let devices = devices.map_err(failed("its memory devices"))?;
        let logs = self.logs(&request.name);
        let logs = logs.as_deref().unwrap_or(&reserved.directory);
        let directories = (reserved.directory.as_path(), logs);
        let with = (&served, records.as_slice(), &plan);
        let mut started = start(request, backing.value, directories, with)?;
        let own = launch::served_names(request.disks.len(), records.len());
        let found = devices::of_new(&started.process, &mut started.qmp, &own)?;
        if let Some(tiers) = &tiers {
            tiers.check(backing.value, &found)?;
        }
        let accelerator = host::accelerator();
        let mode = host::mode(request.mode, request.strict_disk().map(|disk| disk.path.as_path()));
        let record = Record {
            name: request.name.clone(),
            pid: started.process.pid(),
            start_ticks: started.process.start_ticks().map_err(failed("QEMU"))?,
            boot: life::boot().map_err(failed("the host's boot"))?,
            userfaultfd: None,
            leaving: None,
            started: true,
            console: false,
            logs: self.logs(&request.name),
            confinement: Some(plan.of(started.process.pid())),
            qmp: reserved.directory.join("qmp.sock"),
            accelerator: api(accelerator.value),
            accelerator_reason: accelerator.reason,
            backing: backing.value,
            backing_reason: backing.reason,
            mode: mode.value,
            mode_reason: mode.reason,
            min_order,
            begin: !request.qemu_args.iter().any(|word| word == "-S"),
            small_pages: false,
            evicts: tiers.as_ref().is_some_and(|tiers| tiers.file.is_some()),
            shares: false,
            size: None,
            size_bytes: None,
            on_violation: OnViolation::default(),
            auto: Auto::default(),
            limit_bytes: tiers.as_ref().and_then(|tiers| tiers.limit_bytes),
            low_bytes: None,
            high_bytes: None,
            share: None,
            disks: request.disks.clone(),
            images: shared.images(),
            growth: records,
            cpus: request.cpus,
            disks_used: false,
            swap: match tiers.as_ref().and_then(|tiers| tiers.file.clone()) {
                Some(file) => file,
                None => self.swap_path(&request.name, started.process.pid()),
            },
            tiers,
            settings: self.settings,
            regions: Vec::new(),
            totals: Totals::default(),
            kernel: None,
            digests: 0,
        };
        let Started { children, process, ram, qmp } = started;
        let pid = process.pid();
        let with = (served, devices);
        let held = held::take(process, ram, qmp, with, record, &reserved.directory)?;
        self.serve(request.name.clone(), held)?;
        // A mark that stays does no harm: the record counts before it.
        let _ = starting::unmark(&reserved.directory);
        for child in children {
            let (daemon, name) = (self.clone(), request.name.clone());
            let filters = plan.sandbox && child.pid() == Some(pid);
            child.release(move |ended| {
                if filters {
                    daemon.note_end(&name, pid, ended);
                }
            });
        }
        plan.keep();
        claimed.keep();
        reserved.keep();
        Ok(())
    }

    /// Settles what the VM's QEMU may do, makes the directory that it may go to, and notes that it
    /// is being started.
    fn confine(&self, request: &RunRequest, directory: &Path, claimed: &Claimed) -> Answer<Plan> {
        handed::make_socket_directory(directory).map_err(failed("the VM's directory"))?;
        let plan = Plan::new(request, &self.vm_user, &qemu(), host::accelerator().value)?;
        let marked =
            starting::mark(directory, plan.qemu(&request.name), plan.cgroups(), claimed.path());
        marked.map_err(unsaved("the VM's directory"))?;
        Ok(plan)
    }

    /// Holds a VM that somebody else started.
    ///
    /// # Errors
    /// [`Refused`]; nothing is changed then.
    pub fn attach(&self, request: &AttachRequest) -> Answer<()> {
        request.check()?;
        let min_order = min_order(request.min_order)?;
        let reserved = self.reserve(&request.name, true)?;
        let process = takeover::open(request.pid).map_err(not_allowed)?;
        let (path, mut qmp) =
            takeover::connect(&process, request.qmp.as_deref()).map_err(not_allowed)?;
        devices::of_new(&process, &mut qmp, &[])?;
        let ram = layout::discover(&process, &mut qmp).map_err(not_allowed)?;
        let hugetlb = ram.files().iter().any(|file| file.file.is_hugetlb().unwrap_or(false));
        let backing = host::backing_of(&ram, hugetlb);
        let accelerator = accelerator_of(&mut qmp)?;
        let mode = host::mode(request.mode, None);
        let mut record = Record {
            name: request.name.clone(),
            pid: process.pid(),
            start_ticks: process.start_ticks().map_err(failed("QEMU"))?,
            boot: life::boot().map_err(failed("the host's boot"))?,
            userfaultfd: None,
            leaving: None,
            started: false,
            console: false,
            logs: None,
            confinement: None,
            qmp: path,
            accelerator: accelerator.value,
            accelerator_reason: accelerator.reason,
            backing: backing.value,
            backing_reason: backing.reason,
            mode: mode.value,
            mode_reason: mode.reason,
            min_order,
            begin: false,
            small_pages: false,
            evicts: false,
            shares: false,
            size: None,
            size_bytes: None,
            on_violation: OnViolation::default(),
            auto: Auto::default(),
            limit_bytes: None,
            low_bytes: None,
            high_bytes: None,
            share: None,
            disks: Vec::new(),
            images: Vec::new(),
            growth: Vec::new(),
            cpus: 0,
            disks_used: false,
            swap: self.swap_path(&request.name, process.pid()),
            tiers: None,
            settings: self.settings,
            regions: Vec::new(),
            totals: Totals::default(),
            kernel: None,
            digests: 0,
        };
        origin::restore(&mut record, &reserved.directory);
        let disks = Disks::none().map_err(failed("a random key"))?;
        let with = (disks, Growth::none());
        let held = held::take(process, ram, qmp, with, record, &reserved.directory)?;
        self.serve(request.name.clone(), held)?;
        reserved.keep();
        Ok(())
    }

    /// Has a VM served that was just taken hold of. Its thread is there before its service is.
    fn serve(&self, name: VmName, held: Held) -> Answer<()> {
        let (give, take) = channel();
        let directory = held.directory.clone();
        let supervisor = Supervisor { name: name.clone(), directory, daemon: self.clone() };
        let run = move || take.recv().map_or((), |ready| supervisor.run(Some(ready)));
        let ready = match thread::Builder::new().name(format!("vm {name}")).spawn(run) {
            Ok(_) => Ready::new(held),
            Err(error) => Err((error, Box::new(held))),
        };
        let ready = ready.map_err(|(error, held)| {
            held.undo();
            failed("the VM's threads")(error)
        })?;
        let listing = Arc::new(Listing::new(ready.record(), Stage::Held(ready.commands())));
        self.vms().insert(name, Some(Arc::clone(&listing)));
        // It waits for nothing else.
        let _ = give.send((ready, listing));
        Ok(())
    }

    /// Takes a name and makes its directory. One that is there already is of
    /// a VM that was let go and still runs: it can be held again, and no other
    /// VM can be started in it.
    fn reserve(&self, name: &VmName, again: bool) -> Answer<Reserved> {
        self.check_keys()?;
        self.swap_dir.check().map_err(not_allowed)?;
        if let Some(thread) = self.clearing().take() {
            // One that panicked has cleared away less, which is done again below.
            let _ = thread.join();
        }
        let directory = self.run_dir.join("vms").join(name.as_str());
        match self.vms().entry(name.clone()) {
            Entry::Occupied(_) => {
                return Err(Refused::Taken(format!("a VM named {name} is held already")));
            }
            Entry::Vacant(vacant) => drop(vacant.insert(None)),
        }
        // The name is ours from here on, so others need not wait for what a look at disks, control
        // groups and processes takes.
        let daemon = self.clone();
        let mut reserved =
            Reserved { daemon, name: name.clone(), directory, made: false, kept: false };
        let directory = &reserved.directory;
        self.clear_away(name, directory);
        reserved.made = match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            made => made.map(|()| true).map_err(failed("the VM's directory"))?,
        };
        let on_record = Record::load(&reserved.directory).map_err(failed("the VM's record"))?;
        if !reserved.made && (!again || on_record.is_some()) {
            starting::check(directory).map_err(failed("the VM's directory"))?;
            return Err(Refused::Taken(format!(
                "{} is of a VM that still runs: take another name, or end that VM",
                reserved.directory.display()
            )));
        }
        self.filtered().remove(name);
        Ok(reserved)
    }

    fn left(&self) -> MutexGuard<'_, Vec<Supervisor>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes what a VM has left, unless it is still on record or lives on.
    fn clear_away(&self, name: &VmName, directory: &Path) {
        let was_there = directory.exists();
        if remove_if_dead(directory)
            && was_there
            && let Some(logs) = self.logs(name)
        {
            // Somebody else's files may be there, too.
            for file in ["console.log", "console.log.1", "qemu.log", "qemu.log.1"] {
                let _ = fs::remove_file(logs.join(file));
            }
            let _ = fs::remove_dir(&logs);
        }
    }

    fn vms(&self) -> MutexGuard<'_, Vms> {
        // The map is whole between any two statements that change it.
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name and a directory, given up unless kept.
struct Reserved {
    daemon: Daemon,
    name: VmName,
    directory: PathBuf,
    /// The directory was made for it.
    made: bool,
    kept: bool,
}

impl Reserved {
    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // First: who has the name next makes a directory of its own there.
        if self.made {
            remove(&self.directory);
        }
        self.daemon.vms().remove(&self.name);
    }
}

/// A QEMU of ours, or a relay; killed unless released.
struct Running(Option<Child>);

impl Running {
    fn pid(&self) -> Option<i32> {
        self.0.as_ref().map(|child| child.id() as i32)
    }

    /// It lives on; `note` takes note of its end.
    fn release(mut self, note: impl FnOnce(ExitStatus) + Send + 'static) {
        if let Some(mut child) = self.0.take() {
            std::thread::spawn(move || child.wait().map(note));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct Started {
    /// QEMU, and who stands before its devices.
    children: Vec<Running>,
    process: Process,
    ram: Ram,
    qmp: Qmp,
}

/// Starts QEMU, stopped before its guest's first instruction.
fn start(
    request: &RunRequest,
    backing: Backing,
    (directory, logs): (&Path, &Path),
    (disks, growth, plan): (&Disks, &[GrowthRecord], &Plan),
) -> Answer<Started> {
    let relays = growth::start_relays(growth, directory).map_err(failed("its memory devices"))?;
    let mut children: Vec<Running> = relays.into_iter().map(|relay| Running(Some(relay))).collect();
    let nodes = nodes(request, backing).map_err(failed("the VM's RAM"))?;
    let sockets: Vec<PathBuf> =
        (0..disks.count()).map(|index| disks::socket(directory, index)).collect();
    let launch = Launch {
        name: request.name.as_str(),
        directory,
        qemu: &qemu(),
        nodes: &nodes,
        served: &growth::served(growth, directory),
        prealloc: request.grow_prealloc,
        balloon: wants_balloon(request),
        cpus: request.cpus,
        accelerator: host::accelerator().value,
        kernel: request.kernel.as_deref(),
        initrd: request.initrd.as_deref(),
        append: request.append.as_deref(),
        disks: &sockets,
        disk_queues: disks::queues(request.cpus),
        qemu_args: &request.qemu_args,
        cwd: request.cwd.as_deref().unwrap_or(Path::new("/")),
        sandbox: plan.sandbox,
    };
    let (mut messages, to_messages) = io::pipe().map_err(failed("a pipe"))?;
    let child = launch.start(plan.child(), to_messages).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => not_allowed(format!(
            "there is no {}: install it with apt-get install qemu-system-x86",
            qemu().display()
        )),
        io::ErrorKind::PermissionDenied => {
            let advice = plan.advice(&error.to_string(), None);
            not_allowed(format!("{} does not start: {error}{advice}", qemu().display()))
        }
        _ => not_allowed(format!("QEMU does not start: {error}")),
    })?;
    let pid = child.id() as i32;
    let mut child = Running(Some(child));
    let mut qmp = control(&launch, &mut child, &mut messages, plan)?;
    // A directory that cannot be made leaves the VM without logs.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(logs);
    let keeper = console::start(directory, logs, Some(messages));
    children.push(Running(Some(keeper.map_err(failed("its console"))?)));
    let process = Process::open(pid).map_err(failed("QEMU"))?;
    let ram = layout::discover(&process, &mut qmp).map_err(not_allowed)?;
    children.push(child);
    Ok(Started { children, process, ram, qmp })
}

/// Files for its RAM, and for what can be plugged: all of them holes.
fn nodes(request: &RunRequest, backing: Backing) -> io::Result<Vec<Node>> {
    let count = u64::from(request.nodes);
    let memory = |name: &str, all_bytes: u64| {
        let bytes = all_bytes / count;
        let file = match backing {
            Backing::Hugetlb => RamFile::create_hugetlb(name, bytes),
            _ => RamFile::create(name, bytes),
        };
        file.map(|file| Memory { file, bytes })
    };
    let growth_bytes = request.max_bytes() - request.memory_bytes;
    let node = |_| {
        let name = format!("ebb-{}", request.name);
        let growth = (growth_bytes > 0).then(|| memory(&(name.clone() + "-growth"), growth_bytes));
        Ok(Node { ram: memory(&name, request.memory_bytes)?, growth: growth.transpose()? })
    };
    (0..request.nodes).map(node).collect()
}

/// QEMU has room for one balloon. A device that cannot wait is not to meet what it takes.
fn wants_balloon(request: &RunRequest) -> bool {
    let has_one = request.qemu_args.iter().any(|word| word.contains("virtio-balloon"));
    !has_one && request.strict_disk().is_none()
}

/// The program to run; `EBB_QEMU` names another one.
fn qemu() -> PathBuf {
    std::env::var_os("EBB_QEMU").map_or_else(|| QEMU.into(), PathBuf::from)
}

/// Waits for QEMU's control socket, or its end.
fn control(
    launch: &Launch<'_>,
    child: &mut Running,
    messages: &mut PipeReader,
    plan: &Plan,
) -> Answer<Qmp> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let ended = child.0.as_mut().map(Child::try_wait).transpose().map_err(failed("QEMU"))?;
        if let Some(Some(status)) = ended {
            let why = last_line(messages);
            let advice = plan.advice(&why, status.signal());
            return Err(not_allowed(format!("QEMU ended: {why}{advice}")));
        }
        match Qmp::connect(&launch.qmp_path()) {
            Ok(qmp) => return Ok(qmp),
            Err(error) if Instant::now() > deadline => return Err(not_allowed(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Of a QEMU that has ended; what it started may not have.
fn last_line(messages: &mut PipeReader) -> String {
    let mut text = vec![0; 64 << 10];
    let nothing = rustix::io::ioctl_fionread(&*messages).is_ok_and(|bytes| bytes == 0);
    let length = if nothing { 0 } else { messages.read(&mut text).unwrap_or(0) };
    let text = String::from_utf8_lossy(&text[..length]);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("it said nothing").trim().to_owned()
}

fn keys_refused(run_dir: &Path) -> String {
    let (why, advice) = advice::keys_on_disk(run_dir, i32::try_from(std::process::id()).ok());
    format!("{why}: {advice}")
}

fn accelerator_of(qmp: &mut Qmp) -> Answer<Chosen<ApiAccelerator>> {
    let answer = qmp.execute("query-kvm", json!({})).map_err(not_allowed)?;
    let kvm = answer.get("enabled").and_then(serde_json::Value::as_bool).unwrap_or(false);
    let value = if kvm { ApiAccelerator::Kvm } else { ApiAccelerator::Tcg };
    Ok(Chosen::new(value, "it was started so"))
}

fn api(accelerator: Accelerator) -> ApiAccelerator {
    match accelerator {
        Accelerator::Kvm => ApiAccelerator::Kvm,
        Accelerator::Tcg => ApiAccelerator::Tcg,
    }
}

fn min_order(asked: Option<u8>) -> Answer<u8> {
    match asked.unwrap_or(MIN_ORDER_DEFAULT) {
        order if order < MIN_ORDER_LOWEST => Err(not_allowed(format!(
            "blocks of order {order} share their metadata's frame with others: the smallest order \
             is {MIN_ORDER_LOWEST}"
        ))),
        order => Ok(order),
    }
}

/// Removes what a VM has left, if it has ended for certain; `false`: it lives on, or nobody can
/// tell.
fn remove_if_dead(directory: &Path) -> bool {
    let looked = Record::load(directory).and_then(|record| {
        let dead = match record.as_ref().map(Record::life) {
            Some(Life::Lives(_)) => None,
            Some(Life::Dead(dead)) => Some(dead),
            Some(Life::Unknown(error)) => return Err(error),
            None => match starting::end(directory)? {
                Some(dead) => Some(dead),
                // One that was let go keeps its control socket as long as it runs.
                None => Life::of_listener(&directory.join("qmp.sock"))?,
            },
        };
        let Some(dead) = dead else { return Ok(false) };
        held::clear(record.as_ref(), directory, &dead).map(|()| true)
    });
    looked.unwrap_or_else(|error| {
        tracing::error!("{}: not cleared away: {error}", directory.display());
        false
    })
}

fn remove(directory: &Path) {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::error!("{}: {error}", directory.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_sys::confine::{self, Child as Settled};
    use rustix::fs::{Mode, OFlags, open};
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    use crate::starting::Qemu;

    /// What is there while a VM is started: a script in place of QEMU, which has the directory of
    /// sockets open, and waits.
    fn begun(directory: &Path) -> Child {
        handed::make_socket_directory(directory).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let sockets = open(handed::socket_directory(directory), flags, Mode::empty()).unwrap();
        let mut settled = Settled::default();
        settled.inherit(sockets);
        let mut command = Command::new("sh");
        command.args(["-c", "read word", "qemu", "-name", "cut"]).stdin(Stdio::piped());
        command.args(["-chardev", "socket,id=ebb-qmp,fd=9,server=on,wait=off"]);
        confine::settle(&mut command, settled);
        command.spawn().unwrap()
    }

    /// What tells it.
    fn cut() -> Qemu {
        Qemu::Named("cut".parse().unwrap())
    }

    #[test]
    fn a_vm_whose_start_was_cut_off_is_ended() {
        for listens in [false, true] {
            let home = tempfile::tempdir().unwrap();
            let directory = home.path().join("vm");
            fs::create_dir(&directory).unwrap();
            let file = home.path().join("tier");
            fs::write(&file, "").unwrap();
            starting::mark(&directory, cut(), &[], Some(&file)).unwrap();
            let mut qemu = begun(&directory);
            let socket = UnixListener::bind(directory.join("qmp.sock")).unwrap();
            let listener = listens.then_some(socket);
            assert!(remove_if_dead(&directory));
            let ended = qemu.try_wait().unwrap();
            assert_eq!(ended.and_then(|status| status.signal()), Some(9));
            assert!(!directory.exists() && !file.exists());
            drop(listener);
        }
    }

    /// The mark of a daemon before this one, and one that is no mark.
    #[test]
    fn a_mark_of_an_earlier_daemon_is_understood() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("vm");
        fs::create_dir(&directory).unwrap();
        let mark = directory.join("start.json");
        fs::write(&mark, r#"{"qemu":{"Program":"/qemu"},"cgroups":[],"file":null}"#).unwrap();
        let mut qemu = begun(&directory);
        assert!(remove_if_dead(&directory));
        assert_eq!(qemu.try_wait().unwrap().and_then(|status| status.signal()), Some(9));
        fs::create_dir(&directory).unwrap();
        fs::write(&mark, r#"{"qemu":{"Later":1}}"#).unwrap();
        assert!(!remove_if_dead(&directory));
        let told = starting::check(&directory).unwrap_err().to_string();
        assert!(told.contains(mark.to_str().unwrap()) && told.contains("end the QEMU"), "{told}");
    }

    /// QEMU may have handed the directory of its sockets to anybody.
    #[test]
    fn whoever_else_has_its_sockets_open_is_not_ended() {
        let other = Qemu::Named("other".parse().unwrap());
        for qemu in [Qemu::User(4711), Qemu::UserFrom(0x7000_0000), other] {
            let home = tempfile::tempdir().unwrap();
            let directory = home.path().join("vm");
            fs::create_dir(&directory).unwrap();
            starting::mark(&directory, qemu, &[], None).unwrap();
            let mut other = begun(&directory);
            // Until it is another program it is this one.
            while Process::open(other.id() as i32).unwrap().program().unwrap()
                == Process::own().unwrap().program().unwrap()
            {
                thread::yield_now();
            }
            assert!(remove_if_dead(&directory));
            assert!(!directory.exists() && other.try_wait().unwrap().is_none());
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }

    #[test]
    fn a_vm_that_was_let_go_runs_on() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().to_owned();
        starting::mark(&directory, cut(), &[], None).unwrap();
        let mut qemu = begun(&directory);
        let listener = UnixListener::bind(directory.join("qmp.sock")).unwrap();
        starting::unmark(&directory).unwrap();
        assert!(!remove_if_dead(&directory));
        assert!(directory.exists() && qemu.try_wait().unwrap().is_none());
        drop(listener);
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }

    /// `ebb` starts the daemon, so an option of it alone would help few.
    #[test]
    fn a_refused_key_names_what_to_set() {
        let told = keys_refused(Path::new("/var/ebb"));
        assert!(told.contains("/var/ebb") && !told.contains('\n'), "{told}");
        assert!(told.contains(&format!("kill {}", std::process::id())), "{told}");
        // As clap knows them.
        use clap::CommandFactory;
        let known = crate::Arguments::command();
        for id in ["run_dir", "allow_keys_on_disk"] {
            let argument = known.get_arguments().find(|argument| argument.get_id() == id).unwrap();
            let variable = argument.get_env().unwrap().to_str().unwrap();
            let option = format!("--{}", argument.get_long().unwrap());
            assert!(told.contains(variable) && told.contains(&option), "{told}");
        }
    }

    /// The disk may be mounted while the daemon runs.
    #[test]
    fn no_vm_begins_without_the_swap_directory() {
        let home = tempfile::tempdir().unwrap();
        let (run, swap) = (home.path(), home.path().join("swap"));
        private_dir::make(&run.join("vms")).unwrap();
        let shared = (pool::Shared::open(run).unwrap(), Calibrated::open(run).unwrap());
        let swap_dir = SwapDir::new(run, Some(&swap)).unwrap();
        let daemon = Daemon::new(run, swap_dir, run, Settings::default(), shared)
            .with_rules(VmUser::default(), true);
        let name: VmName = "a".parse().unwrap();
        let refused = daemon.reserve(&name, false).err().unwrap().to_string();
        let (why, advice) = advice::no_swap_dir(&swap);
        assert_eq!(refused, format!("{why}: {advice}"));
        assert!(daemon.vms().is_empty() && !swap.exists());
        private_dir::make(&swap).unwrap();
        assert!(daemon.reserve(&name, false).is_ok());
    }

    /// A look that takes long, here at a record that is a FIFO, is nobody else's matter.
    #[test]
    fn others_do_not_wait_for_what_one_vm_left() {
        let home = tempfile::tempdir().unwrap();
        let run = home.path();
        let directory = run.join("vms/slow");
        fs::create_dir_all(&directory).unwrap();
        let fifo = directory.join("vm.json");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR).unwrap();
        let shared = (pool::Shared::open(run).unwrap(), Calibrated::open(run).unwrap());
        let swap_dir = SwapDir::new(run, Some(run)).unwrap();
        let daemon = Daemon::new(run, swap_dir, run, Settings::default(), shared)
            .with_rules(VmUser::default(), true);
        let name: VmName = "slow".parse().unwrap();
        thread::scope(|scope| {
            let reserving = scope.spawn(|| daemon.reserve(&name, true).is_ok());
            // There is a reader once this can be opened.
            let mut all_free = true;
            while !reserving.is_finished() {
                let Ok(writer) = open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty())
                else {
                    continue;
                };
                // It is taken for moments.
                all_free &= (0..1000).any(|_| {
                    thread::yield_now();
                    daemon.vms.try_lock().is_ok()
                });
                drop(writer);
            }
            assert!(all_free, "the VMs are locked");
            assert!(!reserving.join().unwrap(), "an empty record is none");
        });
        assert!(daemon.vms().is_empty());
    }
}
