//! The events that are kept: so many of each type, so that many of one type push out no other. A
//! pilot can decide every second for every VM.

use std::collections::VecDeque;
use std::sync::Arc;

use ebb_api::{Event, EventType, VmName};

/// Events of each type that are kept. Each takes some hundred bytes, and six KiB at most.
pub const KEPT_OF_EACH_TYPE: usize = 512;

const TYPES: usize = EventType::ALL.len();

/// Which events a reader wants.
pub struct Filter {
    /// Of this VM; none: of all.
    vm: Option<VmName>,
    /// By type.
    types: [bool; TYPES],
}

impl Filter {
    /// Those of this VM and of these types; none: all.
    pub fn new(vm: Option<VmName>, types: &[EventType]) -> Filter {
        let mut wanted = [types.is_empty(); TYPES];
        types.iter().for_each(|kind| wanted[*kind as usize] = true);
        Filter { vm, types: wanted }
    }

    fn is_of_vm(&self, event: &Event) -> bool {
        self.vm.is_none() || self.vm == event.vm
    }
}

/// How far a reader has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// It has had the events up to this number, or does not want them.
    pub after: u64,
    /// It knows that events up to this number may be lost.
    pub told_lost: u64,
}

/// What comes next for a reader.
#[derive(Debug)]
pub enum Next {
    /// This event.
    Event(Arc<Event>),
    /// Events are lost behind the reader's place, up to this number at most.
    Lost(u64),
    /// Nothing yet.
    Nothing,
}

/// The events, by type.
pub struct Kept {
    next: u64,
    most_of_each: usize,
    parts: [Part; TYPES],
}

#[derive(Default)]
struct Part {
    events: VecDeque<Arc<Event>>,
    /// Number of the last one that was dropped, or that an earlier daemon may have had.
    dropped: u64,
}

impl Kept {
    /// Nothing yet. The first event gets this number.
    pub fn new(first: u64, most_of_each: usize) -> Kept {
        let dropped = first.saturating_sub(1);
        let parts = std::array::from_fn(|_| Part { events: VecDeque::new(), dropped });
        Kept { next: first, most_of_each, parts }
    }

    /// Adds an event, and drops the oldest of its type if there are too many. Returns its number.
    pub fn add(&mut self, make: impl FnOnce(u64) -> Event) -> u64 {
        let (number, event) = (self.next, Arc::new(make(self.next)));
        self.next = number.saturating_add(1);
        let part = &mut self.parts[event.kind as usize];
        if part.events.len() >= self.most_of_each
            && let Some(oldest) = part.events.pop_front()
        {
            part.dropped = oldest.number;
        }
        part.events.push_back(event);
        number
    }

    /// Number of the next event.
    #[cfg(test)]
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// The place of a reader that has had the events up to the number `since`; none: it has had
    /// nothing, and wants what there is.
    pub fn place(&self, since: Option<u64>) -> Place {
        let lost = self.parts.iter().map(|part| part.dropped).max().unwrap_or(0);
        match since {
            None => Place { after: 0, told_lost: lost },
            // The clock of the host was set back since that event.
            Some(since) if since >= self.next => Place { after: 0, told_lost: 0 },
            Some(since) => Place { after: since, told_lost: 0 },
        }
    }

    /// What comes next at this place, which moves on.
    pub fn next(&self, place: &mut Place, filter: &Filter) -> Next {
        let wanted = || self.parts.iter().zip(filter.types).filter(|(_, is_wanted)| *is_wanted);
        let lost = wanted().map(|(part, _)| part.dropped).max().unwrap_or(0);
        if lost > place.after.max(place.told_lost) {
            place.told_lost = lost;
            return Next::Lost(lost);
        }
        let next_of = |part: &Part| {
            let first = part.events.partition_point(|event| event.number <= place.after);
            part.events.range(first..).find(|event| filter.is_of_vm(event)).cloned()
        };
        let next = wanted().filter_map(|(part, _)| next_of(part)).min_by_key(|event| event.number);
        place.after = next.as_ref().map_or(self.next.saturating_sub(1), |event| event.number);
        next.map_or(Next::Nothing, Next::Event)
    }
}
