//! A VM that is to be started.

use std::path::PathBuf;

use ebb_units::{Bytes, HUGE_BYTES};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::bounds::{
    BadRequest, CPUS_MAX, MEMORY_BYTES_MAX, NODES_MAX, check_absolute, check_memory,
    check_min_order, ensure,
};
use super::disk::DiskRequest;
use crate::{Backing, DmaMode, Mode, VmName};

/// Start QEMU and manage the VM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// The VM's name, unique on the host.
    #[schema(value_type = String)]
    pub name: VmName,
    /// The guest's RAM: a multiple of 2 MiB, from 64 MiB to 1 TiB. With `tier`: 0, or left out,
    /// means the sum of the tiers.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Tiers of memory, fastest first, as in `dram=1G,file=/var/lib/ebb/web:4G`; null: the host's
    /// memory.
    #[serde(default)]
    pub tier: Option<String>,
    /// The largest size for a resize: the guest plugs the difference (virtio-mem); null:
    /// `memory_bytes`.
    #[serde(default)]
    pub grow_to_bytes: Option<u64>,
    /// Give plugged memory its pages at once, not at the first touch.
    #[serde(default)]
    pub grow_prealloc: bool,
    /// NUMA nodes, 1 to 16, each with the same part of memory and vCPUs.
    #[serde(default = "one")]
    pub nodes: u32,
    /// vCPUs, 1 to 255.
    #[serde(default = "one")]
    pub cpus: u32,
    /// Kernel image to boot directly; absolute path.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, with `kernel` only; absolute path.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, with `kernel` only.
    #[serde(default)]
    pub append: Option<String>,
    /// What the guest's RAM is made of.
    #[serde(default)]
    pub backing: Backing,
    /// How reclaimed memory is watched; null: Ebb chooses.
    #[serde(default)]
    pub mode: Option<Mode>,
    /// Smallest buddy block to reclaim, as its order: 6 to 10; null: 9, which is 2 MiB.
    #[serde(default)]
    pub min_order: Option<u8>,
    /// Raw images that Ebb serves to the guest as virtio disks, in this order.
    #[serde(default)]
    pub disks: Vec<DiskRequest>,
    /// More arguments for QEMU, passed unchanged.
    #[serde(default)]
    pub qemu_args: Vec<String>,
    /// QEMU's working directory, absolute: relative paths in `qemu_args` start there. Null means
    /// `/`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub cwd: Option<PathBuf>,
    /// The user that QEMU runs as: a name, a number, `UID:GID`, or `own` for one that no other
    /// process has; null: the daemon's `--vm-user`, by default `own`.
    #[serde(default)]
    pub user: Option<String>,
    /// Run QEMU as root, with the capabilities of the daemon and without a seccomp filter.
    #[serde(default)]
    pub privileged: bool,
}

fn one() -> u32 {
    1
}

impl RunRequest {
    /// Checks all that needs neither the host nor QEMU.
    pub fn check(&self) -> Result<(), BadRequest> {
        if self.tier.is_none() || self.memory_bytes > 0 {
            check_memory(self.memory_bytes)?;
        }
        ensure((1..=CPUS_MAX).contains(&self.cpus), || {
            format!("{} vCPUs: give 1 to {CPUS_MAX}", self.cpus)
        })?;
        check_min_order(self.min_order)?;
        self.check_nodes()?;
        self.check_growth()?;
        self.check_dma()?;
        ensure(!self.privileged || self.user.is_none(), || {
            "--privileged is root with all capabilities: leave out --user".into()
        })?;
        self.check_boot()
    }

    /// What the VM can have in all.
    pub fn max_bytes(&self) -> u64 {
        self.grow_to_bytes.unwrap_or(self.memory_bytes)
    }

    fn check_nodes(&self) -> Result<(), BadRequest> {
        let Self { nodes, cpus, memory_bytes, .. } = *self;
        ensure((1..=NODES_MAX).contains(&nodes), || {
            format!("{nodes} NUMA nodes: give 1 to {NODES_MAX}")
        })?;
        ensure(cpus.is_multiple_of(nodes), || {
            format!("{cpus} vCPUs cannot be shared evenly by {nodes} NUMA nodes")
        })?;
        ensure(memory_bytes.is_multiple_of(u64::from(nodes) * HUGE_BYTES), || {
            format!("memory of {:#} cannot be shared by {nodes} NUMA nodes", Bytes(memory_bytes))
        })
    }

