//! What `deploy/` and `docs/metrics.md` name is what is told, and the other way round.

use std::collections::BTreeSet;

use serde_json::Value;

use super::text_with;
use crate::model::times::Times;

const BOARD: &str = include_str!("../../../../../../deploy/grafana/ebb.json");
const RULES: &str = include_str!("../../../../../../deploy/prometheus/ebb.rules.yml");
const RULES_TEST: &str = include_str!("../../../../../../deploy/prometheus/ebb.rules.test.yml");
const PAGE: &str = include_str!("../../../../../../docs/metrics.md");

/// The figures that are told, each with its type.
fn told() -> Vec<(String, String)> {
    let text = text_with(Times::default());
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

/// The names under which Prometheus keeps a figure.
fn kept(name: &str, kind: &str) -> Vec<String> {
    match kind {
        "counter" => vec![format!("{name}_total")],
        "histogram" => ["bucket", "sum", "count"].map(|end| format!("{name}_{end}")).to_vec(),
        _ => vec![name.to_owned()],
    }
}

/// All words that begin like this, as names of figures and of rules are written.
fn words<'t>(text: &'t str, begin: &'static str) -> BTreeSet<&'t str> {
    let is_outside = |letter: char| !letter.is_ascii_alphanumeric() && !"_:".contains(letter);
    let words = text.split(is_outside).map(|word| word.trim_end_matches(':'));
    words.filter(|word| word.starts_with(begin)).collect()
}

/// What stands behind this in lines of the text.
fn named<'t>(text: &'t str, key: &'static str) -> BTreeSet<&'t str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(key)).map(str::trim).collect()
}

#[test]
fn the_board_and_the_rules_name_only_figures_that_are_told() {
    let of = |(name, kind): (String, String)| kept(&name, &kind);
    let kept: BTreeSet<String> = told().into_iter().flat_map(of).collect();
    let recorded = named(RULES, "- record: ");
    for (file, text) in [("board", BOARD), ("rules", RULES), ("their test", RULES_TEST)] {
        let (names, rules) = (words(text, "ebb_"), words(text, "ebb:"));
        assert!(!names.is_empty(), "{file} names no figure");
        let unknown: Vec<_> = names.into_iter().filter(|name| !kept.contains(*name)).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
        assert!(rules.is_subset(&recorded), "{file}: {rules:?}");
    }
}

#[test]
fn the_page_describes_all_figures_and_no_others() {
    let mut known = BTreeSet::new();
    for (name, kind) in told() {
        let kept = kept(&name, &kind);
        let described = if kind == "histogram" { &name } else { &kept[0] };
        assert!(PAGE.contains(&format!("`{described}`")), "{described}");
        known.extend(kept);
        known.insert(name);
    }
    let named = words(PAGE, "ebb_").into_iter();
    let unknown: Vec<_> = named.filter(|name| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn every_alert_is_tested_and_described() {
    let alerts = named(RULES, "- alert: ");
    assert!(!alerts.is_empty());
    for alert in alerts {
        assert!(RULES_TEST.contains(&format!("alertname: {alert}")), "{alert} is not tested");
        assert!(PAGE.contains(&format!("`{alert}`")), "{alert} is not described");
    }
}

/// Panels of a board. Those of a closed row would be inside of it.
fn panels(board: &Value) -> Vec<&Value> {
    let of = |value: &Value| value["panels"].as_array().cloned().unwrap_or_default();
    assert!(of(board).iter().all(|panel| of(panel).is_empty()), "rows are open");
    board["panels"].as_array().into_iter().flatten().collect()
}

#[test]
fn the_board_can_be_loaded() {
    let board: Value = serde_json::from_str(BOARD).unwrap();
    assert!(board["id"].is_null(), "Grafana would look for a board of this number");
    let mut ids = BTreeSet::new();
    for panel in panels(&board) {
        assert!(ids.insert(panel["id"].as_u64()), "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        let source = panel["datasource"]["uid"].as_str();
        assert!(source.is_some_and(|it| it.starts_with('$')), "not the chosen one: {panel}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(targets.iter().all(|target| target["expr"].is_string()), "{panel}");
        let place = &panel["gridPos"];
        let right = place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap();
        assert!(right <= 24 && panel["description"].is_string(), "{panel}");
    }
}
