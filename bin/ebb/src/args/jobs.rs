//! Arguments of `ebb jobs`.

use clap::Subcommand;

use super::Output;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Jobs {
    #[command(subcommand)]
    pub command: Option<JobsCommand>,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Subcommand)]
pub enum JobsCommand {
    /// Have a job end after its present step, and wait for that; what was done until then stays done
    Cancel {
        /// The job's number
        id: u64,
        #[command(flatten)]
        output: Output,
    },
}
