use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use ebb_api::PilotMode;

use super::*;

fn parse(text: &str) -> Result<File, String> {
    File::parse(Path::new("/e.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn what_is_wrong_is_said_in_one_line_with_its_place_and_a_hint() {
    for (text, said) in [
        ("[daemon]\nswap-max = 64G\n", "/e.toml:2:"),
        ("[daemon", "/e.toml:1:"),
        ("[daemon]\nswap-max = \"1G\"\nswap-max = \"1G\"\n", "/e.toml:3:1: "),
        ("x = 1\n", "/e.toml:1:1: there is no section \"x\": give [daemon] or [pilot]"),
        ("\n[pilots]\n", "/e.toml:2:2: there is no section \"pilots\": give [daemon] or [pilot]"),
        ("reserve = \"1G\"\n", "/e.toml:1:1: reserve is in no section: put it below [pilot]"),
        ("pilot = true\n", "/e.toml:1:1: pilot is a section: write [pilot] on a line of its own"),
        (
            "[daemon]\n  swap_max = 1\n",
            "/e.toml:2:3: [daemon] has no key \"swap_max\": write swap-max",
        ),
        ("[daemon]\nmode = \"on\"\n", "2:1: mode is no key of [daemon]: put it below [pilot]"),
        ("[pilot]\nmodes = 1\n", "2:1: [pilot] has no key \"modes\": `ebb config show` lists all"),
        ("[daemon.listen]\n", ": listen is a key, and no section"),
        ("[pilot]\nreserve = \"10 GB/s\"\n", "/e.toml:2:11: reserve: \"10 GB/s\" is no size: "),
        ("[pilot]\nreserve = \"10,5%\"\n", "2:11: reserve: \"10,5%\" is no part of memory: write"),
        ("[pilot]\nreserve = \"95%\"\n", "2:11: reserve: a reserve of 95 % leaves VMs too little"),
        ("[pilot]\nreserve = true\n", "2:11: reserve: true is no size: write it as \"512M\""),
        ("[pilot]\nmode = \"On\"\n", "mode: \"On\" is not one of \"off\", \"dry-run\", \"on\""),
        ("[pilot]\nattach = \"on\"\n", "attach: \"on\": write true or false, without quotes"),
        ("[pilot]\nstall = 101\n", "stall: 101: write a whole number from 0 to 100"),
        (
            "[pilot]\nstall = \"5\"\n",
            "stall: \"5\": write a whole number from 0 to 100, without quotes",
        ),
        ("[daemon]\ncompressed = 1\n", "compressed: 1 B is too little: give 1 MiB or more, or 0"),
        ("[daemon]\nswap-max = -1\n", "swap-max: \"-1\" is no size"),
        ("[daemon]\nswap-max = 1.5\n", "swap-max: this float is no size: write it as \"512M\""),
        (
            "[daemon]\nlog-dir = \"log\"\n",
            "log-dir: \"log\" is no absolute path: write it as \"/a/b\"",
        ),
        (
            "[daemon]\nlisten = \"web1:7443\"\n",
            "listen: \"web1:7443\" is no IP address with a port",
        ),
        ("[daemon]\nvm-user = \"\"\n", "vm-user: \"\" is no user: write a name, UID or \"own\""),
    ] {
        let why = parse(text).expect_err(text);
        assert!(why.contains(said) && why.starts_with("/e.toml:"), "{text}: {why}");
        assert!(!why.contains('\n'), "{why}");
    }
}

#[test]
fn what_the_file_says_is_known_with_its_place() {
    let text = "# a host\n[daemon]\nswap-max = \"64G\"\nread-freed = true\nvm-user = 1000\n\n\
                [pilot]\nmode = \"dry-run\"\nreserve = \"20%\"\nswap-max = 4096\n";
    let file = parse(text).expect("a file");
    let said = |name| file.get(Section::Daemon, name).map(|setting| setting.value.to_string());
    assert_eq!(said("swap-max").as_deref(), Some("64G"));
    assert_eq!(said("read-freed").as_deref(), Some("true"));
    assert_eq!(said("vm-user").as_deref(), Some("1000"));
    assert_eq!((said("listen"), file.count()), (None, 6));
    let place = file.get(Section::Pilot, "swap-max").map(|setting| setting.place.line);
    assert_eq!(place, Some(10));
    let pilot = PilotRequest {
        mode: Some(PilotMode::DryRun),
        reserve_percent: Some(20),
        swap_max_bytes: Some(4096),
        ..PilotRequest::default()
    };
    assert_eq!(file.pilot(), pilot);
    let other = parse("pilot.reserve = \"2G\"\npilot.attach = false\npilot.stall = 0\n");
    let pilot = PilotRequest {
        reserve_bytes: Some(2 << 30),
        attach: Some(false),
        stall_percent: Some(0),
        ..PilotRequest::default()
    };
    assert_eq!(other.expect("a file").pilot(), pilot);
}

#[test]
fn a_file_that_says_nothing_changes_nothing() {
    for text in ["", "# nothing\n", "[daemon]\n[pilot]\n"] {
        let file = parse(text).expect("a file");
        assert_eq!((file.count(), file.pilot()), (0, PilotRequest::default()), "{text}");
    }
}

#[test]
fn a_file_that_others_can_change_is_not_the_hosts_own() {
    let base = tempfile::tempdir().expect("a directory");
    let path = base.path().join("ebb.toml");
    fs::write(&path, "[pilot]\n").expect("a file");
    for (mode, is_own) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it is this test's");
        assert_eq!(File::read_own(&path).is_ok(), is_own, "{mode:o}");
        assert!(File::read(&path).is_ok(), "{mode:o}");
    }
    let why = File::read_own(&path).expect_err("others can write it").to_string();
    assert!(why.contains("(mode 0646)") && why.contains("`chmod go-w /"), "{why}");
}

#[test]
fn what_is_no_file_of_text_is_refused() {
    let base = tempfile::tempdir().expect("a directory");
    let path = base.path().join("ebb.toml");
    assert!(File::read(&path).expect_err("there is none").is_missing());
    let why = File::read(base.path()).expect_err("a directory");
    assert!(matches!(why, ConfigError::NoFile(_)), "{why}");
    fs::write(&path, b"[pilot]\n#\xff\n").expect("a file");
    let why = File::read(&path).expect_err("no text");
    assert!(matches!(why, ConfigError::NoText(_)) && !why.is_missing(), "{why}");
    fs::write(&path, vec![b'\n'; MOST_BYTES as usize + 1]).expect("a file");
    let why = File::read(&path).expect_err("too long");
    assert!(matches!(why, ConfigError::TooLarge(..)), "{why}");
}

/// The sample has each key with its default, in a comment, and the page describes each.
#[test]
fn the_sample_and_the_page_have_every_key() {
    let sample = include_str!("../../../../deploy/systemd/ebb.toml");
    assert_eq!(parse(sample).expect("a file").count(), 0, "nothing is set");
    let is_key = |line: &str| line.starts_with(|first: char| first.is_ascii_lowercase());
    let without_hash = |line: &'static str| match line.strip_prefix('#') {
        Some(key) if is_key(key) => key,
        _ => line,
    };
    let text: Vec<&str> = sample.lines().map(without_hash).collect();
    let file = parse(&text.join("\n")).expect("a file");
    let has = |setting: &Setting| (setting.key.section, setting.key.name);
    let all: Vec<_> = KEYS.iter().map(|key| (key.section, key.name)).collect();
    assert_eq!(file.settings.iter().map(has).collect::<Vec<_>>(), all);
    let page = include_str!("../../../../docs/config.md");
    for Setting { key, value, .. } in &file.settings {
        if let Some(default) = key.default_value() {
            assert_eq!(*value, default, "{}", key.name);
        }
        assert!(page.contains(&format!("| `{}` |", key.name)), "{} {}", key.section, key.name);
    }
}
