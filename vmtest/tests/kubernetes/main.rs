//! Ebb in a Kubernetes: what `ebb-node` publishes, and the manifests of `deploy/kubernetes`. The
//! API server is a real one. There is no kubelet, so nothing runs in pods: `docs/kubernetes.md` says
//! what no test shows. `cargo xtask soak kubernetes`.

mod cluster;
mod program;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use vmtest::{Guest, Host, Ran, assets, has_time, require, until, until_fits};

use cluster::{ADMIN, Cluster, NAMESPACE, free_ports};
use program::Program;

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes");
const ANNOTATION: &str = "ebb.internal/reclaimable-bytes";
const RESOURCE: &str = "ebb.internal/reclaimable-memory";
/// The node that `ebb-node` runs for.
const NODE: &str = "node1";
/// What `admission.yaml` says.
const POLICY: &str = "ebb-node may change only the node that its pod is on";
const MIB: u64 = 1 << 20;

#[test]
fn a_node_tells_what_its_vms_could_give_back() {
    require!(has_time("the API server takes minutes to build: cargo xtask soak kubernetes"));
    let programs = assets::kubernetes();
    require!(programs.as_ref());
    let mut cluster = Cluster::start(&programs.unwrap());
    apply_manifests(&cluster);
    let host = Host::new();
    host.start();
    let token = check_refusals(&cluster, &host);
    check_figures(&mut cluster, &host, &token);
}

/// The files that a kustomization lists.
fn resources(directory: &Path) -> Vec<String> {
    let file = directory.join("kustomization.yaml");
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let named = text.lines().filter_map(|line| line.strip_prefix("- "));
    named.filter(|name| name.ends_with(".yaml") && !name.contains(' ')).map(Into::into).collect()
}

/// The path under which the API server keeps objects like this one.
fn collection(document: &str) -> String {
    let field = |name: &str| {
        let line = document.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name} in {document}")).trim()
    };
    let api = match field("apiVersion:") {
        "v1" => "/api/v1".to_owned(),
        group => format!("/apis/{group}"),
    };
    let kind = field("kind:");
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{}ies", stem.to_lowercase()),
        None => format!("{}s", kind.to_lowercase()),
    };
    match kind {
        "ServiceAccount" | "Service" | "DaemonSet" => {
            format!("{api}/namespaces/{NAMESPACE}/{plural}")
        }
        _ => format!("{api}/{plural}"),
    }
}

/// Gives the API server all manifests. It knows each field of them.
fn apply_manifests(cluster: &Cluster) {
    let (base, monitoring) = (Path::new(DEPLOY), Path::new(DEPLOY).join("monitoring"));
    let files = resources(base).into_iter().map(|name| base.join(name));
    let further = resources(&monitoring).into_iter().map(|name| monitoring.join(name));
    // Prometheus' operator brings this kind of object.
    let further = further.filter(|path| !path.ends_with("servicemonitor.yaml"));
    let mut count = 0;
    for path in files.chain(further) {
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        for document in text.split("\n---\n") {
            let to = collection(document) + "?fieldValidation=Strict";
            let answer = cluster.ask("POST", &to, ADMIN, Some(("application/yaml", document)));
            let (status, made) = answer.expect("the API server answers");
            assert_eq!(status, 201, "{path:?}: {made}");
            count += 1;
        }
    }
    assert_eq!(count, 8, "manifests are missing");

    let patch = fs::read_to_string(monitoring.join("listen.yaml")).expect("a patch");
    let to = collection(&patch) + "/ebb?fieldManager=test&fieldValidation=Strict";
    let answer = cluster.ask("PATCH", &to, ADMIN, Some(("application/apply-patch+yaml", &patch)));
    let (status, set) = answer.expect("the API server answers");
    assert_eq!(status, 200, "{set}");
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["env"][0]["name"], "EBB_LISTEN", "{set}");
    assert_eq!(pod["containers"][0]["securityContext"]["privileged"], true, "{set}");
    assert_eq!(pod["volumes"].as_array().map(Vec::len), Some(4), "{set}");
}

/// The command `ebb-node` of this host.
fn ebb_node(host: &Host, kubeconfig: &Path) -> Command {
    let program = assets::program_directory().join("ebb-node");
    let build = "cargo build --release -p ebb-node";
    assert!(program.is_file(), "no {}: run `{build}` first", program.display());
    let mut command = host.command("ebb-node");
    command.env("KUBECONFIG", kubeconfig).env("HOME", host.directory());
    for name in ["KUBERNETES_SERVICE_HOST", "NODE_NAME", "HTTPS_PROXY", "https_proxy"] {
        command.env_remove(name);
    }
    command.args(["--every", "1"]);
    command
}

