//! The settings of a host, as its configuration file leaves them.

use super::table;
use crate::config::Setting;

/// Returns one line for each setting.
pub fn config(settings: &[Setting]) -> String {
    let head = ["SECTION", "KEY", "VALUE", "FROM"].map(String::from);
    let lines: Vec<[String; 4]> = std::iter::once(head).chain(settings.iter().map(line)).collect();
    table(&lines)
}

fn line(setting: &Setting) -> [String; 4] {
    let value = setting.value.as_ref().map(ToString::to_string);
    let words = || setting.otherwise.unwrap_or_default().to_owned();
    [
        setting.section.to_owned(),
        setting.key.to_owned(),
        value.unwrap_or_else(words).replace(char::is_control, "?"),
        setting.line.map_or_else(|| "default".into(), |line| format!("line {line}")),
    ]
}
