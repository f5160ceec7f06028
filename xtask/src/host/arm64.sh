# Runs the agent of its package on an arm64 Debian kernel, with busybox alone. Prints results like lib.sh.
ip address add 10.98.0.1/32 dev lo
# Routed over the loopback interface, where these addresses do not exist.
ip route add 192.0.2.0/24 dev lo src 10.98.0.1

count=0
# check NAME COMMAND...: the command must succeed.
check() {
  name=$1
  shift
  count=$((count + 1))
  if said=$("$@" 2>&1); then echo "ok arm64: $name"; else echo "not ok arm64: $name: $(echo $said)"; fi
}
# The RTO, in ms, of a new connection to 192.0.2.1, port 9, in SYN-SENT: in /proc/net/tcp it is in hundredths of a second.
is_rto() {
  nc 192.0.2.1 9 </dev/null >/dev/null 2>&1 &
  connecting=$! rto=
  for _ in $(seq 100); do
    rto=$(awk '$3 == "010200C0:0009" && $4 == "02" { print $13 * 10; exit }' /proc/net/tcp)
    [ -z "$rto" ] || break
    sleep 0.01
  done
  kill $connecting
  [ "$rto" = "$1" ] || { echo "rto $rto"; return 1; }
}
is_machine() { [ "$(uname -m)" = aarch64 ]; }
answers() {
  for _ in $(seq 60); do
    rto-agent status && return
    sleep 1
  done
  cat /run/log
  return 1
}

check "the machine is arm64" is_machine
check "without the agent the kernel's own timer is in force" is_rto 1000
rto-agent run >/run/log 2>&1 &
check "the program is loaded and attached, the daemon is healthy" answers
check "the policy is in force" is_rto 100
check "the kernel holds the entries" rto-agent verify
check "detaches" rto-agent detach
check "the policy is no longer in force" is_rto 1000
echo "checks end $count"
