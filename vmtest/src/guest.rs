//! The VM that a test wants.

use std::fs::File;
use std::path::Path;

use ebb_units::Bytes;

use crate::assets::{self, Kernel};
use crate::disk::Disk;
use crate::host::permit;

/// Options of the kernel. Messages down to warnings go to the console. There is no watchdog, since
/// guests are stopped on purpose. There is no check at boot that timer interrupts come in time,
/// since on a busy host they do not and the kernel panics.
const COMMAND_LINE: &str = "console=ttyS0 loglevel=5 nowatchdog no_timer_check";
/// Option for several vCPUs under a QEMU before 8.1. Its emulation can run an instruction that
/// another vCPU has replaced (Red Hat's bug 2216496). At boot, Linux replaces one in its timers
/// when ticks may stop; a guest that runs the old one panics with "int3". So ticks never stop in
/// such guests. A guest that comes with a QEMU of its own does without this option, since each of
/// those is newer.
const OF_SEVERAL_CPUS: &str = "nohz=off";

/// A VM to be started.
#[derive(Clone)]
pub struct Guest {
    pub(crate) kernel: Kernel,
    pub(crate) memory: Bytes,
    pub(crate) cpus: u32,
    pub(crate) append: String,
    pub(crate) options: Vec<String>,
    qemu: Vec<String>,
    machine: String,
    nodes: u64,
    slow_node: Option<Bytes>,
    pub(crate) ram: String,
    disk: Option<Bytes>,
    room: Option<Bytes>,
}

impl Guest {
    /// A guest with one of Debian's kernels, by its label, with 1 GiB and two processors.
    ///
    /// # Panics
    /// There is no such kernel: `require!` it first.
    pub fn debian(label: &str) -> Guest {
        Guest::of(assets::kernel(label).unwrap_or_else(|why| panic!("{why}")))
    }

    /// A guest with this kernel, 1 GiB and two processors.
    pub fn of(kernel: Kernel) -> Guest {
        Guest {
            kernel,
            memory: Bytes(1 << 30),
            cpus: 2,
            append: COMMAND_LINE.into(),
            options: Vec::new(),
            qemu: Vec::new(),
            machine: "q35".into(),
            nodes: 1,
            slow_node: None,
            ram: "memfd,share=on".into(),
            disk: None,
            room: None,
        }
    }

    /// Sets the size of the RAM, as in `2G`.
    pub fn memory(mut self, size: &str) -> Guest {
        self.memory = size.parse().expect("a size");
        self
    }

    /// Selects the QEMU in this directory.
    pub fn qemu_in(mut self, directory: &Path) -> Guest {
        self.kernel.qemu_directory = Some(directory.into());
        self
    }

    /// Makes room for memory devices, up to `size` including its RAM; for [`crate::Host::qemu`]
    /// only.
    pub fn room(mut self, size: &str) -> Guest {
        self.room = Some(size.parse().expect("a size"));
        self
    }

    /// Sets the number of processors.
    pub fn cpus(mut self, count: u32) -> Guest {
        self.cpus = count;
        self
    }

    pub(crate) fn command_line(&self) -> String {
        match self.cpus > 1 && self.kernel.qemu_directory.is_none() {
            true => format!("{} {OF_SEVERAL_CPUS}", self.append),
            false => self.append.clone(),
        }
    }

    /// Adds words to the kernel's command line.
    pub fn append(mut self, words: &str) -> Guest {
        self.append += &format!(" {words}");
        self
    }

    /// Sets the backing, `small`, `thp`, `hugetlb` or `auto`; for [`crate::Host::run`] only.
    pub fn backing(self, backing: &str) -> Guest {
        self.with("--backing", backing)
    }

    /// Sets QEMU's user, a name, a number or `own`; for [`crate::Host::run`] only.
    pub fn user(self, user: &str) -> Guest {
        self.with("--user", user)
    }

    /// Runs QEMU as root; for [`crate::Host::run`] only.
    pub fn privileged(mut self) -> Guest {
        self.options.push("--privileged".into());
        self
    }

    /// Boots from copies of its kernel and its initial RAM disk in this directory, with this mode.
    pub fn own_boot_files(&mut self, directory: &Path, mode: u32) {
        for file in [&mut self.kernel.vmlinuz, &mut self.kernel.initrd] {
            let copy = directory.join(file.file_name().expect("a file"));
            std::fs::copy(&*file, &copy).expect("a copy");
            permit(&copy, mode);
            *file = copy;
        }
    }

