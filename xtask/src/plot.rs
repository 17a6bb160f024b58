//! Draws panels of curves, one above the other, as SVG.

use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::chart::ChartContext;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH: u32 = 1000;
const TITLE_HEIGHT: u32 = 56;
const LEGEND_HEIGHT: u32 = 30;
const PANEL_HEIGHT: u32 = 330;
const FONT: &str = "sans-serif";
/// The palette of Okabe and Ito: people of every colour vision can tell its colours apart.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];
const TEXT: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(120, 120, 120);
const GRID: RGBColor = RGBColor(228, 228, 228);

/// A whole picture: panels one above the other. They share axes, except that a panel may have a y
/// axis of its own.
pub struct Figure<'a> {
    pub title: &'a str,
    /// Label of the x axis, with its unit.
    pub x_label: &'a str,
    /// Label of the y axis, with its unit.
    pub y_label: &'a str,
    /// Panels, top first. Series with the same index have the same colour in all panels. The legend
    /// has the names of the first panel.
    pub panels: &'a [Panel],
}

/// One pair of axes.
#[derive(Default)]
pub struct Panel {
    pub title: String,
    /// Label of a y axis of this panel's own, with its unit.
    pub y_label: Option<String>,
    pub series: Vec<Series>,
    /// What the shaded space between the first two series means.
    pub between: Option<String>,
    /// Places on the x axis, and what begins there.
    pub marks: Vec<(f64, String)>,
}

/// One curve.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// Whether the curve is a bound and not a measurement: it is grey and dashed.
    pub is_bound: bool,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Draws `figure` into the file at `path`, and makes its directory if it is missing.
///
/// # Errors
/// The file cannot be written, or there is nothing to draw.
pub fn draw(path: &Path, figure: &Figure) -> anyhow::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    // Errors of plotters borrow the picture.
    draw_all(path, figure).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw_all(path: &Path, figure: &Figure) -> anyhow::Result<()> {
    let count = u32::try_from(figure.panels.len())?;
    let first = figure.panels.first().context("there is nothing to draw")?;
    let height = TITLE_HEIGHT + LEGEND_HEIGHT + PANEL_HEIGHT * count;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (title, rest) = root.split_vertically(TITLE_HEIGHT);
    write(&title, figure.title, 24, (20, TITLE_HEIGHT as i32 / 2))?;
    let (keys, rest) = rest.split_vertically(LEGEND_HEIGHT);
    draw_legend(&keys, first)?;
    let (x_max, y_max) = ends(figure.panels);
    for (panel, area) in figure.panels.iter().zip(rest.split_evenly((figure.panels.len(), 1))) {
        let (_, own_y_max) = ends(std::slice::from_ref(panel));
        let y_max = if panel.y_label.is_some() { own_y_max } else { y_max };
        draw_panel(&area, figure, panel, x_max, y_max)?;
    }
    root.present()?;
    Ok(())
}

fn write(area: &Area, text: &str, size: u32, at: (i32, i32)) -> anyhow::Result<()> {
    let style = text_style(size, TEXT).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw_text(text, &style, at)?;
    Ok(())
}

fn text_style(size: u32, colour: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&colour)
}

/// Returns the largest x, and the largest y with room for marks above it.
fn ends(panels: &[Panel]) -> (f64, f64) {
    let points = panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points);
    let (x, y) =
        points.fold((0.0, 0.0), |(x, y): (f64, f64), point| (x.max(point.0), y.max(point.1)));
    let has_marks = panels.iter().any(|panel| !panel.marks.is_empty());
    (x, y * if has_marks { 1.18 } else { 1.06 })
}

fn draw_panel(
    area: &Area,
    figure: &Figure,
    panel: &Panel,
    x_max: f64,
    y_max: f64,
) -> anyhow::Result<()> {
    let mut chart = ChartBuilder::on(area)
        .margin_left(14)
        .margin_right(24)
        .margin_bottom(10)
        .caption(&panel.title, text_style(16, TEXT))
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..x_max, 0.0..y_max)?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT)
        .label_style(text_style(13, TEXT))
        .axis_desc_style(text_style(14, TEXT))
        .x_desc(figure.x_label)
        .y_desc(panel.y_label.as_deref().unwrap_or(figure.y_label))
        .x_labels(12)
        .y_labels(6)
        .x_label_formatter(&|x| round(*x))
        .y_label_formatter(&|y| round(*y))
        .draw()?;
    draw_between(&mut chart, panel)?;
    draw_marks(&mut chart, panel, x_max, y_max)?;
    panel
        .series
        .iter()
        .enumerate()
        .try_for_each(|(place, series)| draw_series(&mut chart, place, series))
}

