//! What a VMM has open that lets a device write guest memory without the VMM's page table.
//!
//! A read(2) copies through the page table, so it meets any protection there. A request with
//! O_DIRECT pins the pages when it begins, and gives their addresses to the disk, which then writes
//! even to pages that are protected later. SCSI commands that are passed on, file systems without a
//! page cache, and buffers registered with an io_uring do the same. What only writes to a file does
//! no harm: it reads memory, and keeps the page that it reads.

use std::io;

use ebb_sys::process::Process;
use rustix::fs::{FileType, OFlags};

/// File systems that copy from their page cache whatever is read without O_DIRECT. For other file
/// systems this is not known: FUSE, 9p, CIFS, Lustre and ZFS read past the page cache if they were
/// told to.
const COPYING: [&str; 19] = [
    "bcachefs",
    "btrfs",
    "devtmpfs",
    "erofs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "nfs",
    "nfs4",
    "proc",
    "ramfs",
    "squashfs",
    "sysfs",
    "tmpfs",
    "vfat",
    "xfs",
];
/// Devices that pass commands on together with the pages of their buffers: SCSI generic, NVMe
/// generic, and a SCSI target in the kernel.
const PASSING: [&str; 3] = ["sg", "ng", "vhost-scsi"];
/// Most times that an io_uring is asked. One that is at work tells nothing.
const RING_TRIES: u32 = 8;

/// Returns the first thing found that may write guest memory past the page table, in words: "PATH
/// is open with O_DIRECT". `None` means that there is nothing now. Then no such request is in
/// flight, because a VMM ends its requests before it closes what they go to.
///
/// # Errors
/// As reading `/proc/PID`.
pub fn pinning(process: &Process) -> io::Result<Option<String>> {
    pinning_of(process, &process.descriptors()?)
}

/// Same as [`pinning`], for descriptors that were listed before ([`Process::descriptors`]). It
/// tells nothing about those that were opened since.
///
/// # Errors
/// As [`pinning`].
pub fn pinning_of(process: &Process, open: &[(i32, String)]) -> io::Result<Option<String>> {
    let mut mounts = None;
    for (fd, link) in open {
        if let Some(why) = of_descriptor(process, *fd, link, &mut mounts)? {
            return Ok(Some(why));
        }
    }
    Ok(None)
}

type Mounts = Vec<(u64, String)>;

