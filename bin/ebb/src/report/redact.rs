//! Values that look like secrets are removed from what goes into a bundle: a log may have QEMU's
//! arguments, and a user may have put a password there.

/// Words behind which, and behind a `=`, a secret may stand. Some have other meanings, too: what is
/// removed needlessly is only missed.
const WORDS: [&str; 6] = ["password", "passwd", "secret", "token", "data", "passphrase"];
/// What stands before a token in HTTP.
const BEARER: &str = "bearer ";
const REMOVED: &str = "[removed]";

/// Returns the text without such values.
pub fn redact(text: &str) -> String {
    let mut redacted = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        redact_line(line, &mut redacted);
    }
    redacted
}

fn redact_line(line: &str, redacted: &mut String) {
    // Only ASCII letters change, so places are the same in both.
    let lower = line.to_ascii_lowercase();
    let mut at = 0;
    while let Some(value) = next_value(&lower, at) {
        redacted.push_str(&line[at..value]);
        let length = line[value..].find(is_end).unwrap_or(line.len() - value);
        if length > 0 {
            redacted.push_str(REMOVED);
        }
        at = value + length;
    }
    redacted.push_str(&line[at..]);
}

/// Where the next secret begins, from this place on.
fn next_value(lower: &str, from: usize) -> Option<usize> {
    let rest = &lower[from..];
    let behind = |word: &str| rest.find(word).map(|at| from + at + word.len());
    let named = WORDS.iter().filter_map(|word| behind(&format!("{word}=")));
    named.chain(behind(BEARER)).min()
}

fn is_end(c: char) -> bool {
    c.is_whitespace() || matches!(c, ',' | '"' | '\'' | '\\' | '&' | ';')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_secrets_are_removed_and_nothing_else() {
        for (text, expected) in [
            (
                "-spice port=1,password=abc,disable-ticketing",
                "-spice port=1,password=[removed],disable-ticketing",
            ),
            ("-object secret,id=s,data=aGk=\n", "-object secret,id=s,data=[removed]\n"),
            ("Authorization: Bearer abc.def ok", "Authorization: Bearer [removed] ok"),
            (r#"{"a": "PASSWORD=x y"}"#, r#"{"a": "PASSWORD=[removed] y"}"#),
            ("token=a token=b", "token=[removed] token=[removed]"),
            ("the token of line 3: PUT /v1/pool: 200", "the token of line 3: PUT /v1/pool: 200"),
            ("password=", "password="),
            ("Käse, passwd=ü,x\n\nß", "Käse, passwd=[removed],x\n\nß"),
            ("", ""),
        ] {
            assert_eq!(redact(text), expected);
        }
    }
}
