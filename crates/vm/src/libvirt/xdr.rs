//! Values as libvirt's protocol encodes them (XDR, RFC 4506): big-endian, in units of four bytes.

/// Bytes of a unit.
const UNIT: usize = 4;

/// Encodes values one after the other.
#[derive(Clone, Default, Debug)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    /// Appends a number.
    #[must_use]
    pub fn number(mut self, value: u32) -> Encoder {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends bytes whose number both sides know.
    #[must_use]
    pub fn fixed(mut self, bytes: &[u8]) -> Encoder {
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(UNIT), 0);
        self
    }

    /// Appends a text with its length.
    #[must_use]
    pub fn text(self, text: &str) -> Encoder {
        // No text is that long: the connection's bound is far below.
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.number(length).fixed(text.as_bytes())
    }

    /// Appends a text that could be absent.
    #[must_use]
    pub fn some_text(self, text: &str) -> Encoder {
        self.number(1).text(text)
    }
}

/// Decodes values one after the other. `None`: the bytes end before.
#[derive(Clone, Copy, Debug)]
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let padded = length.checked_next_multiple_of(UNIT)?;
        let all = self.0.get(..padded)?;
        self.0 = self.0.get(padded..)?;
        all.get(..length)
    }

    /// The next number.
    pub fn number(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.bytes(UNIT)?.try_into().ok()?))
    }

    /// The next bytes, whose number both sides know.
    pub fn fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// The next text.
    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.number()?.try_into().ok()?;
        std::str::from_utf8(self.bytes(length)?).ok()
    }

    /// The next text that may be absent.
    pub fn maybe_text(&mut self) -> Option<Option<&'a str>> {
        match self.number()? {
            0 => Some(None),
            1 => self.text().map(Some),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let all = Encoder::default().number(7).fixed(b"12345").text("abc").some_text("").number(0);
        assert_eq!(all.0.len(), 4 + 8 + 8 + 8 + 4);
        let mut from = Decoder(&all.0);
        assert_eq!(from.number(), Some(7));
        assert_eq!(from.fixed(), Some(*b"12345"));
        assert_eq!(from.text(), Some("abc"));
        assert_eq!(from.maybe_text(), Some(Some("")));
        assert_eq!(from.maybe_text(), Some(None));
        assert_eq!(from.number(), None);
    }

    #[test]
    fn a_length_beyond_the_end_is_no_text() {
        for length in [5, u32::MAX] {
            let short = Encoder::default().number(length).fixed(b"abcd");
            assert_eq!(Decoder(&short.0).text(), None);
        }
        let other = Encoder::default().number(2).text("abcd");
        assert_eq!(Decoder(&other.0).maybe_text(), None);
        let no_text = Encoder::default().number(2).fixed(b"\xff\xff");
        assert_eq!(Decoder(&no_text.0).text(), None);
    }
}