fn of_descriptor(
    process: &Process,
    fd: i32,
    link: &str,
    mounts: &mut Option<Mounts>,
) -> io::Result<Option<String>> {
    if link == "anon_inode:[io_uring]" {
        return Ok(of_ring(process, fd));
    }
    if !link.starts_with('/') || link.starts_with("/memfd:") {
        return Ok(None);
    }
    let (info, kind) = match (process.descriptor_info(fd), process.descriptor_type(fd)) {
        (Ok(info), Ok(kind)) => (info, kind),
        // The descriptor was closed after it was listed, so its requests have ended.
        (Err(error), _) | (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    let flags = OFlags::from_bits_retain(field(&info, "flags:", 8).unwrap_or(0) as u32);
    let reads = !flags.contains(OFlags::WRONLY);
    Ok(match kind {
        FileType::BlockDevice | FileType::RegularFile if flags.contains(OFlags::DIRECT) => {
            Some(format!("{link} is open with O_DIRECT"))
        }
        FileType::BlockDevice => Some(format!("{link} is open, which takes SCSI commands")),
        FileType::RegularFile if reads => {
            if mounts.is_none() {
                *mounts = Some(process.mounts()?);
            }
            let number = field(&info, "mnt_id:", 10);
            of_file_system(link, number, mounts.as_deref().unwrap_or_default())
        }
        FileType::CharacterDevice => {
            passes_on(link).then(|| format!("{link} is open, which passes commands on"))
        }
        _ => None,
    })
}

fn of_file_system(link: &str, number: Option<u64>, mounts: &[(u64, String)]) -> Option<String> {
    let found = mounts.iter().find(|(mount, _)| Some(*mount) == number);
    let kind = found.map_or("a file system that is not mounted any more", |(_, kind)| kind);
    let copies = COPYING.contains(&kind);
    (!copies).then(|| format!("{link} is open on {kind}, which may read past the page cache"))
}

fn passes_on(link: &str) -> bool {
    let name = link.rsplit('/').next().unwrap_or_default();
    let numbered = |prefix: &&str| {
        let rest = name.strip_prefix(*prefix);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    link.contains("/bsg/") || PASSING.iter().any(numbered)
}

fn of_ring(process: &Process, fd: i32) -> Option<String> {
    for _ in 0..RING_TRIES {
        let info = match process.descriptor_info(fd) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            // It could not be read, so nothing is known.
            Err(_) => break,
            Ok(info) => info,
        };
        let registered = [field(&info, "UserFiles:", 10), field(&info, "UserBufs:", 10)];
        match registered {
            [Some(0), Some(0)] => return None,
            [Some(_), Some(_)] => {
                return Some("an io_uring has registered buffers or files".into());
            }
            _ => std::thread::yield_now(),
        }
    }
    Some("an io_uring does not show whether it has registered buffers".into())
}

/// The number that follows `name`.
fn field(info: &str, name: &str, radix: u32) -> Option<u64> {
    let value = info.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(value.trim(), radix).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    fn of(file: &File) -> Option<String> {
        use std::os::fd::AsRawFd;
        let process = Process::own().expect("this process");
        let all = process.descriptors().expect("descriptors");
        let (fd, link) = all.into_iter().find(|(fd, _)| *fd == file.as_raw_fd()).expect("listed");
        of_descriptor(&process, fd, &link, &mut None).expect("/proc")
    }

    #[test]
    fn a_file_pins_if_it_is_open_with_o_direct() {
        // Uses the build directory, because not every file system has O_DIRECT.
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        let open = |flags: OFlags| {
            let mut options = File::options();
            options.read(true).custom_flags(flags.bits() as i32).open(file.path())
        };
        assert_eq!(of(&open(OFlags::empty()).expect("a file")), None);
        let Ok(direct) = open(OFlags::DIRECT) else { return };
        let why = of(&direct).expect("it pins");
        assert!(why.ends_with(" is open with O_DIRECT"), "{why}");
    }

    #[test]
    fn a_device_node_pins_nothing() {
        let null = File::options().write(true).open("/dev/null").expect("a device");
        assert_eq!(of(&null), None);
    }

    #[test]
    fn devices_that_pass_commands_on_are_known() {
        for link in ["/dev/sg0", "/dev/sg12", "/dev/ng0n1", "/dev/bsg/0:0:0:0", "/dev/vhost-scsi"] {
            assert!(passes_on(link), "{link}");
        }
        for link in ["/dev/sgx_enclave", "/dev/kvm", "/dev/vhost-net", "/dev/null"] {
            assert!(!passes_on(link), "{link}");
        }
    }

    #[test]
    fn a_file_system_is_known_to_copy_or_counts_as_pinning() {
        let mounts = [(7, "ext4".to_owned()), (8, "fuse.gluster".to_owned())];
        let found = |number| of_file_system("/a", number, &mounts);
        assert_eq!(found(Some(7)), None);
        assert!(found(Some(8)).expect("it may").contains("fuse.gluster"));
        assert!(found(Some(9)).is_some() && found(None).is_some());
    }

    #[test]
    fn fields_are_numbers_of_their_radix() {
        let info = "pos:\t0\nflags:\t0140002\nmnt_id:\t27\nUserBufs:\t0\n";
        assert_eq!(field(info, "flags:", 8), Some(0o140_002));
        assert_eq!(field(info, "mnt_id:", 10), Some(27));
        assert_eq!(field(info, "UserFiles:", 10), None);
    }
}
