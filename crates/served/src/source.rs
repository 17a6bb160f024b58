//! The disks as the pager sees them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ebb_block::SECTOR_BYTES;
use ebb_pager::{Digest, GuestDisk};
use ebb_store::Page;
use ebb_units::FRAME_BYTES;

use crate::disks::{SharedDisks, disk_of};

/// The disks of one VM, in which the pager finds and reads content of frames.
pub struct Source(pub Arc<SharedDisks>);

impl GuestDisk for Source {
    fn find(&self, digest: &Digest) -> Option<u64> {
        if self.0.disks.is_empty() { None } else { self.0.hashes.find(digest) }
    }

    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()> {
        let (disk, block) = disk_of(block);
        let no_disk = || io::Error::other("no such disk of this VM is served here");
        let disk = self.0.disks.get(disk).ok_or_else(no_disk)?;
        let reader = &disk.reader;
        // Read-ahead does not know where the disk ends.
        let there = reader.blocks().saturating_sub(block).min(pages.len() as u64) as usize;
        match pages.get_mut(..there) {
            Some(pages) if !pages.is_empty() => {
                let read = reader.read(block, pages);
                read.map_err(|error| unreadable(&disk.path, block, &error))
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Says which sector of which image cannot be read, and what to do.
fn unreadable(image: &Path, block: u64, error: &io::Error) -> io::Error {
    let sector = block * (FRAME_BYTES / SECTOR_BYTES);
    let text = format!(
        "{}: sector {sector} cannot be read: {error}: look for its disk in the host's kernel log \
         (dmesg); the guest waits for what cannot be read",
        image.display()
    );
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ebb_block::Image;
    use ebb_store::PageBuffer;

    use super::*;
    use crate::disks::block_of;

    const BLOCKS: u64 = 256;

    #[test]
    fn all_disks_share_one_space_of_block_numbers() {
        let home = tempfile::tempdir().unwrap();
        let image = |fill: u8| {
            let path = home.path().join(fill.to_string());
            fs::write(&path, vec![fill; (BLOCKS * 4096) as usize]).unwrap();
            Image::open_raw(&path, false).unwrap()
        };
        let images = [7, 8].map(image);
        let source = Source(SharedDisks::new(&images, [false, true], 64 << 20).unwrap());
        let read = |disk, block| {
            let mut pages = PageBuffer::new(2);
            let read = source.read(block_of(disk, block), pages.pages_mut());
            read.map(|()| [0, 1].map(|page| pages.pages()[page][0])).map_err(|error| error.kind())
        };
        assert_eq!((read(0, 3), read(1, 3)), (Ok([7; 2]), Ok([8; 2])));
        // Its last block.
        assert_eq!(read(1, BLOCKS - 1), Ok([8, 0]));
        assert_eq!(read(0, BLOCKS), Err(io::ErrorKind::UnexpectedEof));
        assert_eq!(read(2, 0), Err(io::ErrorKind::Other));
    }

    #[test]
    fn what_cannot_be_read_is_named_in_one_line() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        fs::write(&path, vec![7; (BLOCKS * 4096) as usize]).unwrap();
        let images = [Image::open_raw(&path, false).unwrap()];
        let source = Source(SharedDisks::new(&images, [false], 64 << 20).unwrap());
        fs::File::options().write(true).open(&path).unwrap().set_len(8 * 4096).unwrap();
        let mut pages = PageBuffer::new(1);
        source.read(block_of(0, 7), pages.pages_mut()).unwrap();
        let error = source.read(block_of(0, 8), pages.pages_mut()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let text = error.to_string();
        let named = format!("{}: sector 64 cannot be read: ", path.display());
        assert!(text.starts_with(&named) && !text.contains('\n'), "{text}");
    }
}
