//! Linux's own ways to swap a guest, set up as by an expert.

use std::fs;
use std::path::Path;

use anyhow::ensure;
use vmtest::HostSetting;

use super::medium::{Drive, Medium, SwapArea};
use super::pool::{Pooled, Zram};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const SWAPPINESS: &str = "/proc/sys/vm/swappiness";
const MGLRU: &str = "/sys/kernel/mm/lru_gen/enabled";
const CGROUP2: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const ZSWAP: &str = "/sys/module/zswap/parameters";
/// Compressors that a kernel may have, the best known first.
const COMPRESSORS: [&str; 7] = ["zstd", "lz4", "lzo-rle", "lzo", "deflate", "lz4hc", "842"];

/// Kind of a guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Memory {
    Anonymous,
    /// Anonymous memory with transparent huge pages.
    AnonymousHuge,
    Memfd,
    /// A memfd with transparent huge pages.
    MemfdHuge,
}

const MEMORIES: [Memory; 4] =
    [Memory::Anonymous, Memory::AnonymousHuge, Memory::Memfd, Memory::MemfdHuge];

/// Where swapped memory goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Swap {
    /// To the disk. Two to the power of this many pages come back at once.
    Disk(u8),
    /// To the disk, with zswap by this compressor in front of it.
    Zswap(&'static str),
    /// To memory, by this compressor.
    Zram(&'static str),
    /// To memory by this compressor, as much as is half of the limit uncompressed, and the rest to
    /// the disk.
    ZramDisk(&'static str),
}

/// One of Linux's ways.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Linux {
    pub memory: Memory,
    pub swap: Swap,
}

/// Linux's own defaults, with each kind of memory that a VMM uses.
pub const PLAIN: [Linux; 2] = [
    Linux { memory: Memory::AnonymousHuge, swap: Swap::Disk(3) },
    Linux { memory: Memory::Memfd, swap: Swap::Disk(3) },
];

impl Linux {
    /// Returns the way's name in tables.
    pub fn name(self) -> String {
        let memory = match self.memory {
            Memory::Anonymous => "anonymous",
            Memory::AnonymousHuge => "anonymous THP",
            Memory::Memfd => "memfd",
            Memory::MemfdHuge => "memfd THP",
        };
        match self.swap {
            Swap::Disk(cluster) => format!("Linux, {memory}, page-cluster {cluster}"),
            Swap::Zswap(compressor) => format!("Linux, {memory}, zswap {compressor}"),
            Swap::Zram(compressor) => format!("Linux, {memory}, zram {compressor}"),
            Swap::ZramDisk(compressor) => format!("Linux, {memory}, zram {compressor} and disk"),
        }
    }

    /// Returns QEMU's backend for this memory.
    pub fn backend(self) -> &'static str {
        match self.memory {
            Memory::Memfd | Memory::MemfdHuge => "memfd,share=on",
            _ => "ram",
        }
    }

    /// Returns the ways to screen that this kernel offers: every kind of memory with the disk, by
    /// each `page-cluster`, and, if the guests' memory `shrinks`, anonymous memory with every
    /// compressor.
    pub fn offered(shrinks: bool, medium: Medium) -> Vec<Linux> {
        let disks = clusters(medium).map(Swap::Disk);
        let on_disk = MEMORIES.iter().flat_map(|&memory| disks.map(|swap| Linux { memory, swap }));
        let zram = zram_compressors();
        let compressed = zswap_compressors().into_iter().map(Swap::Zswap);
        let compressed = compressed.chain(zram.iter().copied().map(Swap::Zram));
        let compressed = compressed.chain(zram.iter().copied().map(Swap::ZramDisk));
        let anonymous = |swap| Linux { memory: Memory::Anonymous, swap };
        on_disk.chain(compressed.filter(|_| shrinks).map(anonymous)).collect()
    }

    /// Combines the best memory with the best compressors of `ranked`, the best first. Combinations
    /// that are in `ranked` already are left out.
    pub fn crossed(ranked: &[Linux], most: usize) -> Vec<Linux> {
        let is_disk = |way: &&Linux| matches!(way.swap, Swap::Disk(_));
        let Some(best) = ranked.iter().find(is_disk) else { return Vec::new() };
        let compressed = ranked.iter().filter(|way| !is_disk(way)).take(most);
        let crossed = compressed.map(|way| Linux { memory: best.memory, swap: way.swap });
        crossed.filter(|way| !ranked.contains(way)).collect()
    }

    /// Says in a few sentences which ways this kernel lacks.
    pub fn lacks() -> String {
        let list = |have: &[&str]| match have.is_empty() {
            true => "none".to_owned(),
            false => have.join(", "),
        };
        let missing = |have: &[&str]| {
            let known = ["zstd", "lz4", "lzo-rle"];
            let missing: Vec<&str> =
                known.into_iter().filter(|name| !have.contains(name)).collect();
            if missing.is_empty() { String::new() } else { format!(" (no {})", missing.join(", ")) }
        };
        let crypt = match Path::new("/dev/mapper/control").exists() && has_device_mapper() {
            true => "what is swapped is not encrypted, though the kernel has device-mapper",
            false => {
                "no dm-crypt, since the kernel has no device-mapper: Linux swaps in clear, Ebb \
                      encrypts"
            }
        };
        let mglru = if Path::new(MGLRU).exists() { "MGLRU" } else { "no MGLRU" };
        let (zswap, zram) = (zswap_compressors(), zram_compressors());
        format!(
            "Linux's ways here: zswap with {}{}; zram with {}{}; {mglru}; {}; swappiness {}; {crypt}. \
             zswap writes nothing back: by version 1 of control groups its shrinker knows no group, \
             and its pool may have more than guests have. Loop devices on this machine's disk are \
             told to be an SSD (queue/rotational 0), HDD-like ones to be a hard disk.",
            list(&zswap),
            missing(&zswap),
            list(&zram),
            missing(&zram),
            if has_cgroup2() {
                "groups by version 1, though 2 is there"
            } else {
                "this host has bound control groups for memory to version 1"
            },
            fs::read_to_string(SWAPPINESS).unwrap_or_default().trim()
        )
    }
}

