# Checks of the unit, after lib.sh and reboot.sh.

# A boot with the service enabled.
is "boot: the service is enabled" "$(systemctl is-enabled $unit)" enabled
check "boot: the enabled service is active" systemctl is-active $unit
# Without the service there is nothing to check.
systemctl -q is-active $unit || { journalctl -b -u $unit -o short-monotonic --no-pager; systemctl poweroff -ff; }
is "boot: nothing else of the system has failed" "$(systemctl list-units --failed --plain --no-legend | tr '\n' ' ')" ""
check "boot: the policy is in force" in_force
check "boot: the entries of the file are loaded" lists 192.0.2.0/24
is "boot: another address has the kernel's own RTO" "$(rto 198.51.100.1)" 1000
link=$(find $pins -name link -printf '%P\n' -quit)
check "boot: the link is pinned" test -n "$link" -a -e "$pins/$link"

# The service becomes active only after the policies are in force.
said=$(journalctl -b -u $unit -o json MESSAGE="policies are active" | tail -1)
in_force_at=$(sed -n 's/.*"__MONOTONIC_TIMESTAMP":"\([0-9]*\)".*/\1/p' <<<"$said")
active_at=$(property ActiveEnterTimestampMonotonic)
check "ready: active not before the policies are in force ($in_force_at, $active_at)" \
  test "${in_force_at:-999999999999}" -le "${active_at:-0}"
is "ready: the service type waits for it" "$(property Type)" notify

