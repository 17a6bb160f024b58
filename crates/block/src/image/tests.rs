//! Tests of images: what is refused, and what zeroing and discarding touch.

use super::*;
use std::os::unix::fs::FileExt;

use ebb_sys::byte_locks;

fn image_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all_at(bytes, 0).unwrap();
    file
}

fn why(path: &Path) -> String {
    Image::open(path, false).err().expect("it is refused").to_string()
}

#[test]
fn an_unusable_image_is_refused_in_one_line() {
    let odd = image_of(&[1; 5000]);
    assert!(why(odd.path()).contains("5000 bytes"), "{}", why(odd.path()));
    assert!(why(image_of(&[]).path()).contains("empty"));
    assert!(why(Path::new("/dev/null")).contains("neither"));
    assert!(why(Path::new("/no/such")).contains("/no/such: "));
    let mut xfs = vec![0; 8192];
    xfs[..4].copy_from_slice(b"XFSB");
    xfs[102] = 2;
    let why = why(image_of(&xfs).path());
    assert!(why.contains("sectors of 512") && !why.contains('\n'), "{why}");
}

#[test]
fn another_format_is_served_as_raw_only_by_word() {
    let mut qcow2 = vec![0; 8192];
    qcow2[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    let file = image_of(&qcow2);
    let why = why(file.path());
    assert!(why.contains("qcow2") && why.contains("format=raw"), "{why}");
    drop(Image::open_raw(file.path(), false).unwrap());
    // The format is found even if the size is one that no raw image has.
    file.as_file().set_len(8192 + 512).unwrap();
    assert!(self::why(file.path()).contains("qcow2"));
}

#[test]
fn an_image_is_reopened_whatever_its_guest_has_written() {
    let file = image_of(&[0; 8192]);
    let image = Image::open(file.path(), false).unwrap();
    let identity = image.identity().unwrap();
    drop(image);
    file.as_file().write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    file.as_file().write_all_at(b"EFI PART", 512).unwrap();
    drop(Image::reopen(file.path(), false, Some(identity)).unwrap());
    let other = image_of(&[0; 8192]);
    let error = Image::reopen(other.path(), false, Some(identity)).err().unwrap();
    assert!(matches!(error.why, OpenErrorKind::Exchanged), "{error}");
    Image::reopen(other.path(), false, None).unwrap();
}

#[test]
fn readers_share_an_image_and_a_writer_does_not() {
    let file = image_of(&[0; 4096]);
    let one = Image::open(file.path(), true).unwrap();
    let _two = Image::open(file.path(), true).unwrap();
    assert!(one.is_readonly());
    assert!(why(file.path()).contains("in use"));
}

/// QEMU locks bytes of its images, and does not see flock(2).
#[test]
fn an_image_that_a_qemu_writes_is_in_use_and_bars_qemus() {
    let file = image_of(&[0; 4096]);
    let qemu = File::options().read(true).write(true).open(file.path()).unwrap();
    byte_locks::share(&qemu, 101).unwrap();
    assert!(why(file.path()).contains("in use"));
    assert!(Image::open(file.path(), true).is_err(), "what is read would change");
    byte_locks::release(&qemu, 101).unwrap();
    let readonly = Image::open(file.path(), true).unwrap();
    let is_barred = |at| byte_locks::is_locked_by_others(&qemu, at).unwrap();
    assert_eq!([100, 101, 201, 203].map(is_barred), [true, false, true, true]);
    drop(readonly);
    let _image = Image::open(file.path(), false).unwrap();
    assert_eq!([100, 101, 201, 203].map(is_barred), [true; 4]);
}

#[test]
fn zeroing_touches_nothing_beside() {
    for direct in [true, false] {
        for unmap in [true, false] {
            let file = image_of(&[7; 5 * 4096]);
            let image = Image::open_with(file.path(), false, direct).unwrap();
            for part in [100..612, 4096 + 512..3 * 4096 + 1024, 5 * 4096 - 512..5 * 4096] {
                image.zero(part, unmap).unwrap();
            }
            let mut read = vec![0; 5 * 4096];
            file.as_file().read_exact_at(&mut read, 0).unwrap();
            let zeros: Vec<usize> = (0..read.len()).filter(|&at| read[at] == 0).collect();
            let expected: Vec<usize> = (100..612).chain(4608..13312).chain(19968..20480).collect();
            assert!(zeros == expected, "direct {direct} unmap {unmap}");
        }
    }
}

#[test]
fn only_whole_blocks_are_discarded() {
    let file = image_of(&[7; 4 * 4096]);
    let image = Image::open(file.path(), false).unwrap();
    image.discard(4000..2 * 4096 + 10).unwrap();
    image.discard(3 * 4096 + 1..4 * 4096).unwrap();
    let mut read = vec![0; 4 * 4096];
    file.as_file().read_exact_at(&mut read, 0).unwrap();
    assert!(read[..4096].iter().chain(&read[2 * 4096..]).all(|&byte| byte == 7));
}

#[test]
fn a_shrunk_file_is_noticed() {
    let file = image_of(&[7; 2 * 4096]);
    let image = Image::open(file.path(), false).unwrap();
    image.check_end(8192).unwrap();
    file.as_file().set_len(4096).unwrap();
    image.check_end(4096).unwrap();
    assert!(image.check_end(8192).is_err());
}
