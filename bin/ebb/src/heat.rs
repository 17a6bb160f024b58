//! Shows which memory is hot, as a map in the terminal or as SVG.

use std::fmt::Write;

use ebb_api::{HeatFigures, HeatRegion, HeatTracker, VmName};
use ebb_units::Bytes;

use crate::interval::readable;
use crate::show::{row, with_percent};

/// Cells in a line of a map.
const COLUMNS: usize = 64;
/// Most lines of a map, unless there are more regions than that.
const LINES_MAX: usize = 24;
/// Characters from unused to hottest, for text.
const SHADES: [char; 6] = ['·', '░', '▒', '▒', '▓', '█'];
/// Numbers of a terminal's 256 colours, from unused to hottest.
const COLOURS: [u8; 6] = [240, 25, 37, 142, 208, 196];
/// Colours from unused to hottest, for an SVG.
const FILLS: [&str; 6] = ["#eceff1", "#90caf9", "#26a69a", "#d4e157", "#ffa726", "#e53935"];
/// Side of a cell in an SVG, in pixels.
const CELL: usize = 12;
const LEFT: usize = 110;
const TOP: usize = 64;

/// A line of a map: the mean degrees of its cells, from address `start` on.
struct Line {
    start: u64,
    degrees: Vec<f64>,
}

/// Lines of cells, each cell with `cell_bytes` of memory.
struct Map {
    cell_bytes: u64,
    lines: Vec<Line>,
}

impl Map {
    fn new(figures: &HeatFigures) -> Map {
        let lines = |blocks: usize| -> usize {
            let each = figures.regions.iter();
            each.map(|region| region.blocks.len().div_ceil(blocks * COLUMNS)).sum()
        };
        let fits = |blocks: &usize| lines(*blocks) <= LINES_MAX.max(figures.regions.len());
        // Larger cells save no line once each region fits into one.
        let blocks = (0..32).map(|shift| 1 << shift).find(fits).unwrap_or(1);
        let cell_bytes = figures.block_bytes.saturating_mul(blocks as u64);
        let each = figures.regions.iter();
        let lines = each.flat_map(|region| lines_of(region, blocks, cell_bytes)).collect();
        Map { cell_bytes, lines }
    }
}

fn lines_of(region: &HeatRegion, blocks: usize, cell_bytes: u64) -> Vec<Line> {
    let mean = |part: &[ebb_api::HeatBlock]| {
        part.iter().map(|block| block.degree).sum::<f64>() / part.len() as f64
    };
    let cells: Vec<f64> = region.blocks.chunks(blocks).map(mean).collect();
    let starts = (0..).map(|line| region.start + line * COLUMNS as u64 * cell_bytes);
    let lines = cells.chunks(COLUMNS).zip(starts);
    lines.map(|(cells, start)| Line { start, degrees: cells.to_vec() }).collect()
}

/// Returns the index of a shade. Only what was not used at all has the first.
fn shade(degree: f64, most: u64) -> usize {
    let last = SHADES.len() - 1;
    match degree > 0.0 {
        true => ((degree * last as f64 / most.max(1) as f64).ceil() as usize).clamp(1, last),
        false => 0,
    }
}

/// Returns the figures as text with the map, in colour if `colour`.
pub fn text(name: &VmName, figures: &HeatFigures, colour: bool) -> String {
    let map = Map::new(figures);
    let mut text = summary(name, figures);
    let cell = Bytes(map.cell_bytes);
    let _ = writeln!(
        text,
        "\nguest-physical memory, {cell} a character: · not used, and from cold to hot ░ ▒ ▓ █"
    );
    for line in &map.lines {
        let _ = write!(text, "  {:#013x} ", line.start);
        for &degree in &line.degrees {
            let shade = shade(degree, figures.degree_max);
            let _ = match colour {
                true => write!(text, "\x1b[38;5;{}m{}", COLOURS[shade], SHADES[shade]),
                false => write!(text, "{}", SHADES[shade]),
            };
        }
        text.push_str(if colour { "\x1b[0m\n" } else { "\n" });
    }
    text
}

fn summary(name: &VmName, figures: &HeatFigures) -> String {
    let took = readable(figures.duration_ms.saturating_mul(1_000_000));
    let by = match figures.tracker {
        HeatTracker::GuestTables => "the guest's page tables",
        HeatTracker::VmmTable => "QEMU's page table",
        HeatTracker::IdlePages => "the host's idle page tracking",
    };
    let cost = format!(
        "{} in all; {} page tables read, {} left out, {} marks cleared{}",
        readable(figures.looking_us.saturating_mul(1000)),
        figures.tables_read,
        figures.tables_pruned,
        figures.marks_cleared,
        if figures.is_truncated { "; the guest has more tables than were looked at" } else { "" }
    );
    let weights = format!("read {}, written {}", figures.read_weight, figures.write_weight);
    [
        format!("{name}: {} windows in {took}, {} s ago\n", figures.windows, figures.age_s),
        row("memory", Bytes(figures.memory_bytes)),
        row("used", with_percent(figures.used_bytes, figures.memory_bytes)),
        row("hot set", with_percent(figures.hot_bytes, figures.memory_bytes)),
        row("degrees", degrees(figures)),
        row("weights", weights),
        row("seen by", format!("{by}: {}", figures.tracker_reason)),
        row("host needs", &figures.host_needs),
        row("looking took", cost),
    ]
    .concat()
}

