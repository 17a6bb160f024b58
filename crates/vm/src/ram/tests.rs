//! Tests of RAM over files of this process.

use ebb_sys::ram_file::RamFile;

use super::*;

fn two_regions() -> Ram {
    let file = RamFile::create("ram-test", 4 << 20).unwrap();
    let mapping = Mapping::new(&file, 0, 4 << 20).unwrap();
    let region =
        |gpa, hva, offset| Region { gpa: Gpa(gpa), bytes: 2 << 20, hva: Hva(hva), file: 0, offset };
    let regions = vec![region(4 << 30, 0x9000_0000, 2 << 20), region(0, 0x7000_0000, 0)];
    Ram::new(regions, vec![Backing::new(file, mapping)]).unwrap()
}

#[test]
fn translates_both_ways_and_not_beyond() {
    let ram = two_regions();
    assert_eq!(ram.bytes(), 4 << 20);
    assert_eq!(ram.place(Gpa((4 << 30) + 8)).unwrap().hva, Hva(0x9000_0008));
    assert_eq!(ram.gpa(Hva(0x7000_1000)), Some(Gpa(0x1000)));
    assert_eq!(ram.gpa(Hva(0x7020_0000)), None);
    assert_eq!(ram.place(Gpa(2 << 20)), None);
    assert_eq!(ram.place(Gpa(u64::MAX)), None);
    assert_eq!(ram.range(FrameRange::new(Gfn(511), 2)), None);
}

#[test]
fn populates_and_punches() {
    let puncher = Puncher::new(two_regions());
    let ram = puncher.ram();
    let frames = FrameRange::new(Gfn(1 << 20), 2);
    ram.populate(frames).unwrap();
    assert_eq!(ram.next_populated(Gpa(0)), Some((Gpa(4 << 30), 8192)));
    assert_eq!(ram.word(Gpa(4 << 30)), Some(0));
    assert!(ram.is_full(frames).unwrap());
    assert!(!ram.is_full(FrameRange::new(Gfn(1 << 20), 3)).unwrap());
    puncher.punch(frames).unwrap();
    assert!(ram.is_hole(frames).unwrap());
    assert_eq!(ram.next_populated(Gpa(0)), None);
}

#[test]
fn memory_that_has_left_is_no_ram() {
    let backing = |name| {
        let file = RamFile::create(name, 2 << 20).unwrap();
        let mapping = Mapping::new(&file, 0, 2 << 20).unwrap();
        Backing::new(file, mapping)
    };
    let region =
        |gpa, hva, file| Region { gpa: Gpa(gpa), bytes: 2 << 20, hva: Hva(hva), file, offset: 0 };
    let regions = vec![region(0, 0x7000_0000, 0), region(4 << 30, 0x9000_0000, 1)];
    let puncher = Puncher::new(Ram::new(regions, vec![backing("stays"), backing("goes")]).unwrap());
    let ram = puncher.ram();
    let (end, frames) = (ram.end(), FrameRange::new(Gfn(1 << 20), 2));
    ram.populate(frames).unwrap();
    ram.set_unplugged(1);
    assert_eq!((ram.place(Gpa(4 << 30)), ram.gpa(Hva(0x9000_0000))), (None, None));
    assert_eq!((ram.clip(frames), ram.here(frames.start)), (None, None));
    assert!(puncher.punch(frames).is_err() && ram.is_hole(frames).is_err());
    assert_eq!((ram.bytes(), ram.first_bytes(), ram.end()), (2 << 20, 4 << 20, end));
    assert_eq!((ram.regions().count(), ram.regions_in(1).count()), (1, 1));
    assert_eq!((ram.next_populated(Gpa(0)), ram.resident_bytes().unwrap()), (None, 0));
    assert!(ram.place(Gpa(0)).is_some() && ram.place(Gpa(4096)).is_some());
}

#[test]
fn a_layout_that_overlaps_is_refused() {
    let file = RamFile::create("ram-test", 4 << 20).unwrap();
    let mapping = Mapping::new(&file, 0, 4 << 20).unwrap();
    let region = Region { gpa: Gpa(0), bytes: 2 << 20, hva: Hva(0), file: 0, offset: 0 };
    let again = Region { gpa: Gpa(1 << 20), ..region };
    assert!(Ram::new(vec![region, again], vec![Backing::new(file, mapping)]).is_err());
}
