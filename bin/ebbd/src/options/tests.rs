use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use clap::{Arg, CommandFactory};
use ebb_api::{PilotMode, PilotRequest};
use ebb_config::{KEYS, Key, Kind, Otherwise, Section};

use super::configured::merge;
use super::reload::reload;
use super::*;
use crate::host::pilot;
use crate::host::registry::Daemon;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;

/// Reads the command line of an `ebbd`, on a host that has this file.
fn parse(file: &Path, words: &[&str]) -> Result<(Arguments, Source), String> {
    let words: Vec<OsString> = ["ebbd"].iter().chain(words).map(OsString::from).collect();
    let matches = Arguments::command().try_get_matches_from(&words).expect("options");
    merge(words, &matches, file).map_err(|error| error.to_string())
}

fn daemon_keys() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(|key| key.section == Section::Daemon)
}

#[test]
fn each_option_has_a_key() {
    let command = Arguments::command();
    let options = command.get_arguments().filter(|option| !option.is_hide_set());
    let mut options: BTreeSet<&str> = options.filter_map(Arg::get_long).collect();
    for no_setting in ["background", "config"] {
        assert!(options.remove(no_setting), "{no_setting}");
    }
    assert_eq!(daemon_keys().map(|key| key.name).collect::<BTreeSet<_>>(), options);
}

#[test]
fn each_key_is_as_its_option() {
    let command = Arguments::command();
    for key in daemon_keys() {
        let is_it = |option: &&Arg| option.get_long() == Some(key.name);
        let option = command.get_arguments().find(is_it).expect(key.name);
        let variable = format!("EBB_{}", key.name.replace('-', "_").to_uppercase());
        assert_eq!(option.get_env(), Some(OsStr::new(&variable)), "{}", key.name);
        let defaults = option.get_default_values().iter();
        let defaults: Vec<_> = defaults.map(|value| value.to_string_lossy()).collect();
        match (key.otherwise, key.kind) {
            (Otherwise::Value(text), Kind::Switch) => assert_eq!(text, "false", "{}", key.name),
            (Otherwise::Value(text), _) => assert_eq!(defaults, [text], "{}", key.name),
            (Otherwise::Words(_), _) => assert!(defaults.is_empty(), "{}", key.name),
        }
        if let Kind::Choice(words) = key.kind {
            let possible = option.get_possible_values();
            let possible: Vec<&str> = possible.iter().map(|value| value.get_name()).collect();
            assert_eq!(possible, words, "{}", key.name);
        }
    }
}

/// A value that the file takes does not keep the daemon from starting.
#[test]
fn the_least_values_of_the_file_are_those_of_the_daemon() {
    let least = |name| match Key::find(Section::Daemon, name).map(|key| key.kind) {
        Some(Kind::Size { least_bytes }) => least_bytes,
        Some(Kind::Number { least, .. }) => least,
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(least("compressed"), crate::COMPRESSED_MIN_BYTES);
    let rate = least("move-rate");
    let check = |bytes| crate::vm::tiering::check_rate(Bytes(bytes)).is_ok();
    assert_eq!([check(rate), check(rate - 1)], [true, false]);
    let window = least("heat-window-ms");
    let none = Path::new("/nowhere/ebb.toml");
    for (window, is_right) in [(window, true), (window - 1, false)] {
        let window = format!("--heat-window-ms={window}");
        let (arguments, _) = parse(none, &[&window]).expect("options");
        assert_eq!(arguments.monitoring.check().is_ok(), is_right, "{window}");
    }
}

#[test]
fn an_option_counts_before_the_file_and_the_file_before_the_default() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("ebb.toml");
    let text = "[daemon]\nmove-rate = \"2G\"\ncompressed = 4194304\nread-freed = true\n\
                allow-keys-on-disk = false\nvm-user = 1000\nforget-by = \"ring\"\n";
    fs::write(&path, text).unwrap();
    let (arguments, source) = parse(&path, &["--move-rate", "3G"]).unwrap();
    assert_eq!((arguments.move_rate, arguments.compressed), (Bytes(3 << 30), Bytes(4 << 20)));
    assert_eq!((arguments.read_freed, arguments.allow_keys_on_disk), (true, false));
    assert_eq!((arguments.vm_user.as_str(), arguments.pressure_stall), ("1000", 15));
    assert!(arguments.forget_by == ForgetBy::Ring && arguments.metadata_by == MetadataBy::Either);
    // What an option overrules does not wait for a restart, either.
    fs::write(&path, "[daemon]\nmove-rate = \"4G\"\ncompressed = 4194304\n").unwrap();
    let file = source.read().unwrap().expect("a file");
    assert_eq!(source.waiting(&file), ["read-freed", "forget-by", "vm-user", "allow-keys-on-disk"]);
}

