//! All keys. What each means is in `docs/config.md` and in the sample, `deploy/systemd/ebb.toml`.

use crate::key::Kind::{Address, Choice, Number, Path, Reserve, Switch, User};
use crate::key::Otherwise::{Value, Words};
use crate::key::{Key, Kind, Otherwise, Section};

/// Any size.
const SIZE: Kind = Kind::Size { least_bytes: 0 };
/// A part of the time.
const PERCENT: Kind = Number { least: 0, most: 100 };
const DAY_MS: u64 = 24 * 60 * 60 * 1000;
const YEAR_S: u64 = 366 * 24 * 60 * 60;

/// All keys, in the order of the documentation.
pub const KEYS: &[Key] = &[
    daemon("run-dir", Path, Value("/run/ebb")),
    daemon("log-dir", Path, Words("/var/log/ebb; run-dir if that is not /run/ebb")),
    daemon("swap-dir", Path, Words("/var/lib/ebb; run-dir if that is not /run/ebb")),
    daemon("swap-max", SIZE, Words("no quota")),
    daemon("swap-max-each", SIZE, Words("no quota")),
    daemon("swap-keep-free", SIZE, Words("a fiftieth of the file system, 1 GiB at most")),
    daemon("when-swap-is-full", Choice(&["wait", "give-way"]), Value("wait")),
    daemon("compressed", Kind::Size { least_bytes: 1 << 20 }, Value("0")),
    daemon("read-freed", Switch, Value("false")),
    daemon("move-rate", Kind::Size { least_bytes: 16 << 20 }, Value("1G")),
    daemon("heat-window-ms", Number { least: 200, most: DAY_MS }, Value("600")),
    daemon("heat-windows", Number { least: 1, most: 250 }, Value("8")),
    daemon("heat-period-s", Number { least: 1, most: YEAR_S }, Words("60; 120 in huge pages")),
    daemon("forget-by", Choice(&["call", "ring"]), Value("call")),
    daemon("metadata-by", Choice(&["either", "note", "registration"]), Value("either")),
    daemon("pressure-stall", PERCENT, Value("15")),
    daemon("vm-user", User, Value("own")),
    daemon("allow-keys-on-disk", Switch, Value("false")),
    daemon("listen", Address, Words("this host only")),
    daemon("tls-cert", Path, Words("none")),
    daemon("tls-key", Path, Words("none")),
    daemon("tokens", Path, Words("none")),
    pilot("mode", Choice(&["off", "dry-run", "on"]), Value("off")),
    pilot("reserve", Reserve, Value("10%")),
    pilot("attach", Switch, Value("false")),
    pilot("stall", PERCENT, Words("as pressure-stall")),
    pilot("swap-max", SIZE, Value("0")),
];

const fn daemon(name: &'static str, kind: Kind, otherwise: Otherwise) -> Key {
    Key { section: Section::Daemon, name, kind, otherwise }
}

const fn pilot(name: &'static str, kind: Kind, otherwise: Otherwise) -> Key {
    Key { section: Section::Pilot, name, kind, otherwise }
}
