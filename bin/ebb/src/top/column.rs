//! The columns of the table of VMs.

use ebb_api::TopVm;

use super::number::{count, size};
use super::trouble::{self, Trouble};

/// A column. The parts of the memory stand between the limit and the size, and add up to the size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Column {
    Name,
    Limit,
    InUse,
    Free,
    Empty,
    Compressed,
    Swapped,
    DiskBacked,
    Size,
    Refaults,
    Faults,
    Class,
    Hold,
    Bar,
    Note,
}

/// By what VMs are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sort {
    /// None: who is in trouble comes first.
    pub by: Option<Column>,
    pub is_reversed: bool,
}

/// Columns of numbers have this width, and a blank before it.
const NUMBER: u16 = 6;
/// With the mark of a VM in trouble, and a blank behind it.
const NAME_LEAST: u16 = 8;
const NAME_MOST: u16 = 24;

impl Column {
    /// All of them, from left to right.
    pub const ALL: [Column; 15] = [
        Column::Name,
        Column::Limit,
        Column::InUse,
        Column::Free,
        Column::Empty,
        Column::Compressed,
        Column::Swapped,
        Column::DiskBacked,
        Column::Size,
        Column::Refaults,
        Column::Faults,
        Column::Class,
        Column::Hold,
        Column::Bar,
        Column::Note,
    ];

    /// The order in which narrow terminals get them. The bar is worth more than half of a note.
    const IN_NEED: [Column; 15] = [
        Column::Name,
        Column::InUse,
        Column::Size,
        Column::Limit,
        Column::Free,
        Column::Empty,
        Column::Compressed,
        Column::Swapped,
        Column::DiskBacked,
        Column::Refaults,
        Column::Faults,
        Column::Class,
        Column::Hold,
        Column::Note,
        Column::Bar,
    ];

    /// The heading.
    pub fn heading(self) -> &'static str {
        match self {
            Column::Name => "NAME",
            // With room for the mark of a limit by the pilot.
            Column::Limit => "LIMIT ",
            Column::InUse => "IN USE",
            Column::Free => "FREE",
            Column::Empty => "EMPTY",
            Column::Compressed => "COMPR",
            Column::Swapped => "SWAP",
            Column::DiskBacked => "DISK",
            Column::Size => "SIZE",
            Column::Refaults => "BACK/s",
            Column::Faults => "FAULTS/s",
            Column::Class => "CLASS",
            Column::Hold => "HOLD",
            Column::Bar => "WHERE ITS MEMORY IS",
            Column::Note => "NOTE",
        }
    }

    /// What the heading means.
    pub fn meaning(self) -> &'static str {
        match self {
            Column::Name => "! waits or is not served, ~ is slow or misses memory",
            Column::Limit => {
                "most that in use, free, and the compressed pages take; * by the pilot"
            }
            Column::InUse => "resident, and not free in the guest",
            Column::Free => "resident, and free in the guest",
            Column::Empty => "reclaimed, in the balloon, never used or zero: takes nothing",
            Column::Compressed => "evicted to compressed memory",
            Column::Swapped => "evicted to the swap file",
            Column::DiskBacked => "evicted, because a disk of the guest has the same content",
            Column::Size => "all of its memory: the sum of the six columns before",
            Column::Refaults => "evicted memory that came back within 30 s, in a second",
            Column::Faults => "faults that Ebb served, in a second",
            Column::Class => "how much its speed matters to the pilot",
            Column::Hold => "whether the pilot leaves it as it is",
            Column::Bar => "the same parts as a picture",
            Column::Note => "what is wrong, or worth knowing",
        }
    }

    /// Whether its text stands at the left.
    pub fn is_text(self) -> bool {
        matches!(self, Column::Name | Column::Class | Column::Hold | Column::Bar | Column::Note)
    }

    /// Whether VMs can be sorted by it.
    pub fn sorts(self) -> bool {
        !matches!(self, Column::Bar | Column::Note)
    }

    /// The least width that it is of use with.
    fn width(self) -> u16 {
        match self {
            Column::Name => NAME_LEAST,
            Column::Faults => 8,
            Column::Class => 7,
            Column::Hold => 4,
            Column::Bar => 24,
            Column::Note => 20,
            _ => NUMBER,
        }
    }

    /// The width that it takes beside these.
    fn needed(self, chosen: &[Column]) -> u16 {
        self.width() + u16::from(!chosen.is_empty())
    }

    /// The figure of a VM in this column; none: it is not known, or there is no such figure.
    fn figure(self, vm: &TopVm) -> Option<u64> {
        match self {
            Column::Limit => vm.limit_bytes,
            Column::InUse => Some(vm.parts?.in_use_bytes),
            Column::Free => vm.parts?.free_bytes,
            Column::Empty => Some(vm.parts?.empty_bytes),
            Column::Compressed => Some(vm.parts?.compressed_bytes),
            Column::Swapped => Some(vm.parts?.swapped_bytes),
            Column::DiskBacked => Some(vm.parts?.disk_backed_bytes),
            Column::Size => Some(vm.memory_bytes),
            Column::Refaults => vm.refaulted_bytes_per_s,
            Column::Faults => vm.faults_per_s,
            Column::Class => Some(vm.class as u64),
            Column::Hold => Some(u64::from(vm.hold)),
            Column::Name | Column::Bar | Column::Note => None,
        }
    }

    /// The text of a VM in this column. The bar is drawn otherwise.
    pub fn cell(self, vm: &TopVm) -> String {
        let figure = self.figure(vm);
        match self {
            Column::Name => format!("{} {}", mark(vm), vm.name),
            Column::Limit => {
                let by = if vm.limit_by_pilot { "*" } else { " " };
                figure.map_or("- ".into(), |bytes| size(bytes) + by)
            }
            Column::Faults => figure.map_or("?".into(), count),
            Column::Class => vm.class.to_string(),
            Column::Hold => if vm.hold { "held" } else { "" }.into(),
            Column::Bar => String::new(),
            Column::Note => trouble::of(vm).1,
            _ => figure.map_or("?".into(), size),
        }
    }

    /// The sum of VMs in this column; none: it makes no sense.
    pub fn sum(self, vms: &[&TopVm]) -> Option<String> {
        let text = match self {
            Column::Limit | Column::Class | Column::Hold => return None,
            Column::Name | Column::Bar | Column::Note => return None,
            Column::Faults => count,
            _ => size,
        };
        let figures = vms.iter().filter_map(|vm| self.figure(vm));
        Some(text(figures.fold(0, u64::saturating_add)))
    }
}