/// Returns exponents from one page up to as many as Ebb may read at once. Without a moving head,
/// neighbours are by address, and the kernel reads at most 32 pages.
fn clusters(medium: Medium) -> [u8; 3] {
    match medium {
        Medium::Ssd => [0, 3, 5],
        // Single pages would take minutes for a VM.
        Medium::Hdd => [3, 5, 7],
    }
}

fn has_cgroup2() -> bool {
    let controllers = CGROUP2.map(|root| Path::new(root).join("cgroup.controllers"));
    let texts = controllers.map(|path| fs::read_to_string(path).unwrap_or_default());
    texts.iter().any(|text| text.split_whitespace().any(|name| name == "memory"))
}

fn has_device_mapper() -> bool {
    fs::read_to_string("/proc/devices").is_ok_and(|text| text.contains("device-mapper"))
}

/// Parses `/proc/crypto`: each entry begins with a `name`, and has a `type`.
fn kernel_compressors(crypto: &str) -> Vec<&'static str> {
    let value = |line: &str, key: &str| {
        let (found, value) = line.split_once(':')?;
        (found.trim() == key).then(|| value.trim().to_owned())
    };
    let entries: Vec<(String, String)> = crypto
        .split("\n\n")
        .filter_map(|entry| {
            let of = |key| entry.lines().find_map(|line| value(line, key));
            Some((of("name")?, of("type")?))
        })
        .collect();
    let is_there = |name: &&str| {
        let kinds = ["compression", "scomp", "acomp"];
        entries.iter().any(|(found, kind)| found == name && kinds.contains(&kind.as_str()))
    };
    COMPRESSORS.into_iter().filter(is_there).collect()
}

fn zswap_compressors() -> Vec<&'static str> {
    match Path::new(ZSWAP).join("enabled").exists() {
        true => kernel_compressors(&fs::read_to_string("/proc/crypto").unwrap_or_default()),
        false => Vec::new(),
    }
}

/// Returns the compressors that a zram device offers, of which the chosen one is in brackets.
fn zram_compressors() -> Vec<&'static str> {
    let offered = Zram::new().and_then(|zram| Ok(fs::read_to_string(zram.file("comp_algorithm"))?));
    let offered = offered.unwrap_or_default();
    let words: Vec<&str> = offered.split([' ', '[', ']', '\n']).collect();
    COMPRESSORS.into_iter().filter(|name| words.contains(name)).collect()
}

