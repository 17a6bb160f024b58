//! Where a made-up guest has its memory.

use ebb_inspect::PageKind;
use ebb_reclaim::cost::Page;

use crate::guest::Random;

/// Frames in a MiB.
pub const MIB: usize = 256;

/// A layout in which frames that are used together lie in pieces, scattered over memory.
pub struct Layout {
    pub pages: Vec<Page>,
    order: Vec<usize>,
    used: usize,
}

impl Layout {
    /// Pieces of up to `most` frames.
    pub fn new(frames: usize, most: usize) -> Layout {
        let mut random = Random(0x1234_5678_9abc_def1);
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < frames {
            let count = (1 + random.below(most)).min(frames - at);
            pieces.push(at..at + count);
            at += count;
        }
        for index in (1..pieces.len()).rev() {
            pieces.swap(index, random.below(index + 1));
        }
        let order = pieces.into_iter().flatten().collect();
        Layout { pages: vec![Page::default(); frames], order, used: 0 }
    }

    /// Takes `count` frames that nobody has.
    pub fn take(&mut self, count: usize, kind: PageKind) -> Vec<usize> {
        let taken = self.order[self.used..self.used + count].to_vec();
        self.used += count;
        let page = Page { kind: Some(kind), has_disk: true, ..Page::default() };
        taken.iter().for_each(|&at| self.pages[at] = page);
        taken
    }
}
