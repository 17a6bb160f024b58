//! What a client may ask for.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::choice::choice;

choice! {
    /// What a client may ask for.
    Role {
        /// To look: its token's line begins with `read`.
        Read = "read",
        /// To look, and to change what other machines may change: its token's line begins with
        /// `control`.
        Control = "control",
        /// All: it asks on the host itself, over the UNIX socket.
        Host = "host",
    }
}

/// What the client may do that asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// What it may ask for.
    pub role: Role,
}
