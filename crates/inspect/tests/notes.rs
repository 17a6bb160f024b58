//! The notes of Debian's cloud kernels, as they were in guests' memory.

use ebb_inspect::{Note, PageLayout};
use ebb_units::Gpa;

#[test]
fn stock_kernels_notes_are_understood() {
    for (version, text) in [
        ((5, 10), &include_bytes!("notes/5.10.txt")[..]),
        ((6, 1), include_bytes!("notes/6.1.txt")),
        ((6, 12), include_bytes!("notes/6.12.txt")),
        ((6, 18), include_bytes!("notes/6.18.txt")),
        ((7, 2), include_bytes!("notes/7.2.txt")),
        ((7, 3), include_bytes!("notes/7.3.txt")),
    ] {
        let note = Note::parse(Gpa(0), text.to_vec()).expect("a note");
        assert_eq!(note.version(), version);
        assert_eq!(PageLayout::new(&note).map(|layout| layout.max_order()), Ok(10), "{version:?}");
    }
}

#[test]
fn a_note_that_ends_early_is_refused() {
    let text = include_bytes!("notes/6.1.txt");
    let end = text.windows(5).position(|at| at == b"page)").expect("SIZE(page)");
    let note = Note::parse(Gpa(0), text[..end].to_vec()).expect("a note");
    assert!(PageLayout::new(&note).is_err());
}
