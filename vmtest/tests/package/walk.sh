#!/bin/sh
# The way of a newcomer, as the docs have it: what the package does to a Debian with two VMs. Each
# step must succeed. The console shows which one it is. PAGE.commands has the commands of a page.
export HOME=/root LC_ALL=C DEBIAN_FRONTEND=noninteractive
cd /root || exit

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

# Tries a command until it succeeds, for ten minutes.
comes() {
    left=600
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 1
    done
}

# follow PAGE SECTION: does what the page tells a newcomer there.
follow() {
    sed -n "s/^$2: //p" "$1.commands" >todo
    step "docs/$1.md has commands in $2" test -s todo
    while read -r command <&3; do
        case $command in
        # The page says so: it is refused until Ebb knows the guest.
        "ebb reclaim "*) step "docs/$1.md: $command" comes sh -c "$command" ;;
        *) step "docs/$1.md: $command" sh -c "$command" ;;
        esac
    done 3<todo
}

active() {
    systemctl is-active --quiet "$1"
}

pid() {
    systemctl show --property MainPID --value "$1"
}

# start NAME SIZE ARGUMENTS...
start() {
    name=$1 size=$2
    shift 2
    systemd-run --quiet --unit "vm-$name" qemu-system-x86_64 -name "$name" -accel tcg,tb-size=32 \
        -m "$size" -machine pc,memory-backend=ram \
        -object "memory-backend-memfd,id=ram,size=$size,share=on" \
        -nodefaults -display none -qmp "unix:/run/$name.qmp,server=on,wait=off" "$@"
}

# A VM with Linux, which says on its console when it has started.
start_linux() {
    start "$1" 256M -kernel /vmlinuz -initrd /initrd -serial "file:/run/$1.log" \
        -append "console=ttyS0 loglevel=5 nowatchdog no_timer_check"
}

managed() {
    [ "$(ebb list --json | grep --count '"state": "held"')" = "$1" ]
}

# Whether both QEMUs are those that were started.
unhurt() {
    active vm-web && active vm-b && [ "$(pid vm-web) $(pid vm-b)" = "$vms" ]
}

ebb_runs() {
    readlink /proc/[0-9]*/exe | grep --quiet /usr/bin/ebbd
}

qemu_of() {
    ebb status "$1" --json | sed -n 's/^ *"pid": \([0-9]*\),*$/\1/p' | head -n 1
}

# The user that a VM's QEMU runs as.
user_of() {
    awk '$1 == "Uid:" { print $2 }' "/proc/$(qemu_of "$1")/status"
}

# Numbers that QEMUs get, and nobody else.
first=1879048192 last=2147352575

reserved() {
    for file in /etc/subuid /etc/subgid; do
        [ "$(grep -c "^_ebb-qemu:$first:$((last - first + 1))\$" $file)" = 1 ] || return 1
    done
}

# Makes an account with subordinate numbers from this one on.
add_user() {
    useradd --key SUB_UID_COUNT=65536 --key SUB_UID_MIN="$1" --key SUB_UID_MAX=$last other
}

# An account that nobody can log in to.
account() {
    getent passwd _ebb-qemu | grep --quiet ':/nonexistent:.*nologin$' &&
        passwd --status _ebb-qemu | grep --quiet '^_ebb-qemu L'
}

has_own_user() {
    user=$(user_of "$1") && [ "$user" -ge $first ] && [ "$user" -le $last ]
}

# A VM with a drive that QEMU opens by itself.
start_drive() {
    ebb run --name d --memory 64M "$@" -- -drive file=/srv/d.img,if=virtio,format=raw
}

# The refusal says what to do.
refused_with_advice() {
    why=$(start_drive 2>&1) && return 1
    echo "$why"
    echo "$why" | grep --quiet -e '--disk.*--user'
}

installed() {
    [ "$(dpkg-query --show --showformat '${db:Status-Status}' ebb)" = installed ]
}

# The answers that a newcomer gives: yes. QEMU is there, though not as a package.
cat >/etc/apt/apt.conf.d/90walk <<'END'
APT::Get::Assume-Yes "true";
APT::Install-Recommends "false";
END
mkdir -p target/debian
mv ebb_*-1_*.deb target/debian
# The page has a later release.
mv ebb_*-2_*.deb ebb_0.2.0-1_amd64.deb

follow start 1-install
step "nothing starts by itself" fails active ebbd
step "settings" test -f /etc/ebb/ebb.toml
step "a manual" test -f /usr/share/man/man1/ebb.1.gz
step "completions" test -f /usr/share/bash-completion/completions/ebb
step "a user for QEMUs" account
step "numbers for QEMUs" reserved
step "nobody else gets these numbers" fails add_user $first
step "others get numbers beside them" add_user $((first - 65536))
step "a VM" start_linux web
step "another VM, without a system" start b 64M
step "its monitor" comes test -S /run/b.qmp
step "the first one's system" comes grep --quiet "@0 ok" /run/web.log
vms="$(pid vm-web) $(pid vm-b)"
follow start 2-see-what-there-is-to-gain
sed -i "s/--pid 4352/--pid $(pid vm-web)/" start.commands
follow start 3-manage-one-vm
step "only that one is managed" managed 1
follow start 4-let-ebb-decide
step "both are managed" managed 2
follow limits set-a-limit
follow attach detach
step "the other is still managed" managed 1
follow attach attach-all-vms
step "both are managed again" managed 2
follow install install
step "no more VMs by themselves" ebb pilot on --attach off
step "watch" ebb top --once
step "take" ebb evict b --bytes 1M
step "settings are right" ebb config check
step "reload" systemctl reload ebbd
step "it goes on" active ebbd

before=$(pid ebbd)
follow install upgrade
step "another daemon" fails test "$(pid ebbd)" = "$before"
step "both are managed after the upgrade" comes managed 2
step "both run after the upgrade" unhurt
step "numbers for QEMUs, once" reserved
step "the daemon dies" kill -9 "$(pid ebbd)"
step "systemd starts another" comes active ebbd
step "both are managed after the death" comes managed 2
step "both run after the death" unhurt

step "a drive of root's alone" install --mode 600 /dev/null /srv/d.img
step "its size" truncate --size 64M /srv/d.img
step "QEMU may not open it" refused_with_advice
step "it is given to the user for QEMUs" chown _ebb-qemu: /srv/d.img
step "QEMU opens it as this user" start_drive --user _ebb-qemu
step "it is this user" test "$(user_of d)" = "$(id --user _ebb-qemu)"
step "the VM with the drive ends" kill "$(qemu_of d)"
step "the VM with the drive is gone" comes managed 2

step "a disk" truncate --size 64M /root/disk.img
step "a VM that needs Ebb" ebb run --name c --memory 64M --disk /root/disk.img \
    -- -boot menu=off
step "its QEMU has a user of its own" has_own_user c
step "Ebb stays while a VM needs it" fails apt-get remove ebb
step "it is installed" installed
step "it runs" active ebbd
step "only that VM is managed" managed 1
step "both run without Ebb" unhurt
step "that VM ends" kill "$(qemu_of c)"
step "it is gone" comes managed 0
step "attach again" ebb attach --all

follow install remove
step "no program is left" fails test -e /usr/bin/ebbd
step "no process is left" fails ebb_runs
step "both run after the removal" unhurt
step "purge" apt-get purge ebb
for place in /etc/ebb /var/log/ebb /var/lib/ebb /run/ebb; do
    step "nothing is left of $place" fails test -e "$place"
done
step "the user for QEMUs stays" account
step "its numbers stay" reserved
step "both run at the end" unhurt
say "all steps succeeded"
over