# Privileges of each thread. The agent drops CHOWN, which the unit grants, after the start. It drops nothing from the
# bounding set, because that needs CAP_SETPCAP, which the unit does not grant.
threads=(/proc/"$(pid)"/task/*)
check "process: it has more than one thread (${#threads[@]})" test ${#threads[@]} -ge 2
for set in CapPrm CapEff; do
  is "capabilities: $set of each thread is BPF, PERFMON, NET_ADMIN" "$(of_threads $set)" 000000c000001000
done
is "capabilities: CapBnd is these and CHOWN" "$(of_threads CapBnd)" 000000c000001001
for set in CapInh CapAmb; do
  is "capabilities: $set is empty" "$(of_threads $set)" 0000000000000000
done
is "process: no new privileges" "$(of_threads NoNewPrivs)" 1
is "process: system calls are filtered" "$(of_threads Seccomp)" 2
is "process: its root user" "$(of_threads Uid)" $'0\t0\t0\t0'

# The journal's fields.
said=$(journalctl -b -u $unit -o json AUDIT=true ACTION=start | tail -1)
for wanted in '"AUDIT":"true"' '"ACTION":"start"' '"SOURCE":"start"' '"ADDED":"1"' '"PRIORITY":' \
  '"SYSLOG_IDENTIFIER":"rto-agent"' '"_SYSTEMD_UNIT":"rto-agent.service"'; do
  check "journal: $wanted" grep -qF "$wanted" <<<"$said" || echo "$said"
done

# The control socket.
socket=/run/rto-agent/control.sock
is "socket: for root and its group" "$(stat -c '%a %u %g' $socket)" "660 0 0"
answers() { rto-agent status >/dev/null 2>&1; }
logged() { journalctl -b -u $unit -o cat | grep -qF "$1"; }
check "socket: answers" answers
rm $socket
check "socket: re-created after its removal" wait_for 10 answers
check "socket: the journal reports it" logged "the socket was removed, and has been created again"
check "socket: in force" in_force
check "socket: a runtime entry is added" rto-agent add 203.0.113.0/24 --policy same-region
# The socket's directory as well: the unit's process may create it in /run.
before=$(pid)
rm -r /run/rto-agent
check "socket: re-created after the removal of its directory" wait_for 10 answers
is "socket: its group can reach it" "$(stat -c '%a' /run/rto-agent) $(stat -c '%a %u %g' $socket)" "755 660 0 0"
check "socket: runtime entries are saved again" wait_for 10 test -s /run/rto-agent/manual.json
is "socket: the same process" "$(pid)" "$before"
check "socket: in force" in_force
check "socket: restart" systemctl restart $unit
check "socket: it answers again" answers
check "socket: in force after the restart" in_force
check "socket: the runtime entry survives the restart" lists 203.0.113.0/24
check "socket: the runtime entry is removed" rto-agent remove 203.0.113.0/24

# Reload.
cp $config /run/config.good
sed -i 's|^cidrs = .*|cidrs = ["192.0.2.0/24", "198.51.100.0/24"]|' $config
check "reload: succeeds" systemctl reload $unit
check "reload: the new entry is loaded" lists 198.51.100.0/24
is "reload: the new entry is in force" "$(rto 198.51.100.1)" 100
before=$(pid)
echo 'this is = no [configuration' >>$config
refuse "reload: a bad file fails" systemctl reload $unit
is "reload: the service stays active" "$(systemctl is-active $unit)" active
is "reload: the same process" "$(pid)" "$before"
check "reload: the former entry is kept" lists 198.51.100.0/24
check "reload: in force" in_force
cp /run/config.good $config
check "reload: the former file is reloaded" systemctl reload $unit
refuse "reload: the entry is removed" lists 198.51.100.0/24

# Stop, with on_exit = "detach".
check "stop: succeeds" systemctl stop $unit
is "stop: inactive" "$(systemctl is-active $unit)" inactive
is "stop: a success" "$(property Result)" success
check "stop: nothing is pinned" test ! -e $pins
check "stop: the policy is no longer in force" out_of_force
check "start: again" systemctl start $unit
check "start: in force" in_force

# A restart with on_exit = "detach": systemd keeps the programs and maps in between.
counted() { rto-agent stats --json | sed -n 's/.*"attempts": *\([0-9]*\).*/\1/p' | sort -n | tail -1; }
before=$(counted)
check "restart: attempts are counted ($before)" test "${before:-0}" -gt 0
check "restart: no moment without the policy" while_in_force systemctl restart $unit
after=$(counted)
check "restart: counters go on ($after)" test "${after:-0}" -gt "${before:-0}"

# With on_exit = "keep".
sed -i '1i [agent]\non_exit = "keep"\n' $config
check "keep: the restart applies it" systemctl restart $unit
check "keep: a restart leaves the link stays pinned" while_pinned systemctl restart $unit
is "keep: active" "$(systemctl is-active $unit)" active
check "keep: in force after the restart" in_force
check "keep: the service stops" systemctl stop $unit
check "keep: the link stays pinned" test -e "$pins/$link"
check "keep: in force without a daemon" in_force
check "keep: the next start adopts the link" while_pinned systemctl start $unit
check "keep: in force" in_force

# The watchdog.
before=$(pid)
restarts=$(property NRestarts)
begin=$SECONDS
another() { local now; now=$(pid); [[ $now != 0 && $now != "$before" ]] && systemctl -q is-active $unit; }
stopped() { kill -STOP "$before" && in_force && wait_for 60 another; }
check "watchdog: a stopped daemon is replaced, the link stays pinned" while_pinned stopped
took=$((SECONDS - begin))
check "watchdog: after its 30 s and not much more ($took s)" test $took -ge 14 -a $took -le 45
is "watchdog: one more restart" "$(property NRestarts)" $((restarts + 1))
check "watchdog: it was the watchdog" \
  sh -c "journalctl -b -u $unit | grep -q 'Failed with result .watchdog.'"
check "watchdog: in force" in_force
check "watchdog: the entries are loaded" lists 192.0.2.0/24

# The self-test beside a daemon with the policy of the example.
check "self-test: passes" rto-agent doctor --self-test

# Metrics on all addresses: the unit lets only the loopback interface reach them, and a drop-in others.
fetch() {
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$1/9464" && printf "GET /healthz HTTP/1.0\r\n\r\n" >&3 && grep -q " 200 " <&3' - "$1"
}
reports() { "${@:2}" 2>&1 | grep -qF "$1"; }
behind="0.0.0.0:9464 cannot be reached from other hosts"
cp $config /run/config.good
sed -i 's/^\[agent\]$/&\nmetrics = "0.0.0.0:9464"/' $config
check "metrics: check reports that the unit keeps other hosts out" reports "$behind" rto-agent check
check "metrics: a restart" systemctl restart $unit
check "metrics: doctor reports it as well" reports "cannot be reached from other hosts" rto-agent doctor
check "metrics: reachable on the loopback interface" fetch 127.0.0.1
refuse "metrics: not from another address" fetch 10.98.0.1
mkdir -p /etc/systemd/system/$unit.d
printf '[Service]\nIPAddressAllow=10.98.0.0/16\n' >/etc/systemd/system/$unit.d/metrics.conf
systemctl daemon-reload
check "metrics: a restart with the drop-in" systemctl restart $unit
check "metrics: reachable from an address that it allows" fetch 10.98.0.1
refuse "metrics: nothing is left to report" reports "cannot be reached from other hosts" rto-agent check

# The probe needs more than the unit grants: one line of information a start, and no warning.
sleep 20
probes() { journalctl _SYSTEMD_INVOCATION_ID="$(property InvocationID)" -o cat "$@" | grep -c "^probe:"; }
is "probe: one line a start" "$(probes)" 1
is "probe: which is no warning" "$(probes -p warning)" 0
refuse "probe: no warning of status" reports "probe" sh -c "rto-agent status | grep ^warning"
rm -r /etc/systemd/system/$unit.d
systemctl daemon-reload
cp /run/config.good $config
check "metrics: a restart without them" systemctl restart $unit

# A bad push, and its correction: a path of 50 ms.
push() {
  sed -i "s|^cidrs = .*|cidrs = [\"192.0.2.0/24\", \"10.98.4.1/32\"]|; s|^initial_rto = .*|initial_rto = \"$1\"|" $config
  systemctl reload $unit
}
healthy() { rto-agent status >/dev/null; }
unhealthy() { ! healthy; }
check "push: a server" serve
tc qdisc add dev lo root netem delay 25ms
check "push: a timer above the path RTT" push 300ms
check "push: connections" connect 10.98.4.1 30
check "push: status is good" healthy
check "push: a timer below the path RTT" push 40ms
check "push: connections, which are established" connect 10.98.4.1 40
begin=$SECONDS
check "push: status has a problem" wait_for 15 unhealthy
check "push: the journal reports the fallback" wait_for 15 logged "fallback (spurious), 40ms -> the kernel"
echo "push: after $((SECONDS - begin)) s"
check "push: status names the value" reports "initial_rto 40ms is shorter than the path RTT" rto-agent status
is "push: new connections have the kernel's own timer" "$(rto 192.0.2.1)" 1000
check "push: the correction" push 300ms
check "push: status is good again" wait_for 10 healthy
of_policy=300
check "push: the corrected timer is in force" in_force
of_policy=100
tc qdisc del dev lo root
cp /run/config.good $config
check "push: the former configuration" systemctl reload $unit

learn_and_reboot