    /// Sets the mode, `strict` or `release`.
    pub fn mode(self, mode: &str) -> Guest {
        self.with("--mode", mode)
    }

    /// Sets the size up to which memory can be plugged; for [`crate::Host::run`] only.
    pub fn grow_to(self, size: &str) -> Guest {
        self.with("--grow-to", size)
    }

    /// Gives plugged memory its pages at once; for [`crate::Host::run`] only.
    pub fn grow_prealloc(mut self) -> Guest {
        self.options.push("--grow-prealloc".into());
        self
    }

    /// Sets the number of NUMA nodes, of equal size; for [`crate::Host::run`] only.
    pub fn run_nodes(self, count: u64) -> Guest {
        self.with("--nodes", &count.to_string())
    }

    /// Sets the order of the smallest block to reclaim.
    pub fn min_order(self, order: u8) -> Guest {
        self.with("--min-order", &order.to_string())
    }

    /// Adds a virtio disk of this size, `/dev/vda`.
    pub fn disk(mut self, size: &str) -> Guest {
        self.disk = Some(size.parse().expect("a size"));
        self
    }

    /// Adds a disk that another process serves, `/dev/vda`. QEMU waits for that process when it has
    /// ended.
    pub fn served_disk(self, disk: &Disk) -> Guest {
        let (socket, queues) = (disk.socket().display(), disk.queue_count());
        self.qemu_args(&format!(
            "-chardev socket,id=disk,path={socket},reconnect=1 \
             -device vhost-user-blk-pci,chardev=disk,num-queues={queues}"
        ))
    }

    /// Adds a disk that Ebb itself serves; for [`crate::Host::run`] only.
    pub fn own_disk(self, disk: &Disk) -> Guest {
        self.own_device(disk.image())
    }

    /// Adds an image or a device that Ebb itself serves; for [`crate::Host::run`] only.
    pub fn own_device(self, path: &Path) -> Guest {
        self.with("--disk", &path.display().to_string())
    }

    /// Sets the tiers, as in `dram=160M,file=/path:352M`; for [`crate::Host::run`] only.
    pub fn tier(self, ladder: &str) -> Guest {
        self.with("--tier", ladder)
    }

    /// Adds a disk that Ebb itself serves behind its IOMMU in software; for [`crate::Host::run`]
    /// only.
    pub fn strict_disk(self, disk: &Disk) -> Guest {
        self.with("--disk", &format!("{},dma=strict", disk.image().display()))
    }

