//! Tests of ladders: what is read, refused and printed.

use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn parse(text: &str) -> Result<Vec<(TierKind, u64)>, String> {
    let ladder = text.parse::<Ladder>().map_err(|error| error.to_string())?;
    Ok(ladder.rungs.into_iter().map(|rung| (rung.kind, rung.bytes / MIB)).collect())
}

fn refused(text: &str) -> String {
    let error = parse(text).unwrap_err();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn reads_what_people_write() {
    let file = |path: &str| TierKind::File(path.into());
    assert_eq!(
        parse("dram=1G,file=/p/a b:4G").unwrap(),
        [(TierKind::Dram, 1024), (file("/p/a b"), 4096)]
    );
    assert_eq!(
        parse("node0=2G,node1=8G").unwrap(),
        [(TierKind::Node(0), 2048), (TierKind::Node(1), 8192)]
    );
    assert_eq!(
        parse("dram=1G,compressed=512M,file=/a,b:c:4G").unwrap(),
        [(TierKind::Dram, 1024), (TierKind::Compressed, 512), (file("/a,b:c"), 4096)]
    );
    assert_eq!(parse("dram=2M").unwrap(), [(TierKind::Dram, 2)]);
}

#[test]
fn says_what_is_wrong() {
    for (text, why) in [
        ("", "\"\" is no tier"),
        ("dram", "\"dram\" is no tier"),
        ("tape=1G", "\"tape=1G\" is no tier"),
        ("node=1G", "\"node=1G\" is no tier"),
        ("node-1=1G", "\"node-1=1G\" is no tier"),
        ("node99999999999=1G", "is no tier"),
        ("dram=1G,", "\"\" is no tier"),
        ("file=/p", "\"file=/p\" is no tier"),
        ("dram=much", "dram: \"much\" is no size"),
        ("dram=1G,file=p:4G", "file=p: give the whole path"),
        ("dram=1G,file=:4G", "give the whole path"),
        ("dram=0", "dram: 0 B is not a size"),
        ("dram=1G,file=/p:1M", "file=/p: 1 MiB is not a size"),
        ("dram=4097K", "dram: 4 MiB is not a size"),
        ("dram=1G,dram=1G", "dram is there twice"),
        ("node1=1G,node01=1G", "node1 is there twice"),
        ("dram=1G,file=/a:1G,file=/b:1G", "file is there twice"),
        ("dram=1G,node1=1G", "not both"),
        ("file=/p:4G,dram=1G", "dram stands behind file=/p"),
        ("dram=1G,file=/p:4G,compressed=1G", "compressed stands behind file=/p"),
        ("dram=1G,compressed=1G", "needs a file behind it"),
    ] {
        let said = refused(text);
        assert!(said.contains(why), "{text}: {said}");
    }
}

#[test]
fn sizes_add_up_to_the_vms_memory() {
    let fit = |text: &str, mib: u64| {
        let ladder: Ladder = text.parse().unwrap();
        ladder.fit(mib * MIB).map(|ladder| ladder.to_string()).map_err(|e| e.to_string())
    };
    assert_eq!(fit("dram=1G,file=/p:4G", 5120).unwrap(), "dram=1G,file=/p:4G");
    assert_eq!(
        fit("compressed=512M,file=/p:4G", 5120).unwrap().split_once(',').unwrap().0,
        "dram=1G"
    );
    assert!(fit("dram=1G,compressed=512M,file=/p:4G", 5120).is_ok());
    let more = fit("dram=1G,file=/p:4G", 6144).unwrap_err();
    assert!(more.contains("hold 5 GiB, the VM has 6 GiB"), "{more}");
    assert!(fit("dram=1G,file=/p:4G", 4096).is_err());
    assert!(fit("node0=1G,node1=1G", 1024).is_err());
    let slow = fit("file=/p:4G", 4096).unwrap_err();
    assert!(slow.contains("leave nothing"), "{slow}");
    assert!(fit("file=/p:4G", 4097).is_err(), "1 MiB is too small");
}

proptest! {
    #[test]
    fn a_printed_ladder_is_read_again(
        nodes in prop::collection::btree_set(0u32..9, 0..4),
        sizes in prop::collection::vec(2u64..(1 << 30), 6),
        has_compressed: bool, path in "/[a-z,: ]{0,12}",
    ) {
        let mut kinds: Vec<TierKind> = nodes.into_iter().map(TierKind::Node).collect();
        kinds.extend(has_compressed.then_some(TierKind::Compressed));
        kinds.push(TierKind::File(path.into()));
        let rungs = kinds.into_iter().zip(&sizes).map(|(kind, mib)| Rung { kind, bytes: mib * MIB });
        let ladder = Ladder::new(rungs.collect()).unwrap();
        let text = ladder.to_string();
        prop_assert_eq!(text.parse::<Ladder>(), Ok(ladder));
    }

    #[test]
    fn no_text_makes_it_panic(text in "(dram|node1|file|compressed|=|,|:|/|[0-9]|G|\\PC){0,20}") {
        let _ = text.parse::<Ladder>();
    }
}
