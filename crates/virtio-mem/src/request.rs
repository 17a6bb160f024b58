//! Requests and responses as bytes: virtio 1.2, section 5.15.6. Everything is little endian.

use ebb_units::Gpa;

/// Size of every request (section 5.15.6).
pub const REQUEST_BYTES: usize = 24;
/// Size of every response (section 5.15.6).
pub const RESPONSE_BYTES: usize = 10;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

/// Consecutive blocks as the driver names them. Nothing of it is checked yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Named {
    /// Address of the first block.
    pub start: Gpa,
    /// Number of blocks.
    pub count: u16,
}

/// A request: sections 5.15.6.3 to 5.15.6.6.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Plug these blocks.
    Plug(Named),
    /// Unplug these blocks.
    Unplug(Named),
    /// Unplug all blocks.
    UnplugAll,
    /// Tell whether these blocks are plugged.
    State(Named),
}

impl Request {
    /// Reads a request. Returns `None` if it is too short, or of a kind that the standard does not
    /// have. Padding, and bytes after the request, are ignored (section 5.15.6.3.2).
    pub fn parse(bytes: &[u8]) -> Option<Request> {
        let bytes: &[u8; REQUEST_BYTES] = bytes.first_chunk()?;
        let (kind, start, count) = match *bytes {
            [k0, k1, _, _, _, _, _, _, a0, a1, a2, a3, a4, a5, a6, a7, n0, n1, ..] => (
                u16::from_le_bytes([k0, k1]),
                u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
                u16::from_le_bytes([n0, n1]),
            ),
        };
        let named = Named { start: Gpa(start), count };
        match kind {
            PLUG => Some(Request::Plug(named)),
            UNPLUG => Some(Request::Unplug(named)),
            UNPLUG_ALL => Some(Request::UnplugAll),
            STATE => Some(Request::State(named)),
            _ => None,
        }
    }

    /// Returns the request's bytes, as a driver would send them.
    pub fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let none = Named { start: Gpa(0), count: 0 };
        let (kind, named) = match self {
            Request::Plug(named) => (PLUG, named),
            Request::Unplug(named) => (UNPLUG, named),
            Request::UnplugAll => (UNPLUG_ALL, none),
            Request::State(named) => (STATE, named),
        };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&named.start.0.to_le_bytes());
        bytes[16..18].copy_from_slice(&named.count.to_le_bytes());
        bytes
    }
}

/// State of a range of blocks (section 5.15.6.6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockState {
    /// All are plugged.
    Plugged = 0,
    /// All are unplugged.
    Unplugged = 1,
    /// Some are plugged, some are not.
    Mixed = 2,
}

/// A response: section 5.15.6.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Response {
    /// Done.
    Ack,
    /// Answer to a STATE request.
    AckState(BlockState),
    /// The request would exceed the requested size. It fails until that size changes.
    Nack,
    /// The request cannot be served now. The driver should ask again later.
    Busy,
    /// The request is invalid.
    Error,
}

impl Response {
    /// Returns the bytes that the driver gets.
    pub fn to_bytes(self) -> [u8; RESPONSE_BYTES] {
        let (kind, state) = match self {
            Response::Ack => (0, 0),
            Response::AckState(state) => (0, state as u8),
            Response::Nack => (1, 0),
            Response::Busy => (2, 0),
            Response::Error => (3, 0),
        };
        // Both are `le16`, and their values fit into the lower byte.
        [kind, 0, 0, 0, 0, 0, 0, 0, state, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: Named = Named { start: Gpa(0x1_2345_6780), count: 0x0203 };

    #[test]
    fn a_request_has_its_fields_where_the_standard_has_them() {
        let mut bytes = [0xee; REQUEST_BYTES];
        bytes[..2].copy_from_slice(&[3, 0]);
        bytes[8..18].copy_from_slice(&[0x80, 0x67, 0x45, 0x23, 1, 0, 0, 0, 3, 2]);
        assert_eq!(Request::parse(&bytes), Some(Request::State(NAMED)));
        let long = [&bytes[..], &[1, 2, 3]].concat();
        assert_eq!(Request::parse(&long), Some(Request::State(NAMED)));
        assert_eq!(Request::parse(&bytes[..REQUEST_BYTES - 1]), None);
        assert_eq!(Request::parse(&[]), None);
    }

    #[test]
    fn every_request_survives_its_bytes() {
        for request in [
            Request::Plug(NAMED),
            Request::Unplug(NAMED),
            Request::UnplugAll,
            Request::State(NAMED),
        ] {
            assert_eq!(Request::parse(&request.to_bytes()), Some(request));
        }
    }

    #[test]
    fn unknown_request_types_are_refused() {
        for kind in [4, 5, 0x100, 0xff00, u16::MAX] {
            let mut bytes = Request::UnplugAll.to_bytes();
            bytes[..2].copy_from_slice(&kind.to_le_bytes());
            assert_eq!(Request::parse(&bytes), None);
        }
    }

    #[test]
    fn a_response_is_ten_bytes() {
        let bytes = |response: Response| response.to_bytes();
        assert_eq!(bytes(Response::Ack), [0; 10]);
        assert_eq!(bytes(Response::Nack), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes(Response::Busy), [2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes(Response::Error), [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes(Response::AckState(BlockState::Plugged)), [0; 10]);
        let unplugged = bytes(Response::AckState(BlockState::Unplugged));
        assert_eq!(unplugged, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        let mixed = bytes(Response::AckState(BlockState::Mixed));
        assert_eq!(mixed, [0, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
    }
}