fn degrees(figures: &HeatFigures) -> String {
    if figures.degrees.is_empty() {
        return "nothing was used".into();
    }
    let each = figures.degrees.iter();
    let texts = each.map(|found| format!("{}: {}", found.degree, Bytes(found.bytes)));
    texts.collect::<Vec<_>>().join(", ")
}

/// Returns the map as an SVG.
pub fn svg(name: &VmName, figures: &HeatFigures) -> String {
    let map = Map::new(figures);
    let (width, height) = (LEFT + COLUMNS * CELL + 20, TOP + map.lines.len() * CELL + 60);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"20\" y=\"24\" font-size=\"16\">{name}: {} used, hot set {}</text>\n\
         <text x=\"20\" y=\"46\">guest-physical memory, {} a square; {} windows</text>\n",
        Bytes(figures.used_bytes),
        Bytes(figures.hot_bytes),
        Bytes(map.cell_bytes),
        figures.windows,
    );
    for (index, line) in map.lines.iter().enumerate() {
        let y = TOP + index * CELL;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" font-family=\"monospace\" \
             font-size=\"10\">{:#x}</text>",
            LEFT - 8,
            y + CELL - 3,
            line.start
        );
        for (column, &degree) in line.degrees.iter().enumerate() {
            let address = line.start + column as u64 * map.cell_bytes;
            let _ = writeln!(
                svg,
                "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>{address:#x}: \
                 degree {degree:.2}</title></rect>",
                LEFT + column * CELL,
                CELL - 1,
                CELL - 1,
                FILLS[shade(degree, figures.degree_max)]
            );
        }
    }
    svg + &legend(figures, TOP + map.lines.len() * CELL + 24) + "</svg>\n"
}

fn legend(figures: &HeatFigures, y: usize) -> String {
    let mut legend = String::new();
    for (index, fill) in FILLS.iter().enumerate() {
        let (x, last) = (LEFT + index * 110, (FILLS.len() - 1) as f64);
        let upto = figures.degree_max as f64 * index as f64 / last;
        let text = if index == 0 { "not used".into() } else { format!("degree to {upto:.1}") };
        let _ = writeln!(
            legend,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{CELL}\" height=\"{CELL}\" fill=\"{fill}\"/>\n\
             <text x=\"{}\" y=\"{}\">{text}</text>",
            x + CELL + 4,
            y + CELL - 2
        );
    }
    legend
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_api::{DegreeBytes, HeatBlock};

    fn figures(blocks: &[usize]) -> HeatFigures {
        let block =
            |index: usize| HeatBlock { degree: (index % 9) as f64, used_bytes: 4096, hot_bytes: 0 };
        let region = |(index, &count): (usize, &usize)| HeatRegion {
            start: (index as u64) << 32,
            blocks: (0..count).map(block).collect(),
        };
        HeatFigures {
            age_s: 3,
            windows: 8,
            duration_ms: 5000,
            tracker: HeatTracker::GuestTables,
            tracker_reason: "it is known".into(),
            host_needs: "nothing".into(),
            read_weight: 1,
            write_weight: 1,
            degree_max: 8,
            memory_bytes: 1 << 30,
            used_bytes: 1 << 20,
            hot_bytes: 1 << 19,
            looking_us: 1500,
            tables_read: 9,
            tables_pruned: 4,
            marks_cleared: 77,
            is_truncated: false,
            degrees: vec![DegreeBytes { degree: 8, bytes: 1 << 20 }],
            block_bytes: 2 << 20,
            regions: blocks.iter().enumerate().map(region).collect(),
        }
    }

    #[test]
    fn the_hottest_has_the_darkest_shade() {
        let shades: Vec<usize> =
            [0.0, 0.01, 1.6, 1.7, 4.0, 8.0, 9.0].map(|degree| shade(degree, 8)).into();
        assert_eq!(shades, [0, 1, 1, 2, 3, 5, 5]);
        assert_eq!(shade(1.0, 0), 5);
    }

    #[test]
    fn a_map_has_a_line_for_each_piece_of_memory() {
        let name: VmName = "web".parse().unwrap();
        let plain = text(&name, &figures(&[65, 3]), false);
        let lines: Vec<&str> = plain.lines().filter(|line| line.starts_with("  0x")).collect();
        assert_eq!(lines.len(), 3, "{plain}");
        assert!(lines[0].starts_with("  0x00000000000 ·░▒▒▒▓▓██·") || lines[0].contains("·░"));
        assert!(
            lines[1].starts_with("  0x00008000000 ") && lines[2].starts_with("  0x00100000000 ")
        );
        assert_eq!((lines[1].chars().count(), lines[2].chars().count()), (17, 19));
        assert!(!plain.contains('\x1b'), "{plain}");
        assert!(text(&name, &figures(&[65]), true).contains("\x1b[38;5;196m█"));
    }

    #[test]
    fn a_large_vm_fits_on_a_screen() {
        let map = Map::new(&figures(&[4096, 10]));
        assert!(map.lines.len() <= LINES_MAX, "{}", map.lines.len());
        assert_eq!(map.cell_bytes, 8 << 20);
        assert_eq!(Map::new(&figures(&[])).lines.len(), 0);
    }

    #[test]
    fn a_picture_has_a_square_for_each_block() {
        let svg = svg(&"web".parse().unwrap(), &figures(&[70]));
        assert_eq!(svg.matches("<title>").count(), 70);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("0x8000000: degree 1.00"), "{svg}");
    }
}
