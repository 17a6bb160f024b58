//! Arguments of `ebb config`.

use std::path::PathBuf;

use clap::Subcommand;

use super::Output;

#[derive(clap::Args)]
pub struct Config {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Check the file: if something is wrong, one line says where, and what to do
    Check {
        /// The file [default: /etc/ebb/ebb.toml]
        #[arg(env = "EBB_CONFIG")]
        file: Option<PathBuf>,
    },
    /// Show every setting of the file, and those that it leaves at their defaults
    Show {
        /// The file [default: /etc/ebb/ebb.toml]
        #[arg(env = "EBB_CONFIG")]
        file: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
}
