//! Bad usage: one line, an exit code, and nothing changed.

use crate::harness::{Dir, ebb};

/// Command lines that make no sense, and a part of what is said of each.
const BAD: &[(&str, &str)] = &[
    ("run --memory 2G --kernel /dev/null", "not provided: --name <NAME>"),
    ("run --name web", "not provided: --memory <SIZE>"),
    ("run --name ../web --memory 2G", "is no VM name"),
    ("run --name web --memory 2X", "is no size"),
    ("run --name web --memory 2G", "nothing to boot: give --kernel"),
    ("run --name web --memory 2G --disk a.img", "boots from no disk with sectors of 4 KiB"),
    ("run --name web --memory 2G --append quiet -- -hda x", "need --kernel"),
    ("run --name web --memory 2049 --kernel /dev/null", "give 64 MiB to 1 TiB"),
    ("run --name web --memory 2T --kernel /dev/null", "give 64 MiB to 1 TiB"),
    ("run --name web --memory 65M --kernel /dev/null", "not a multiple of 2 MiB"),
    ("run --name web --memory 2G --cpus 0 --kernel /dev/null", "give 1 to 255"),
    ("run --name web --memory 2G --cpus 256 --kernel /dev/null", "give 1 to 255"),
    ("run --name web --memory 2G --backing gold --kernel /dev/null", "auto, hugetlb, thp, small"),
    ("run --name web --memory 2G --mode loose --kernel /dev/null", "strict, release"),
    ("run --name web --memory 2G --min-order 11 --kernel /dev/null", "give 6 to 10"),
    ("attach --name web --pid 4242 --min-order 5", "give 6 to 10"),
    ("attach --name web --pid 0", "the pid of no QEMU"),
    ("attach --name web --pid four", "invalid digit"),
    ("auto web maybe", "for '[on|off]' [possible values: on, off]"),
    ("auto web --when pressure", "not provided: <on|off>"),
    ("auto web --keep 1M", "not provided: <on|off>"),
    ("auto web on --when never", "not one of interval, pressure"),
    ("auto web on --below ten", "as in 512M, or 10%"),
    ("auto web on --below 1.5%", "write a whole number, as in 10%"),
    ("auto web on --below 101%", "give 0% to 100%"),
    ("auto web on --when interval --below 5%", "belongs to --when pressure"),
    ("auto web on --interval 5", "as in 5s"),
    ("auto web on --interval 1ms", "give 100ms to 24h"),
    ("reclaim web --bytes lots", "is no size"),
    ("limit web off --low 100M", "belong to a limit"),
    ("limit web 200M --high 201M", "above the limit of 200 MiB"),
    ("limit web 200M --low 180M --high 180M", "not below 180 MiB"),
    ("limit web 200M --low 200M", "not below 200 MiB"),
    ("resize web lots", "as in 512M, or `off`"),
    ("resize web 2G --by magic", "hyperalloc, balloon, virtio-mem"),
    ("resize web off --by balloon", "belong to a size"),
    ("resize web off --node 0", "belong to a size"),
    ("run --name web --memory 2G --grow-to 1G --kernel /dev/null", "give more than 2 GiB"),
    ("run --name web --memory 2G --grow-to 2049M --kernel /dev/null", "multiple of 2 MiB"),
    ("run --name web --memory 2G --nodes 17 --kernel /dev/null", "give 1 to 16"),
    ("run --name web --memory 2G --nodes 2 --kernel /dev/null", "cannot be shared evenly"),
    ("evict web", "not provided: --bytes <SIZE>"),
    ("heat", "not provided: <NAME>"),
    ("pool lots", "as in 512M, or `off`"),
    ("share web", "not provided: <SIZE|off>"),
    ("share web off --lower 50", "belong to a share"),
    ("share web 0", "a share of 0"),
    ("share web 1G --lower 101", "give 1 to 100"),
    ("share web 1G --upper 99", "give 100 to 10000"),
    ("jobs cancel", "not provided: <ID>"),
    ("jobs cancel seven", "invalid value 'seven'"),
    ("jobs stop 7", "unrecognized subcommand 'stop'"),
    ("heat web --background --svg a.svg", "cannot be used with"),
    ("detach", "not provided: <NAME>"),
    ("detach web --all", "cannot be used with"),
    ("detach --all --background", "cannot be used with"),
    ("top --at soon", "write it as 14:05"),
    ("top --control --once", "cannot be used with '--once'"),
    ("top --control --at 14:05", "cannot be used with '--at <TIME>'"),
    ("config chekc", "unrecognized subcommand 'chekc'"),
    ("statsu web", "a similar subcommand exists: 'status'"),
    ("foo", "unrecognized subcommand 'foo': ebb help shows all"),
];

#[test]
fn bad_usage_is_one_line_and_exit_2() {
    for (line, expected) in BAD {
        let dir = Dir::new();
        let run_dir = dir.path().join("run");
        let ran = ebb(&run_dir, line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with(expected), "{line}: {}", ran.stderr);
        assert!(!run_dir.exists(), "{line}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    let dir = Dir::new();
    let run_dir = dir.path().join("run");
    for (line, expected) in [
        ("run --name web --memory 2G --kernel /nowhere/vmlinuz", "/nowhere/vmlinuz: No such file"),
        ("run --name web --memory 2G --kernel /dev", "/dev is not a file"),
        ("attach --name web --pid 4242 --qmp /dev/null", "/dev/null is not a UNIX socket"),
        ("heat web --svg /nowhere/a.svg", "/nowhere is no directory"),
        ("heat web --svg /dev", "/dev is a directory"),
    ] {
        let ran = ebb(&run_dir, line);
        assert_eq!(ran.code, Some(1), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with(expected), "{line}: {}", ran.stderr);
        assert!(!run_dir.exists(), "{line}");
    }
}
