//! Arguments of `ebb observe`.

use super::Output;
use crate::interval::Interval;

#[derive(clap::Args)]
pub struct Observe {
    /// QEMU's process number; repeat the option for several
    #[arg(long, value_name = "PID")]
    pub pid: Vec<i32>,
    /// Look at every QEMU of the host [default, if no --pid is given]
    #[arg(long, conflicts_with = "pid")]
    pub all: bool,
    /// Look again after this time, as 500ms, 15s or 1m, until Ctrl-C [default: look once]
    #[arg(long, value_name = "TIME")]
    pub every: Option<Interval>,
    #[command(flatten)]
    pub output: Output,
}
