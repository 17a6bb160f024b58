//! An archive that the kernel unpacks as its first root: the format "newc" of the Linux
//! documentation, driver-api/early-userspace/buffer-format.

/// An archive being written.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl Archive {
    /// Adds a directory. Its parent must be added before.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY, (0, 0), &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, PROGRAM, (0, 0), content);
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// Returns the whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files are small");
        let name_size = u32::try_from(path.len()).expect("paths are short") + 1;
        // Inode, mode, user, group, links, time, size, device (major, minor), special device
        // (major, minor), name's size, checksum (unused).
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(path.bytes().chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stand_on_multiples_of_four() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.device("dev/null", 1, 3);
        archive.file("init", b"abcde");
        let bytes = archive.finish();
        let starts: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, w)| w == b"070701")
            .map(|(at, _)| at)
            .collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|start| start % 4 == 0), "{starts:?}");
        let file = &bytes[starts[2]..starts[3]];
        assert_eq!(&file[6 + 6 * 8..][..8], b"00000005", "the file's size");
        assert_eq!(&file[116..121], b"abcde");
    }
}
