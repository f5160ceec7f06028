#!/bin/bash
# Runs in the machine after multi-user.target. It prints "ok NAME" or "not ok NAME: why" on the console for each check,
# and the number of checks at the end. The checks of checks.sh, packages.sh or node/*.sh follow.
exec </dev/null >/dev/console 2>&1
unit=rto-agent.service
config=/etc/rto-agent/config.toml
pins=/sys/fs/bpf/rto-agent
count=0

failed=0
ok() { count=$((count + 1)); echo "ok $1"; }
not_ok() { count=$((count + 1)) failed=$((failed + 1)); echo "not ok $1: $2"; }
# check NAME COMMAND...: the command must succeed.
check() {
  local name=$1 said
  shift
  if said=$("$@" 2>&1); then ok "$name"; else not_ok "$name" "$* gave $? ${said//$'\n'/ | }"; fi
}
refuse() {
  local name=$1 said
  shift
  if said=$("$@" 2>&1); then not_ok "$name" "$* succeeded: ${said//$'\n'/ | }"; else ok "$name"; fi
}
is() {
  if [[ $2 == "$3" ]]; then ok "$1"; else not_ok "$1" "$2 and not $3"; fi
}
# silent COMMAND...: it must succeed without a word.
silent() {
  local said
  said=$("$@" 2>&1) && [[ -z $said ]] || { echo "$said"; return 1; }
}
property() { systemctl show -p "$1" --value $unit; }
pid() { property MainPID; }
# Prints the distinct values of a field in the threads of the process.
of_threads() {
  local status
  for status in /proc/"$(pid)"/task/*/status; do sed -n "s/^$1:[[:space:]]*//p" "$status"; done | sort -u
}
lists() { rto-agent list --json | grep -qF "\"$1\""; }
# Prints the RTO, in ms, of a new connection to an address that does not answer: of the socket in SYN-SENT (02) in
# /proc/net/tcp, which has it in hundredths of a second.
rto() {
  local -a part
  IFS=. read -ra part <<<"$1"
  local peer connecting found=
  printf -v peer '%02X%02X%02X%02X:0009' "${part[3]}" "${part[2]}" "${part[1]}" "${part[0]}"
  (exec 3<>"/dev/tcp/$1/9") 2>/dev/null &
  connecting=$!
  for _ in {1..200}; do
    found=$(awk -v peer="$peer" '$3 == peer && $4 == "02" { print $13 * 10; exit }' /proc/net/tcp)
    [[ -n $found ]] && break
    sleep 0.01
  done
  kill $connecting 2>/dev/null
  wait $connecting 2>/dev/null
  echo "${found:-0}"
}
# The policy is in force if the RTO is 100 ms (or matches); the kernel's own is 1000 ms.
of_policy=100
of_kernel=1000
in_force() { is_rto "$of_policy"; }
out_of_force() { is_rto "$of_kernel"; }
# is_rto VALUE [ADDRESS]
is_rto() {
  local rto
  rto=$(rto "${2:-192.0.2.1}")
  [[ $rto =~ ^($1)$ ]] || { echo "rto $rto"; return 1; }
}
# Sleeps 10 ms without a new process, which takes long on an emulated CPU.
exec {never}<> <(:)
nap() { read -rt 0.01 -u "$never"; }
# wait_for SECONDS COMMAND...
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do ((SECONDS < end)) || return 1; sleep 1; done
}
# observe LOOK COMMAND...: runs a command, and LOOK repeatedly while the command runs. The output of LOOK is in $looks.
looks=/run/looks
observe() {
  local look=$1 looking=/run/looking watcher status
  shift
  : >$looking
  (while "$look"; [[ -e $looking ]]; do :; done >$looks) &
  watcher=$!
  "$@"
  status=$?
  rm $looking
  wait $watcher
  return $status
}
# Whether the link stayed pinned while a command ran.
look_at_link() { [[ -e $pins/$link ]] || echo gone; nap; }
while_pinned() {
  observe look_at_link "$@"
  local status=$?
  [[ ! -s $looks ]] || { echo "$link was gone"; return 1; }
  return $status
}
# Whether each connection that began while a command ran had the policy.
look_at_rto() { rto 192.0.2.1; }
while_in_force() {
  local status without
  observe look_at_rto "$@"
  status=$?
  [[ -s $looks ]] || { echo "no connection was observed"; return 1; }
  without=$(grep -cvxE "$of_policy" $looks)
  ((without == 0)) || { echo "$without of $(wc -l <$looks) observed connections without the policy"; return 1; }
  return $status
}

# The daemon's log, printed if a check fails.
logs() { journalctl -b -u $unit -o short-monotonic --no-pager; }
conclude() {
  ((failed == 0)) || logs
  echo "checks end $count"
  sync
  systemctl poweroff --force --force
}

echo "checks begin"
wait_for 120 systemctl -q is-active multi-user.target
ip link set lo up
ip address add 10.98.0.1/32 dev lo
# Routed over the loopback interface, where these addresses do not exist.
ip route add 192.0.2.0/24 dev lo src 10.98.0.1
ip route add 198.51.100.0/24 dev lo src 10.98.0.1
