//! A Kubernetes without machines: its API server, and the store that keeps its objects.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use testkit::certificate::{Certificate, write_private};
use vmtest::{Ran, Scratch, until};

use crate::program::Program;

const ASK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kubernetes/ask.py");
const ADDRESS: &str = "127.0.0.1";
/// The token of one who may do everything.
pub const ADMIN: &str = "token-of-an-administrator";
/// The namespace of Ebb.
pub const NAMESPACE: &str = "ebb-system";

/// The API server and its store.
pub struct Cluster {
    // The fields are dropped in this order.
    server: Option<Program>,
    _store: Program,
    programs: PathBuf,
    directory: Scratch,
    certificate: Certificate,
    port: u16,
    store_port: u16,
}

impl Cluster {
    /// Starts both, and waits until the API server answers.
    pub fn start(programs: &Path) -> Cluster {
        let directory = Scratch::new("ebb-test-").expect("a directory");
        let certificate = Certificate::new(directory.path(), "server", &[ADDRESS]);
        write_private(&directory.path().join("tokens"), &format!("{ADMIN},admin,1,system:masters"));
        let [port, store_port, peer_port] = free_ports();
        let mut command = Command::new(programs.join("etcd"));
        let (clients, peers) =
            (format!("http://{ADDRESS}:{store_port}"), format!("http://{ADDRESS}:{peer_port}"));
        command.arg("--data-dir").arg(directory.path().join("store"));
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}"), "--unsafe-no-fsync"]);
        let store = Program::start(command, &directory.path().join("etcd.log"));
        let mut cluster = Cluster {
            server: None,
            _store: store,
            programs: programs.into(),
            directory,
            certificate,
            port,
            store_port,
        };
        cluster.start_server();
        cluster
    }

    /// Starts the API server, also again.
    pub fn start_server(&mut self) {
        let mut command = Command::new(self.programs.join("kube-apiserver"));
        command.args([
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
        ]);
        command.arg(format!("--bind-address={ADDRESS}"));
        command.arg(format!("--advertise-address={ADDRESS}"));
        command.arg(format!("--secure-port={}", self.port));
        command.arg(format!("--etcd-servers=http://{ADDRESS}:{}", self.store_port));
        let Certificate { certificate, key } = &self.certificate;
        for (option, file) in [
            ("tls-cert-file", certificate),
            ("tls-private-key-file", key),
            // A certificate has a public key.
            ("service-account-key-file", certificate),
            ("service-account-signing-key-file", key),
            ("token-auth-file", &self.directory.path().join("tokens")),
        ] {
            command.arg(format!("--{option}={}", file.display()));
        }
        let server = Program::start(command, &self.directory.path().join("server.log"));
        until("the API server", || {
            assert!(server.runs(), "the API server has ended: {}", end_of(&server.said()));
            let (status, _) = self.ask("GET", "/readyz", ADMIN, None)?;
            (status == 200).then_some(())
        });
        self.server = Some(server);
    }

    /// Kills the API server. Its objects stay in the store.
    pub fn stop_server(&mut self) {
        self.server = None;
    }

    /// Sends a request with a body of a kind, or without one. Returns the status and the answer.
    /// `None`: the server does not answer.
    pub fn ask(
        &self,
        method: &str,
        path: &str,
        token: &str,
        content: Option<(&str, &str)>,
    ) -> Option<(u16, Value)> {
        let mut command = Command::new("python3");
        command.args([ASK, method, &self.url(path)]).arg(&self.certificate.certificate).arg(token);
        if let Some((kind, body)) = content {
            command.args([kind, body]);
        }
        let ran = Ran::of(&mut command);
        let (status, text) = ran.stdout.split_once('\n')?;
        let answer = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        Some((status.parse().expect("a status"), answer))
    }

    /// Makes an object, and returns it as the server has it.
    pub fn create(&self, path: &str, object: &Value) -> Value {
        let text = object.to_string();
        let answer = self.ask("POST", path, ADMIN, Some(("application/json", &text)));
        let (status, made) = answer.expect("the API server answers");
        assert_eq!(status, 201, "{path}: {made}");
        made
    }

    /// Makes a token of a service account, as the pods of `node` have it.
    pub fn token(&self, account: &str, node: &Value) -> String {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token");
        let (name, uid) = (&node["metadata"]["name"], &node["metadata"]["uid"]);
        let object = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "expirationSeconds": 86400,
                "boundObjectRef": { "kind": "Node", "apiVersion": "v1", "name": name, "uid": uid },
            },
        });
        let made = self.create(&path, &object);
        made["status"]["token"].as_str().unwrap_or_else(|| panic!("no token: {made}")).into()
    }

    /// Writes a file that says where the API server is, and who asks. `port`: where it is to be
    /// looked for; `None`: where it is.
    pub fn kubeconfig(&self, name: &str, token: &str, port: Option<u16>) -> PathBuf {
        let path = self.directory.path().join(name);
        let server = format!("https://{ADDRESS}:{}", port.unwrap_or(self.port));
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{ "name": "test", "cluster": {
                "server": server, "certificate-authority": &self.certificate.certificate,
            } }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        fs::write(&path, config.to_string()).expect("a file");
        path
    }

    fn url(&self, path: &str) -> String {
        format!("https://{ADDRESS}:{}{path}", self.port)
    }
}

/// Ports on which nobody listens now.
pub fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let sockets = [(); COUNT].map(|()| TcpListener::bind((ADDRESS, 0)).expect("a port"));
    sockets.each_ref().map(|socket| socket.local_addr().expect("an address").port())
}

/// The last lines of what a program has said.
fn end_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
