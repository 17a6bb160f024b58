//! VFIO with an IOMMU of type 1: which memory the passed-through devices of a VM reach
//! (`include/uapi/linux/vfio.h` of Linux).
//!
//! A VMM puts its devices into a container, and maps guest memory there. Whoever has the descriptor
//! of the container may map and unmap, also what the VMM has mapped (since Linux 6.0).
//!
//! Linux frees the state of a container when the last of its devices leaves, also under a call that
//! is still running. While a descriptor of one of its devices is open, none leaves. So whoever
//! calls [`Container::map`] or [`Container::unmap`] must have a [`Device`] of the container.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ebb_units::Gpa;
use rustix::fs::{FileType, fstat, makedev};
use rustix::io::pread;

use crate::mapping::Mapping;

/// Letter of VFIO's requests, and their first number.
const LETTER: u64 = 0x3b;
const FIRST: u64 = 100;
const CHECK_EXTENSION: u64 = request(1);
const DEVICE_GET_INFO: u64 = request(7);
const DEVICE_GET_REGION_INFO: u64 = request(8);
const IOMMU_GET_INFO: u64 = request(12);
const IOMMU_MAP_DMA: u64 = request(13);
const IOMMU_UNMAP_DMA: u64 = request(14);

/// The second version of type 1, in which one call unmaps many mappings, and never a part of one.
const TYPE1_V2: u64 = 3;
/// Extension that a container has only if every device in it is behind an IOMMU.
const UPDATE_VADDR: u64 = 10;
const DEVICE_IS_PCI: u32 = 1 << 1;
/// Index of the region that is a PCI device's configuration space.
const CONFIG_REGION: u32 = 7;
/// Offset of the command register there, and its bit that allows DMA (PCI 3.0, section 6.2.2).
const COMMAND: u64 = 4;
const BUS_MASTER: u16 = 1 << 2;
const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
/// Flag of an answer that has capabilities, and the one that tells how many mappings are left.
const HAS_CAPABILITIES: u32 = 1 << 1;
const DMA_AVAIL: u16 = 3;
/// Bytes for capabilities. The kernel's are below 1 KiB.
const CAPABILITIES: usize = 4096;

/// Number of the kernel's file for containers: a miscellaneous device.
const MISC: u32 = 10;
const VFIO: u32 = 196;

const fn request(number: u64) -> u64 {
    (LETTER << 8) | (FIRST + number)
}

#[repr(C)]
struct MapArg {
    size: u32,
    flags: u32,
    address: u64,
    iova: u64,
    bytes: u64,
}

#[repr(C)]
struct UnmapArg {
    size: u32,
    flags: u32,
    iova: u64,
    bytes: u64,
}

#[repr(C)]
struct IommuInfo {
    size: u32,
    flags: u32,
    page_sizes: u64,
    first_capability: u32,
    unused: u32,
    capabilities: [u8; CAPABILITIES],
}

#[repr(C)]
#[derive(Default)]
struct DeviceInfo {
    size: u32,
    flags: u32,
    regions: u32,
    interrupts: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    size: u32,
    flags: u32,
    index: u32,
    first_capability: u32,
    bytes: u64,
    offset: u64,
}

