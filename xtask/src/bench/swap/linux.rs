//! Linux's own ways to swap a guest, as who knows them sets them up.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use vmtest::{HostSetting, Undo};

use super::medium::{Drive, SwapArea};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const ZSWAP: &str = "/sys/module/zswap/parameters";
const ZRAM_CONTROL: &str = "/sys/class/zram-control";
/// What there may be, best known first.
const COMPRESSORS: [&str; 7] = ["zstd", "lz4", "lzo-rle", "lzo", "deflate", "lz4hc", "842"];

/// What a guest's memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Memory {
    Anonymous,
    /// With transparent huge pages.
    AnonymousHuge,
    Memfd,
}

/// Where it goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Swap {
    /// To the disk; two to the power of this many pages come back at once.
    Disk(u8),
    /// The same, with this compressor in front.
    Zswap(&'static str),
    /// To memory, by this compressor.
    Zram(&'static str),
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
    /// As tables have it.
    pub fn name(self) -> String {
        let memory = match self.memory {
            Memory::Anonymous => "anonymous",
            Memory::AnonymousHuge => "anonymous THP",
            Memory::Memfd => "memfd",
        };
        match self.swap {
            Swap::Disk(cluster) => format!("Linux, {memory}, page-cluster {cluster}"),
            Swap::Zswap(compressor) => format!("Linux, {memory}, zswap {compressor}"),
            Swap::Zram(compressor) => format!("Linux, {memory}, zram {compressor}"),
        }
    }

    /// QEMU's backend for it.
    pub fn backend(self) -> &'static str {
        match self.memory {
            Memory::Memfd => "memfd,share=on",
            _ => "ram",
        }
    }

    /// All that this kernel has.
    pub fn offered() -> Vec<Linux> {
        let swaps: Vec<Swap> = [Swap::Disk(0), Swap::Disk(3)]
            .into_iter()
            .chain(zswap_compressors().into_iter().map(Swap::Zswap))
            .chain(zram_compressors().into_iter().map(Swap::Zram))
            .collect();
        let memories = [Memory::Anonymous, Memory::AnonymousHuge, Memory::Memfd];
        let each = memories.into_iter();
        each.flat_map(|memory| swaps.iter().map(move |&swap| Linux { memory, swap })).collect()
    }

    /// What this kernel lacks of what there may be, in one sentence.
    pub fn lacks() -> String {
        let list = |have: Vec<&str>| match have.is_empty() {
            true => "none".to_owned(),
            false => have.join(", "),
        };
        let crypt = match Path::new("/dev/mapper/control").exists() && has_device_mapper() {
            true => "the kernel has device-mapper, but what is swapped is not encrypted here",
            false => {
                "no dm-crypt, since the kernel has no device-mapper: Linux swaps in clear, Ebb \
                      encrypts"
            }
        };
        format!(
            "Linux's ways here: zswap with {}; zram with {}; {crypt}. Loop devices on this machine's \
             disk are told to be an SSD (queue/rotational 0), HDD-like ones to be a hard disk.",
            list(zswap_compressors()),
            list(zram_compressors())
        )
    }
}

fn has_device_mapper() -> bool {
    fs::read_to_string("/proc/devices").is_ok_and(|text| text.contains("device-mapper"))
}

/// Of `/proc/crypto`: each entry begins with a `name`, and has a `type`.
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

/// As each device offers them, the chosen one in brackets.
fn zram_compressors() -> Vec<&'static str> {
    let offered = Zram::new().and_then(|zram| Ok(fs::read_to_string(zram.file("comp_algorithm"))?));
    let offered = offered.unwrap_or_default();
    let words: Vec<&str> = offered.split([' ', '[', ']', '\n']).collect();
    COMPRESSORS.into_iter().filter(|name| words.contains(name)).collect()
}

/// A way that is set up: the kernel swaps by it while this lives.
pub struct Swapping {
    // Taken away in this order.
    _area: SwapArea,
    _zram: Option<Zram>,
    _settings: Vec<HostSetting>,
    pooled: Pooled,
}

impl Swapping {
    /// Sets it up; `drive`: the disk to swap to.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not let us.
    pub fn new(way: Linux, drive: &Drive, memory_bytes: u64) -> anyhow::Result<Swapping> {
        let set =
            |path: PathBuf, value: &str| HostSetting::of(&path, value).map_err(anyhow::Error::msg);
        let huge = if way.memory == Memory::Anonymous { "never" } else { "madvise" };
        let cluster = match way.swap {
            Swap::Disk(cluster) => cluster,
            // What is compressed has no neighbours that come with it.
            Swap::Zswap(_) | Swap::Zram(_) => 0,
        };
        let mut settings =
            vec![set(HUGE_PAGES.into(), huge)?, set(PAGE_CLUSTER.into(), &cluster.to_string())?];
        let zswap = |name| Path::new(ZSWAP).join(name);
        let (area, zram, pooled) = match way.swap {
            Swap::Zram(compressor) => {
                let zram = Zram::new()?;
                fs::write(zram.file("comp_algorithm"), compressor).context("zram's compressor")?;
                fs::write(zram.file("disksize"), memory_bytes.to_string())
                    .context("zram's size")?;
                let area = SwapArea::at(&zram.device)?;
                let pooled = Pooled::Zram(zram.file("mm_stat"));
                (area, Some(zram), pooled)
            }
            Swap::Zswap(compressor) => {
                settings.push(set(zswap("compressor"), compressor)?);
                settings.push(set(zswap("enabled"), "Y")?);
                // Until it is on it takes any name, and then has another one.
                let has = fs::read_to_string(zswap("compressor"))?;
                ensure!(has.trim() == compressor, "zswap compresses by {}", has.trim());
                (SwapArea::at(drive.device())?, None, Pooled::Zswap)
            }
            Swap::Disk(_) => {
                if zswap("enabled").exists() {
                    settings.push(set(zswap("enabled"), "N")?);
                }
                (SwapArea::at(drive.device())?, None, Pooled::Nothing)
            }
        };
        Ok(Swapping { _area: area, _zram: zram, _settings: settings, pooled })
    }