impl Sort {
    /// Sorts VMs. Those that are equal stand in the order of their names.
    pub fn apply(self, vms: &mut [&TopVm]) {
        vms.sort_by(|a, b| {
            let order = match self.by {
                None => trouble::of(b).0.cmp(&trouble::of(a).0),
                // The one with more comes first.
                Some(column) => column.figure(b).cmp(&column.figure(a)),
            };
            let order = order.then_with(|| a.name.cmp(&b.name));
            if self.is_reversed { order.reverse() } else { order }
        });
    }

    /// The same by the next column, or by the one before.
    pub fn turned(self, forward: bool) -> Sort {
        let all: Vec<Option<Column>> = std::iter::once(None)
            .chain(Column::ALL.into_iter().filter(|column| column.sorts()).map(Some))
            .collect();
        let at = all.iter().position(|by| *by == self.by).unwrap_or(0);
        let step = if forward { 1 } else { all.len() - 1 };
        let by = all.get((at + step) % all.len()).copied().flatten();
        Sort { by, is_reversed: false }
    }

    /// In words.
    pub fn words(self) -> String {
        let by = self.by.map_or("trouble", Column::heading).to_lowercase();
        format!("by {by}{}", if self.is_reversed { ", reversed" } else { "" })
    }
}

/// The columns that fit into a width, from left to right, with their widths. Before each but the
/// first is a blank.
pub fn fitting(width: u16, longest_name: u16) -> Vec<(Column, u16)> {
    let (mut left, mut chosen, mut name_more) = (width, Vec::new(), 0);
    for column in Column::IN_NEED {
        // Names come before what is only of interest.
        if column == Column::Faults || column.needed(&chosen) > left {
            let wanted = longest_name.clamp(NAME_LEAST, NAME_MOST) - NAME_LEAST;
            let more = (wanted - name_more).min(left);
            (name_more, left) = (name_more + more, left - more);
        }
        if column.needed(&chosen) > left {
            break;
        }
        left -= column.needed(&chosen);
        chosen.push(column);
    }
    let note_more = if chosen.contains(&Column::Note) { left } else { 0 };
    let widened = |column: Column| {
        column.width()
            + match column {
                Column::Name => name_more,
                Column::Note => note_more,
                _ => 0,
            }
    };
    let fits = |column: &Column| chosen.contains(column);
    Column::ALL.into_iter().filter(fits).map(|column| (column, widened(column))).collect()
}

/// Whether a VM is in trouble, as a mark before its name.
fn mark(vm: &TopVm) -> &'static str {
    match trouble::of(vm).0 {
        Trouble::None => " ",
        Trouble::Slow => "~",
        Trouble::Waits => "!",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::vm;

    #[test]
    fn narrow_terminals_get_the_columns_that_matter_most() {
        let headings = |width| {
            let all = fitting(width, 8);
            let used: u16 = all.iter().map(|(_, width)| width + 1).sum();
            assert!(used <= width + 1, "{width}: {used}");
            all.into_iter().map(|(column, _)| column).collect::<Vec<_>>()
        };
        assert_eq!(headings(0), []);
        assert_eq!(headings(16), [Column::Name, Column::InUse]);
        let sums = headings(71);
        assert!(sums.ends_with(&[Column::DiskBacked, Column::Size, Column::Refaults]), "{sums:?}");
        assert_eq!(headings(400), Column::ALL);
    }

    #[test]
    fn a_long_name_takes_room_that_is_left() {
        let name = |width, longest| fitting(width, longest)[0].1;
        assert_eq!(name(64 + 7, 20), 8, "all sums come first");
        assert_eq!(name(64 + 7 + 5, 20), 13);
        assert_eq!(name(400, 64), NAME_MOST);
    }

    #[test]
    fn sorting_goes_through_all_columns_and_back() {
        let first = Sort { by: None, is_reversed: false };
        let mut sort = first;
        let mut seen = Vec::new();
        loop {
            sort = sort.turned(true);
            assert_eq!(sort.turned(false).turned(true), sort);
            if sort == first {
                break;
            }
            seen.push(sort.by);
        }
        assert_eq!(seen.len(), Column::ALL.into_iter().filter(|column| column.sorts()).count());
    }

    #[test]
    fn the_one_in_trouble_comes_first_and_names_decide() {
        let (a, b, mut c) = (vm("a"), vm("b"), vm("c"));
        c.waits = true;
        let names = |sort: Sort| {
            let mut all = [&b, &c, &a];
            sort.apply(&mut all);
            all.map(|vm| vm.name.to_string()).concat()
        };
        assert_eq!(names(Sort { by: None, is_reversed: false }), "cab");
        assert_eq!(names(Sort { by: Some(Column::Size), is_reversed: false }), "abc");
        assert_eq!(names(Sort { by: Some(Column::Name), is_reversed: true }), "cba");
    }
}
