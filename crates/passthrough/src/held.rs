//! A VMM's descriptors of its container and of the devices in it, shared with the VMM.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ebb_sys::process::Process;
use ebb_sys::vfio::{Container, Device};
use rustix::io::Errno;

/// What `/proc/PID/fd` says of a container of type 1, of a device, and of iommufd.
const CONTAINER: &str = "/dev/vfio/vfio";
const DEVICE: &str = "anon_inode:[vfio-device]";
const IOMMUFD: &str = "/dev/iommu";
/// Most devices of one VM. A VMM may have many descriptors of one device, too.
const DEVICES_MAX: usize = 64;

/// Numbers of a VMM's descriptors, and what they lead to.
type Links = [(i32, String)];

/// Why the memory of a VM with passed-through devices cannot be unmapped and mapped from here.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Its devices use iommufd.
    #[error("they use iommufd: leave out iommufd= of their -device options")]
    Iommufd,
    /// Its devices are in several containers.
    #[error("they are in more than one container, and Ebb drives one")]
    Containers,
    /// It has more devices, or descriptors of them, than are looked at.
    #[error("there are more than {DEVICES_MAX} of them")]
    Devices,
    /// The container is none of type 1, or a device is a part of one that is shared (mdev).
    #[error("one of them is behind no IOMMU of its own, such as a mediated device")]
    NoIommu,
    /// A device is no PCI device.
    #[error("one of them is no PCI device")]
    NoPci,
    /// The kernel refused.
    #[error("they cannot be looked at: {0}")]
    Io(#[from] io::Error),
}

/// Numbers of the descriptors that are held, as the VMM has them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldNumbers {
    /// That of the container.
    pub container: i32,
    /// Those of devices in it.
    pub devices: Vec<i32>,
}

/// What of a VMM's descriptors is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Has {
    /// Its only container is the one that is held.
    Held,
    /// It has the container that is held, and devices that may be elsewhere.
    More,
    /// It no longer has the container that is held, or no device in it.
    Nothing,
}

/// A VMM's container, and devices in it. While a device is held, the kernel keeps the container's
/// state, and the device's group stays in use.
#[derive(Clone)]
pub struct Held {
    container: Arc<Container>,
    number: i32,
    devices: Vec<(i32, Arc<Device>)>,
}

