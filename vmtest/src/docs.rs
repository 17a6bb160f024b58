//! The commands that pages of `docs` give to newcomers, for a test that carries them out.
//!
//! A page marks a block of such commands by its first line, ```` ```sh run ````. Code hosts and the
//! book show it as any other block of `sh`. A command may go on in the next line, as in a shell.

use std::fs;
use std::path::{Path, PathBuf};

const FENCE: &str = "```";
/// The first line of a marked block.
const RUN: &str = "```sh run";

/// The commands in the marked blocks of a page, in order. Each is one line, `SECTION: COMMAND`. The
/// section is the heading above the block, or the page's title, as links to it have it:
/// `1-install`.
///
/// # Panics
/// There is no such page, or no such command on it.
pub fn commands(page: &str) -> String {
    let path = directory().join(page).with_extension("md");
    let text = fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let commands = in_page(&text);
    assert!(!commands.is_empty(), "{} has no {RUN}", path.display());
    commands.concat()
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

fn in_page(text: &str) -> Vec<String> {
    let text = text.replace("\\\n", "");
    let mut section = String::new();
    // Of the block of code that the line is in, if it is in one.
    let mut is_marked = None;
    let mut commands = Vec::new();
    for line in text.lines() {
        match is_marked {
            None if line.starts_with(FENCE) => is_marked = Some(line.trim_end() == RUN),
            None if line.starts_with("# ") || line.starts_with("## ") => section = anchor(line),
            Some(_) if line.trim_end() == FENCE => is_marked = None,
            Some(true) => {
                commands.extend(command(line).map(|command| format!("{section}: {command}\n")));
            }
            _ => {}
        }
    }
    commands
}

/// The command on a line, without its comment.
fn command(line: &str) -> Option<&str> {
    let command = line.split(" #").next().unwrap_or_default().trim();
    (!command.is_empty() && !command.starts_with('#')).then_some(command)
}

fn anchor(heading: &str) -> String {
    let words = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = words.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-'));
    kept.map(|char| if char == ' ' { '-' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_blocks_give_their_commands_below_their_headings() {
        let page = "# A page\n\n```sh run\nebb discover\n```\n\n\
                    ## 1. Begin here\n\n```sh run\nebb list      # all VMs\n\n\
                    # a remark\nebb rule web --min 1G\n```\n\n```sh\n## none\nebb stop\n```\n\n\
                    ## Go on\n```text\n```sh run\n```\n```sh run\nebb top --once\n```\n";
        assert_eq!(
            in_page(page),
            [
                "a-page: ebb discover\n",
                "1-begin-here: ebb list\n",
                "1-begin-here: ebb rule web --min 1G\n",
                "go-on: ebb top --once\n"
            ]
        );
    }

    #[test]
    fn a_command_in_two_lines_is_one() {
        let page = "# A page\n```sh run\nebb run \\\n  --name web\nebb list\n```\n";
        assert_eq!(in_page(page), ["a-page: ebb run   --name web\n", "a-page: ebb list\n"]);
    }

    #[test]
    fn each_marked_block_is_carried_out() {
        let walk = include_str!("../tests/package/walk.sh");
        let test = include_str!("../tests/package/main.rs");
        let mut commands = 0;
        for file in fs::read_dir(directory()).unwrap().flatten() {
            let name = file.file_name().into_string().unwrap();
            let Some(page) = name.strip_suffix(".md") else { continue };
            for line in in_page(&fs::read_to_string(file.path()).unwrap()) {
                let (section, _) = line.split_once(": ").unwrap();
                let step = format!("\nfollow {page} {section}\n");
                assert!(walk.contains(&step), "walk.sh lacks: {step}");
                assert!(test.contains(&format!("\"{page}\"")), "main.rs has no page {page}");
                commands += 1;
            }
        }
        assert!(commands > 0);
    }
}
