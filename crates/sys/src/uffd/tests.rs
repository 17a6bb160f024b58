//! Tests of a userfaultfd over memory of this process.

use ebb_units::FRAME_BYTES;

use super::*;
use crate::mapping::Mapping;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::ram_file::RamFile;

/// Returns `None` if this process lacks the privilege. The VM tests need it too, and say so.
fn over(file: &RamFile, watch: Watch) -> Option<(Uffd, Mapping, HvaRange)> {
    let uffd = match Uffd::new() {
        Ok(uffd) => uffd,
        Err(error) => {
            eprintln!("SKIPPED: no userfaultfd here: {error}");
            return None;
        }
    };
    uffd.handshake(feature::needed()).unwrap();
    let mapping = Mapping::new(file, 0, file.bytes().unwrap()).unwrap();
    let range = HvaRange { start: mapping.address(), bytes: mapping.bytes() };
    uffd.register(range, watch).unwrap();
    Some((uffd, mapping, range))
}

fn one_fault(uffd: &Uffd) -> Fault {
    let mut events = Events::new();
    loop {
        if let Some(fault) = uffd.read(&mut events).unwrap().next() {
            return fault;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_missing_page_waits_for_its_content() {
    let file = RamFile::create("uffd-test", 1 << 20).unwrap();
    let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            mapping.words(8 << 10, 1).unwrap()[0].load(std::sync::atomic::Ordering::Relaxed)
        });
        let fault = one_fault(&uffd);
        assert_eq!(fault.address, Hva(range.start.0 + (8 << 10)));
        assert!(!fault.write_protected && !fault.write);
        uffd.copy(fault.address, &[7; 4096]).unwrap();
        uffd.wake(range).unwrap();
        assert_eq!(reader.join().unwrap(), 0x0707_0707_0707_0707);
    });
}

#[test]
fn a_protected_page_waits_for_leave_to_be_written() {
    let file = RamFile::create("uffd-test", 1 << 20).unwrap();
    let Some((uffd, mapping, range)) = over(&file, Watch::Write) else { return };
    let word = &mapping.words(0, 1).unwrap()[0];
    word.store(1, std::sync::atomic::Ordering::Relaxed);
    uffd.protect(range).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| word.store(2, std::sync::atomic::Ordering::Relaxed));
        assert!(one_fault(&uffd).write_protected);
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 1);
        uffd.unprotect(range).unwrap();
        writer.join().unwrap();
    });
    assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 2);
}

#[test]
fn pages_in_a_row_come_to_be_written() {
    let file = RamFile::create("uffd-test", 1 << 20).unwrap();
    let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
    assert_eq!(uffd.copy_run(range.start, &[7; 8192]).unwrap(), 8192);
    let word = &mapping.words(4096, 1).unwrap()[0];
    assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 0x0707_0707_0707_0707);
    // This must not fault: nobody would serve it.
    word.store(2, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(
        uffd.copy_run(range.start, &[8; 8192]).unwrap_err().raw_os_error(),
        Some(libc::EEXIST)
    );
    assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 2);
}

/// The kernel keeps a marker in place of the page.
#[test]
fn a_protected_page_that_is_forgotten_is_not_mapped() {
    let file = RamFile::create("marked", 2 * FRAME_BYTES).unwrap();
    let Some((uffd, mapping, range)) = over(&file, Watch::Write) else { return };
    mapping.populate(0, 2 * FRAME_BYTES).unwrap();
    let first = HvaRange { start: range.start, bytes: FRAME_BYTES };
    uffd.protect(first).unwrap();
    let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
    let mapped = || {
        let mut bytes = 0;
        pagemap.mapped(range, |part| bytes += part.bytes).map(|()| bytes)
    };
    match mapped() {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            return eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN");
        }
        all => assert_eq!(all.unwrap(), 2 * FRAME_BYTES),
    }
    mapping.forget(0, FRAME_BYTES).unwrap();
    assert_eq!(mapped().unwrap(), FRAME_BYTES);
}

#[test]
fn a_descriptor_of_another_kind_is_refused() {
    let file = RamFile::create("uffd-test", 4096).unwrap();
    let copy = file.as_fd().try_clone_to_owned().unwrap();
    let error = Uffd::taken(copy).err().unwrap();
    assert!(error.to_string().contains("memfd:uffd-test"), "{error}");
    let Ok(uffd) = Uffd::new() else { return eprintln!("SKIPPED: no userfaultfd here") };
    assert!(Uffd::taken(uffd.fd).is_ok());
}

#[test]
fn a_blocking_descriptor_is_read_without_waiting() {
    let file = RamFile::create("uffd-test", 1 << 20).unwrap();
    let Some((uffd, mapping, range)) = over(&file, Watch::MissingAndWrite) else { return };
    let flags = rustix::fs::fcntl_getfl(&uffd.fd).unwrap();
    let waits = flags - rustix::fs::OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&uffd.fd, waits).unwrap();
    let mut events = Events::new();
    assert_eq!(uffd.read(&mut events).unwrap().count(), 0);
    std::thread::scope(|scope| {
        let reader = scope
            .spawn(|| mapping.words(0, 1).unwrap()[0].load(std::sync::atomic::Ordering::Relaxed));
        assert_eq!(one_fault(&uffd).address, range.start);
        uffd.zero(HvaRange { bytes: 4096, ..range }, true).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn a_second_descriptor_is_refused() {
    let file = RamFile::create("uffd-test", 1 << 20).unwrap();
    let Some((_first, _mapping, range)) = over(&file, Watch::Write) else { return };
    let second = Uffd::new().unwrap();
    second.handshake(0).unwrap();
    let error = second.register(range, Watch::Write).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
}

#[test]
fn a_run_is_filled_as_long_as_pages_come() {
    let again = || Err(io::ErrorKind::WouldBlock.into());
    let all = fill_run(|done| if done < 3000 { (again(), 1) } else { (Ok(()), 0) });
    assert_eq!(all.unwrap(), 3000);
    let mut calls = 0;
    let error = fill_run(|_| {
        calls += 1;
        (again(), -1)
    });
    assert_eq!((error.unwrap_err().kind(), calls), (io::ErrorKind::WouldBlock, 1000));
}

#[test]
fn before_its_handshake_nothing_can_be_watched() {
    let Ok(uffd) = Uffd::new() else { return eprintln!("SKIPPED: no userfaultfd here") };
    let (own, number) = (Process::own().unwrap(), uffd.fd.as_raw_fd());
    assert!(!own.may_watch(number).unwrap());
    uffd.handshake(feature::needed()).unwrap();
    assert!(own.may_watch(number).unwrap());
}
