//! The finished parts of a long benchmark, so that an interrupted one can continue: a file with a
//! line for each block.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::identity::Identity;
use super::session::Session;

/// Figures of one VM, or of VMs that ran together: all values of each name, in the order in which
/// they were taken.
pub type Figures = BTreeMap<String, Vec<f64>>;

/// Adds a figure.
pub fn add(figures: &mut Figures, name: &str, figure: f64) {
    figures.entry(name.to_owned()).or_default().push(figure);
}

/// Outcome of a side in a block.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Figures(Figures),
    /// The reason of the failure.
    Failed(String),
}

/// One turn of all sides, or of those that were taken so far.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Block {
    /// Case and number of the block.
    pub key: String,
    /// Name and outcome of each side, in the order in which they were taken.
    pub sides: Vec<(String, Outcome)>,
}

impl Block {
    /// Returns why a side failed, if it did.
    pub fn failed(&self, name: &str) -> Option<&str> {
        match self.outcome(name)? {
            Outcome::Failed(why) => Some(why),
            Outcome::Figures(_) => None,
        }
    }

    /// Returns the figures of a side that succeeded.
    pub fn figures(&self, name: &str) -> Option<&Figures> {
        match self.outcome(name)? {
            Outcome::Figures(figures) => Some(figures),
            Outcome::Failed(_) => None,
        }
    }

    /// Returns the outcome of a side, or `None` if the side was not taken yet.
    pub fn outcome(&self, name: &str) -> Option<&Outcome> {
        self.sides.iter().find(|(side, _)| side == name).map(|(_, outcome)| outcome)
    }

    /// Whether the block has no other sides than these. Some may be missing.
    pub fn is_of(&self, names: &[String]) -> bool {
        self.sides.iter().all(|(side, _)| names.contains(side))
    }
}

/// First line of the file: what all its blocks were taken of.
#[derive(PartialEq, Serialize, Deserialize)]
struct Head {
    identity: Identity,
    seed: u64,
}

/// A benchmark's file.
pub struct Kept {
    path: PathBuf,
    /// Seed of the order of sides, with which the file was begun.
    pub seed: u64,
    blocks: Vec<Block>,
}

impl Kept {
    /// Opens the file of this name. If the session resumes, it continues with the content.
    /// Otherwise it begins a new file, and renames the old one.
    ///
    /// # Errors
    /// The content to continue is of another build, machine or form, or those of the file system.
    pub fn open(session: &Session, name: &str) -> anyhow::Result<Kept> {
        let path = session.directory.join(format!("{name}.blocks"));
        let goes_on = session.goes_on(name);
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let head: Option<Head> = lines.next().and_then(|line| serde_json::from_str(line).ok());
        // A last line that was cut off is ignored.
        let there: Vec<Block> = lines.map_while(|line| serde_json::from_str(line).ok()).collect();
        let other = match &head {
            Some(head) => head.identity.difference(&session.identity),
            None => Some("a head that nobody can read".to_owned()),
        };
        if let (true, false, Some(other)) = (goes_on, there.is_empty(), &other) {
            bail!(
                "{} has {} blocks of {other}: name another directory by --results, or leave \
                 --resume away",
                path.display(),
                there.len()
            );
        }
        let (seed, blocks) = match head.filter(|_| goes_on && other.is_none()) {
            Some(head) => (head.seed, there),
            None => {
                if text.lines().count() > 1 {
                    let aside = set_aside(&path)?;
                    println!("{name}: what was there is in {} now", aside.display());
                }
                (session.seed, Vec::new())
            }
        };
        if !blocks.is_empty() {
            println!("{name}: {} blocks are there already, seed {seed}", blocks.len());
        }
        let kept = Kept { path, seed, blocks };
        let head = Head { identity: session.identity.clone(), seed };
        let mut text = serde_json::to_string(&head)? + "\n";
        for block in &kept.blocks {
            text += &(serde_json::to_string(block)? + "\n");
        }
        let new = kept.path.with_extension("blocks.new");
        fs::write(&new, text).with_context(|| new.display().to_string())?;
        fs::rename(&new, &kept.path)?;
        Ok(kept)
    }

    /// Returns a kept block. If the key was taken again, it is the last one.
    pub fn get(&self, key: &str) -> Option<&Block> {
        self.blocks.iter().rev().find(|block| block.key == key)
    }

    /// Keeps another block.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn put(&mut self, block: Block) -> anyhow::Result<()> {
        let line = serde_json::to_string(&block)? + "\n";
        let mut file = File::options().append(true).open(&self.path)?;
        file.write_all(line.as_bytes())?;
        file.sync_data()?;
        self.blocks.push(block);
        Ok(())
    }
}

/// Renames a file to a name that no other file has. Returns that name.
fn set_aside(path: &Path) -> anyhow::Result<PathBuf> {
    for number in 1_u32.. {
        let aside = path.with_extension(format!("blocks.{number}"));
        // Unlike rename(2), this replaces no file.
        match fs::hard_link(path, &aside) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| aside.display().to_string()),
            Ok(()) => {
                fs::remove_file(path)?;
                return Ok(aside);
            }
        }
    }
    bail!("{}: no name is left", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(directory: &Path, resume: bool, seed: u64) -> Session {
        Session::new(Identity::of_test(), resume, Some(seed), directory.to_owned()).unwrap()
    }

    fn block(key: &str) -> Block {
        let figures = Figures::from([("s".to_owned(), vec![1.5, 0.1 + 0.2])]);
        let sides = vec![
            ("Ebb".to_owned(), Outcome::Figures(figures)),
            ("Linux".to_owned(), Outcome::Failed("killed".into())),
        ];
        Block { key: key.into(), sides }
    }

    #[test]
    fn blocks_are_there_again_but_not_of_another_build() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let mut kept = Kept::open(&session(directory.path(), true, 1), "x").unwrap();
        kept.put(block("a")).unwrap();
        kept.put(block("b")).unwrap();
        // A power cut tears the last line.
        let mut file = File::options().append(true).open(&kept.path).unwrap();
        file.write_all(b"{\"key\":\"c\",\"sid").unwrap();
        let mut again = Kept::open(&session(directory.path(), true, 2), "x").unwrap();
        assert_eq!((again.seed, again.get("a"), again.get("c")), (1, Some(&block("a")), None));
        again.put(block("c")).unwrap();
        let again = Kept::open(&session(directory.path(), true, 3), "x").unwrap();
        assert_eq!(again.blocks, ["a", "b", "c"].map(block));
        let mut other = session(directory.path(), true, 4);
        other.identity.programs += "!";
        let before = fs::read(&kept.path).unwrap();
        let error = Kept::open(&other, "x").err().unwrap().to_string();
        assert!(error.contains("3 blocks of other programs"), "{error}");
        assert_eq!(fs::read(&kept.path).unwrap(), before);
    }

    #[test]
    fn a_session_that_does_not_ask_for_kept_results_begins_anew() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        Kept::open(&session(directory.path(), false, 1), "x").unwrap().put(block("a")).unwrap();
        let path = directory.path().join("x.blocks");
        for number in 1..3 {
            let before = fs::read(&path).unwrap();
            let mut anew = Kept::open(&session(directory.path(), false, 2), "x").unwrap();
            assert!(anew.get("a").is_none());
            // The results of hours are still there.
            assert_eq!(fs::read(path.with_extension(format!("blocks.{number}"))).unwrap(), before);
            anew.put(block("b")).unwrap();
        }
    }
}