/// A container of a VMM's, shared with it.
pub struct Container(OwnedFd);

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Container {
    /// Takes a descriptor for a container.
    ///
    /// # Errors
    /// `Unsupported`: it is no device of the kernel's VFIO, or one without an IOMMU of type 1.
    /// Others as fstat(2) and ioctl(2).
    pub fn taken(fd: OwnedFd) -> io::Result<Container> {
        let stat = fstat(&fd)?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        let container = Container(fd);
        match is_device && stat.st_rdev == makedev(MISC, VFIO) && container.has(TYPE1_V2)? {
            true => Ok(container),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether each device in it is behind an IOMMU. That of a mediated device is not, and its driver
    /// asks for memory by itself.
    ///
    /// # Errors
    /// As ioctl(2).
    pub fn has_iommu(&self) -> io::Result<bool> {
        self.has(UPDATE_VADDR)
    }

    fn has(&self, extension: u64) -> io::Result<bool> {
        // SAFETY: this ioctl takes one integer and touches no memory of ours.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), CHECK_EXTENSION, extension) } {
            answer @ 0.. => Ok(answer > 0),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Lets devices reach `bytes` bytes of a mapping of ours, from byte `offset` on, at `iova`. The
    /// memory stays pinned until it is unmapped, also if this process ends. A hole gets memory.
    ///
    /// # Errors
    /// `AlreadyExists`: a part is mapped. `InvalidInput`: it is not all in the mapping, or is not
    /// made of pages. `ENOSPC`: the container has no mapping left. Others as mmap(2) with
    /// `MAP_LOCKED`.
    pub fn map(&self, iova: Gpa, from: &Mapping, offset: u64, bytes: u64) -> io::Result<()> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= from.bytes());
        let address = from.address().0.checked_add(offset).filter(|_| fits);
        let mut arg = MapArg {
            size: size_of::<MapArg>() as u32,
            flags: READ | WRITE,
            address: address.ok_or(io::ErrorKind::InvalidInput)?,
            iova: iova.0,
            bytes,
        };
        // SAFETY: the kernel reads the struct of its size. The device then writes to pages of a
        // shared mapping, which this process accesses only as memory that others change at any time.
        unsafe { call(&self.0, IOMMU_MAP_DMA, &mut arg) }
    }

    /// Forbids devices these addresses. On return no device uses them. Returns how many of the bytes
    /// were mapped: a range may span many mappings, and addresses that are not mapped.
    ///
    /// # Errors
    /// `InvalidInput`: the range cuts a mapping, or the container has no device any more. Nothing
    /// has changed then. Others as ioctl(2).
    pub fn unmap(&self, iova: Gpa, bytes: u64) -> io::Result<u64> {
        let size = size_of::<UnmapArg>() as u32;
        let mut arg = UnmapArg { size, flags: 0, iova: iova.0, bytes };
        // SAFETY: the kernel reads and writes the struct of its size.
        unsafe { call(&self.0, IOMMU_UNMAP_DMA, &mut arg)? };
        Ok(arg.bytes)
    }

    /// How many more mappings it may have. `None`: the kernel does not tell.
    ///
    /// # Errors
    /// As ioctl(2).
    pub fn mappings_left(&self) -> io::Result<Option<u32>> {
        let mut info = IommuInfo {
            size: size_of::<IommuInfo>() as u32,
            flags: 0,
            page_sizes: 0,
            first_capability: 0,
            unused: 0,
            capabilities: [0; CAPABILITIES],
        };
        // SAFETY: the kernel reads and writes the struct of its size.
        unsafe { call(&self.0, IOMMU_GET_INFO, &mut info)? };
        let before = size_of::<IommuInfo>() - CAPABILITIES;
        let first = (info.first_capability as usize).checked_sub(before);
        let first = first.filter(|_| info.flags & HAS_CAPABILITIES != 0);
        Ok(first.and_then(|first| available(&info.capabilities, first)))
    }
}

/// Finds the number of mappings that are left among the capabilities of an answer. Their offsets
/// count from the beginning of the answer. `at`: the first, in `capabilities`.
fn available(capabilities: &[u8; CAPABILITIES], mut at: usize) -> Option<u32> {
    let before = size_of::<IommuInfo>() - CAPABILITIES;
    let word = |at: usize| {
        let bytes = capabilities.get(at..at.checked_add(4)?)?;
        bytes.first_chunk().copied().map(u32::from_ne_bytes)
    };
    // Each capability has eight bytes at least.
    for _ in 0..CAPABILITIES / 8 {
        let id = word(at)? as u16;
        if id == DMA_AVAIL {
            return word(at + 8);
        }
        at = (word(at + 4)? as usize).checked_sub(before)?;
    }
    None
}

/// A device of a VMM's that is passed through, shared with it.
pub struct Device(OwnedFd);

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Device {
    /// Takes a descriptor for a device.
    ///
    /// # Errors
    /// `Unsupported`: it is no PCI device. Others as ioctl(2).
    pub fn taken(fd: OwnedFd) -> io::Result<Device> {
        let mut info = DeviceInfo { size: size_of::<DeviceInfo>() as u32, ..DeviceInfo::default() };
        // SAFETY: the kernel reads and writes the struct of its size.
        unsafe { call(&fd, DEVICE_GET_INFO, &mut info)? };
        match info.flags & DEVICE_IS_PCI {
            0 => Err(io::ErrorKind::Unsupported.into()),
            _ => Ok(Device(fd)),
        }
    }

    /// Whether it may access memory now: the bus master bit of its command register.
    ///
    /// # Errors
    /// As ioctl(2) and pread(2).
    pub fn may_access_memory(&self) -> io::Result<bool> {
        let size = size_of::<RegionInfo>() as u32;
        let mut region = RegionInfo { size, index: CONFIG_REGION, ..RegionInfo::default() };
        // SAFETY: the kernel reads and writes the struct of its size.
        unsafe { call(&self.0, DEVICE_GET_REGION_INFO, &mut region)? };
        let mut command = [0; 2];
        match pread(&self.0, &mut command, region.offset + COMMAND)? {
            2 => Ok(u16::from_le_bytes(command) & BUS_MASTER != 0),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// # Safety
/// The request must take an argument of the type `T`, whose first field is its size.
unsafe fn call<T>(fd: &OwnedFd, request: u64, arg: &mut T) -> io::Result<()> {
    // SAFETY: by the contract of this function.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(arg)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram_file::RamFile;

    #[test]
    fn requests_have_the_numbers_of_the_header() {
        assert_eq!((CHECK_EXTENSION, IOMMU_GET_INFO), (0x3b65, 0x3b70));
        assert_eq!((IOMMU_MAP_DMA, IOMMU_UNMAP_DMA), (0x3b71, 0x3b72));
        assert_eq!((size_of::<MapArg>(), size_of::<UnmapArg>()), (32, 24));
    }

    #[test]
    fn what_is_no_container_and_no_device_is_refused() {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(Container::taken(null()).is_err());
        assert!(Device::taken(null()).is_err());
    }

    #[test]
    fn nothing_beside_the_mapping_is_mapped() {
        let file = RamFile::create("vfio-test", 8192).unwrap();
        let mapping = Mapping::new(&file, 0, 8192).unwrap();
        let container = Container(std::fs::File::open("/dev/null").unwrap().into());
        for (offset, bytes) in [(4096, 8192), (u64::MAX, 4096), (8192, 1)] {
            let error = container.map(Gpa(1 << 32), &mapping, offset, bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{offset} {bytes}");
        }
    }

    /// A chain as the kernel makes it: the first capability is another one.
    fn chain(next: u32) -> [u8; CAPABILITIES] {
        let mut all = [0; CAPABILITIES];
        let mut put = |at: usize, word: u32| all[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        put(0, 1);
        put(4, next);
        put(40, u32::from(DMA_AVAIL) | 1 << 16);
        put(48, 65_533);
        all
    }

    #[test]
    fn the_number_of_mappings_is_found_in_the_chain() {
        let before = (size_of::<IommuInfo>() - CAPABILITIES) as u32;
        assert_eq!(available(&chain(before + 40), 0), Some(65_533));
        for broken in [0, before, u32::MAX, before + CAPABILITIES as u32 - 2] {
            assert_eq!(available(&chain(broken), 0), None, "{broken}");
        }
    }
}
