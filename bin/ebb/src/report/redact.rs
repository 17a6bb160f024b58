//! Values that look like secrets are removed from what goes into a bundle: a log may have QEMU's
//! arguments, and a user may have put a password there.

/// Words that name a secret, which stands behind a `=` or `:`, or behind the option of that name. Some
/// have other meanings, too: to remove too much does less harm than to keep a secret.
const WORDS: [&str; 7] =
    ["password", "passwd", "passphrase", "secret", "token", "api_key", "api-key"];
/// Words that name one only before a `=`.
const BEFORE_EQUALS: [&str; 2] = ["data", "key"];
/// What stands before a token in HTTP.
const BEARER: &str = "bearer ";
/// What stands before a user, and perhaps the password, in an address.
const SCHEME: &str = "://";
const REMOVED: &str = "[removed]";
const QUOTES: [char; 2] = ['"', '\''];

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
    while let Some((value, length)) = next_value(&lower, at) {
        redacted.push_str(&line[at..value]);
        if length > 0 {
            redacted.push_str(REMOVED);
        }
        at = value + length;
    }
    redacted.push_str(&line[at..]);
}

/// Where the next secret begins, from this place on, and how long it is.
fn next_value(lower: &str, from: usize) -> Option<(usize, usize)> {
    let rest = &lower[from..];
    let named = WORDS.iter().filter_map(|word| first(rest, word, value_of_word));
    let before_equals = BEFORE_EQUALS.iter().filter_map(|word| {
        first(rest, word, |_, behind| value_behind(behind.strip_prefix('=')?, behind))
    });
    let bearer = first(rest, BEARER, |_, behind| value_behind(behind, behind));
    let address = first(rest, SCHEME, |_, behind| password_of(behind));
    let (at, length) = named.chain(before_equals).chain(bearer).chain(address).min()?;
    Some((from + at, length))
}

/// The first value that `value` finds at an occurrence of `word`. It is given what comes before the
/// occurrence and behind it, and tells where the value begins behind it.
fn first(
    text: &str,
    word: &str,
    value: impl Fn(&str, &str) -> Option<(usize, usize)>,
) -> Option<(usize, usize)> {
    text.match_indices(word).find_map(|(at, _)| {
        let end = at + word.len();
        value(&text[..at], &text[end..]).map(|(offset, length)| (end + offset, length))
    })
}

/// The value of a word: `word=value`, `"word": "value"`, `--word value`.
fn value_of_word(before: &str, behind: &str) -> Option<(usize, usize)> {
    let unquoted = behind.strip_prefix(QUOTES).unwrap_or(behind).trim_start();
    let value = match unquoted.strip_prefix(['=', ':']) {
        Some(value) => value,
        None if before.ends_with('-') => behind.strip_prefix(' ')?,
        None => return None,
    };
    value_behind(value.trim_start_matches(' '), behind)
}

/// The value with which `value` begins, a part of `behind`. A quoted one ends with its quote.
fn value_behind(value: &str, behind: &str) -> Option<(usize, usize)> {
    let at = behind.len() - value.len();
    let quote = value.chars().next().filter(|first| QUOTES.contains(first));
    match quote {
        Some(quote) => {
            let quoted = &value[1..];
            Some((at + 1, quoted.find(quote).unwrap_or_else(|| quoted.trim_end().len())))
        }
        None => Some((at, value.find(is_end).unwrap_or(value.len()))),
    }
}

/// The password of an address: `user:password@host`.
fn password_of(behind: &str) -> Option<(usize, usize)> {
    let end = behind.find(|c: char| is_end(c) || c == '/').unwrap_or(behind.len());
    let user_end = behind[..end].rfind('@')?;
    let at = behind[..user_end].find(':')? + 1;
    Some((at, user_end - at))
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
            (r#"password="a b",x"#, r#"password="[removed]",x"#),
            (r#"{"password": "a b", "c": 1}"#, r#"{"password": "[removed]", "c": 1}"#),
            ("passwd: x\n", "passwd: [removed]\n"),
            ("client --password x --token y z", "client --password [removed] --token [removed] z"),
            ("nbd://me:pw@host/x?key=a", "nbd://me:[removed]@host/x?key=[removed]"),
            ("http://host:80/a@b", "http://host:80/a@b"),
            ("\"password", "\"password"),
            ("Käse, passwd=ü,x\n\nß", "Käse, passwd=[removed],x\n\nß"),
            ("", ""),
        ] {
            assert_eq!(redact(text), expected);
        }
    }
}
