//! QEMU's command line: the options that tell who a VM is and what its RAM is made of.
//!
//! QEMU parses its options itself, and nothing here replaces that. What is not understood counts as
//! not given.

use serde_json::Value;

/// Most values of one option that count.
const VALUES_MAX: usize = 256;
/// Most memory backends that count.
const BACKENDS_MAX: usize = 64;
/// Most characters of a name, because names go into messages.
const NAME_MAX: usize = 128;

/// The words of a command line, the program first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommandLine(Vec<String>);

/// A memory backend, or the RAM of a VM without one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RamBlock {
    /// The backend's name; none: QEMU's own RAM.
    pub id: Option<String>,
    /// Its size in bytes.
    pub bytes: u64,
}

impl CommandLine {
    /// The command line with these words.
    pub fn new(words: Vec<String>) -> CommandLine {
        CommandLine(words)
    }

    /// The program, as it was called, on one line.
    pub fn program(&self) -> String {
        crate::shown::shown(self.0.first().map_or("", String::as_str), NAME_MAX)
    }

    /// The words, the program first.
    pub fn words(&self) -> &[String] {
        &self.0
    }

    /// The first 256 values of an option, which QEMU accepts with one dash or two.
    pub fn values<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        let is_option = move |word: &str| {
            let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
            name == Some(option)
        };
        let pairs = self.0.windows(2).filter(move |pair| is_option(&pair[0]));
        pairs.map(|pair| pair[1].as_str()).take(VALUES_MAX)
    }

    /// The VM's name, on one line.
    pub fn name(&self) -> Option<String> {
        let value = self.values("name").last()?;
        let guest = key(value, "guest=").or_else(|| parts(value).into_iter().next())?;
        Some(crate::shown::shown(&guest, NAME_MAX)).filter(|name| !name.is_empty())
    }

    /// The VM's UUID, on one line.
    pub fn uuid(&self) -> Option<String> {
        self.values("uuid").last().map(|uuid| crate::shown::shown(uuid, NAME_MAX))
    }

    /// The backends of the VM's RAM in guest-physical order, without memory that is plugged.
    /// Empty: the size is not known.
    pub fn ram(&self) -> Vec<RamBlock> {
        let backends: Vec<RamBlock> =
            self.values("object").filter_map(backend).take(BACKENDS_MAX).collect();
        let named =
            |id: &str| backends.iter().find(|found| found.id.as_deref() == Some(id)).cloned();
        let nodes = self.values("numa").filter_map(|node| key(node, "memdev="));
        let of_nodes: Vec<RamBlock> =
            nodes.filter_map(|id| named(&id)).take(BACKENDS_MAX).collect();
        if !of_nodes.is_empty() {
            return of_nodes;
        }
        let of_machine = self.machine_options().find_map(|one| key(one, "memory-backend="));
        if let Some(block) = of_machine.and_then(|id| named(&id)) {
            return vec![block];
        }
        let size = self.values("m").last().and_then(|value| {
            let size = key(value, "size=").or_else(|| parts(value).into_iter().next())?;
            bytes(&size, 1 << 20)
        });
        // QEMU's default.
        let bytes = size.unwrap_or(128 << 20);
        vec![RamBlock { id: None, bytes }]
    }

    /// The size of all of [`CommandLine::ram`], in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.ram().iter().fold(0, |sum, block| sum.saturating_add(block.bytes))
    }

    /// How much of the RAM lies below 4 GiB at most, if the machine is told so.
    pub fn ram_below_4g(&self) -> Option<u64> {
        let value = self.machine_options().find_map(|one| key(one, "max-ram-below-4g="))?;
        bytes(&value, 1)
    }

    fn machine_options(&self) -> impl Iterator<Item = &str> {
        self.values("machine").chain(self.values("M"))
    }
}

/// A memory backend, as `-object` names it: `memory-backend-memfd,id=ram,size=1G`, or the same in
/// JSON.
fn backend(value: &str) -> Option<RamBlock> {
    const PREFIX: &str = "memory-backend-";
    if value.starts_with('{') {
        let value: Value = serde_json::from_str(value).ok()?;
        value.get("qom-type")?.as_str()?.starts_with(PREFIX).then_some(())?;
        let id = value.get("id")?.as_str()?.to_owned();
        let size = value.get("size")?;
        let bytes = size.as_u64().or_else(|| bytes(size.as_str()?, 1))?;
        return Some(RamBlock { id: Some(id), bytes });
    }
    value.starts_with(PREFIX).then_some(())?;
    let bytes = bytes(&key(value, "size=")?, 1)?;
    Some(RamBlock { id: Some(key(value, "id=")?), bytes })
}

