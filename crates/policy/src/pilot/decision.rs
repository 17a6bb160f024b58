//! What the pilot decides.

use std::fmt;

use ebb_units::Bytes;

/// What is to be done with a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Reclaim so much of its free memory.
    Reclaim {
        /// The bytes.
        bytes: u64,
    },
    /// Change the limit of its resident memory. `None`: no limit.
    Limit {
        /// The limit until now.
        from: Option<u64>,
        /// The limit from now on.
        to: Option<u64>,
    },
    /// Change the most memory that its compressed pages may take. What is above it goes to the swap
    /// file.
    Compress {
        /// The bytes until now.
        from: u64,
        /// The bytes from now on. `None`: as the daemon has it for all VMs.
        to: Option<u64>,
    },
    /// Have its guest plug or unplug memory.
    Plug {
        /// What was to be plugged until now, in bytes.
        from: u64,
        /// What is to be plugged from now on, in bytes.
        to: u64,
    },
}

/// A decision, with its reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// Name of the VM.
    pub vm: String,
    /// What is to be done with it.
    pub action: Action,
    /// Why, with the figures.
    pub why: String,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = |f: &mut fmt::Formatter<'_>, limit: Option<u64>| match limit {
            Some(bytes) => write!(f, "{}", Bytes(bytes)),
            None => f.write_str("none"),
        };
        match *self {
            Action::Reclaim { bytes } => write!(f, "reclaim {} of free memory", Bytes(bytes)),
            Action::Limit { from, to } => {
                f.write_str("limit ")?;
                limit(f, from)?;
                f.write_str(" -> ")?;
                limit(f, to)
            }
            Action::Compress { from, to: Some(to) } => {
                write!(f, "compressed memory {} -> {}", Bytes(from), Bytes(to))
            }
            Action::Compress { from, to: None } => {
                write!(f, "compressed memory {} -> as ebbd --compressed", Bytes(from))
            }
            Action::Plug { from, to } => {
                write!(f, "plugged memory {} -> {}", Bytes(from), Bytes(to))
            }
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.vm, self.action, self.why)
    }
}