    fn check_growth(&self) -> Result<(), BadRequest> {
        let Some(most) = self.grow_to_bytes else { return Ok(()) };
        ensure(self.tier.is_none(), || {
            "--tier holds what the VM has, and no more: leave out --grow-to, or --tier".into()
        })?;
        ensure((self.memory_bytes + 1..=MEMORY_BYTES_MAX).contains(&most), || {
            let (memory, max) = (Bytes(self.memory_bytes), Bytes(MEMORY_BYTES_MAX));
            format!(
                "--grow-to {} is out of range: give more than {memory}, up to {max}",
                Bytes(most)
            )
        })?;
        let (nodes, growth) = (self.nodes, most - self.memory_bytes);
        ensure(growth.is_multiple_of(u64::from(nodes) * HUGE_BYTES), || {
            format!(
                "--grow-to adds {:#}: give the memory and a multiple of {:#} more",
                Bytes(growth),
                Bytes(u64::from(nodes) * HUGE_BYTES)
            )
        })?;
        ensure(self.backing != Backing::Hugetlb, || {
            "--grow-to would reserve hugetlb pages for all that may be plugged: give --backing thp"
                .into()
        })?;
        self.strict_disk().map_or(Ok(()), |disk| {
            Err(BadRequest(format!(
                "{} with dma=strict must know of all memory, and QEMU's virtio-mem plugs without a \
                 word to its IOMMU: leave out --grow-to",
                disk.path.display()
            )))
        })
    }

    /// The first disk that reaches the guest's memory as a device passed through does.
    pub fn strict_disk(&self) -> Option<&DiskRequest> {
        self.disks.iter().find(|disk| disk.dma == DmaMode::Strict)
    }

    /// In release mode memory comes back when a processor touches it; a device does not wait.
    fn check_dma(&self) -> Result<(), BadRequest> {
        let strict = self.strict_disk().filter(|_| self.mode == Some(Mode::Release));
        strict.map_or(Ok(()), |disk| {
            Err(BadRequest(format!(
                "a disk with dma=strict ({}) needs strict mode: leave --mode out, or give --mode \
                 strict",
                disk.path.display()
            )))
        })
    }

    fn check_boot(&self) -> Result<(), BadRequest> {
        ensure(self.kernel.is_some() || !self.qemu_args.is_empty(), || self.lack_of_boot())?;
        ensure(self.kernel.is_some() || (self.initrd.is_none() && self.append.is_none()), || {
            "--initrd and --append need --kernel".into()
        })?;
        let paths = self.kernel.iter().chain(&self.initrd).chain(&self.cwd);
        paths.map(PathBuf::as_path).try_for_each(check_absolute)
    }

