//! What the VM's vCPUs run, by their registers as QEMU prints them.

use ebb_vm::Qmp;
use ebb_vm::qmp::QmpError;

/// The PG bit of CR0.
const PAGING: u64 = 1 << 31;
/// The LA57 bit of CR4: page tables have five levels.
const FIVE_LEVELS: u64 = 1 << 12;
/// The VMXE bit of CR4: the vCPU may run guests of its own.
const VMX: u64 = 1 << 13;
/// The SVME bit of EFER: the same for AMD's processors.
const SVM: u64 = 1 << 12;
/// Where a processor stands before it is started.
const RESET_VECTOR: u64 = 0xfff0;
/// The debug registers that hold an address.
const ADDRESSES: [&str; 4] = ["DR0=", "DR1=", "DR2=", "DR3="];

/// The registers of a vCPU that tell which kernel it runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vcpu {
    /// The value of CR3.
    pub root: u64,
    /// Levels of its page tables: 4 or 5.
    pub levels: u32,
    /// Whether it runs nothing: nobody has started it, or the firmware has halted it, and paging is
    /// off.
    pub waits: bool,
    /// The addresses of its enabled hardware breakpoints.
    pub breakpoints: Vec<u64>,
    /// Whether it may run guests of its own, whose registers QEMU would print. `true` also if QEMU
    /// does not tell.
    pub may_nest: bool,
}

/// Asks QEMU for every vCPU.
///
/// # Errors
/// Why QEMU does not tell, in words for a user.
pub fn vcpus(qmp: Option<&mut Qmp>) -> Result<Vec<Vcpu>, String> {
    let qmp =
        qmp.ok_or("QEMU's QMP socket is lost, so Ebb cannot tell whether this kernel runs")?;
    let text = qmp.human("info registers -a").map_err(|error: QmpError| error.to_string())?;
    // Without registers nobody could tell whether the kernel runs.
    parse_vcpus(&text).ok_or_else(|| "QEMU does not tell its vCPUs' registers".into())
}

/// Parses all vCPUs. `None`: there is none, or a register of one is missing.
fn parse_vcpus(registers: &str) -> Option<Vec<Vcpu>> {
    let parts = registers.split("CPU#").skip(1);
    let vcpus: Vec<Vcpu> = parts.map(parse_vcpu).collect::<Option<_>>()?;
    (!vcpus.is_empty()).then_some(vcpus)
}

fn parse_vcpu(registers: &str) -> Option<Vcpu> {
    let field = |names: &[&str]| {
        let mut words = registers.split_ascii_whitespace();
        let hex = words.find_map(|word| names.iter().find_map(|name| word.strip_prefix(name)))?;
        u64::from_str_radix(hex, 16).ok()
    };
    let is_paging = field(&["CR0="])? & PAGING != 0;
    let is_halted = field(&["HLT="])? != 0 || field(&["RIP=", "EIP="])? == RESET_VECTOR;
    let controls = field(&["CR4="]);
    let enabled = field(&["DR7="]).unwrap_or(0);
    let is_enabled = |index: &usize| enabled >> (2 * index) & 0b11 != 0;
    let breakpoints = (0..ADDRESSES.len()).filter(is_enabled);
    Some(Vcpu {
        root: field(&["CR3="])?,
        levels: if controls.unwrap_or(0) & FIVE_LEVELS != 0 { 5 } else { 4 },
        waits: !is_paging && is_halted,
        breakpoints: breakpoints.filter_map(|index| field(&[ADDRESSES[index]])).collect(),
        may_nest: controls.is_none_or(|bits| bits & VMX != 0)
            || field(&["EFER="]).is_none_or(|bits| bits & SVM != 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "RAX=0 RIP=ffffffff9e1a10b RFL=2 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=1\n\
        CR0=80050033 CR2=0 CR3=0000000005c0a000 CR4=06f0\n\
        DR0=ffffc90000012000 DR1=0 DR2=ffffc90000013000 DR3=0\n\
        DR6=ffff0ff0 DR7=00000402\nEFER=0000000000000d01\n";
    const UNSTARTED: &str = "EAX=0 EIP=0000fff0 EFL=2 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=0\n\
        CR0=60000010 CR2=0 CR3=00000000 CR4=0\nEFER=0\n";

    fn parsed(text: &str) -> Option<Vec<Vcpu>> {
        parse_vcpus(&format!("\nCPU#0\n{text}"))
    }

    fn one(text: &str) -> Vcpu {
        parsed(text).expect("registers").remove(0)
    }

    #[test]
    fn every_processor_is_parsed() {
        let text = format!("\nCPU#0\n{RUNNING}\nCPU#1\n{UNSTARTED}");
        let running = Vcpu {
            root: 0x5c0_a000,
            levels: 4,
            waits: false,
            breakpoints: vec![0xffff_c900_0001_2000],
            may_nest: false,
        };
        let unstarted = Vcpu { root: 0, waits: true, breakpoints: Vec::new(), ..running.clone() };
        assert_eq!(parse_vcpus(&text).unwrap(), [running, unstarted]);
    }

    #[test]
    fn who_runs_without_paging_does_not_wait() {
        let runs = UNSTARTED.replace("fff0", "7c00");
        assert!(!one(&runs).waits && one(&runs.replace("HLT=0", "HLT=1")).waits);
        assert_eq!(parsed(&RUNNING.replace("CR3=", "CR9=")), None);
        assert_eq!(parsed(&RUNNING.replace("CR3=0", "CR3=zz")), None);
        assert_eq!(parse_vcpus("no"), None);
    }

    #[test]
    fn only_enabled_breakpoints_count() {
        assert_eq!(one(&RUNNING.replace("402", "430")).breakpoints, [0xffff_c900_0001_3000]);
        assert_eq!(one(&RUNNING.replace("402", "400")).breakpoints, [0; 0]);
        assert_eq!(one(&RUNNING.replace("DR7=", "XX7=")).breakpoints, [0; 0]);
    }

    #[test]
    fn a_processor_that_may_run_guests_is_seen() {
        for (before, after) in
            [("CR4=06f0", "CR4=26f0"), ("0d01", "1d01"), ("EFER=", "XFER="), ("CR4=", "XR4=")]
        {
            assert!(one(&RUNNING.replace(before, after)).may_nest, "{after}");
        }
        assert_eq!(one(&RUNNING.replace("CR4=06f0", "CR4=16f0")).levels, 5);
    }
}
