//! Where a guest's RAM lies, from the memory tree that QEMU prints for `info mtree`.
//!
//! The flat view of `info mtree -f` would be easier to read. But QEMU (7.2, and by their source
//! later versions, too) takes a reference to a view for each address space that shows it, and gives
//! only one back. The view then stays for ever, with all RAM in it, so a memory device whose
//! backend is deleted later would keep its memory as long as QEMU lives.

use std::collections::{BTreeMap, HashMap, HashSet};

/// Most aliases in a row that lead to each other. Real boards have two.
const DEPTH_MAX: usize = 8;
/// Most lines to look at in all. A board has some hundred.
const LOOKS_MAX: usize = 1 << 20;
/// Most ranges of backends to find in all. A board has some dozen, and a virtio-mem device 256.
const PIECES_MAX: usize = 1 << 14;

/// A guest-physical run of one memory backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) backend: String,
    pub(crate) gpa: u64,
    /// Last address, inclusive.
    pub(crate) last: u64,
    /// An address in it where QEMU has memory now.
    pub(crate) mapped: u64,
}

/// A range of one backend without holes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece<'t> {
    backend: &'t str,
    gpa: u64,
    last: u64,
    /// Guest-physical address minus the offset in the backend.
    distance: u64,
}

/// A region in the tree. Its addresses are relative to the section that it is in.
struct Line<'t> {
    start: u64,
    last: u64,
    /// Its own name. For an alias, the name of the region that it shows.
    name: &'t str,
    /// For an alias, the offset from which on it shows that region.
    shows: Option<u64>,
}

type Sections<'t> = HashMap<&'t str, Vec<Line<'t>>>;

/// The ranges of these backends that the processors see. Ranges of one backend with the same
/// distance are joined: the holes between them are the legacy ROM windows below 1 MiB, which the
/// firmware turns into RAM as it boots.
pub(crate) fn segments(text: &str, backends: &[String]) -> Vec<Segment> {
    let mut joined = BTreeMap::new();
    for Piece { backend, gpa, last, distance } in pieces(text, backends).0 {
        let run = joined.entry((backend, distance)).or_insert((gpa, last));
        *run = (run.0.min(gpa), run.1.max(last));
    }
    let segment = |((backend, _), (gpa, last)): ((&str, u64), (u64, u64))| Segment {
        backend: backend.to_owned(),
        gpa,
        last,
        mapped: gpa,
    };
    joined.into_iter().map(segment).collect()
}

/// The ranges in which the processors see memory of some backends.
pub(crate) struct Mapped(HashMap<String, Vec<(u64, u64)>>);

impl Mapped {
    /// Reads the tree once for all of `backends`. `None` if the tree exceeds the bounds.
    pub(crate) fn new(text: &str, backends: &[String]) -> Option<Mapped> {
        let mut mapped: HashMap<String, Vec<_>> = HashMap::new();
        let (pieces, is_all) = pieces(text, backends);
        for Piece { backend, gpa, last, .. } in pieces {
            mapped.entry(backend.to_owned()).or_default().push((gpa, last));
        }
        is_all.then_some(Mapped(mapped))
    }

    /// The first address in a range that has memory of this backend.
    pub(crate) fn first(&self, backend: &str, (at, last): (u64, u64)) -> Option<u64> {
        let pieces = self.0.get(backend)?.iter();
        pieces.filter(|piece| piece.0 <= last && piece.1 >= at).map(|piece| piece.0.max(at)).min()
    }
}

/// All ranges of these backends that the processors see, and whether these are all.
fn pieces<'t>(text: &'t str, backends: &[String]) -> (Vec<Piece<'t>>, bool) {
    let (memory, regions) = sections(text);
    let backends = backends.iter().map(String::as_str).collect();
    let mut walk = Walk { regions, backends, pieces: Vec::new(), looks: LOOKS_MAX };
    walk.visit(&memory, (0, u64::MAX), 0, 0);
    (walk.pieces, walk.looks > 0)
}

/// The address space of the processors, and the regions that aliases show, by name.
fn sections(text: &str) -> (Vec<Line<'_>>, Sections<'_>) {
    let (mut memory, mut regions) = (Vec::new(), HashMap::new());
    // Identical address spaces stand one below the other, before their content.
    let (mut is_memory, mut region) = (false, None);
    let mut begun = false;
    for line in text.lines() {
        if !line.starts_with(' ') {
            if begun {
                (is_memory, region, begun) = (false, None, false);
            }
            is_memory |= line.trim_end() == "address-space: memory";
            region = line.strip_prefix("memory-region: ").map(str::trim_end).or(region);
            continue;
        }
        begun = true;
        let Some(line) = parse(line) else { continue };
        match region {
            _ if is_memory => memory.push(line),
            Some(name) => regions.entry(name).or_insert_with(Vec::new).push(line),
            None => {}
        }
    }
    (memory, regions)
}

