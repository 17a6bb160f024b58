//! QEMU's options for which its filter of system calls would end it, at once or days later: those
//! by which it starts a program or changes its user.

use serde_json::Value;

const NETWORK: [&str; 3] = ["netdev", "nic", "net"];
/// Fields with descriptors that the starter of QEMU opens. With one of them, QEMU starts no
/// program.
const OPENED: [&str; 2] = ["fd", "fds"];

/// Why a QEMU that filters its system calls must not be started with these arguments, and what to
/// do.
pub fn refusal(qemu_args: &[String]) -> Option<String> {
    let values = qemu_args.iter().skip(1).map(String::as_str).chain([""]);
    let found = qemu_args.iter().zip(values).find_map(|(word, value)| {
        // QEMU takes options with one dash or two.
        let option = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        match option {
            "runas" => Some(("-runas", "would change its user", "name a user by --user")),
            option if NETWORK.contains(&option) => network(&Fields::parse(value)),
            _ => None,
        }
    });
    let (what, why, instead) = found?;
    Some(format!(
        "{what}: QEMU {why}, for which its filter of system calls would end it: {instead}, or run \
         the VM with --privileged"
    ))
}

type Denied = (&'static str, &'static str, &'static str);

fn network(fields: &Fields) -> Option<Denied> {
    let starts = "would start a program";
    let own_tap = "make a tap of QEMU's user beforehand (ip tuntap add NAME mode tap user UID) and \
                   give --user UID and tap,ifname=NAME,script=no,downscript=no";
    match fields.kind() {
        "bridge" => return Some(("a network of the kind bridge", starts, own_tap)),
        "passt" => {
            let instead = "start passt beforehand and give stream,addr.type=unix,addr.path=SOCKET";
            return Some(("a network of the kind passt", starts, instead));
        }
        _ => {}
    }
    if fields.has("helper") {
        return Some(("helper=", starts, own_tap));
    }
    if fields.kind() == "tap"
        && !OPENED.iter().any(|name| fields.has(name))
        && !["script", "downscript"].iter().all(|name| fields.is_off(name))
    {
        let what = "a network of the kind tap without script=no,downscript=no";
        return Some((what, starts, own_tap));
    }
    if fields.has("smb") {
        let instead = "share the directory otherwise, as by virtiofsd";
        return Some(("smb=", "would start smbd", instead));
    }
    if fields.all("guestfwd").any(|to| to.contains("-cmd:")) {
        let instead = "forward to a chardev or an address (guestfwd=tcp:ADDRESS:PORT-tcp:...)";
        return Some(("guestfwd=...-cmd:", starts, instead));
    }
    None
}

/// Names and values of one option.
struct Fields(Vec<(String, String)>);

impl Fields {
    /// Parses `tap,id=a,script=no`, where a comma within a value is doubled, or the same as JSON.
    fn parse(text: &str) -> Fields {
        if text.starts_with('{') {
            return Fields::of_json(text);
        }
        let whole = text.replace(",,", "\0");
        let each = whole.split(',').map(|word| word.replace('\0', ","));
        let pair = |(index, word): (usize, String)| match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            // The first value may lack its name.
            None if index == 0 => ("type".into(), word),
            None => (word, "on".into()),
        };
        Fields(each.enumerate().map(pair).collect())
    }

    /// Parses JSON. If the text is no JSON, QEMU itself says what is wrong with it.
    fn of_json(text: &str) -> Fields {
        let Ok(Value::Object(object)) = serde_json::from_str(text) else {
            return Fields(Vec::new());
        };
        let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Fields(object.into_iter().map(|(name, value)| (name, text(value))).collect())
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn kind(&self) -> &str {
        self.all("type").last().unwrap_or_default()
    }

    fn has(&self, name: &str) -> bool {
        self.all(name).next().is_some()
    }

    fn is_off(&self, name: &str) -> bool {
        self.all(name).last().is_some_and(|value| value == "no" || value.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> Option<String> {
        refusal(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn what_needs_another_program_is_refused_with_what_to_do() {
        for (line, part) in [
            ("-netdev bridge,id=n", "ip tuntap add"),
            ("-netdev type=bridge,id=n", "bridge"),
            ("--nic bridge,br=br0", "bridge"),
            ("-net bridge", "bridge"),
            ("-netdev tap,id=n", "script=no,downscript=no"),
            ("-nic tap,ifname=t0,script=no", "downscript=no"),
            ("-nic tap,ifname=t0,downscript=no", "script=no"),
            ("-netdev tap,id=n,script=/etc/up,downscript=no", "tap"),
            ("-netdev tap,id=n,script=no,downscript=no,script=/etc/up", "tap"),
            ("-netdev tap,id=n,helper=/bin/helper", "helper="),
            ("-netdev passt,id=n", "stream"),
            ("-netdev user,id=n,smb=/srv", "smbd"),
            ("-nic user,guestfwd=tcp:10.0.2.9:80-cmd:netcat", "-cmd:"),
            ("-netdev user,id=n,guestfwd=tcp:10.0.2.9:80-cmd:echo,,a", "-cmd:"),
            (r#"-netdev {"type":"tap","id":"n","script":"no"}"#, "downscript=no"),
            (r#"-netdev {"type":"bridge","id":"n"}"#, "bridge"),
            (r#"-netdev {"type":"user","id":"n","smb":"/srv"}"#, "smb="),
            (r#"-netdev {"type":"user","guestfwd":[{"str":"tcp:1.2.3.4:5-cmd:a"}]}"#, "-cmd:"),
            ("-m 1G -runas nobody", "--user"),
            ("-netdev user,id=a -netdev tap,id=b", "tap"),
        ] {
            let why = refused(line).unwrap_or_default();
            assert!(why.contains(part) && why.contains("--privileged"), "{line}: {why}");
            assert!(!why.contains('\n'), "{line}: {why}");
        }
    }

    #[test]
    fn what_needs_none_passes() {
        for line in [
            "",
            "-netdev",
            "-netdev user,id=n,hostfwd=tcp::2222-:22",
            "-nic user,model=virtio-net-pci",
            "-netdev tap,id=n,ifname=t0,script=no,downscript=no,vhost=off",
            "-netdev tap,id=n,ifname=t0,script=,downscript=",
            "-netdev tap,id=n,fd=7",
            "-nic tap,fds=7:8",
            r#"-netdev {"type":"tap","id":"n","ifname":"t0","script":"no","downscript":"no"}"#,
            "-netdev {no",
            "-netdev user,id=n,guestfwd=tcp:10.0.2.9:80-tcp:10.1.1.1:80",
            "-netdev user,id=bridge",
            "-device e1000,netdev=tap",
            "-append bridge",
            "-drive file=a,,smb=b",
        ] {
            assert_eq!(refused(line), None, "{line}");
        }
    }
}
