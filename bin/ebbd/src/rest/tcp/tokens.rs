//! The tokens that clients show, and what each allows.
//!
//! The file has them as clients send them. A file of their digests would hide them from who reads a
//! copy of it, but Ebb could not tell then whether a token can be guessed, and the file must be
//! private all the same.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ebb_api::Role;
use ebb_sys::private_file::{self, PrivateFileError};

/// Least length of a token: 128 random bits as hexadecimal digits.
pub const LENGTH_LEAST: usize = 32;
/// Most length of a token.
pub const LENGTH_MOST: usize = 512;
/// Most tokens: each request is compared with all of them.
const TOKENS_MOST: usize = 1000;
const FILE_MOST_BYTES: u64 = 1 << 20;
/// What a token may consist of beside letters and digits (RFC 6750, section 2.1).
const MARKS: &[u8] = b"-._~+/=";

/// Why a file of tokens is not used.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// It cannot be read, or others can.
    #[error("--tokens: {0}")]
    File(#[from] PrivateFileError),
    /// A line of it makes no sense.
    #[error("--tokens {path}, line {1}: {2}", path = .0.display())]
    Line(PathBuf, usize, Wrong),
    /// It has none.
    #[error(
        "--tokens {} has no token: write a line `read TOKEN` or `control TOKEN` \
         (`openssl rand -hex 32` makes a token)",
        .0.display()
    )]
    Empty(PathBuf),
}

/// What is wrong with a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Wrong {
    /// It is not a role and a token.
    #[error("write `read TOKEN` or `control TOKEN`, or a comment that begins with #")]
    Form,
    /// The token can be guessed.
    #[error(
        "a token of fewer than {LENGTH_LEAST} characters can be guessed: \
         `openssl rand -hex 32` makes a longer one"
    )]
    Short,
    /// The token is too long for a header.
    #[error("a token has {LENGTH_MOST} characters at most")]
    Long,
    /// The token cannot be sent.
    #[error("a token consists of letters, digits and -._~+/=")]
    Character,
    /// The token stands there already.
    #[error("the same token stands in an earlier line: give each client its own")]
    Again,
    /// The file has too many.
    #[error("it is one too many: {TOKENS_MOST} tokens are possible")]
    Many,
}

/// All tokens of a file. Only their digests are kept.
pub struct Tokens(Vec<Token>);

struct Token {
    role: Role,
    line: usize,
    digest: blake3::Hash,
}

impl Tokens {
    /// Reads a file that only this user can read.
    ///
    /// # Errors
    /// See [`TokensError`].
    pub fn read(path: &Path) -> Result<Tokens, TokensError> {
        let content = private_file::read(path, FILE_MOST_BYTES)?;
        let tokens = Tokens::parse(&content)
            .map_err(|(line, wrong)| TokensError::Line(path.into(), line, wrong))?;
        if tokens.0.is_empty() {
            return Err(TokensError::Empty(path.into()));
        }
        Ok(tokens)
    }

    /// Parses lines of a role and a token. Lines are counted from 1.
    pub fn parse(content: &[u8]) -> Result<Tokens, (usize, Wrong)> {
        let (mut tokens, mut known) = (Vec::new(), HashSet::new());
        for (number, line) in (1..).zip(content.split(|&byte| byte == b'\n')) {
            let Some((role, token)) = parts(line).map_err(|wrong| (number, wrong))? else {
                continue;
            };
            let digest = blake3::hash(token);
            if !known.insert(digest) {
                return Err((number, Wrong::Again));
            }
            if tokens.len() == TOKENS_MOST {
                return Err((number, Wrong::Many));
            }
            tokens.push(Token { role, line: number, digest });
        }
        Ok(Tokens(tokens))
    }

    /// What a token allows, and the line that it stands in. The time that this takes tells nothing
    /// about the tokens: digests are compared, in constant time, and always all of them.
    pub fn find(&self, shown: &[u8]) -> Option<(Role, usize)> {
        let digest = blake3::hash(shown);
        self.0.iter().fold(None, |found, token| {
            let is_it = token.digest == digest;
            if is_it { Some((token.role, token.line)) } else { found }
        })
    }
}

/// Role and token of a line; none: it is empty, or a comment.
fn parts(line: &[u8]) -> Result<Option<(Role, &[u8])>, Wrong> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let Some(first) = words.next().filter(|word| !word.starts_with(b"#")) else {
        return Ok(None);
    };
    let role = match first {
        b"read" => Role::Read,
        b"control" => Role::Control,
        _ => return Err(Wrong::Form),
    };
    let (Some(token), None) = (words.next(), words.next()) else {
        return Err(Wrong::Form);
    };
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || MARKS.contains(byte);
    match token.len() {
        ..LENGTH_LEAST => Err(Wrong::Short),
        LENGTH_LEAST..=LENGTH_MOST if token.iter().all(is_allowed) => Ok(Some((role, token))),
        LENGTH_LEAST..=LENGTH_MOST => Err(Wrong::Character),
        _ => Err(Wrong::Long),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "0123456789abcdef0123456789abcdef";
    const B: &str = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldY+/=";

    fn wrong(text: &str) -> (usize, Wrong) {
        Tokens::parse(text.as_bytes()).err().expect("an error")
    }

    #[test]
    fn a_token_has_the_role_of_its_line() {
        let text = format!("# monitoring\nread {A}\r\n\n  control\t{B}  \n# end");
        let tokens = Tokens::parse(text.as_bytes()).expect("tokens");
        assert_eq!(tokens.find(A.as_bytes()), Some((Role::Read, 2)));
        assert_eq!(tokens.find(B.as_bytes()), Some((Role::Control, 4)));
        for other in ["", &A[1..], &format!("{A}0"), &A.to_uppercase(), "read"] {
            assert_eq!(tokens.find(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        assert_eq!(wrong(&format!("\nadmin {A}")), (2, Wrong::Form));
        assert_eq!(wrong(A), (1, Wrong::Form));
        assert_eq!(wrong("read"), (1, Wrong::Form));
        assert_eq!(wrong(&format!("read {A} web")), (1, Wrong::Form));
        assert_eq!(wrong(&format!("read {}", &A[1..])), (1, Wrong::Short));
        assert_eq!(wrong(&format!("read {}", "a".repeat(LENGTH_MOST + 1))), (1, Wrong::Long));
        assert_eq!(wrong(&format!("read {A}\u{e4}")), (1, Wrong::Character));
        assert_eq!(wrong(&format!("read {A}\ncontrol {A}")), (2, Wrong::Again));
        let many: String = (0..=TOKENS_MOST).map(|n| format!("read {n:032}\n")).collect();
        assert_eq!(wrong(&many), (TOKENS_MOST + 1, Wrong::Many));
    }

    #[test]
    fn a_file_must_be_private_and_have_a_token() {
        use std::fs::{Permissions, set_permissions, write};
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tokens");
        let refused = |text: &str, mode: u32| {
            write(&path, text).expect("a file");
            set_permissions(&path, Permissions::from_mode(mode)).expect("a mode");
            let why = Tokens::read(&path).err().expect("an error").to_string();
            assert!(why.starts_with("--tokens") && !why.contains('\n'), "{why}");
            why
        };
        assert!(refused(&format!("read {A}\n"), 0o644).contains("chmod go= "));
        assert!(refused("# none\n", 0o600).contains("has no token"));
        let why = refused("\nread secret\n", 0o600);
        assert!(why.contains("line 2: ") && !why.contains("secret"), "{why}");
    }
}
