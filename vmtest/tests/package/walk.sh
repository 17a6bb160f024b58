#!/bin/sh
# The way of a newcomer, as docs/install.md has it: what the package does to a Debian with two VMs.
# Each step must succeed. The console shows which one it is.
export HOME=/root LC_ALL=C

say() {
    echo "walk: $*" >/dev/kmsg
}

show() {
    tail -n 20 | while read -r line; do say "  $line"; done
}

over() {
    say over
    systemctl --force poweroff
    exit
}

# step WHAT COMMAND...
step() {
    what=$1
    shift
    say "$what"
    "$@" >/root/out 2>&1 </dev/null && return
    show </root/out
    journalctl --no-pager --lines 20 --unit ebbd | show
    say "failed: $what"
    over
}

fails() {
    ! "$@"
}

# Tries a command until it succeeds, for two minutes.
comes() {
    left=120
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 1
    done
}

active() {
    systemctl is-active --quiet "$1"
}

pid() {
    systemctl show --property MainPID --value "$1"
}

start() {
    systemd-run --quiet --unit "vm-$1" qemu-system-x86_64 -name "$1" -accel tcg,tb-size=16 -m 64M \
        -machine pc,memory-backend=ram -object memory-backend-memfd,id=ram,size=64M,share=on \
        -nodefaults -display none -qmp "unix:/run/$1.qmp,server=on,wait=off"
}

managed() {
    [ "$(ebb list --json | grep --count '"state": "held"')" = "$1" ]
}

# Whether both QEMUs are those that were started.
unhurt() {
    active vm-a && active vm-b && [ "$(pid vm-a) $(pid vm-b)" = "$vms" ]
}

ebb_runs() {
    readlink /proc/[0-9]*/exe | grep --quiet /usr/bin/ebbd
}

installed() {
    [ "$(dpkg-query --show --showformat '${db:Status-Status}' ebb)" = installed ]
}

step "install" dpkg --install /root/ebb-1.deb
step "nothing starts by itself" fails active ebbd
step "settings" test -f /etc/ebb/ebb.toml
step "a manual" test -f /usr/share/man/man1/ebb.1.gz
step "completions" test -f /usr/share/bash-completion/completions/ebb
step "start" systemctl enable --now ebbd
step "a VM" start a
step "another VM" start b
step "its monitor" comes test -S /run/a.qmp
step "the other monitor" comes test -S /run/b.qmp
vms="$(pid vm-a) $(pid vm-b)"
step "attach" ebb attach --all
step "both are managed" managed 2
step "the pilot" ebb pilot on
step "watch" ebb top --once
step "take" ebb evict a --bytes 1M
step "settings are right" ebb config check
step "reload" systemctl reload ebbd
step "it goes on" active ebbd

before=$(pid ebbd)
step "upgrade" dpkg --install /root/ebb-2.deb
step "another daemon" fails test "$(pid ebbd)" = "$before"
step "both are managed after the upgrade" comes managed 2
step "both run after the upgrade" unhurt
step "the daemon dies" kill -9 "$(pid ebbd)"
step "systemd starts another" comes active ebbd
step "both are managed after the death" comes managed 2
step "both run after the death" unhurt

step "a disk" truncate --size 64M /root/disk.img
step "a VM that needs Ebb" ebb run --name c --memory 64M --disk /root/disk.img \
    -- -boot menu=off
step "Ebb stays while a VM needs it" fails dpkg --remove ebb
step "it is installed" installed
step "it runs" active ebbd
step "only that VM is managed" managed 1
step "both run without Ebb" unhurt
qemu=$(ebb status c --json | sed -n 's/^ *"pid": \([0-9]*\),*$/\1/p' | head -n 1)
step "that VM ends" kill "$qemu"
step "it is gone" comes managed 0
step "attach again" ebb attach --all

step "remove" dpkg --remove ebb
step "no program is left" fails test -e /usr/bin/ebbd
step "no process is left" fails ebb_runs
step "both run after the removal" unhurt
step "purge" dpkg --purge ebb
for place in /etc/ebb /var/log/ebb /var/lib/ebb /run/ebb; do
    step "nothing is left of $place" fails test -e "$place"
done
step "both run at the end" unhurt
say "all steps succeeded"
over
