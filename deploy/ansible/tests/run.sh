#!/bin/sh
# Tests of the role, on a copy of this machine's file system (overlayfs on tmpfs) that disappears with the mount
# namespace: cargo xtask ansible runs this script by unshare --mount. No systemd runs there: units are enabled, but not
# started.
#
# usage: run.sh ANSIBLE_PLAYBOOK RTO_AGENT
set -eu
ansible=$1 binary=$2
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../../.." && pwd)
name=rto-ansible-$$
cgroup=$(findmnt -nt cgroup2 -o TARGET | head -1)/$name pins=/sys/fs/bpf/$name
work=$(mktemp -d)
daemon=

clean() {
  status=$?
  if [ -n "$daemon" ]; then
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  rm -rf "$pins"
  rmdir "$cgroup" 2>/dev/null || true
  umount --recursive --lazy "$work" 2>/dev/null || true
  rmdir "$work"
  exit "$status"
}
trap clean EXIT
trap 'exit 1' INT TERM

failed() {
  echo "FAILED: $1"
  exit 1
}

mkdir "$cgroup"
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root" "$work/package"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
root=$work/root
for dir in proc sys dev; do mount --rbind "/$dir" "$root/$dir"; done
mount -t tmpfs tmpfs "$root/run"
# An installation on this machine must not appear in the copy.
rm -rf "$root/etc/rto-agent" "$root/usr/local/bin/rto-agent" "$root/etc/systemd/system/rto-agent.service"

# The smallest package that the role accepts: binary, unit, configuration.
package=$work/package
install -D -m 755 "$binary" "$package/usr/bin/rto-agent"
strip "$package/usr/bin/rto-agent"
install -D -m 644 \
  "$tree/systemd/rto-agent.service" "$package/usr/lib/systemd/system/rto-agent.service"
install -D -m 644 "$tree/config/config.toml" "$package/etc/rto-agent/config.toml"
mkdir "$package/DEBIAN"
echo /etc/rto-agent/config.toml >"$package/DEBIAN/conffiles"
cat >"$package/DEBIAN/control" <<END
Package: rto-agent
Version: 0.1.0
Architecture: $(dpkg --print-architecture)
Maintainer: rto-agent
Description: rto-agent, for tests of the role
END
build() { dpkg-deb --root-owner-group -Znone --build "$package" "$root/var/tmp/$1" >/dev/null; }
build rto-agent.deb
sed -i 's/^Version: .*/Version: 0.0.9/' "$package/DEBIAN/control"
build older.deb

inside() { chroot "$root" "$@"; }
# play INITIAL_RTO [STATE [ATTACH [VARIABLES]]]: prints the recap's numbers of changed and failed tasks
play() {
  inside env SYSTEMD_OFFLINE=1 ANSIBLE_NOCOWS=1 ANSIBLE_PIPELINING=1 ANSIBLE_FORCE_COLOR=0 LC_ALL=C.UTF-8 HOME=/root "$ansible" "$here/playbook.yml" \
    -i localhost, -e "rto_agent_package=/var/tmp/rto-agent.deb cgroup=$cgroup pin_dir=$pins initial_rto=$1 rto_agent_state=${2:-started} attach=${3:-true} ${4:-}" \
    >"$work/log" 2>&1 || true
  sed -n 's/.*changed=\([0-9]*\) .*failed=\([0-9]*\) .*/changed \1 failed \2/p' "$work/log"
}
# expect WHAT WANTED FOUND
expect() {
  if [ "$2" != "$3" ]; then
    cat "$work/log"
    failed "$1: $3, not $2"
  fi
  echo "passed: $1"
}
rto_of() { inside rto-agent lookup 192.0.2.1 | sed -n 's/ *initial_rto *\([0-9a-z]*\),.*/\1/p'; }

# There is no systemd to start the daemon. The three changes: the copied package, the installation, the configuration.
expect "the first run installs and configures" "changed 3 failed 0" "$(play 300ms stopped)"
expect "a stopped service is not enabled" disabled "$(inside systemctl is-enabled rto-agent || true)"
# Not by the function inside(), because the child would be its shell.
chroot "$root" rto-agent run >"$work/daemon.log" 2>&1 &
daemon=$!
n=0
until inside rto-agent status >/dev/null 2>&1; do
  n=$((n + 1))
  [ $n -lt 300 ] || { cat "$work/daemon.log"; failed "the daemon did not start"; }
  sleep 0.1
done
expect "the policy is in force" 300ms "$(rto_of)"
expect "the unit is enabled" "changed 1 failed 0" "$(play 300ms)"
expect "as systemd sees it" enabled "$(inside systemctl is-enabled rto-agent)"
expect "a second run changes nothing" "changed 0 failed 0" "$(play 300ms)"
expect "a new value is written and reloaded" "changed 2 failed 0" "$(play 400ms)"
expect "the new value is in force" 400ms "$(rto_of)"
before=$(sha256sum <"$root/etc/rto-agent/config.toml")
expect "a value that is refused fails the play" "changed 0 failed 1" "$(play 400)"
grep -q "invalid duration" "$work/log" || failed "no reason: $(cat "$work/log")"
expect "and the file stays" "$before" "$(sha256sum <"$root/etc/rto-agent/config.toml")"
expect "and what is in force" 400ms "$(rto_of)"

older=rto_agent_package=/var/tmp/older.deb
version() { inside dpkg-query --show --showformat '${Version}' rto-agent; }
expect "an older package is copied and refused" "changed 1 failed 1" "$(play 400ms started true $older)"
expect "unless a downgrade is allowed" "changed 1 failed 0" "$(play 400ms started true "$older rto_agent_allow_downgrade=true")"
expect "the older version is installed" 0.0.9 "$(version)"
expect "and the newer one again" "changed 1 failed 0" "$(play 400ms)"
expect "as its package says" 0.1.0 "$(version)"

