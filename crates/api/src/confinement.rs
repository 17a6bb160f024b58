//! What keeps a QEMU that Ebb has started to itself.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a QEMU that Ebb has started is and may do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Confinement {
    /// It runs as the daemon does, with all that root may do: `--privileged`.
    pub privileged: bool,
    /// The number of its user.
    pub uid: u32,
    /// The number of its group.
    pub gid: u32,
    /// It filters its own system calls (seccomp).
    pub sandbox: bool,
    /// The directories of its control groups, one in each hierarchy that limits it.
    #[schema(value_type = Vec<String>)]
    pub cgroups: Vec<PathBuf>,
    /// What of this it lacks, and why.
    pub lacks: Vec<String>,
}