    /// Adds arguments of QEMU, passed on unchanged.
    pub fn qemu_args(mut self, words: &str) -> Guest {
        self.qemu.extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// Sets the machine, `pc` or `q35`, with properties; for [`crate::Host::qemu`] only.
    pub fn machine(mut self, machine: &str) -> Guest {
        self.machine = machine.into();
        self
    }

    /// Sets the number of NUMA nodes, of equal size, each with a memory backend of its own; for
    /// [`crate::Host::qemu`] only.
    pub fn nodes(mut self, count: u64) -> Guest {
        self.nodes = count;
        self
    }

    /// Adds a second NUMA node of this size, with memory and no processor, beside the one that has
    /// all the rest; for [`crate::Host::qemu`] only.
    pub fn slow_node(mut self, size: &str) -> Guest {
        self.slow_node = Some(size.parse().expect("a size"));
        self
    }

    /// Sets the kind of memory backend and its properties, as in `ram,share=off`; for
    /// [`crate::Host::qemu`] only.
    pub fn ram(mut self, backend: impl Into<String>) -> Guest {
        self.ram = backend.into();
        self
    }

    fn with(mut self, key: &str, value: &str) -> Guest {
        self.options.extend([key.to_owned(), value.to_owned()]);
        self
    }

    /// The arguments that `ebb attach` and `ebb run` have in common.
    pub(crate) fn common_options(&self) -> &[String] {
        &self.options
    }

    /// The arguments of `ebb run` for a VM called `name` with its own files in `directory`.
    pub(crate) fn run_args(&self, name: &str, directory: &Path) -> Vec<String> {
        let kernel = &self.kernel;
        let mut words: Vec<String> = ["run", "--name", name].map(Into::into).into();
        words.extend(["--memory".into(), self.memory.0.to_string()]);
        words.extend(["--cpus".into(), self.cpus.to_string()]);
        words.extend(["--kernel".into(), kernel.vmlinuz.display().to_string()]);
        words.extend(["--initrd".into(), kernel.initrd.display().to_string()]);
        words.extend(["--append".into(), self.command_line()]);
        words.extend(self.options.iter().cloned());
        words.push("--".into());
        words.extend(self.common_args(directory));
        words
    }

    /// The arguments of a QEMU that Ebb does not start.
    pub(crate) fn plain_args(&self, name: &str, directory: &Path) -> Vec<String> {
        let socket = |file| directory.join(file).display().to_string();
        let mut words = Vec::new();
        let mut option = |key: &str, value: String| words.extend([key.to_owned(), value]);
        option("-name", name.into());
        option("-accel", "tcg".into());
        option("-smp", self.cpus.to_string());
        let slow_bytes = self.slow_node.map_or(0, |slow| slow.0);
        let room = self.room.map(|room| format!(",slots=0,maxmem={}M", room.0 >> 20));
        let memory_mib = (self.memory.0 + slow_bytes) >> 20;
        option("-m", format!("{memory_mib}M{}", room.unwrap_or_default()));
        option("-qmp", format!("unix:{},server=on,wait=off", socket("qmp.sock")));
        option(
            "-chardev",
            format!(
                "socket,id=console,path={},server=on,wait=off,logfile={}",
                socket("console.sock"),
                socket("console.log")
            ),
        );
        option("-serial", "chardev:console".into());
        option("-kernel", self.kernel.vmlinuz.display().to_string());
        option("-initrd", self.kernel.initrd.display().to_string());
        option("-append", self.command_line());
        option("-display", "none".into());
        words.extend(["-nodefaults".into(), "-no-user-config".into()]);
        words.extend(self.ram_args());
        words.extend(self.common_args(directory));
        words
    }

    fn ram_args(&self) -> Vec<String> {
        match self.slow_node {
            Some(slow) => self.two_nodes(slow),
            None => self.equal_nodes(),
        }
    }

    fn two_nodes(&self, slow: Bytes) -> Vec<String> {
        let backend = |id, bytes| format!("memory-backend-{},id={id},size={bytes}", self.ram);
        let last = self.cpus.saturating_sub(1);
        let words = [
            ("-object", backend("fast", self.memory.0)),
            ("-object", backend("slow", slow.0)),
            ("-machine", self.machine.clone()),
            ("-numa", format!("node,nodeid=0,cpus=0-{last},memdev=fast")),
            ("-numa", "node,nodeid=1,memdev=slow".into()),
        ];
        words.into_iter().flat_map(|(key, value)| [key.to_owned(), value]).collect()
    }

    fn equal_nodes(&self) -> Vec<String> {
        let bytes = self.memory.0 / self.nodes;
        let mut words = Vec::new();
        let mut option = |key: &str, value: String| words.extend([key.to_owned(), value]);
        for node in 0..self.nodes {
            let backend = format!("memory-backend-{},id=ram{node},size={bytes}", self.ram);
            option("-object", backend);
        }
        if self.nodes == 1 {
            option("-machine", format!("{},memory-backend=ram0", self.machine));
        } else {
            option("-machine", self.machine.clone());
            (0..self.nodes).for_each(|node| {
                option("-numa", format!("node,nodeid={node},memdev=ram{node}"));
            });
        }
        words
    }

    /// Arguments for a second control socket, for the test, beside the one that Ebb uses.
    pub(crate) fn common_args(&self, directory: &Path) -> Vec<String> {
        let test_socket = directory.join("test.sock");
        let socket = format!("unix:{},server=on,wait=off", test_socket.display());
        let mut words = vec!["-qmp".to_owned(), socket];
        if let Some(size) = self.disk {
            let path = directory.join("disk.img");
            File::create(&path).and_then(|file| file.set_len(size.0)).expect("a disk image");
            permit(&path, 0o666);
            let drive = format!("file={},if=virtio,format=raw", path.display());
            words.extend(["-drive".to_owned(), drive]);
        }
        words.extend(self.qemu.iter().cloned());
        words
    }
}