attached() { inside rto-agent status --json | tr -d ' \n' | sed -n 's/.*"attached":\([a-z]*\).*/\1/p'; }
expect "attach = false is reloaded" "changed 2 failed 0" "$(play 400ms started false)"
expect "and detaches" false "$(attached)"
# The order of docs/operate/rollout.md#return.
inside rto-agent detach >/dev/null
expect "rto-agent attach is refused with attach = false" refused "$(inside rto-agent attach >/dev/null 2>&1 || echo refused)"
expect "attach = true is reloaded" "changed 2 failed 0" "$(play 400ms)"
expect "and does not end rto-agent detach" false "$(attached)"
inside rto-agent attach >/dev/null
expect "which rto-agent attach ends" true "$(attached)"

# family FAMILY PACKAGE
family() {
  inside env ANSIBLE_NOCOWS=1 ANSIBLE_FORCE_COLOR=0 LC_ALL=C.UTF-8 HOME=/root "$ansible" "$here/family.yml" -i localhost, \
    -e '{"rto_agent_packages": {"Debian": "a.deb", "RedHat": "b.rpm"}}' -e "family=$1 package=$2" >"$work/log" 2>&1 || true
  sed -n 's/.*failed=\([0-9]*\) .*/failed \1/p' "$work/log"
}
expect "Debian and Ubuntu get the deb" "failed 0" "$(family Debian a.deb)"
expect "RHEL gets the rpm" "failed 0" "$(family RedHat b.rpm)"
expect "other families get it from their repositories" "failed 0" "$(family Suse rto-agent)"

# The gate of the example, with the real daemon, whose policies have too few attempts to judge.
# gate INVENTORY VARIABLES: prints the recap, a line for each host: NAME ok|failed
gate() {
  inside env ANSIBLE_NOCOWS=1 ANSIBLE_PIPELINING=1 ANSIBLE_FORCE_COLOR=0 LC_ALL=C.UTF-8 HOME=/root "$ansible" "$here/../example.yml" \
    --tags gate -i "$1" -e "ansible_become=false ansible_connection=local ansible_python_interpreter=/usr/bin/python3" \
    -e "rto_agent_gate_delay=1 $2" >"$work/log" 2>&1 || true
  sed -n 's/^\([a-z]*\) .*failed=0 .*/\1 ok/p; s/^\([a-z]*\) .*failed=[1-9].*/\1 failed/p' "$work/log" | paste -sd ' '
}
expect "the gate passes a healthy daemon without traffic" "localhost ok" "$(gate localhost, "rto_agent_gate_wait=1")"
expect "unless a verdict is needed" "localhost failed" \
  "$(gate localhost, "rto_agent_gate_wait=1 rto_agent_gate_needs_verdict=true")"
kill "$daemon"
wait "$daemon" || true
daemon=
expect "the gate fails without a daemon" "localhost failed" "$(gate localhost, "rto_agent_gate_wait=1")"

# The gate with prepared answers: a directory for each host.
"$(dirname "$ansible")/python" "$here/gate/schema.py" "$tree/docs/api.schema.json" "$here/gate"
hosts=$root/var/tmp/hosts
# host NAME ANSWER: of the second and later calls of stats --json
host() {
  mkdir -p "$hosts/$1"
  cp "$here/gate/rto-agent" "$here/gate/status.json" "$hosts/$1"
  cp "$here/gate/stats-before.json" "$hosts/$1/stats.json"
  cp "$here/gate/stats-$2.json" "$hosts/$1/stats-after.json"
}
# waves ANSWER ANSWER ANSWER ANSWER: the gate of four hosts, one in each wave
waves() {
  rm -rf "$hosts"
  host first "$1"
  host second "$2"
  host third "$3"
  host fourth "$4"
  gate first,second,third,fourth, "rto_agent_gate_wait=2 rto_agent_program=/var/tmp/hosts/{{inventory_hostname}}/rto-agent"
}
expect "all waves run if no policy does harm" "first ok fourth ok second ok third ok" "$(waves healthy healthy healthy healthy)"
expect "the waves stop at a host where a policy does harm" "first ok second failed" "$(waves healthy harm healthy healthy)"
grep -q "same-region: bad attempts: 1000 of 20000 (5.00 %)" "$work/log" || failed "no reason: $(cat "$work/log")"
expect "and the next wave does not run" "first second" "$(cd "$hosts" && ls -d ./*/calls | cut -d/ -f2 | paste -sd ' ')"
grep -q "no-control-arm: no control arm" "$work/log" || failed "no reason: $(cat "$work/log")"
# A bad push, and its correction: all connections spurious, no connect bad.
expect "the waves stop at a timer that is too short" "first failed" "$(waves short healthy healthy healthy)"
grep -q "same-region: 900 of 1000 connections sent a SYN or SYN-ACK in vain" "$work/log" || failed "no reason: $(cat "$work/log")"
expect "and go on with the corrected one" "first ok fourth ok second ok third ok" "$(waves healthy healthy healthy healthy)"
sed -i 's/"features": /"tuning": ["policy same-region, outgoing: initial_rto the kernel'\''s own, fallback (spurious); next: the value again in 9m 55s"], &/' "$hosts/first/status.json"
expect "a fallback (spurious) fails the gate" "first failed" "$(gate first, "rto_agent_gate_wait=2 rto_agent_program=/var/tmp/hosts/{{inventory_hostname}}/rto-agent")"
expect "too few attempts are not judged" "first ok fourth ok second ok third ok" "$(waves few few few few)"
