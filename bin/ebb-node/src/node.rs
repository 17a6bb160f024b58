//! This node, as the API server of Kubernetes has it.

use std::error::Error;
use std::time::Duration;

use anyhow::{anyhow, bail};
use k8s_openapi::api::core::v1;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use tokio::time::timeout;

/// The annotation, in bytes.
const ANNOTATION: &str = "ebb.internal/reclaimable-bytes";
/// The extended resource, in bytes.
const RESOURCE: &str = "ebb.internal/reclaimable-memory";
/// Who has changed the node, as its `managedFields` say.
const MANAGER: &str = "ebb-node";
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A node of the cluster.
pub struct Node {
    api: Api<v1::Node>,
    name: String,
}

impl Node {
    /// The node of this name. Asks nobody yet.
    ///
    /// # Errors
    /// It is not known where the API server is, or who asks.
    pub async fn new(name: &str) -> anyhow::Result<Node> {
        let mut config = Config::infer().await.map_err(|error| {
            anyhow!(
                "no way to the API server: in a pod, give it a service account; elsewhere, name a \
                 file by KUBECONFIG: {error}"
            )
        })?;
        // The next look asks again.
        config.default_retry = false;
        config.connect_timeout = Some(PATIENCE);
        let client = Client::try_from(config)
            .map_err(|error| anyhow!("the way to the API server cannot be used: {error}"))?;
        Ok(Node { api: Api::all(client), name: name.into() })
    }

    /// Publishes how much the node could give back. `None`: that is not known, so nothing stays
    /// there.
    ///
    /// # Errors
    /// There is no such node, the API server forbids it, or it does not answer.
    pub async fn publish(&self, bytes: Option<u64>) -> anyhow::Result<()> {
        let parameters =
            PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
        let (annotation, status) = patches(bytes);
        self.in_time(self.api.patch(&self.name, &parameters, &Patch::Merge(annotation))).await?;
        self.in_time(self.api.patch_status(&self.name, &parameters, &Patch::Merge(status))).await
    }

    async fn in_time(
        &self,
        asked: impl Future<Output = Result<v1::Node, kube::Error>>,
    ) -> anyhow::Result<()> {
        match timeout(PATIENCE, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => bail!(self.explain(&error)),
            Err(_) => bail!("the API server is silent for {} s", PATIENCE.as_secs()),
        }
    }

    fn explain(&self, error: &kube::Error) -> String {
        let name = &self.name;
        match error {
            kube::Error::Api(status) if status.is_not_found() => format!(
                "the cluster has no node {name}: give --node, or NODE_NAME, the name that \
                 `kubectl get nodes` shows"
            ),
            kube::Error::Api(status) if status.is_forbidden() => format!(
                "the API server forbids to change node {name}: the service account needs the \
                 rights of deploy/kubernetes/rbac.yaml, and a token of this node's: {}",
                status.message
            ),
            kube::Error::Api(status) if status.code == 401 => {
                "the API server does not know who asks: the token is wrong or has expired".into()
            }
            kube::Error::Api(status) => format!("the API server refuses: {}", status.message),
            error => format!("the API server does not answer: {}", first_cause(error)),
        }
    }
}

/// What to change in the node, and in its status. Null takes a field away.
fn patches(bytes: Option<u64>) -> (Value, Value) {
    let bytes = bytes.map(|bytes| bytes.to_string());
    let resource = json!({ RESOURCE: bytes });
    (
        json!({ "metadata": { "annotations": { ANNOTATION: bytes } } }),
        json!({ "status": { "capacity": resource, "allocatable": resource } }),
    )
}

/// The error that caused all others.
fn first_cause(error: &kube::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_that_is_not_known_is_taken_away() {
        let (annotation, status) = patches(Some(1 << 30));
        let text = "1073741824";
        assert_eq!(annotation["metadata"]["annotations"][ANNOTATION], text);
        assert_eq!(status["status"]["capacity"][RESOURCE], text);
        assert_eq!(status["status"]["allocatable"][RESOURCE], text);
        let (annotation, status) = patches(None);
        for (patch, path) in [
            (&annotation, ["metadata", "annotations", ANNOTATION]),
            (&status, ["status", "capacity", RESOURCE]),
            (&status, ["status", "allocatable", RESOURCE]),
        ] {
            let parent = patch[path[0]][path[1]].as_object().unwrap();
            assert_eq!(parent.get(path[2]), Some(&Value::Null), "{path:?}");
        }
    }
}
