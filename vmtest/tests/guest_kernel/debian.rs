//! All of Debian in a guest with the shared allocator.

use std::time::Duration;

use vmtest::{Disk, Host, assets, require};

use crate::zones::zones;
use crate::{guest, with_disk};

/// Writes ten files with a hundred functions each; the program adds up what they return.
const PROGRAM: &str = "export PATH=/usr/bin:/bin; cd /tmp && for file in 0 1 2 3 4 5 6 7 8 9; do \
    { i=0; while [ $i -lt 100 ]; do echo \"int f${file}_$i(int x) { return x * $i + $file; }\"; \
    i=$((i+1)); done; echo \"int sum$file(void) { int s = 0;\"; \
    i=0; while [ $i -lt 100 ]; do echo \"s += f${file}_$i(1);\"; i=$((i+1)); done; \
    echo 'return s; }'; } >part$file.c; done; \
    { for file in 0 1 2 3 4 5 6 7 8 9; do echo \"int sum$file(void);\"; done; \
    echo 'int main(void) { return !('; \
    for file in 0 1 2 3 4 5 6 7 8 9; do echo \"sum$file() +\"; done; \
    echo '0 == 54000); }'; } >main.c; \
    printf 'OBJECTS := main.o $(foreach n,0 1 2 3 4 5 6 7 8 9,part$n.o)\\n\
main: $(OBJECTS)\\n\\tgcc -o $@ $^\\n' >Makefile; make -s -j4 CC=gcc CFLAGS=-O2 main && ./main";

/// Longest time for one step, where another test has one of two processors.
const PATIENCE: Duration = Duration::from_secs(900);

/// Debian's compiler first, then all of Debian: systemd starts, and every file is checked against
/// its package.
#[test]
fn debian_runs() {
    require!(assets::kernel("llfree"));
    let userland = assets::userland();
    require!(userland.as_ref());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "2G").formatted("ext4").filled(&userland.unwrap());
    let vm = with_disk(&host, &disk, guest().memory("512M"));
    vm.console().be_patient(PATIENCE);
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest(&format!("timed program /mnt {PROGRAM}"));
    zones(&vm);
    vm.guest("dropcaches");
    zones(&vm);
    vm.guest("umount /mnt");
    vm.leave("boot ext4 /dev/vda");
    vm.wait_console("every file was checked");
    let text = vm.console().text();
    let is_wrong = |line: &&str| line.contains("??5??????") || line.contains("missing  ");
    let wrong: Vec<&str> = text.lines().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    vm.wait_end();
    disk.check("ext4");
}
