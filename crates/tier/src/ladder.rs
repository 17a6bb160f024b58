//! Which tiers a VM has, as its owner writes them: `dram=1G,file=/var/lib/ebb/web:4G`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ebb_units::{Bytes, FRAME_BYTES, HUGE_BYTES};

/// A kind of memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum TierKind {
    /// Memory of any node of the host, as its kernel chooses.
    Dram,
    /// Memory of one NUMA node, by its number.
    Node(u32),
    /// Memory that holds pages compressed.
    Compressed,
    /// A file or block device.
    File(PathBuf),
}

impl TierKind {
    /// Whether a processor can read and write what is there. From other tiers, pages come back on a
    /// fault.
    pub fn is_addressable(&self) -> bool {
        matches!(self, TierKind::Dram | TierKind::Node(_))
    }

    /// Tiers of different rank must be in the order of their ranks. Among tiers of one rank, the
    /// ladder's order says which is faster.
    fn rank(&self) -> u8 {
        match self {
            TierKind::Dram | TierKind::Node(_) => 0,
            TierKind::Compressed => 1,
            TierKind::File(_) => 2,
        }
    }
}

impl fmt::Display for TierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierKind::Dram => f.write_str("dram"),
            TierKind::Node(number) => write!(f, "node{number}"),
            TierKind::Compressed => f.write_str("compressed"),
            TierKind::File(path) => write!(f, "file={}", path.display()),
        }
    }
}

/// One tier of a VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rung {
    /// Its kind of memory.
    pub kind: TierKind,
    /// Bytes of the VM's memory that it may hold. For compressed memory: bytes that the compressed
    /// pages may take.
    pub bytes: u64,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let between = if let TierKind::File(_) = self.kind { ':' } else { '=' };
        let (number, unit) = match self.bytes {
            bytes if bytes.is_multiple_of(1 << 30) => (bytes >> 30, "G"),
            bytes => (bytes >> 20, "M"),
        };
        write!(f, "{}{between}{number}{unit}", self.kind)
    }
}

/// A VM's tiers, fastest first. There is at least one, and none twice. Those that a processor can
/// address come first, then compressed memory, then a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ladder {
    rungs: Vec<Rung>,
}

/// What is wrong with a ladder, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LadderError {
    /// This is not a tier.
    #[error(
        "{0:?} is no tier: write dram=SIZE, nodeN=SIZE, compressed=SIZE or file=PATH:SIZE, as in \
         dram=1G,file=/var/lib/ebb/web:4G"
    )]
    NoTier(String),
    /// The size of a tier cannot be read.
    #[error("{tier}: {size:?} is no size: write a number with K, M, G or T behind it, as in 512M")]
    NoSize {
        /// The tier.
        tier: String,
        /// The text in place of the size.
        size: String,
    },
    /// A file is not named by its absolute path.
    #[error("file={0}: give the whole path, from / on")]
    RelativePath(String),
    /// The size of a tier is too small, or not in whole MiB.
    #[error("{tier}: {} is not a size for a tier: give whole MiB, 2 at least", Bytes(*bytes))]
    TooSmall {
        /// The tier.
        tier: String,
        /// Its size.
        bytes: u64,
    },
    /// A tier is there twice.
    #[error("{0} is there twice: give each tier one size")]
    Twice(String),
    /// There are both memory of any node and memory of a certain node.
    #[error("dram is any node's memory: name dram or nodes, not both")]
    DramAndNodes,
    /// A faster tier stands behind a slower one.
    #[error("{faster} stands behind {slower}: name the fastest tier first")]
    Order {
        /// The tier that must come first.
        faster: String,
        /// The tier that comes first now.
        slower: String,
    },
    /// There is compressed memory, but no file behind it.
    #[error("compressed memory needs a file behind it, for pages that do not shrink")]
    NothingBehind,
    /// The tiers together do not hold what the VM has.
    #[error(
        "the tiers hold {}, the VM has {}: they must be the same (compressed memory is a part of \
         the tier before it and does not count)",
        Bytes(*tiers_bytes), Bytes(*memory_bytes)
    )]
    Sum {
        /// All tiers together.
        tiers_bytes: u64,
        /// The VM's memory.
        memory_bytes: u64,
    },
    /// The slow tiers alone hold as much as the VM has.
    #[error(
        "slow tiers of {} leave nothing of the VM's {} in memory: make them smaller",
        Bytes(*slow_bytes), Bytes(*memory_bytes)
    )]
    NothingFast {
        /// All slow tiers together.
        slow_bytes: u64,
        /// The VM's memory.
        memory_bytes: u64,
    },
}

/// The least that a tier may hold.
const TIER_BYTES_MIN: u64 = HUGE_BYTES;
const TIER_BYTES_UNIT: u64 = 1 << 20;

impl FromStr for Ladder {
    type Err = LadderError;

    /// Reads `dram=1G,file=/path:4G`, `node0=2G,node1=8G`, `compressed=512M,file=/path:4G`. A path
    /// may contain commas, as long as no tier's name follows them.
    fn from_str(text: &str) -> Result<Ladder, LadderError> {
        Ladder::new(pieces(text).iter().map(|piece| rung(piece)).collect::<Result<_, _>>()?)
    }
}

