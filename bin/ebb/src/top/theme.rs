//! Colours and their meaning. With `NO_COLOR`, there are none; marks and words say the same.

use ratatui::style::{Color, Modifier, Style};

use super::trouble::Trouble;

/// How the screen is coloured.
#[derive(Clone, Copy)]
pub struct Theme {
    pub is_coloured: bool,
}

impl Theme {
    /// What has nothing to say now.
    pub fn quiet(self) -> Style {
        match self.is_coloured {
            true => Style::new().fg(Color::DarkGray),
            false => Style::new(),
        }
    }

    /// Headings.
    pub fn heading(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// The chosen VM.
    pub fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// What is wrong, or not.
    pub fn trouble(self, trouble: Trouble) -> Style {
        match trouble {
            Trouble::None => Style::new(),
            Trouble::Slow => self.of(Color::Yellow),
            Trouble::Waits => self.of(Color::Red).add_modifier(Modifier::BOLD),
        }
    }

    /// A part of a bar, or a chart.
    pub fn of(self, colour: Color) -> Style {
        match self.is_coloured {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }
}