#[test]
fn a_named_file_must_exist_and_the_hosts_own_need_not() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("ebb.toml");
    let (arguments, source) = parse(&path, &[]).unwrap();
    assert_eq!((arguments.move_rate, source.began().count()), (Bytes(1 << 30), 0));
    let named = path.display().to_string();
    let why = parse(&path, &["--config", &named]).err().expect("there is none");
    assert!(why.starts_with(&format!("{named}: No such file")), "{why}");
}

#[test]
fn the_hosts_file_is_for_the_daemon_of_its_run_directory() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("ebb.toml");
    fs::write(&path, "[daemon]\nrun-dir = \"/run/a\"\nmove-rate = \"2G\"\n").unwrap();
    let named = path.display().to_string();
    for (words, run_dir, gib) in [
        (vec![], "/run/a", 2),
        (vec!["--run-dir", "/run/a"], "/run/a", 2),
        (vec!["--run-dir", "/run/b"], "/run/b", 1),
        (vec!["--run-dir", "/run/b", "--config", named.as_str()], "/run/b", 2),
    ] {
        let (arguments, _) = parse(&path, &words).unwrap();
        let found = (arguments.run_dir.as_path(), arguments.move_rate);
        assert_eq!(found, (Path::new(run_dir), Bytes(gib << 30)), "{words:?}");
    }
}

#[test]
fn a_value_that_only_the_daemon_can_check_is_named_with_its_place() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("ebb.toml");
    fs::write(&path, "[daemon]\n\nvm-user = \"nobody-has-this-name\"\n").unwrap();
    let why = parse(&path, &[]).err().expect("there is no such user");
    assert!(why.starts_with(&format!("{}:3:11: vm-user: ", path.display())), "{why}");
    assert!(why.contains("nobody-has-this-name") && !why.contains('\n'), "{why}");
}

/// A daemon that has started with this file.
fn started(home: &Path, text: &str) -> (Daemon, Source) {
    let path = home.join("ebb.toml");
    fs::write(&path, text).unwrap();
    let (_, source) = parse(&path, &[]).unwrap();
    let daemon = testing::daemon(home, SwapDir::new(home, None).unwrap());
    begin(&daemon, &source).unwrap();
    (daemon, source)
}

#[test]
fn what_is_new_in_the_file_counts_and_what_was_set_meanwhile_stays() {
    let home = tempfile::tempdir().unwrap();
    let text = "[pilot]\nmode = \"on\"\nreserve = \"20%\"\n";
    let (daemon, source) = started(home.path(), text);
    let known = || {
        let status = pilot::status(&daemon);
        (status.mode, status.reserve_percent, status.stall_percent)
    };
    assert_eq!(known(), (PilotMode::On, Some(20), None));
    let request = PilotRequest { mode: Some(PilotMode::Off), ..PilotRequest::default() };
    pilot::set(&daemon, &request).unwrap();
    let path = home.path().join("ebb.toml");
    let news = || reload(&daemon, &source).unwrap();
    assert!(news().ends_with("ebb.toml is read again: nothing is new"));
    assert_eq!(known(), (PilotMode::Off, Some(20), None));
    let text = "[daemon]\nswap-max = \"1G\"\n\
                [pilot]\nmode = \"on\"\nreserve = \"30%\"\nstall = 0\n";
    fs::write(&path, text).unwrap();
    let said = news();
    assert!(said.contains("the pilot has a new reserve, stall; only a restart of ebbd"), "{said}");
    assert!(said.ends_with("changes swap-max") && !said.contains('\n'), "{said}");
    assert_eq!(known(), (PilotMode::Off, Some(30), Some(0)));
    // Another daemon has the same settings, and knows what the file said.
    let (daemon, _) = started(home.path(), text);
    let status = pilot::status(&daemon);
    assert_eq!((status.mode, status.reserve_percent), (PilotMode::Off, Some(30)));
    fs::write(&path, "").unwrap();
    assert!(news().contains("a new mode, reserve, stall"));
    assert_eq!(known(), (PilotMode::Off, Some(10), None));
}

#[test]
fn a_wrong_file_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let (daemon, source) = started(home.path(), "[pilot]\nmode = \"dry-run\"\n");
    let before = pilot::status(&daemon);
    let path = home.path().join("ebb.toml");
    for (text, place) in [
        ("[pilot]\nmode = \"on\"\nreserve = \"9 GB/s\"\n", ":3:11: reserve: \"9 GB/s\" is no size"),
        ("[pilot]\nmode = \"on\"\nreserve = \"999T\"\n", ":3:11: reserve: a reserve of 999 TiB is"),
        ("[pilot]\nmode = \"on\"\n[daemon]\nvm-user = \"no:b\"\n", ":4:11: vm-user: "),
        ("[pilot]\nmode = \"on\"\nmodes = 1\n", ":3:1: [pilot] has no key"),
    ] {
        fs::write(&path, text).unwrap();
        let why = reload(&daemon, &source).unwrap_err();
        let place = format!("{}{place}", path.display());
        assert!(why.starts_with(&place) && !why.contains('\n'), "{text}: {why}");
        assert_eq!(pilot::status(&daemon), before, "{text}");
    }
}