/// Splits at commas before a tier's name, since a path may contain other commas.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices(',') {
        let (piece, rest) = (&text[start..at], &text[at + 1..]);
        let begins = rest.split_once('=').is_some_and(|(name, _)| is_name(name));
        if begins || !piece.starts_with("file=") {
            pieces.push(piece);
            start = at + 1;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

fn is_name(name: &str) -> bool {
    ["dram", "compressed", "file"].contains(&name) || node(name).is_some()
}

fn node(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("node")?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

fn rung(piece: &str) -> Result<Rung, LadderError> {
    let no_tier = || LadderError::NoTier(piece.into());
    let (name, value) = piece.trim().split_once('=').ok_or_else(no_tier)?;
    let (kind, size) = match name {
        "dram" => (TierKind::Dram, value),
        "compressed" => (TierKind::Compressed, value),
        "file" => {
            let (path, size) = value.rsplit_once(':').ok_or_else(no_tier)?;
            if !Path::new(path).is_absolute() {
                return Err(LadderError::RelativePath(path.into()));
            }
            (TierKind::File(path.into()), size)
        }
        _ => (TierKind::Node(node(name).ok_or_else(no_tier)?), value),
    };
    let bytes = size
        .parse::<Bytes>()
        .map_err(|_| LadderError::NoSize { tier: name.into(), size: size.into() })?;
    Ok(Rung { kind, bytes: bytes.0 })
}

impl Ladder {
    /// A ladder of these tiers, fastest first.
    ///
    /// # Errors
    /// Why these tiers make no ladder.
    pub fn new(rungs: Vec<Rung>) -> Result<Ladder, LadderError> {
        if rungs.is_empty() {
            return Err(LadderError::NoTier(String::new()));
        }
        for (index, rung) in rungs.iter().enumerate() {
            check_size(rung)?;
            let before = rungs.get(..index).unwrap_or_default();
            before.iter().try_for_each(|other| stands_behind(rung, other))?;
        }
        let has = |wanted: fn(&TierKind) -> bool| rungs.iter().any(|rung| wanted(&rung.kind));
        let has_file = has(|kind| matches!(kind, TierKind::File(_)));
        if has(|kind| *kind == TierKind::Compressed) && !has_file {
            return Err(LadderError::NothingBehind);
        }
        Ok(Ladder { rungs })
    }

    /// Its tiers.
    pub fn rungs(&self) -> &[Rung] {
        &self.rungs
    }

    /// Bytes of a VM's memory that the tiers together hold. Compressed memory is a part of the tier
    /// before it (`docs/decisions/0014-*`) and does not count.
    pub fn bytes(&self) -> u64 {
        self.sum(|kind| *kind != TierKind::Compressed)
    }

    /// Bytes of it that a processor can address.
    pub fn addressable_bytes(&self) -> u64 {
        self.sum(TierKind::is_addressable)
    }

    /// Bytes that compressed pages may take.
    pub fn compressed_bytes(&self) -> u64 {
        self.sum(|kind| *kind == TierKind::Compressed)
    }

    /// The path of the file, and the bytes that it holds.
    pub fn file(&self) -> Option<(&Path, u64)> {
        self.rungs.iter().find_map(|rung| match &rung.kind {
            TierKind::File(path) => Some((path.as_path(), rung.bytes)),
            _ => None,
        })
    }

    fn sum(&self, wanted: impl Fn(&TierKind) -> bool) -> u64 {
        let rungs = self.rungs.iter().filter(|rung| wanted(&rung.kind));
        rungs.fold(0, |sum, rung| sum.saturating_add(rung.bytes))
    }

    /// Fits the ladder to a VM with this much memory. If it has no addressable tier, it gets a tier
    /// `dram` of what the others leave.
    ///
    /// # Errors
    /// The tiers hold more or less than the VM's memory.
    pub fn fit(mut self, memory_bytes: u64) -> Result<Ladder, LadderError> {
        let tiers_bytes = self.bytes();
        if self.addressable_bytes() == 0 {
            let bytes = memory_bytes.saturating_sub(tiers_bytes);
            if bytes == 0 {
                return Err(LadderError::NothingFast { slow_bytes: tiers_bytes, memory_bytes });
            }
            let dram = Rung { kind: TierKind::Dram, bytes };
            check_size(&dram)?;
            self.rungs.insert(0, dram);
            return Ok(self);
        }
        match tiers_bytes == memory_bytes {
            true => Ok(self),
            false => Err(LadderError::Sum { tiers_bytes, memory_bytes }),
        }
    }

    /// Frames that each tier may hold, fastest tier first.
    pub fn capacity_frames(&self) -> Vec<u64> {
        self.rungs.iter().map(|rung| rung.bytes / FRAME_BYTES).collect()
    }
}

fn check_size(rung: &Rung) -> Result<(), LadderError> {
    let bytes = rung.bytes;
    match bytes >= TIER_BYTES_MIN && bytes.is_multiple_of(TIER_BYTES_UNIT) {
        true => Ok(()),
        false => Err(LadderError::TooSmall { tier: rung.kind.to_string(), bytes }),
    }
}

/// Checks that a tier may stand behind another.
fn stands_behind(rung: &Rung, before: &Rung) -> Result<(), LadderError> {
    let (kind, other) = (&rung.kind, &before.kind);
    match (kind, other) {
        (TierKind::File(_), TierKind::File(_)) => Err(LadderError::Twice("file".into())),
        _ if kind == other => Err(LadderError::Twice(kind.to_string())),
        (TierKind::Dram, TierKind::Node(_)) | (TierKind::Node(_), TierKind::Dram) => {
            Err(LadderError::DramAndNodes)
        }
        _ if kind.rank() < other.rank() => {
            Err(LadderError::Order { faster: kind.to_string(), slower: other.to_string() })
        }
        _ => Ok(()),
    }
}

impl fmt::Display for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, rung) in self.rungs.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{rung}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
