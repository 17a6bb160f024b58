//! Finds images that are not raw by their first bytes.
//!
//! Served as raw, such an image shows the guest its headers and tables in place of the disk, and
//! the guest's first write destroys them. A guest can write the same bytes to its own raw disk,
//! so the user who starts a VM can say that an image is raw, whatever it contains. LUKS is not
//! in the list: a guest that encrypts a whole disk makes such an image.

use crate::probe::ReadAt;

/// Offset, magic bytes, and the format's name as `qemu-img` knows it.
const MAGICS: [(u64, &[u8], &str); 11] = [
    // QEMU, docs/interop/qcow2; version 1 begins in the same way.
    (0, b"QFI\xfb", "qcow2"),
    // QEMU, docs/interop/qed_spec.
    (0, b"QED\0", "qed"),
    // Virtual Disk Format 5.0: hosted sparse extent, ESX sparse extent, descriptor file.
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    // VirtualBox, VDICore.h: VDI_IMAGE_SIGNATURE.
    (0x40, &0xbeda_107f_u32.to_le_bytes(), "vdi"),
    // MS-VHDX, section 2.2.1.
    (0, b"vhdxfile", "vhdx"),
    // Virtual Hard Disk Image Format Specification: a copy of the footer.
    (0, b"conectix", "vpc"),
    // QEMU, docs/interop/parallels.
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    // QEMU, block/bochs.c.
    (0, b"Bochs Virtual HD Image", "bochs"),
];

/// Returns the format of an image that is not raw. Bytes that cannot be read match no format.
pub(crate) fn format_of(read_at: ReadAt) -> Option<&'static str> {
    let stands = |offset: u64, magic: &[u8]| {
        let mut found = vec![0; magic.len()];
        read_at(offset, &mut found).is_ok() && found == magic
    };
    MAGICS.iter().find(|(offset, magic, _)| stands(*offset, magic)).map(|(_, _, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_magic() {
        for (offset, magic, name) in MAGICS {
            let mut image = vec![0; 4096];
            image[offset as usize..][..magic.len()].copy_from_slice(magic);
            let read_at = |offset: u64, into: &mut [u8]| {
                into.copy_from_slice(&image[offset as usize..][..into.len()]);
                Ok(())
            };
            assert_eq!(format_of(&read_at), Some(name));
        }
        let luks = |_: u64, into: &mut [u8]| {
            into.fill(0);
            into.iter_mut().zip(b"LUKS\xba\xbe").for_each(|(byte, magic)| *byte = *magic);
            Ok(())
        };
        assert_eq!(format_of(&luks), None);
        assert_eq!(format_of(&|_, _| Err(std::io::ErrorKind::UnexpectedEof.into())), None);
    }
}
