//! The command line.

use std::path::PathBuf;

use clap::Parser;
use ebb_api::route;

/// Longest name of an object in Kubernetes.
const NAME_LEN_MAX: usize = 253;

/// Tells Kubernetes what the VMs of this node could give back
///
/// It finds the API server by KUBECONFIG, by ~/.kube/config, or as a pod does.
#[derive(Parser)]
#[command(name = "ebb-node", version, max_term_width = 100)]
pub struct Args {
    /// The run directory of ebbd
    #[arg(long, env = "EBB_RUN_DIR", value_name = "DIR")]
    #[arg(default_value = route::RUN_DIR_DEFAULT)]
    pub run_dir: PathBuf,
    /// The name of this node in the cluster
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node: String,
    /// Ask ebbd every so many seconds
    #[arg(long = "every", value_name = "SECONDS", default_value_t = 15)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=300))]
    pub every_s: u64,
}

/// Checks that a text can be a node's name: it becomes part of a path.
fn node_name(text: &str) -> Result<String, String> {
    let is_allowed = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
    };
    let begins_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    match begins_well && text.len() <= NAME_LEN_MAX && text.bytes().all(is_allowed) {
        true => Ok(text.to_owned()),
        false => Err("give the name that `kubectl get nodes` shows".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nodes_are_names_of_hosts() {
        for name in ["a", "7", "web-1.example.org", &"x".repeat(253)] {
            assert_eq!(node_name(name).as_deref(), Ok(name));
        }
        for name in ["", ".", "..", "-a", "A", "a b", "a/b", "a%2f", "ü", &"x".repeat(254)] {
            assert!(node_name(name).is_err(), "{name:?}");
        }
    }
}
