//! `ebb attach`: one VM, or all that can be managed.

use anyhow::Context;
use ebb_api::{AttachRequest, DiscoveredVm, VmName, VmStatus, VmSummary};
use serde::Serialize;

use crate::args::Attach;
use crate::{FAILED, Outcome, observe, show};

/// What became of one VM.
#[derive(Serialize)]
struct Attached {
    name: VmName,
    pid: i32,
    /// Its status; null: Ebb does not manage it.
    status: Option<VmStatus>,
    /// Why Ebb does not manage it; null: Ebb does.
    error: Option<String>,
}

/// The request for one VM.
///
/// # Errors
/// The VM's name or process is missing, or the request makes no sense.
pub fn request(attach: Attach) -> anyhow::Result<AttachRequest> {
    let (name, pid) = (attach.name, attach.pid);
    let request = AttachRequest {
        name: name.context("name the VM: --name NAME --pid PID, or --all")?,
        pid: pid.context("give QEMU's process number: --pid PID, or --all")?,
        qmp: attach.qmp.map(crate::paths::existing_socket).transpose()?,
        mode: attach.watch.mode,
        min_order: attach.watch.min_order,
    };
    request.check()?;
    Ok(request)
}

/// Attaches every VM that can be managed, one after the other.
///
/// # Errors
/// `/proc` cannot be read, or no answer can be shown. A VM that cannot be attached is in the
/// outcome.
pub fn all(
    attach: &Attach,
    managed: &[VmSummary],
    has_directory: impl Fn(&VmName) -> bool,
    mut send: impl FnMut(&AttachRequest) -> anyhow::Result<VmStatus>,
) -> anyhow::Result<Outcome> {
    let all = observe::discover(managed)?;
    let attached: Vec<Attached> = observe::attachable(&all, managed, has_directory)
        .into_iter()
        .map(|(name, pid)| {
            let (mode, min_order) = (attach.watch.mode, attach.watch.min_order);
            let request = AttachRequest { name, pid, qmp: None, mode, min_order };
            let sent = request.check().map_err(Into::into).and_then(|()| send(&request));
            let (status, error) = match sent {
                Ok(status) => (Some(status), None),
                Err(error) => (None, Some(format!("{error:#}"))),
            };
            Attached { name: request.name, pid, status, error }
        })
        .collect();
    let failed = attached.iter().any(|vm| vm.error.is_some());
    let text = match attach.output.json {
        true => serde_json::to_string_pretty(&attached)? + "\n",
        false => shown(&attached, &all),
    };
    Ok(Outcome { text, code: if failed { FAILED } else { 0 } })
}

fn shown(attached: &[Attached], all: &[DiscoveredVm]) -> String {
    let mut text: String = attached.iter().map(Attached::line).collect();
    let left = all.iter().filter(|vm| vm.obstacle.is_some()).count();
    if text.is_empty() {
        text = "there is no further VM that Ebb can manage\n".into();
    }
    if left > 0 {
        text += &format!("{left} cannot be managed: `ebb discover` says why\n");
    }
    text
}

impl Attached {
    fn line(&self) -> String {
        let text = match &self.error {
            None => "managed".to_owned(),
            Some(why) => why.replace(char::is_control, "?"),
        };
        show::row(self.name.as_str(), format!("process {}: {text}", self.pid))
    }
}
