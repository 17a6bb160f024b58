//! What is finished of a long benchmark, so that one that was interrupted goes on: a file with a
//! line for each block.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::identity::Identity;
use super::session::Session;

/// Of one VM, or of VMs that ran together: by name, as often as it was taken.
pub type Figures = BTreeMap<String, Vec<f64>>;

/// What became of a side in a block.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Figures(Figures),
    /// Why.
    Failed(String),
}

/// All sides in turn.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Block {
    /// Which.
    pub key: String,
    /// Sides in the order in which they were taken, by name.
    pub sides: Vec<(String, Outcome)>,
}

/// What all blocks of a file were taken of.
#[derive(PartialEq, Serialize, Deserialize)]
struct Head {
    identity: Identity,
    seed: u64,
}

/// A benchmark's file.
pub struct Kept {
    path: PathBuf,
    /// Of the order of sides: the one that it was begun with.
    pub seed: u64,
    blocks: Vec<Block>,
}

impl Kept {
    /// Opens the file of this name. What is there is gone on with where that is asked for and it is
    /// of the same build, machine and form; else it begins anew.
    ///
    /// # Errors
    /// As the file system's.
    pub fn open(session: &Session, name: &str) -> anyhow::Result<Kept> {
        let path = session.directory.join(format!("{name}.blocks"));
        let goes_on = session.goes_on(name);
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let head: Option<Head> = lines.next().and_then(|line| serde_json::from_str(line).ok());
        let head = head.filter(|head| goes_on && head.identity == session.identity);
        let (seed, blocks) = match head {
            // A last line that was cut off is none.
            Some(head) => {
                (head.seed, lines.map_while(|line| serde_json::from_str(line).ok()).collect())
            }
            None => (session.seed, Vec::new()),
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

    /// A block that is there already.
    pub fn get(&self, key: &str) -> Option<&Block> {
        self.blocks.iter().find(|block| block.key == key)
    }

    /// Keeps another one.
    ///
    /// # Errors
    /// As the file system's.
    pub fn put(&mut self, block: Block) -> anyhow::Result<()> {
        let line = serde_json::to_string(&block)? + "\n";
        let mut file = File::options().append(true).open(&self.path)?;
        file.write_all(line.as_bytes())?;
        file.sync_data()?;
        self.blocks.push(block);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
        // Torn by a power cut.
        let mut file = File::options().append(true).open(&kept.path).unwrap();
        file.write_all(b"{\"key\":\"c\",\"sid").unwrap();
        let mut again = Kept::open(&session(directory.path(), true, 2), "x").unwrap();
        assert_eq!((again.seed, again.get("a"), again.get("c")), (1, Some(&block("a")), None));
        again.put(block("c")).unwrap();
        let again = Kept::open(&session(directory.path(), true, 3), "x").unwrap();
        assert_eq!(again.blocks, ["a", "b", "c"].map(block));
        let mut other = session(directory.path(), true, 4);
        other.identity.programs += "!";
        let anew = Kept::open(&other, "x").unwrap();
        assert_eq!((anew.seed, anew.blocks.len()), (4, 0));
    }

    #[test]
    fn who_does_not_ask_for_them_begins_anew() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        Kept::open(&session(directory.path(), false, 1), "x").unwrap().put(block("a")).unwrap();
        let anew = Kept::open(&session(directory.path(), false, 2), "x").unwrap();
        assert!(anew.get("a").is_none());
    }
}