/// Returns `value` with at most two decimal places.
fn round(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn draw_between(chart: &mut Chart, panel: &Panel) -> anyhow::Result<()> {
    let (Some(_), [lower, upper, ..]) = (&panel.between, &panel.series[..]) else {
        return Ok(());
    };
    let there = upper.points.iter().copied();
    let back = lower.points.iter().rev().copied();
    let outline: Vec<_> = there.chain(back).collect();
    chart.draw_series([Polygon::new(outline, shade())])?;
    Ok(())
}

fn shade() -> RGBAColor {
    COLOURS[1].mix(0.2)
}

fn draw_marks(chart: &mut Chart, panel: &Panel, x_max: f64, y_max: f64) -> anyhow::Result<()> {
    let style = text_style(11, FAINT);
    for (index, (x, text)) in panel.marks.iter().enumerate() {
        // Neighbouring marks are in two rows, so that each has room for its words.
        let height = y_max * if index % 2 == 0 { 0.97 } else { 0.92 };
        let line = vec![(*x, 0.0), (*x, height)];
        chart.draw_series([PathElement::new(line, FAINT.mix(0.25))])?;
        // At the right edge the words would be cut off, so they stand left of the line.
        let (side, shift) = if *x < x_max * 0.95 { (HPos::Left, 1.0) } else { (HPos::Right, -1.0) };
        let style = style.pos(Pos::new(side, VPos::Center));
        let beside = (*x + shift * x_max * 0.004, height);
        chart.draw_series([Text::new(text.clone(), beside, style)])?;
    }
    Ok(())
}

fn draw_series(chart: &mut Chart, place: usize, series: &Series) -> anyhow::Result<()> {
    let points = series.points.iter().copied();
    let style = stroke(place, series);
    if series.is_bound {
        chart.draw_series(DashedLineSeries::new(points, 8, 6, style))?;
    } else {
        chart.draw_series(LineSeries::new(points, style))?;
    }
    Ok(())
}

fn stroke(place: usize, series: &Series) -> ShapeStyle {
    let colour = if series.is_bound { FAINT } else { COLOURS[place % COLOURS.len()] };
    colour.stroke_width(2)
}

fn draw_legend(area: &Area, panel: &Panel) -> anyhow::Result<()> {
    let middle = LEGEND_HEIGHT as i32 / 2;
    let mut x = 78;
    for (place, series) in panel.series.iter().enumerate() {
        let pieces = if series.is_bound { vec![(0, 10), (16, 26)] } else { vec![(0, 26)] };
        for (from, to) in pieces {
            let line = vec![(x + from, middle), (x + to, middle)];
            area.draw(&PathElement::new(line, stroke(place, series).stroke_width(3)))?;
        }
        x = write_key(area, &series.name, x, middle)?;
    }
    if let Some(name) = &panel.between {
        area.draw(&Rectangle::new([(x, middle - 7), (x + 26, middle + 7)], shade().filled()))?;
        write_key(area, name, x, middle)?;
    }
    Ok(())
}

/// Writes a key of the legend, and returns where the next key begins.
fn write_key(area: &Area, name: &str, x: i32, y: i32) -> anyhow::Result<i32> {
    write(area, name, 14, (x + 34, y))?;
    Ok(x + 34 + 8 * i32::try_from(name.chars().count())? + 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, points: &[(f64, f64)]) -> Series {
        Series { name: name.into(), points: points.into(), is_bound: false }
    }

    #[test]
    fn a_picture_has_its_names_and_one_curve_for_each_series() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/figure.svg");
        let points = [(0.0, 1.0), (1.0, 2.0)];
        let panel = Panel {
            series: vec![series("a < b", &points), series("c", &points)],
            ..Panel::default()
        };
        let figure = Figure { title: "T", x_label: "x [s]", y_label: "y [GiB]", panels: &[panel] };
        draw(&path, &figure).unwrap();
        let text = fs::read_to_string(path).unwrap();
        for needle in ["a &lt; b", "x [s]", "y [GiB]", "#0072B2", "#D55E00"] {
            assert!(text.contains(needle), "{needle}");
        }
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let figure = Figure { title: "", x_label: "", y_label: "", panels: &[] };
        let error = draw(Path::new("/tmp/never.svg"), &figure).unwrap_err();
        assert!(error.to_string().contains("nothing to draw"), "{error}");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!([2.0, 0.5, 0.25, 0.0].map(round), ["2", "0.5", "0.25", "0"]);
    }
}