/// Parses one line of a tree: `0000000100000000-000000013fffffff (prio 0, ram): alias above-4g @r0
/// 0000000080000000-00000000bfffffff`
fn parse(line: &str) -> Option<Line<'_>> {
    let (range, rest) = line.trim().split_once(" (prio ")?;
    let (_, what) = rest.split_once("): ")?;
    let (start, last) = parse_range(range)?;
    if what.ends_with("[disabled]") {
        return None;
    }
    match what.strip_prefix("alias ") {
        Some(alias) => {
            let (_, shown) = alias.rsplit_once(" @")?;
            let (name, range) = shown.rsplit_once(' ')?;
            Some(Line { start, last, name, shows: Some(parse_range(range)?.0) })
        }
        None => Some(Line { start, last, name: what, shows: None }),
    }
}

fn parse_range(text: &str) -> Option<(u64, u64)> {
    let (start, last) = text.split_once('-')?;
    let (start, last) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
    (last >= start).then_some((start, last))
}

struct Walk<'t, 'b> {
    regions: Sections<'t>,
    backends: HashSet<&'b str>,
    pieces: Vec<Piece<'t>>,
    looks: usize,
}

impl<'t> Walk<'t, '_> {
    /// Collects the pieces of these lines that lie in a window, which begins at guest-physical
    /// address `gpa`.
    fn visit(&mut self, lines: &[Line<'t>], (from, to): (u64, u64), gpa: u64, depth: usize) {
        for line in lines {
            let Some(left) = self.looks.checked_sub(1) else { return };
            self.looks = left;
            let (start, last) = (line.start.max(from), line.last.min(to));
            if start > last {
                continue;
            }
            let into = line.shows.unwrap_or(0).checked_add(start - line.start);
            let at = gpa.checked_add(start - from);
            let (Some(into), Some(at)) = (into, at) else { continue };
            let (Some(end), Some(shown)) =
                (at.checked_add(last - start), into.checked_add(last - start))
            else {
                continue;
            };
            if self.backends.contains(line.name) {
                if self.pieces.len() == PIECES_MAX {
                    self.looks = 0;
                    return;
                }
                let distance = at.wrapping_sub(into);
                self.pieces.push(Piece { backend: line.name, gpa: at, last: end, distance });
            } else if line.shows.is_some()
                && depth < DEPTH_MAX
                && let Some((name, lines)) = self.regions.remove_entry(line.name)
            {
                // Removed while it is visited: a region that shows itself is not found again.
                self.visit(&lines, (into, shown), at, depth + 1);
                self.regions.insert(name, lines);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What QEMU 7.2 prints, shortened.
    const PLAIN: &str = "address-space: mch
  0000000000000000-ffffffffffffffff (prio 0, i/o): bus master container

address-space: cpu-memory-0
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000007fffffff (prio 0, ram): alias ram-below-4g @r0 0000000000000000-000000007fffffff
    0000000000000000-ffffffffffffffff (prio -1, i/o): pci
      00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
      00000000000e0000-00000000000fffff (prio 1, rom): alias isa-bios @pc.bios 0000000000020000-000000000003ffff
    00000000000a0000-00000000000bffff (prio 1, i/o): alias smram-region @pci 00000000000a0000-00000000000bffff
    00000000000c0000-00000000000c3fff (prio 1, ram): alias pam-ram @r0 00000000000c0000-00000000000c3fff
    00000000000f0000-00000000000fffff (prio 1, ram): alias pam-rom @r0 00000000000f0000-00000000000fffff [disabled]
    0000000100000000-000000013fffffff (prio 0, ram): alias ram-above-4g @r0 0000000080000000-00000000bfffffff
    0000000140000000-00000009ffffffff (prio 0, i/o): device-memory
      0000000140000000-00000001bfffffff (prio 0, ram): r1

address-space: I/O
  0000000000000000-000000000000ffff (prio 0, i/o): io

memory-region: pci
  0000000000000000-ffffffffffffffff (prio -1, i/o): pci

memory-region: r0
  0000000000000000-00000000bfffffff (prio 0, ram): r0
";

    /// Two nodes with a backend each: the board's RAM is a container of them.
    const NODES: &str = "address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, container): system
    0000000000000000-000000007fffffff (prio 0, ram): alias ram-below-4g @pc.ram 0000000000000000-000000007fffffff
    0000000100000000-000000017fffffff (prio 0, ram): alias ram-above-4g @pc.ram 0000000080000000-00000000ffffffff

memory-region: pc.ram
  0000000000000000-00000000ffffffff (prio 0, container): pc.ram
    0000000000000000-000000005fffffff (prio 0, ram): r0
    0000000060000000-00000000ffffffff (prio 0, ram): r1
";

    fn found(text: &str) -> Vec<Segment> {
        segments(text, &["r0".into(), "r1".into()])
    }

    fn segment(backend: &str, gpa: u64, last: u64) -> Segment {
        Segment { backend: backend.into(), gpa, last, mapped: gpa }
    }

    #[test]
    fn reads_the_processors_view_and_joins_around_rom() {
        let expected = [
            segment("r0", 0, 0x7fff_ffff),
            segment("r0", 0x1_0000_0000, 0x1_3fff_ffff),
            segment("r1", 0x1_4000_0000, 0x1_bfff_ffff),
        ];
        assert_eq!(found(PLAIN), expected);
        assert_eq!(segments(PLAIN, &["r1".into()]), expected[2..]);
    }

    #[test]
    fn aliases_are_followed_into_containers() {
        let expected = [
            segment("r0", 0, 0x5fff_ffff),
            segment("r1", 0x6000_0000, 0x7fff_ffff),
            segment("r1", 0x1_0000_0000, 0x1_7fff_ffff),
        ];
        assert_eq!(found(NODES), expected);
    }

    /// A virtio-mem device with `dynamic-memslots=on`, of which the guest has plugged 300 MiB, as
    /// QEMU 11.1 prints it, shortened.
    pub(crate) const SLOTS: &str = "address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000001fffffff (prio 0, ram): alias ram-below-4g @ram 0000000000000000-000000001fffffff
    0000000100000000-00000001dfffffff (prio 0, i/o): device-memory
      0000000100000000-000000017fffffff (prio 0, i/o): virtio-mem
        0000000100000000-000000013fffffff (prio 0, ram): alias memslot-0 @more 0000000000000000-000000003fffffff

memory-region: more
  0000000000000000-000000007fffffff (prio 0, ram): more
";

    #[test]
    fn a_part_of_a_device_is_mapped() {
        let found = segments(SLOTS, &["more".into()]);
        assert_eq!(found, [segment("more", 0x1_0000_0000, 0x1_3fff_ffff)]);
        let mapped = Mapped::new(SLOTS, &["more".into(), "ram".into()]).unwrap();
        let first = |backend, at, last| mapped.first(backend, (at, last));
        assert_eq!(first("more", 0xf000_0000, 0x1_7fff_ffff), Some(0x1_0000_0000));
        assert_eq!(first("more", 0x1_3000_0000, 0x1_7fff_ffff), Some(0x1_3000_0000));
        assert_eq!(first("more", 0x1_4000_0000, 0x1_7fff_ffff), None);
        assert_eq!(first("less", 0, u64::MAX), None);
        assert_eq!(first("ram", 0x1000, u64::MAX), Some(0x1000));
    }

    /// An answer in which everything is a backend, and is shown again and again.
    #[test]
    fn an_answer_without_end_ends() {
        let names: Vec<String> = (0..20_000).map(|at| format!("r{at}")).collect();
        let lines = |line: &dyn Fn(usize) -> String| (0..20_000).map(line).collect::<String>();
        let all = lines(&|at| format!("  {at:x}000-{at:x}fff (prio 0, ram): r{at}\n"));
        let aliases = lines(&|_| "  0-ffffffff (prio 0, ram): alias a @all 0-ffffffff\n".into());
        let text = format!("address-space: memory\n{aliases}\nmemory-region: all\n{all}");
        assert_eq!(pieces(&text, &names).0.len(), PIECES_MAX);
        assert!(Mapped::new(&text, &names).is_none());
        let none = ["none".to_owned()];
        assert_eq!(segments(&text, &none), []);
    }

    #[test]
    fn nonsense_gives_nothing_and_ends() {
        assert_eq!(found(""), []);
        assert_eq!(found("address-space: memory\n  zz-yy (prio 0, ram): r0"), []);
        assert_eq!(found("memory-region: r0\n  00-ff (prio 0, ram): r0"), []);
        let turns = "address-space: memory\n  00-ff (prio 0, ram): alias a @b 00-ff\n\
                     memory-region: b\n  00-ff (prio 0, ram): alias b @b 00-ff\n  \
                     00-0f (prio 0, ram): r0\n";
        assert_eq!(found(turns), [segment("r0", 0, 15)]);
        let far = "address-space: memory\n  ff-ffffffffffffffff (prio 0, ram): \
                   alias a @r0 ffffffffffffff00-ffffffffffffffff\n";
        assert_eq!(found(far), []);
    }
}