    /// What it keeps in memory, for whoever holds guests at a limit.
    pub fn pooled(&self) -> Pooled {
        self.pooled.clone()
    }
}

/// Compressed memory of the host's, which version 1 of cgroups charges to nobody.
#[derive(Clone)]
pub enum Pooled {
    Nothing,
    Zswap,
    /// By this file.
    Zram(PathBuf),
}

impl Pooled {
    /// How much there is now.
    ///
    /// # Errors
    /// As the file system's, or the kernel tells nothing.
    pub fn bytes(&self) -> anyhow::Result<u64> {
        match self {
            Pooled::Nothing => Ok(0),
            Pooled::Zswap => {
                let meminfo = fs::read_to_string("/proc/meminfo")?;
                let line = meminfo.lines().find_map(|line| line.strip_prefix("Zswap:"));
                let value = line.context("the kernel does not tell what zswap has")?;
                Ok(value.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
            }
            Pooled::Zram(path) => zram_bytes(&fs::read_to_string(path)?),
        }
    }
}

/// The third figure: memory with all that the pool needs besides.
fn zram_bytes(stat: &str) -> anyhow::Result<u64> {
    Ok(stat.split_whitespace().nth(2).context("a short mm_stat")?.parse()?)
}

/// A zram device of our own.
struct Zram {
    device: PathBuf,
    _undo: Undo,
}

impl Zram {
    fn new() -> anyhow::Result<Zram> {
        let control = Path::new(ZRAM_CONTROL);
        // Reading adds one.
        let add = || fs::read_to_string(control.join("hot_add"));
        let (number, undo) = Undo::of(add, |number| {
            let number = number.trim().to_owned();
            move || {
                let reset = format!("/sys/block/zram{number}/reset");
                let gone = fs::write(&reset, "1")
                    .and_then(|()| fs::write(Path::new(ZRAM_CONTROL).join("hot_remove"), &number));
                if let Err(error) = gone {
                    eprintln!("zram{number}: {error}");
                }
            }
        })
        .context("no zram")?;
        let device = Path::new("/dev").join(format!("zram{}", number.trim()));
        Ok(Zram { device, _undo: undo })
    }

    fn file(&self, name: &str) -> PathBuf {
        let device = self.device.file_name().unwrap_or_default();
        Path::new("/sys/block").join(device).join(name)
    }
}

/// Who has the host swap takes turns.
#[cfg(test)]
pub static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use super::*;
    use crate::bench::swap::medium::{Content, Medium};

    #[test]
    fn compressors_are_read_from_the_kernels_list() {
        let crypto = "name         : lzo-rle\ndriver       : lzo-rle-scomp\ntype         : scomp\n\n\
                      name         : deflate\ndriver       : x\ntype         : scomp\n\n\
                      name         : zstd\ndriver       : y\ntype         : hash\n";
        assert_eq!(kernel_compressors(crypto), ["lzo-rle", "deflate"]);
        assert_eq!(zram_bytes("1 2 4096 0 8 0 0 0\n").unwrap(), 4096);
        assert!(zram_bytes("1 2").is_err());
    }

    /// What a way changes on the host.
    fn host() -> Vec<String> {
        let settings = [HUGE_PAGES, PAGE_CLUSTER, "/proc/swaps"].map(PathBuf::from).into_iter();
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
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let before = host();
        let scratch = vmtest::Scratch::new("ebb-test-").unwrap();
        let content = Content::Empty(64 << 20);
        let drive = match Drive::new(&scratch.path().join("swap"), content, Medium::Ssd) {
            Ok(drive) if before[2].lines().count() == 1 => drive,
            Ok(_) => return eprintln!("SKIPPED: this host swaps already"),
            Err(why) => return eprintln!("SKIPPED: {why:#}"),
        };
        for way in Linux::offered() {
            let swapping = Swapping::new(way, &drive, 64 << 20).unwrap();
            let now = host();
            assert_eq!(now[2].lines().count(), 2, "{}: {now:?}", way.name());
            assert_eq!(now[3].trim() == "Y", matches!(way.swap, Swap::Zswap(_)), "{}", way.name());
            assert!(swapping.pooled().bytes().unwrap() < 1 << 20, "{}", way.name());
            drop(swapping);
            assert_eq!(host(), before, "{}", way.name());
        }
    }

    #[test]
    fn each_way_has_a_name_of_its_own() {
        let ways: Vec<Linux> = [Memory::Anonymous, Memory::AnonymousHuge, Memory::Memfd]
            .into_iter()
            .flat_map(|memory| {
                let swaps = [Swap::Disk(0), Swap::Disk(3), Swap::Zswap("lzo"), Swap::Zram("lzo")];
                swaps.map(|swap| Linux { memory, swap })
            })
            .collect();
        let names: std::collections::BTreeSet<String> = ways.iter().map(|way| way.name()).collect();
        assert_eq!(names.len(), ways.len());
    }
}