/// A size as QEMU writes it: a number, which may have a fraction, and a suffix.
fn bytes(text: &str, unit: u64) -> Option<u64> {
    let digits = text.trim_end_matches(|sign: char| sign.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..)? {
        "" => unit,
        "b" | "B" => 1,
        "k" | "K" => 1 << 10,
        "m" | "M" => 1 << 20,
        "g" | "G" => 1 << 30,
        "t" | "T" => 1 << 40,
        _ => return None,
    };
    match digits.parse::<u64>() {
        Ok(number) => number.checked_mul(unit),
        Err(_) => {
            let number = digits.parse::<f64>().ok()? * unit as f64;
            (number.is_finite() && (0.0..=(1_u64 << 52) as f64).contains(&number))
                .then_some(number as u64)
        }
    }
}

/// The value that follows `key` in one of a value's parts.
pub(crate) fn key(value: &str, key: &str) -> Option<String> {
    parts(value).iter().find_map(|part| part.strip_prefix(key).map(str::to_owned))
}

/// Splits a value at its commas. Two commas stand for one.
pub(crate) fn parts(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut signs = value.chars().peekable();
    while let Some(sign) = signs.next() {
        match sign == ',' && signs.next_if_eq(&',').is_none() {
            true => parts.push(String::new()),
            false => parts.iter_mut().next_back().into_iter().for_each(|part| part.push(sign)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        CommandLine::new(text.split(' ').map(str::to_owned).collect())
    }

    fn blocks(text: &str) -> Vec<(Option<String>, u64)> {
        line(text).ram().into_iter().map(|block| (block.id, block.bytes >> 20)).collect()
    }

    #[test]
    fn a_vm_is_known_by_its_name_and_uuid() {
        let libvirts = line("qemu -name guest=web-1,debug-threads=on -uuid 4dea22b3-1d52");
        assert_eq!(libvirts.name().as_deref(), Some("web-1"));
        assert_eq!(libvirts.uuid().as_deref(), Some("4dea22b3-1d52"));
        assert_eq!(line("qemu --name web").name().as_deref(), Some("web"));
        assert_eq!(line("qemu -name").name(), None);
        let forged = CommandLine::new(["qemu", "-name", "a\n\x1b[2Jb"].map(str::to_owned).into());
        assert_eq!(forged.name().as_deref(), Some("a??[2Jb"));
    }

    #[test]
    fn ram_is_that_of_nodes_or_of_the_machine_or_of_m() {
        let one = |mib| vec![(None, mib)];
        assert_eq!(blocks("qemu -m 512"), one(512));
        assert_eq!(blocks("qemu -m 1.5G,slots=2,maxmem=8G"), one(1536));
        assert_eq!(blocks("qemu -m size=2097152k"), one(2048));
        assert_eq!(blocks("qemu -cpu max"), one(128));
        let named = |id: &str, mib| (Some(id.to_owned()), mib);
        let memfd = "-object memory-backend-memfd,id=ram,size=1G,share=on";
        assert_eq!(
            blocks(&format!("qemu {memfd} -machine q35,memory-backend=ram -m 1G")),
            [named("ram", 1024)]
        );
        let nodes = "-object memory-backend-ram,id=a,size=64M -object memory-backend-ram,id=b,size=32M \
             -numa node,nodeid=0,memdev=a -numa node,nodeid=1,memdev=b -numa dist,src=0,dst=1,val=20";
        assert_eq!(blocks(&format!("qemu {nodes}")), [named("a", 64), named("b", 32)]);
        let json =
            r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"size":1073741824}"#;
        assert_eq!(
            blocks(&format!("qemu -machine pc,memory-backend=pc.ram -object {json}")),
            [named("pc.ram", 1024)]
        );
        // A backend that no option uses is another device's.
        assert_eq!(blocks(&format!("qemu -m 256 {memfd}")), one(256));
    }

    #[test]
    fn sizes_that_make_no_sense_count_as_not_given() {
        for size in ["", "x", "1Q", "-1", "1e400", "99999999999999999999T", "nan", "inf"] {
            assert_eq!(bytes(size, 1), None, "{size}");
        }
        assert_eq!(bytes("0.5k", 1), Some(512));
        assert_eq!(line("qemu -M pc,max-ram-below-4g=2G").ram_below_4g(), Some(2 << 30));
    }
}
