//! Which devices of a VM reach its memory from processes that we know nothing of.

use ebb_vm::Qmp;

/// The first vhost-user device that Ebb does not serve: its process maps the guest's
/// memory, and would find zeros where frames were evicted.
///
/// # Errors
/// QEMU does not tell.
pub fn foreign(qmp: &mut Qmp) -> Result<Option<String>, String> {
    let tree = qmp.human("info qtree").map_err(|error| error.to_string())?;
    let networks = qmp.human("info network").map_err(|error| error.to_string())?;
    Ok(in_tree(&tree).or_else(|| in_networks(&networks)))
}

/// `dev: NAME, id "..."` and, deeper, its properties.
fn in_tree(tree: &str) -> Option<String> {
    let mut device = "";
    tree.lines().map(str::trim).find_map(|line| {
        if let Some(rest) = line.strip_prefix("dev: ") {
            device = rest.split(',').next().unwrap_or_default();
        }
        let chardev = line.strip_prefix("chardev = \"")?;
        let is_foreign = device.starts_with("vhost-user") && !chardev.starts_with("ebb-");
        is_foreign.then(|| device.to_owned())
    })
}

fn in_networks(networks: &str) -> Option<String> {
    networks.contains("type=vhost-user").then(|| "vhost-user-net".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "bus: main-system-bus\n  type System\n  dev: q35-pcihost, id \"\"\n    \
        dev: vhost-user-blk-pci, id \"\"\n      class = 255\n      bus: virtio-bus\n        \
        dev: vhost-user-blk, id \"\"\n          chardev = \"ebb-disk0\"\n  \
        dev: isa-serial, id \"\"\n    chardev = \"ebb-console\"\n";

    #[test]
    fn our_own_are_known() {
        assert_eq!(in_tree(OURS), None);
        let memory = "  dev: vhost-user-test-device, id \"\"\n    chardev = \"ebb-growth0\"\n";
        assert_eq!(in_tree(&(OURS.to_owned() + memory)), None);
    }

    #[test]
    fn others_are_named() {
        let tree = OURS.to_owned() + "  dev: vhost-user-fs, id \"\"\n    chardev = \"fs\"\n";
        assert_eq!(in_tree(&tree).as_deref(), Some("vhost-user-fs"));
        let networks = " \\ n: index=0,type=vhost-user,vhost-user0: unix:/a\n";
        assert_eq!(in_networks(networks).as_deref(), Some("vhost-user-net"));
        assert_eq!(in_networks("n: index=0,type=tap,ifname=tap0"), None);
    }
}
