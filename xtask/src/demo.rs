//! `cargo xtask demo`: runs the same work in a real VM twice, without Ebb and with it, and then three
//! VMs under the pilot.

mod curve;
mod dashboard;
mod host;
mod pilot;
mod round;
mod summary;
mod table;
mod usage;
mod view;
mod workload;

use anyhow::{bail, ensure};
use vmtest::assets;

use crate::{guard, interrupt};

use round::{Keeper, Record};
use table::Table;
use view::View;

/// Runs the demo.
///
/// # Errors
/// The host cannot run it, the user interrupts, or a byte was wrong.
pub fn run() -> anyhow::Result<()> {
    guard::silence();
    let note = guard::guard(host::check)?;
    let kernel = assets::kernel(round::KERNEL).map_err(anyhow::Error::msg)?;
    interrupt::catch()?;
    println!(
        "A VM of 2 GiB with Debian's kernel ({}) does the same work twice, {} s each time:\n\
         it fills memory, writes files, checks every byte and frees it all again.\n\
         Then three VMs share the host's memory under `ebb pilot on`.\n",
        kernel.package,
        workload::lasts().as_secs(),
    );
    note.iter().for_each(|note| println!("{note}\n"));
    let mut view = View::new();
    let without = round(Keeper::Nobody, &mut view)?;
    let with = round(Keeper::Ebb, &mut view)?;
    report(&[without, with])?;
    println!(
        "3 of 3: booting three VMs of 384 MiB; `ebb pilot on --reserve 90%` then decides what to \
         take\nfrom which of them, as on a host that is short of memory"
    );
    pilot::run(&mut Table::new())
}

fn round(keeper: Keeper, view: &mut View) -> anyhow::Result<Record> {
    println!(
        "{}",
        match keeper {
            Keeper::Nobody =>
                "1 of 3: booting; then `ebb detach`, and nothing of Ebb is left in the VM",
            Keeper::Ebb => "2 of 3: booting; `ebb auto on --interval 1s` then reclaims free memory",
        }
    );
    let record = round::run(keeper, view)?;
    println!();
    Ok(record)
}

fn report(records: &[Record; 2]) -> anyhow::Result<()> {
    let [without, with] = records;
    let path = assets::target_directory().join("demo/ebb-demo.svg");
    summary::draw(&path, records)?;
    println!("{}\n{}", summary::table(records), summary::verdict(without, with));
    println!("The picture: {}", path.display());
    let wrong: u64 = records.iter().map(|record| record.guest.wrong_bytes).sum();
    ensure!(wrong == 0, "{wrong} bytes were not what the guest had written");
    if with.ebb.as_ref().is_none_or(|ebb| ebb.status.reclaimed_total_bytes == 0) {
        bail!("Ebb has reclaimed nothing");
    }
    Ok(())
}