/// A way that is set up: the kernel swaps by it as long as this exists.
pub struct Swapping {
    // The fields are dropped in this order.
    _area: SwapArea,
    _zram: Option<Zram>,
    _settings: Vec<HostSetting>,
    pooled: Pooled,
}

impl Swapping {
    /// Sets a way up. `drive` is the disk to swap to. The array is what guests believe to have, and
    /// what they have.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not permit it.
    pub fn new(
        way: Linux,
        drive: &Drive,
        [memory_bytes, limit_bytes]: [u64; 2],
    ) -> anyhow::Result<Swapping> {
        let mut settings = of_memory(way)?;
        let zswap = |name| Path::new(ZSWAP).join(name);
        let disk = drive.device();
        let (area, zram, pooled) = match way.swap {
            Swap::Zram(compressor) => {
                let zram = Zram::with(compressor, memory_bytes)?;
                (SwapArea::at(&[zram.device()])?, Some(zram), None)
            }
            Swap::ZramDisk(compressor) => {
                let zram = Zram::with(compressor, limit_bytes / 2)?;
                (SwapArea::at(&[zram.device(), disk])?, Some(zram), None)
            }
            Swap::Zswap(compressor) => {
                settings.push(set(&zswap("compressor"), compressor)?);
                settings.push(set(&zswap("enabled"), "Y")?);
                // Until zswap is on it accepts any name, and later it may use another compressor.
                let has = fs::read_to_string(zswap("compressor"))?;
                ensure!(has.trim() == compressor, "zswap compresses by {}", has.trim());
                (SwapArea::at(&[disk])?, None, Some(Pooled::Zswap))
            }
            Swap::Disk(_) => {
                if zswap("enabled").exists() {
                    settings.push(set(&zswap("enabled"), "N")?);
                }
                (SwapArea::at(&[disk])?, None, None)
            }
        };
        let of_zram = zram.as_ref().map(|zram| Pooled::Zram(zram.file("mm_stat")));
        let pooled = pooled.or(of_zram).unwrap_or(Pooled::Nothing);
        Ok(Swapping { _area: area, _zram: zram, _settings: settings, pooled })
    }

    /// Returns what is kept in memory, for the code that limits the guests.
    pub fn pooled(&self) -> Pooled {
        self.pooled.clone()
    }
}

/// Allows huge pages where a program asks for them, as QEMU does for its translation cache.
/// [`super::pin`] keeps huge pages from a guest's memory that must not have them.
///
/// # Errors
/// The host does not permit it.
pub fn huge_pages() -> anyhow::Result<HostSetting> {
    set(HUGE_PAGES.as_ref(), "madvise")
}

/// Sets what memory is made of, and how much comes back at once.
fn of_memory(way: Linux) -> anyhow::Result<Vec<HostSetting>> {
    let shared = if way.memory == Memory::MemfdHuge { "advise" } else { "never" };
    let cluster = match way.swap {
        Swap::Disk(cluster) => cluster,
        // Compressed pages have no neighbours to come with them.
        Swap::Zswap(_) | Swap::Zram(_) | Swap::ZramDisk(_) => 0,
    };
    Ok(vec![
        set(SHARED_HUGE_PAGES.as_ref(), shared)?,
        set(PAGE_CLUSTER.as_ref(), &cluster.to_string())?,
    ])
}

fn set(path: &Path, value: &str) -> anyhow::Result<HostSetting> {
    HostSetting::of(path, value).map_err(anyhow::Error::msg)
}

/// Lets tests that make the host swap take turns, also with those of other processes: the host has
/// one list of swap areas, and one set of zswap's settings. Each test has the lock of that list
/// until it drops the file.
#[cfg(test)]
pub fn one_at_a_time() -> fs::File {
    use rustix::fs::{FlockOperation, flock};
    let areas = fs::File::open("/proc/swaps").expect("a list of swap areas");
    flock(&areas, FlockOperation::LockExclusive).expect("a lock");
    areas
}