/// Checks that who cannot publish says why, in one line. Returns a token with which one can.
fn check_refusals(cluster: &Cluster, host: &Host) -> String {
    let nodes = [NODE, "node2"].map(|name| {
        let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        cluster.create("/api/v1/nodes", &object)
    });
    let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
    let kind = "ServiceAccount";
    let other = json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": "a" } });
    cluster.create(&accounts, &other);
    let own = cluster.token("ebb-node", &nodes[0]);
    let of_other_node = cluster.token("ebb-node", &nodes[1]);
    let without_rights = cluster.token("a", &nodes[0]);
    // A policy counts a moment after it was made.
    let nothing = Some(("application/merge-patch+json", "{}"));
    let path = format!("/api/v1/nodes/{NODE}");
    until("the policy", || {
        let (_, answer) = cluster.ask("PATCH", &path, &of_other_node, nothing)?;
        answer["message"].as_str()?.contains(POLICY).then_some(())
    });

    let refused = |token: &str, node: &str, port: Option<u16>| {
        let config = cluster.kubeconfig("refused", token, port);
        Ran::of(ebb_node(host, &config).args(["--node", node])).refused()
    };
    let [unused] = free_ports();
    for (token, node, port, why) in [
        (own.as_str(), "nobody", None, "the cluster has no node nobody"),
        (without_rights.as_str(), NODE, None, "forbids to change node node1"),
        (of_other_node.as_str(), NODE, None, POLICY),
        ("wrong", NODE, None, "does not know who asks"),
        (own.as_str(), NODE, Some(unused), "does not answer: Connection refused"),
        (own.as_str(), "a/b", None, "'a/b'"),
    ] {
        let line = refused(token, node, port);
        assert!(line.contains(why), "{why}: {line}");
    }
    let nowhere = host.directory().join("no-kubeconfig");
    let line = Ran::of(ebb_node(host, &nowhere).args(["--node", NODE])).refused();
    assert!(line.contains("no way to the API server"), "{line}");
    let node = look(cluster);
    assert_eq!(annotation(&node), None, "nothing is changed: {node}");
    own
}

/// The node as the API server has it.
fn look(cluster: &Cluster) -> Value {
    let answer = cluster.ask("GET", &format!("/api/v1/nodes/{NODE}"), ADMIN, None);
    let (status, node) = answer.expect("the API server answers");
    assert_eq!(status, 200, "{node}");
    node
}

fn annotation(node: &Value) -> Option<u64> {
    let text = node["metadata"]["annotations"][ANNOTATION].as_str()?;
    Some(text.parse().expect("a number"))
}

/// The extended resource in a part of the status. The server writes thousands of thousands short.
fn resource(node: &Value, part: &str) -> Option<u64> {
    let text = node["status"][part][RESOURCE].as_str()?;
    let digits = text.trim_end_matches(|it: char| it.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "k" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        unit => panic!("a unit of {unit}"),
    };
    Some(digits.parse::<u64>().expect("a number") * unit)
}

/// Waits until the node tells such a figure in all places.
fn wait_published(cluster: &Cluster, what: &str, fits: impl Fn(Option<u64>) -> bool) {
    until_fits(
        format_args!("a figure that is {what}"),
        || {
            let node = look(cluster);
            let [capacity, allocatable] =
                ["capacity", "allocatable"].map(|part| resource(&node, part));
            [annotation(&node), capacity, allocatable]
        },
        |&[told, capacity, allocatable]| fits(told) && told == capacity && told == allocatable,
    );
}

fn check_figures(cluster: &mut Cluster, host: &Host, token: &str) {
    let much = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes > 150 * MIB);
    let little = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes < 120 * MIB);
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").cpus(1));
    vm.wait_trusted();
    vm.guest("fill freed 300M");
    vm.guest("free freed");
    let mut command = ebb_node(host, &cluster.kubeconfig("node", token, None));
    command.args(["--node", NODE]);
    let node = Program::start(command, &host.directory().join("ebb-node.log"));
    wait_published(cluster, "large", much);
    vm.reclaim();
    wait_published(cluster, "small", little);

    // It outlives the API server.
    cluster.stop_server();
    vm.guest("fill freed 300M");
    vm.guest("free freed");
    let says = |what: &str| node.said().contains(what).then_some(());
    until("trouble to be told", || says("the API server does not answer: "));
    cluster.start_server();
    wait_published(cluster, "large again", much);
    until("the end of it to be told", || says("the API server takes the figure again"));

    // What nobody knows is not told.
    host.kill_daemon();
    wait_published(cluster, "absent", |bytes| bytes.is_none());
    until("trouble to be told", || says("no ebbd listens at "));
    host.start();
    wait_published(cluster, "large once more", much);
    assert!(node.runs(), "{}", node.said());
    assert_eq!(node.terminate(), Some(0), "{}", node.said());
    let left = look(cluster);
    let (capacity, told) = (resource(&left, "capacity"), annotation(&left));
    assert_eq!((told, capacity), (None, None), "{left}");
}
