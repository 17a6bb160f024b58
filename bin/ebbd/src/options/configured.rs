//! Which configuration file this daemon has, and what it adds to the command line.
//!
//! What the file says becomes options in front of the others. So it is checked as they are, and
//! has the same defaults.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use ebb_api::route;
use ebb_config::{ConfigError, File, KEYS, Section, Setting, Value};

use super::Arguments;

/// Where options are from that neither the command line nor the environment has.
pub struct Source {
    /// The file; none: this daemon has none.
    path: Option<PathBuf>,
    /// Whether the file must exist.
    is_named: bool,
    /// What the file said when the daemon started.
    began: File,
    /// Keys that the command line or the environment overrules.
    overruled: Vec<&'static str>,
}

/// Reads the command line, the environment and the file. Ends the process if the command line makes
/// no sense.
///
/// # Errors
/// The file cannot be used. One line says where it is wrong, and what to do.
pub fn read() -> anyhow::Result<(Arguments, Source)> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let matches = Arguments::command().get_matches_from(&words);
    merge(words, &matches, Path::new(ebb_config::PATH))
}

/// Puts the options of the file in front of these words, of which clap made `matches`. `default`:
/// the file, if none is named.
///
/// # Errors
/// Those of [`read`].
pub(super) fn merge(
    words: Vec<OsString>,
    matches: &ArgMatches,
    default: &Path,
) -> anyhow::Result<(Arguments, Source)> {
    let source = Source::new(&Arguments::from_arg_matches(matches)?, matches, default)?;
    let mut all: Vec<OsString> = vec!["ebbd".into()];
    all.extend(source.check(&source.began)?);
    all.extend(words.into_iter().skip(1));
    Ok((Arguments::try_parse_from(all)?, source))
}

impl Source {
    fn new(arguments: &Arguments, matches: &ArgMatches, default: &Path) -> anyhow::Result<Source> {
        let is_named = arguments.config.is_some();
        let path = std::path::absolute(arguments.config.as_deref().unwrap_or(default))?;
        let is_given = |name: &str| {
            let from = matches.value_source(&name.replace('-', "_"));
            matches!(from, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        let loaded = load(&path, is_named);
        let is_for = |file: &File| run_dir(file) == arguments.run_dir;
        let is_of_host = match &loaded {
            Ok(file) => is_for(file),
            // Nobody can tell which daemon a wrong file is for: most likely the usual one.
            Err(_) => is_for(&File::default()),
        };
        if !is_named && is_given("run-dir") && !is_of_host {
            // The host's file is for one daemon. Another one could not listen at the same port.
            let (began, overruled) = (File::default(), Vec::new());
            return Ok(Source { path: None, is_named, began, overruled });
        }
        let began = loaded?;
        let names = KEYS.iter().filter(|key| key.section == Section::Daemon).map(|key| key.name);
        let overruled = names.filter(|name| is_given(name)).collect();
        Ok(Source { path: Some(path), is_named, began, overruled })
    }

    /// What the file said when the daemon started.
    pub fn began(&self) -> &File {
        &self.began
    }

    /// Reads the file as it is now, and checks it; none: this daemon has none.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn read(&self) -> Result<Option<File>, ConfigError> {
        let Some(path) = &self.path else { return Ok(None) };
        let file = load(path, self.is_named)?;
        self.check(&file)?;
        Ok(Some(file))
    }

    /// The keys of the daemon whose values count only for a daemon that starts with them.
    pub fn waiting(&self, file: &File) -> Vec<&'static str> {
        let is_other = |name: &&str| {
            let value = |file: &File| Some(file.get(Section::Daemon, name)?.value.clone());
            value(file) != value(&self.began)
        };
        let names = KEYS.iter().filter(|key| key.section == Section::Daemon).map(|key| key.name);
        names.filter(|name| !self.overruled.contains(name)).filter(is_other).collect()
    }

    /// The options that say what the file says.
    ///
    /// # Errors
    /// An option does not take the value of its key.
    fn check(&self, file: &File) -> Result<Vec<OsString>, ConfigError> {
        let counts = |setting: &&Setting| !self.overruled.contains(&setting.key.name);
        let options = file.of(Section::Daemon).filter(counts);
        let checked = options.filter_map(|setting| {
            let option = option(setting)?;
            let alone = Arguments::command().try_get_matches_from(["ebbd", option.as_str()]);
            let why = |error| file.wrong(setting, &first_line(&error));
            Some(alone.map(|_| OsString::from(option)).map_err(why))
        });
        checked.collect()
    }
}

/// Reads a file that need not exist unless it `is_named`.
fn load(path: &Path, is_named: bool) -> Result<File, ConfigError> {
    match File::read_own(path) {
        Err(error) if error.is_missing() && !is_named => File::parse(path, ""),
        read => read,
    }
}

/// The run directory of the daemon that a file is for.
fn run_dir(file: &File) -> PathBuf {
    let named = file.get(Section::Daemon, "run-dir").map(|setting| setting.value.to_string());
    named.map_or_else(|| route::RUN_DIR_DEFAULT.into(), PathBuf::from)
}

/// The option that says the same; none: it is a switch that is off.
fn option(setting: &Setting) -> Option<String> {
    let name = setting.key.name;
    match &setting.value {
        Value::Switch(false) => None,
        Value::Switch(true) => Some(format!("--{name}")),
        value => Some(format!("--{name}={value}")),
    }
}

/// What clap says is wrong, without its advice on how to see the help.
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}