impl Held {
    /// Takes the container of a VMM, and its devices. `None`: it has none. `links`: its descriptors.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn take(process: &Process, links: &Links) -> Result<Option<Held>, Refused> {
        if numbers(links, IOMMUFD).next().is_some() {
            return Err(Refused::Iommufd);
        }
        let mut all = numbers(links, CONTAINER);
        let Some(number) = all.next() else { return Ok(None) };
        let devices = bounded(links)?;
        let Some(held) = Held::of(process, number, &devices)? else { return Ok(None) };
        if !held.container.has_iommu()? {
            return Err(Refused::NoIommu);
        }
        for other in all {
            if !process.shares(other, &*held.container)? {
                return Err(Refused::Containers);
            }
        }
        Ok(Some(held))
    }

    /// Takes the same descriptors again, after another process had taken them: whatever the VMM has
    /// besides. `None`: it no longer has them.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn take_again(
        process: &Process,
        links: &Links,
        had: &HeldNumbers,
    ) -> Result<Option<Held>, Refused> {
        if !numbers(links, CONTAINER).any(|number| number == had.container) {
            return Ok(None);
        }
        let devices: Vec<i32> =
            numbers(links, DEVICE).filter(|number| had.devices.contains(number)).collect();
        Held::of(process, had.container, &devices)
    }

    fn of(process: &Process, number: i32, devices: &[i32]) -> Result<Option<Held>, Refused> {
        let Some(fd) = descriptor(process, number)? else { return Ok(None) };
        let container = Container::taken(fd).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => Refused::NoIommu,
            _ => error.into(),
        })?;
        // Also finds out whether the kernel can compare descriptors at all.
        if !process.shares(number, &container)? {
            return Ok(None);
        }
        let mut held = Held { container: Arc::new(container), number, devices: Vec::new() };
        held.add_devices(process, devices)?;
        Ok(Some(held).filter(|held| !held.devices.is_empty()))
    }

    /// The container.
    pub(crate) fn container(&self) -> &Container {
        &self.container
    }

    /// The numbers of what is held.
    pub fn numbers(&self) -> HeldNumbers {
        let devices = self.devices.iter().map(|(number, _)| *number).collect();
        HeldNumbers { container: self.number, devices }
    }

    /// Whether a device may access memory now.
    pub(crate) fn may_access_memory(&self) -> io::Result<bool> {
        for (_, device) in &self.devices {
            if device.may_access_memory()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Follows the VMM. A device that it no longer has is let go of only if it is certain that the
    /// others that are held are in the same container.
    pub(crate) fn follow(&mut self, process: &Process, links: &Links) -> Result<Has, Refused> {
        let (mut has, mut is_only) = (false, numbers(links, IOMMUFD).next().is_none());
        for number in numbers(links, CONTAINER) {
            match process.shares(number, &*self.container)? {
                true => has = true,
                false => is_only = false,
            }
        }
        let mut there = Vec::new();
        for (number, device) in &self.devices {
            let at = numbers(links, DEVICE).any(|other| other == *number);
            there.push(at && process.shares(*number, &**device)?);
        }
        if !has || !there.contains(&true) {
            return Ok(Has::Nothing);
        }
        if !is_only || !self.container.has_iommu()? {
            return Ok(Has::More);
        }
        let mut there = there.into_iter();
        self.devices.retain(|_| there.next().unwrap_or(true));
        self.add_devices(process, &bounded(links)?)?;
        Ok(Has::Held)
    }

    fn add_devices(&mut self, process: &Process, wanted: &[i32]) -> Result<(), Refused> {
        for &number in wanted {
            if self.devices.iter().any(|(known, _)| *known == number) {
                continue;
            }
            // A descriptor may have been closed since it was listed.
            let Some(fd) = descriptor(process, number)? else { continue };
            let device = Device::taken(fd).map_err(|error| match error.kind() {
                io::ErrorKind::Unsupported => Refused::NoPci,
                _ => error.into(),
            })?;
            self.devices.push((number, Arc::new(device)));
        }
        Ok(())
    }
}

fn bounded(links: &Links) -> Result<Vec<i32>, Refused> {
    let all: Vec<i32> = numbers(links, DEVICE).take(DEVICES_MAX + 1).collect();
    if all.len() > DEVICES_MAX { Err(Refused::Devices) } else { Ok(all) }
}

fn descriptor(process: &Process, number: i32) -> io::Result<Option<OwnedFd>> {
    match process.descriptor(number) {
        Err(error) if error.raw_os_error() == Some(Errno::BADF.raw_os_error()) => Ok(None),
        fd => fd.map(Some),
    }
}

fn numbers<'a>(links: &'a Links, what: &'static str) -> impl Iterator<Item = i32> + 'a {
    links.iter().filter(move |(_, link)| link == what).map(|(number, _)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(all: &[&str]) -> Vec<(i32, String)> {
        (3..).zip(all.iter().map(|link| (*link).to_owned())).collect()
    }

    #[test]
    fn a_vmm_without_a_container_has_none() {
        let process = Process::own().unwrap();
        let taken = Held::take(&process, &links(&["/dev/kvm", "/dev/vfio/12", "socket:[7]"]));
        assert!(matches!(taken, Ok(None)));
    }

    /// Also beside a container, and with no device yet.
    #[test]
    fn iommufd_is_refused_with_what_to_do() {
        let process = Process::own().unwrap();
        for all in [&[IOMMUFD][..], &[CONTAINER, DEVICE, IOMMUFD]] {
            let Err(refused) = Held::take(&process, &links(all)) else { panic!("it is taken") };
            assert!(matches!(refused, Refused::Iommufd));
            assert!(refused.to_string().contains("leave out iommufd="), "{refused}");
        }
    }
}