    /// What to add to a request without a kernel and QEMU's own arguments. SeaBIOS boots only from
    /// sectors of 512 bytes.
    fn lack_of_boot(&self) -> String {
        match self.disks.first() {
            None => "nothing to boot: give --kernel, or QEMU's own arguments behind --".into(),
            Some(disk) => format!(
                "nothing to boot: QEMU's firmware boots from no disk with sectors of 4 KiB, as {} \
                 has by --disk: give --kernel and --initrd, too, or QEMU's own arguments behind --",
                disk.path.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MEMORY_BYTES_MIN, MIN_ORDER_LEAST, ORDER_MAX};

    fn run() -> RunRequest {
        RunRequest {
            name: "web".parse().expect("a name"),
            memory_bytes: 2 << 30,
            tier: None,
            grow_to_bytes: None,
            grow_prealloc: false,
            nodes: 1,
            cpus: 1,
            kernel: Some("/boot/vmlinuz".into()),
            initrd: None,
            append: None,
            backing: Backing::Auto,
            mode: None,
            min_order: None,
            disks: vec![],
            qemu_args: vec![],
            cwd: None,
            user: None,
            privileged: false,
        }
    }

    fn refused(request: RunRequest) -> String {
        request.check().expect_err("it makes no sense").to_string()
    }

    #[test]
    fn privileged_and_a_user_exclude_each_other() {
        let privileged = RunRequest { privileged: true, ..run() };
        assert_eq!(privileged.check(), Ok(()));
        let both = RunRequest { user: Some("web".into()), ..privileged };
        assert!(both.check().unwrap_err().to_string().contains("leave out --user"));
    }

    #[test]
    fn a_disk_may_be_kept_from_memory_that_is_not_there() {
        let dma = |text: &str| text.parse().map(|disk: DiskRequest| disk.dma);
        assert_eq!(dma("a.img"), Ok(DmaMode::Pinned));
        assert_eq!(dma("a.img,readonly,dma=strict"), Ok(DmaMode::Strict));
        assert!(dma("a.img,dma=none").is_err_and(|why| why.contains("pinned, strict")));
        let disks = vec!["/a.img,dma=strict".parse().expect("a disk")];
        assert_eq!(RunRequest { disks: disks.clone(), ..run() }.check(), Ok(()));
        let released = RunRequest { disks, mode: Some(Mode::Release), ..run() };
        assert!(refused(released).contains("(/a.img) needs strict mode"));
    }

    #[test]
    fn takes_the_ends_of_each_range() {
        for memory_bytes in [MEMORY_BYTES_MIN, MEMORY_BYTES_MAX] {
            assert_eq!(RunRequest { memory_bytes, ..run() }.check(), Ok(()));
        }
        for cpus in [1, CPUS_MAX] {
            assert_eq!(RunRequest { cpus, ..run() }.check(), Ok(()));
        }
        for order in [MIN_ORDER_LEAST, ORDER_MAX] {
            assert_eq!(RunRequest { min_order: Some(order), ..run() }.check(), Ok(()));
        }
    }

    #[test]
    fn refuses_what_lies_outside() {
        let small = RunRequest { memory_bytes: MEMORY_BYTES_MIN - HUGE_BYTES, ..run() };
        assert_eq!(refused(small), "memory of 62 MiB is out of range: give 64 MiB to 1 TiB");
        let large = RunRequest { memory_bytes: MEMORY_BYTES_MAX + HUGE_BYTES, ..run() };
        assert!(refused(large).contains("out of range"));
        let odd = RunRequest { memory_bytes: (64 << 20) + 4096, ..run() };
        assert!(refused(odd).contains("not a multiple of 2 MiB"));
        assert!(refused(RunRequest { cpus: 0, ..run() }).contains("give 1 to 255"));
        assert!(refused(RunRequest { cpus: 256, ..run() }).contains("give 1 to 255"));
        for order in [MIN_ORDER_LEAST - 1, ORDER_MAX + 1] {
            let message = refused(RunRequest { min_order: Some(order), ..run() });
            assert!(message.contains("give 6 to 10"), "{message}");
        }
    }

    #[test]
    fn nodes_share_evenly() {
        let nodes = |nodes, cpus| RunRequest { nodes, cpus, ..run() };
        assert_eq!(nodes(2, 4).check(), Ok(()));
        assert!(refused(nodes(0, 1)).contains("give 1 to 16"));
        assert!(refused(nodes(17, 17)).contains("give 1 to 16"));
        assert!(refused(nodes(2, 3)).contains("3 vCPUs cannot be shared"));
        let odd = RunRequest { memory_bytes: 66 << 20, ..nodes(2, 2) };
        assert!(refused(odd).contains("cannot be shared by 2 NUMA nodes"));
    }

    #[test]
    fn growth_is_beyond_the_memory_in_whole_blocks() {
        let to = |bytes| RunRequest { grow_to_bytes: Some(bytes), ..run() };
        assert_eq!((to(16 << 30).check(), to(16 << 30).max_bytes()), (Ok(()), 16 << 30));
        for bytes in [0, 2 << 30, MEMORY_BYTES_MAX + HUGE_BYTES] {
            assert!(refused(to(bytes)).contains("give more than 2 GiB"), "{bytes}");
        }
        assert!(refused(to((4 << 30) + 4096)).contains("a multiple of 2 MiB"));
        let nodes = RunRequest { nodes: 2, cpus: 2, ..to((2 << 30) + HUGE_BYTES) };
        assert!(refused(nodes).contains("a multiple of 4 MiB more"));
        let reserved = RunRequest { backing: Backing::Hugetlb, ..to(4 << 30) };
        assert!(refused(reserved).contains("--backing thp"));
        let tier = Some("dram=1G,file=/f:1G".into());
        assert!(refused(RunRequest { tier, ..to(4 << 30) }).contains("leave out --grow-to"));
        let disks = vec!["/a.img,dma=strict".parse().expect("a disk")];
        assert!(refused(RunRequest { disks, ..to(4 << 30) }).contains("leave out --grow-to"));
    }

    #[test]
    fn refuses_a_vm_with_nothing_to_boot() {
        let none = refused(RunRequest { kernel: None, ..run() });
        assert_eq!(none, "nothing to boot: give --kernel, or QEMU's own arguments behind --");
        let disks = vec!["/a.img".parse().expect("a disk")];
        let by_disk = refused(RunRequest { kernel: None, disks: disks.clone(), ..run() });
        assert!(by_disk.contains("as /a.img has by --disk: give --kernel"), "{by_disk}");
        assert_eq!(RunRequest { disks, ..run() }.check(), Ok(()));
        let by_args = RunRequest { kernel: None, qemu_args: vec!["-snapshot".into()], ..run() };
        assert_eq!(by_args.check(), Ok(()));
        let orphan = RunRequest { append: Some("quiet".into()), ..by_args };
        assert!(refused(orphan).contains("need --kernel"));
        assert!(
            refused(RunRequest { kernel: Some("vmlinuz".into()), ..run() }).contains("absolute")
        );
    }

    #[test]
    fn left_out_fields_have_their_defaults() {
        let short = r#"{"name":"web","memory_bytes":2147483648,"kernel":"/boot/vmlinuz"}"#;
        assert_eq!(serde_json::from_str::<RunRequest>(short).ok(), Some(run()));
        let typo = r#"{"name":"web","memory_bytes":2147483648,"kernal":"/boot/vmlinuz"}"#;
        assert!(serde_json::from_str::<RunRequest>(typo).is_err());
    }
}
