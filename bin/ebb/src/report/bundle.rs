//! The file itself: parts of bounded size, compressed, and never over another file.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::Part;
use super::redact::redact;

/// Largest part. What is longer is left out, or cut at its beginning if it is a log.
pub const PART_MOST_BYTES: usize = 1 << 20;
/// Largest sum of all parts.
const ALL_MOST_BYTES: usize = 32 << 20;
/// What stands in the bundle's first part.
const ABOUT: &str = "\
This is a bundle of `ebb report` for a bug report.

It holds what Ebb and this host say of themselves: see the list below. It holds nothing of a guest's
memory, no console, no disk, no image, no log of QEMU, no key and no token. It does hold names of VMs,
files and processes, the daemon's command line, and addresses in the daemon's log. Values behind words
like `password=` are replaced by [removed]. Look through the files before you send them.

";

/// What is gathered.
#[derive(Default)]
pub struct Bundle {
    parts: Vec<(Part, Vec<u8>)>,
    missing: Vec<String>,
    bytes: usize,
}

impl Bundle {
    /// Adds a text, without secrets. If it is too long, says so instead.
    pub fn text(&mut self, name: &str, what: &'static str, text: &str) {
        let text = redact(text);
        if text.len() > PART_MOST_BYTES || self.bytes + text.len() > ALL_MOST_BYTES {
            self.miss(name, format!("its {} bytes are too many", text.len()));
            return;
        }
        self.bytes += text.len();
        let part = Part { name: name.into(), bytes: text.len() as u64, what };
        self.parts.push((part, text.into_bytes()));
    }

    /// Adds a text that may not be there.
    pub fn found(&mut self, name: &str, what: &'static str, text: anyhow::Result<String>) {
        match text {
            Ok(text) => self.text(name, what, &text),
            Err(why) => self.miss(name, format!("{why:#}")),
        }
    }

    /// Notes that a part is not there, and why.
    pub fn miss(&mut self, name: &str, why: impl std::fmt::Display) {
        let why = why.to_string().replace(char::is_control, " ");
        self.missing.push(redact(&format!("{name}: {why}")));
    }

    /// Returns all parts, the list of them first, and what is missing.
    pub fn finish(mut self, made: &str) -> (Vec<(Part, Vec<u8>)>, Vec<String>) {
        let lines = self.parts.iter().map(|(part, _)| format!("{}: {}\n", part.name, part.what));
        let mut text = ABOUT.to_owned() + "Made by " + made + "\n" + &lines.collect::<String>();
        if !self.missing.is_empty() {
            text += "\nMissing:\n";
            text.extend(self.missing.iter().map(|line| format!("{line}\n")));
        }
        let (name, what) = ("README.txt".into(), "what the bundle holds, and what it does not");
        let part = Part { name, bytes: text.len() as u64, what };
        self.parts.insert(0, (part, text.into_bytes()));
        (self.parts, self.missing)
    }
}

/// Where the bundle goes: a new file, which is removed again unless it is written.
pub struct Place {
    path: PathBuf,
    file: File,
    is_written: bool,
}

impl Place {
    /// Makes the file.
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub fn new(path: &Path) -> anyhow::Result<Place> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let advice = || format!("{}: give a new file, in a directory that exists", path.display());
        let file = file.with_context(advice)?;
        Ok(Place { path: path.into(), file, is_written: false })
    }

    /// Writes all parts into a directory of this name. Returns the size of the file.
    ///
    /// # Errors
    /// As write(2).
    pub fn write(
        mut self,
        name: &str,
        parts: &[(Part, Vec<u8>)],
        unix_s: i64,
    ) -> anyhow::Result<u64> {
        self.pack(name, parts, unix_s).with_context(|| self.path.display().to_string())?;
        let bytes = self.file.metadata().with_context(|| self.path.display().to_string())?.len();
        self.is_written = true;
        Ok(bytes)
    }

    fn pack(&self, name: &str, parts: &[(Part, Vec<u8>)], unix_s: i64) -> std::io::Result<()> {
        let mut tar = tar::Builder::new(GzEncoder::new(&self.file, Compression::default()));
        for (part, content) in parts {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o600);
            header.set_size(content.len() as u64);
            header.set_mtime(u64::try_from(unix_s).unwrap_or(0));
            tar.append_data(&mut header, format!("{name}/{}", part.name), &content[..])?;
        }
        let mut file = tar.into_inner()?.finish()?;
        file.flush()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.is_written {
            // Half a bundle is of no use.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use flate2::read::GzDecoder;

    use super::*;

    fn read(path: &Path) -> Vec<(String, String)> {
        let mut tar = tar::Archive::new(GzDecoder::new(File::open(path).unwrap()));
        let entries = tar.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_string_lossy().into_owned();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (name, text)
        });
        entries.collect()
    }

    #[test]
    fn a_bundle_says_what_it_holds_and_what_it_does_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.tar.gz");
        let mut bundle = Bundle::default();
        bundle.text("host.txt", "this host", "Linux, password=letmein\n");
        bundle.found("vms.json", "all VMs", Err(anyhow::anyhow!("no ebbd\nruns")));
        bundle.text("long.txt", "too long", &"x".repeat(PART_MOST_BYTES + 1));
        let (parts, missing) = bundle.finish("ebb\n");
        assert_eq!(missing.len(), 2, "{missing:?}");
        Place::new(&path).unwrap().write("ebb-report", &parts, 7).unwrap();
        let all = read(&path);
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["ebb-report/README.txt", "ebb-report/host.txt"]);
        let readme = &all[0].1;
        assert!(readme.contains("host.txt: this host\n"), "{readme}");
        assert!(readme.contains("vms.json: no ebbd runs\n"), "{readme}");
        assert_eq!(all[1].1, "Linux, password=[removed]\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn no_file_is_overwritten_and_none_is_left_half() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.tar.gz");
        fs::write(&path, "mine").unwrap();
        let why = format!("{:#}", Place::new(&path).err().unwrap());
        assert!(why.contains("give a new file"), "{why}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        let other = home.path().join("b.tar.gz");
        drop(Place::new(&other).unwrap());
        assert!(!other.exists());
    }

    #[test]
    fn all_parts_together_are_bounded() {
        let mut bundle = Bundle::default();
        for index in 0..40 {
            bundle.text(&index.to_string(), "text", &"x".repeat(PART_MOST_BYTES));
        }
        assert_eq!((bundle.bytes, bundle.missing.len()), (ALL_MOST_BYTES, 8));
    }
}
