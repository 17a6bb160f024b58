//! The answer of a VM's process to its task.

use std::io::{self, Write};

use crate::model::task::TaskResult;

/// Writes the answer to standard output, where `ebbd` waits for it.
pub(super) fn say(result: &TaskResult) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, result)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
