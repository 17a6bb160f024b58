//! The arguments of `ebb top`.

use crate::clock;

/// What `ebb top` shows, and how.
#[derive(clap::Args)]
pub struct Top {
    /// Show only VMs with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Allow keys that change a limit or a hold; each asks before it acts
    #[arg(long, conflicts_with_all = ["once", "json", "at"])]
    pub control: bool,
    /// Show history at this time: 14:05, 14:05:30 or 2026-11-28T14:05
    #[arg(long, value_name = "TIME", value_parser = clock::moment)]
    pub at: Option<u64>,
    /// Print one screen as text, and end
    #[arg(long)]
    pub once: bool,
    /// Print the figures as JSON, and end
    #[arg(long)]
    pub json: bool,
}
