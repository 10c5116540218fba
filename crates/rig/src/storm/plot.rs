//! Plots as SVG text.

use plotters::prelude::*;

/// One line of a plot.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A plot: lines over a common axis.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) lines: Vec<Line>,
    /// The x axis is a share of calls from 0 to 1, shown by how few are left:
    /// 50 %, 90 %, 99 %, 99.9 %.
    pub(super) tail: bool,
}

/// Distinct also for those who do not tell red from green.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
];

/// Width and height of a plot without its legend, and the legend's width.
const SIZE: (u32, u32) = (470, 290);
const LEGEND: u32 = 110;

/// As short as it can be.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Nines: 0.9 is 1, 0.99 is 2.
fn nines(share: f64) -> f64 {
    -(1.0 - share.min(0.999_999)).log10()
}

fn nines_text(nines: f64) -> String {
    let share = 100.0 * (1.0 - 10_f64.powf(-nines));
    format!("{share:.3}")
        .trim_end_matches('0')
        .trim_end_matches('.')
        .to_owned()
        + " %"
}

impl Plot {
    /// The plot as SVG; empty if there is nothing to show.
    pub(super) fn svg(&self) -> String {
        let mut text = String::new();
        // Drawing into a String fails on impossible axes only; such a plot is left out.
        match self.draw(&mut text) {
            Ok(()) => text,
            Err(_) => String::new(),
        }
    }

    fn draw(&self, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let at = |(x, y): &(f64, f64)| (if self.tail { nines(*x) } else { *x }, *y);
        let points = || self.lines.iter().flat_map(|l| l.points.iter().map(at));
        let most = |value: fn((f64, f64)) -> f64| points().map(value).fold(0.0, f64::max);
        let (x_max, y_max) = (most(|p| p.0), most(|p| p.1));
        if points().next().is_none() || x_max <= 0.0 {
            return Err("nothing to show".into());
        }
        let root = SVGBackend::with_string(text, (SIZE.0 + LEGEND, SIZE.1)).into_drawing_area();
        root.fill(&WHITE)?;
        let font = ("sans-serif", 13);
        // Beside the plot: over it, it would hide what it explains.
        let (left, right) = root.split_horizontally(SIZE.0);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, ("sans-serif", 15))
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max.max(0.001) * 1.08)?;
        let x_text = |x: &f64| match self.tail {
            true => nines_text(*x),
            false => number(*x),
        };
        chart
            .configure_mesh()
            .x_desc(self.x)
            .y_desc(self.y)
            .label_style(font)
            .axis_desc_style(font)
            .x_labels(6)
            .y_labels(6)
            .x_label_formatter(&x_text)
            .y_label_formatter(&|y| number(*y))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (n, line) in self.lines.iter().enumerate() {
            // Lines often lie on each other: the later, the thinner.
            let behind = u32::try_from(self.lines.len() - n).unwrap_or(1).min(4);
            let style = COLOURS[n % COLOURS.len()].stroke_width(behind + 1);
            chart.draw_series(LineSeries::new(line.points.iter().map(at), style))?;
            let y = 40 + 20 * i32::try_from(n).unwrap_or(0);
            right.draw(&PathElement::new([(0, y), (16, y)], style))?;
            let name = Text::new(line.name.as_str(), (22, y - 7), font);
            right.draw(&name)?;
        }
        root.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_svg_with_its_lines_and_an_empty_one_is_nothing() {
        let line = Line {
            name: "running".to_owned(),
            points: vec![(0.0, 1.0), (1.0, 5.0)],
        };
        let mut plot = Plot {
            title: "calls".to_owned(),
            x: "s",
            y: "n",
            lines: vec![line],
            tail: false,
        };
        let svg = plot.svg();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("<polyline") && svg.contains("running"));
        plot.lines[0].points.clear();
        assert_eq!(plot.svg(), "");
    }

    #[test]
    fn nines_are_named_by_their_share() {
        assert_eq!(nines_text(nines(0.9)), "90 %");
        assert_eq!(nines_text(nines(0.999)), "99.9 %");
    }
}
