//! What keeps a QEMU that Ebb has started to itself.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How Ebb confines a QEMU that it has started.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Confinement {
    /// QEMU runs as root, with the daemon's capabilities (`--privileged`).
    pub privileged: bool,
    /// Number of QEMU's user.
    pub uid: u32,
    /// Number of QEMU's group.
    pub gid: u32,
    /// QEMU filters its own system calls (seccomp).
    pub sandbox: bool,
    /// Directories of QEMU's control groups, one in each hierarchy that limits it.
    #[schema(value_type = Vec<String>)]
    pub cgroups: Vec<PathBuf>,
    /// What is missing of the confinement, and why.
    pub lacks: Vec<String>,
}
