//! The NUMA node of each page of a process, and moving pages: move_pages(2).

use std::io;

use ebb_units::Hva;

use crate::process::Process;

/// Moves also pages that other processes map, `include/uapi/linux/mempolicy.h`.
const MPOL_MF_MOVE_ALL: libc::c_long = 1 << 2;

/// Writes each page's node to `statuses`: its number, or a negative error number. `ENOENT`: the
/// process maps no page there.
///
/// # Errors
/// As move_pages(2): `ESRCH`, `EPERM`. `InvalidInput`: there are not as many statuses as pages.
pub fn locate(process: &Process, pages: &[Hva], statuses: &mut [i32]) -> io::Result<()> {
    move_pages(process, pages, None, statuses)
}

/// Moves pages to a node, in one thread, including those that other processes map. Each status is
/// then as of [`locate`]. If the kernel fails half-way, some statuses keep the value that they had
/// before the call, whether their pages have moved or not.
///
/// # Errors
/// As move_pages(2): `ESRCH`. `EPERM`: without the privilege. `ENODEV`, `EACCES`: there is no such
/// node, or it is not allowed. `ENOMEM`: the node is full. Some pages may have moved.
pub fn move_to(
    process: &Process,
    pages: &[Hva],
    node: u32,
    statuses: &mut [i32],
) -> io::Result<()> {
    let node = i32::try_from(node).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    move_pages(process, pages, Some(&vec![node; pages.len()]), statuses)
}

fn move_pages(
    process: &Process,
    pages: &[Hva],
    nodes: Option<&[i32]>,
    statuses: &mut [i32],
) -> io::Result<()> {
    let count = pages.len();
    if statuses.len() != count || nodes.is_some_and(|nodes| nodes.len() != count) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let addresses: Vec<u64> = pages.iter().map(|page| page.0).collect();
    let nodes = nodes.map_or(std::ptr::null(), |nodes| nodes.as_ptr());
    // SAFETY: each array has `count` elements and outlives the call; only the statuses are
    // written. The addresses are another process's, or ours, whose content does not change.
    let left = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            libc::c_long::from(process.pid()),
            count,
            addresses.as_ptr(),
            nodes,
            statuses.as_mut_ptr(),
            MPOL_MF_MOVE_ALL,
        )
    };
    // A positive number says how many pages were not moved. Their statuses say so, too.
    if left < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use crate::ram_file::RamFile;

    #[test]
    fn pages_of_this_process_are_found_and_holes_are_not() {
        let file = RamFile::create("numa", 3 * 4096).unwrap();
        let mapping = Mapping::new(&file, 0, 3 * 4096).unwrap();
        mapping.populate(0, 4096).unwrap();
        mapping.populate(2 * 4096, 4096).unwrap();
        let own = Process::open(std::process::id() as i32).unwrap();
        let pages = [0, 1, 2].map(|page| Hva(mapping.address().0 + page * 4096));
        let mut statuses = [i32::MIN; 3];
        match locate(&own, &pages, &mut statuses) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                eprintln!("SKIPPED: the kernel has no NUMA");
            }
            result => {
                result.unwrap();
                assert!(statuses[0] >= 0 && statuses[2] >= 0, "{statuses:?}");
                assert_eq!(statuses[1], -libc::ENOENT);
                assert!(locate(&own, &pages, &mut statuses[..2]).is_err());
                let no_node = move_to(&own, &pages[..1], 1 << 20, &mut statuses[..1]);
                assert_eq!(no_node.unwrap_err().raw_os_error(), Some(libc::ENODEV));
            }
        }
    }
}
