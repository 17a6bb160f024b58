//! Seals pages, so that others cannot read a slot and damage to it is found.

use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::{AeadInOut, Aes256Gcm, KeyInit};
use ebb_sys::confine::lock_in_memory;
use twox_hash::XxHash3_128;

use crate::Page;

/// What a slot on disk is protected against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Readers and damage: AES-256-GCM, with a key that is removed with the VM.
    Encrypted,
    /// Accidental damage only: XXH3. For a disk that encrypts by itself.
    Checksum,
}

/// 16 bytes that prove a slot's content.
pub(crate) type Tag = [u64; 2];

/// A generation of a slot. It never occurs twice under one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotGeneration {
    /// Below 2^48.
    pub(crate) slot: u64,
    /// Below 2^48.
    pub(crate) generation: u64,
}

impl SlotGeneration {
    fn nonce(self) -> [u8; 12] {
        let (mut nonce, [slot, generation]) =
            ([0; 12], [self.slot, self.generation].map(u64::to_le_bytes));
        let bytes = slot.iter().take(6).chain(generation.iter().take(6));
        nonce.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        nonce
    }

    /// Returns the seed for the hash: the same bytes hash differently at different places.
    fn seed(self) -> u64 {
        self.slot ^ self.generation.rotate_left(32)
    }
}

/// Seals and opens pages.
pub(crate) enum Sealer {
    Aes(Box<Aes256Gcm>),
    Xxh3,
}

impl Sealer {
    /// Makes a sealer with this key. The cipher overwrites its keys when it is dropped. Until then
    /// they stay out of the host's swap, as far as this process may lock memory.
    pub(crate) fn aes(key: &[u8; 32]) -> Sealer {
        let cipher = Box::new(Aes256Gcm::new(key.into()));
        // If memory cannot be locked, the VM still runs.
        let _ = lock_in_memory(&*cipher);
        Sealer::Aes(cipher)
    }

    /// Whether the sealed page is the page itself.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Sealer::Xxh3)
    }

    /// Returns the tag of a page that is stored as it is.
    pub(crate) fn tag(place: SlotGeneration, page: &Page) -> Tag {
        let hash = XxHash3_128::oneshot_with_seed(place.seed(), page);
        [hash as u64, (hash >> 64) as u64]
    }

    /// Writes what is to be stored to `sealed` and returns its tag. `None`: the cipher refuses the
    /// page's length, which it never does.
    pub(crate) fn seal(
        &self,
        place: SlotGeneration,
        page: &Page,
        sealed: &mut Page,
    ) -> Option<Tag> {
        let Sealer::Aes(cipher) = self else {
            sealed.copy_from_slice(page);
            return Some(Sealer::tag(place, page));
        };
        let both = InOutBuf::new(page.as_slice(), sealed.as_mut_slice()).ok()?;
        let tag = cipher.encrypt_inout_detached(&place.nonce().into(), &[], both).ok()?;
        let (halves, _) = tag.as_chunks::<8>();
        <[[u8; 8]; 2]>::try_from(halves).ok().map(|halves| halves.map(u64::from_le_bytes))
    }

    /// Writes the page that was stored to `page`. `false`: `sealed` is not what was stored at this
    /// place, and `page` is unchanged.
    pub(crate) fn open(
        &self,
        place: SlotGeneration,
        tag: Tag,
        sealed: &Page,
        page: &mut Page,
    ) -> bool {
        match self {
            Sealer::Aes(_) => {
                let both = InOutBuf::new(sealed.as_slice(), page.as_mut_slice());
                both.is_ok_and(|both| self.decrypt(place, tag, both))
            }
            Sealer::Xxh3 => {
                let whole = Sealer::tag(place, sealed) == tag;
                if whole {
                    page.copy_from_slice(sealed);
                }
                whole
            }
        }
    }

    /// Opens a page in place. `false`: it is not what was stored at this place.
    pub(crate) fn open_in_place(&self, place: SlotGeneration, tag: Tag, page: &mut Page) -> bool {
        match self {
            Sealer::Aes(_) => self.decrypt(place, tag, page.as_mut_slice().into()),
            Sealer::Xxh3 => Sealer::tag(place, page) == tag,
        }
    }

    /// Decrypts a page. The cipher checks the tag before it writes anything.
    fn decrypt(&self, place: SlotGeneration, tag: Tag, both: InOutBuf<'_, '_, u8>) -> bool {
        let Sealer::Aes(cipher) = self else { return false };
        let mut bytes = [0; 16];
        let (halves, _) = bytes.as_chunks_mut::<8>();
        halves.iter_mut().zip(tag).for_each(|(to, from)| *to = from.to_le_bytes());
        cipher.decrypt_inout_detached(&place.nonce().into(), &[], both, &bytes.into()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: SlotGeneration = SlotGeneration { slot: 7, generation: 3 };

    fn sealers() -> [Sealer; 2] {
        [Sealer::aes(&[5; 32]), Sealer::Xxh3]
    }

    #[test]
    fn a_page_opens_at_its_place_alone() {
        for sealer in sealers() {
            let (page, mut sealed, mut back) = ([9; 4096], [0; 4096], [1; 4096]);
            let tag = sealer.seal(PLACE, &page, &mut sealed).unwrap();
            let others =
                [SlotGeneration { slot: 8, ..PLACE }, SlotGeneration { generation: 4, ..PLACE }];
            for place in others {
                assert!(!sealer.open(place, tag, &sealed, &mut back));
                assert_eq!(back, [1; 4096]);
            }
            assert!(sealer.open(PLACE, tag, &sealed, &mut back));
            assert_eq!(back, page);
            assert_eq!(sealer.is_plain(), sealed == page);
        }
    }

    #[test]
    fn any_damaged_byte_is_found() {
        for sealer in sealers() {
            let mut sealed = [0; 4096];
            let tag = sealer.seal(PLACE, &[9; 4096], &mut sealed).unwrap();
            for at in (0..4096).step_by(31).chain([4095]) {
                let mut damaged = sealed;
                damaged[at] ^= 1 << (at % 8);
                assert!(!sealer.open_in_place(PLACE, tag, &mut damaged));
            }
            assert!(!sealer.open_in_place(PLACE, [tag[0] ^ 1, tag[1]], &mut sealed));
        }
    }
}