/// Whether the host swaps, to whatever.
#[cfg(test)]
pub fn swaps() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|areas| areas.lines().count() > 1)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::bench::swap::medium::Content;

    #[test]
    fn compressors_are_read_from_the_kernels_list() {
        let crypto = "name         : lzo-rle\ndriver       : lzo-rle-scomp\ntype         : scomp\n\n\
                      name         : deflate\ndriver       : x\ntype         : scomp\n\n\
                      name         : zstd\ndriver       : y\ntype         : hash\n";
        assert_eq!(kernel_compressors(crypto), ["lzo-rle", "deflate"]);
    }

    /// Returns the host's settings that a way changes.
    fn host() -> Vec<String> {
        let settings = [HUGE_PAGES, PAGE_CLUSTER, "/proc/swaps", SHARED_HUGE_PAGES];
        let settings = settings.map(PathBuf::from).into_iter();
        let zswap = ["enabled", "compressor"].map(|name| Path::new(ZSWAP).join(name));
        let texts = settings.chain(zswap).map(|path| fs::read_to_string(path).unwrap_or_default());
        let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
        let names = devices.filter_map(|entry| entry.file_name().into_string().ok());
        let mut all: Vec<String> = names.filter(|name| name.starts_with("zram")).collect();
        all.sort_unstable();
        texts.chain(all).collect()
    }

    #[test]
    fn each_way_can_be_set_up_and_leaves_nothing() {
        let _turn = one_at_a_time();
        let before = host();
        let scratch = vmtest::Scratch::new("ebb-test-").unwrap();
        let content = Content::Empty(64 << 20);
        let drive = match Drive::new(&scratch.path().join("swap"), content, Medium::Ssd) {
            Ok(drive) if before[2].lines().count() == 1 => drive,
            Ok(_) => return eprintln!("SKIPPED: this host swaps already"),
            Err(why) => return eprintln!("SKIPPED: {why:#}"),
        };
        for way in Linux::offered(true, Medium::Ssd) {
            let swapping = Swapping::new(way, &drive, [64 << 20, 32 << 20]).unwrap();
            let now = host();
            let areas = if matches!(way.swap, Swap::ZramDisk(_)) { 2 } else { 1 };
            assert_eq!(now[2].lines().count(), 1 + areas, "{}: {now:?}", way.name());
            let is_huge = |setting: &str, word: &str| setting.contains(&format!("[{word}]"));
            assert_eq!(is_huge(&now[3], "advise"), way.memory == Memory::MemfdHuge, "{now:?}");
            assert_eq!(now[4].trim() == "Y", matches!(way.swap, Swap::Zswap(_)), "{}", way.name());
            assert!(swapping.pooled().bytes().unwrap() < 1 << 20, "{}", way.name());
            drop(swapping);
            assert_eq!(host(), before, "{}", way.name());
        }
    }

    #[test]
    fn each_way_has_a_name_of_its_own() {
        let swaps = [
            Swap::Disk(0),
            Swap::Disk(3),
            Swap::Zswap("lzo"),
            Swap::Zram("lzo"),
            Swap::ZramDisk("lzo"),
        ];
        let ways: Vec<Linux> = MEMORIES
            .into_iter()
            .flat_map(|memory| swaps.map(|swap| Linux { memory, swap }))
            .collect();
        let names: std::collections::BTreeSet<String> = ways.iter().map(|way| way.name()).collect();
        assert_eq!(names.len(), ways.len());
    }

    #[test]
    fn the_best_memory_meets_the_best_compressors() {
        let of = |memory, swap| Linux { memory, swap };
        let (anonymous, huge) = (Memory::Anonymous, Memory::MemfdHuge);
        let zram = ["lz4", "lzo"].map(Swap::Zram);
        let ranked = [
            of(anonymous, zram[0]),
            of(huge, Swap::Disk(3)),
            of(anonymous, Swap::Disk(0)),
            of(anonymous, zram[1]),
        ];
        assert_eq!(Linux::crossed(&ranked, 1), [of(huge, zram[0])]);
        assert_eq!(Linux::crossed(&ranked, 2), zram.map(|swap| of(huge, swap)));
        assert_eq!(Linux::crossed(&ranked[2..], 2), []);
        assert_eq!(Linux::crossed(&ranked[..1], 2), []);
    }
}
