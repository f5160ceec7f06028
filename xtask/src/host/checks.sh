# Checks of the unit, after lib.sh and reboot.sh.

# A boot with the service enabled.
is "boot: the service is enabled" "$(systemctl is-enabled $unit)" enabled
check "boot: the enabled service is active" systemctl is-active $unit
# Without it there is nothing to look at.
systemctl -q is-active $unit || { journalctl -b -u $unit -o short-monotonic --no-pager; systemctl poweroff -ff; }
is "boot: nothing else of the system has failed" "$(systemctl list-units --failed --plain --no-legend | tr '\n' ' ')" ""
check "boot: the policy is in force" in_force
check "boot: the entries of the file are there" lists 192.0.2.0/24
is "boot: another address has the kernel's own" "$(rto 198.51.100.1)" 1000
link=$(find $pins -name link -printf '%P\n' -quit)
check "boot: the link is pinned" test -n "$link" -a -e "$pins/$link"

# Ready: only when the policies are in force.
said=$(journalctl -b -u $unit -o json MESSAGE="in force" | tail -1)
in_force_at=$(sed -n 's/.*"__MONOTONIC_TIMESTAMP":"\([0-9]*\)".*/\1/p' <<<"$said")
active_at=$(property ActiveEnterTimestampMonotonic)
check "ready: active no sooner than in force ($in_force_at, $active_at)" \
  test "${in_force_at:-999999999999}" -le "${active_at:-0}"
is "ready: a type that waits for it" "$(property Type)" notify

# What the process may do, each of its threads. CHOWN, which the unit grants, is given up after the start; from
# the bounding set nothing is, as that takes CAP_SETPCAP, which the unit does not grant.
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
said=$(journalctl -b -u $unit -o json MESSAGE="policies changed" | tail -1)
for wanted in '"AUDIT":"true"' '"ACTION":"start"' '"SOURCE":"start"' '"ADDED":"1"' '"PRIORITY":' \
  '"SYSLOG_IDENTIFIER":"rto-agent"' '"_SYSTEMD_UNIT":"rto-agent.service"'; do
  check "journal: $wanted" grep -qF "$wanted" <<<"$said" || echo "$said"
done

# The control socket.
socket=/run/rto-agent/control.sock
is "socket: for root and its group" "$(stat -c '%a %u %g' $socket)" "660 0 0"
answers() { rto-agent status >/dev/null 2>&1; }
told() { journalctl -b -u $unit -o cat | grep -qF "$1"; }
check "socket: answers" answers
rm $socket
check "socket: removed, it is made again" wait_for 10 answers
check "socket: which the journal tells" told "the socket was gone; it is there again"
check "socket: in force" in_force
check "socket: a runtime entry" rto-agent add 203.0.113.0/24 --policy same-region
# With its directory: the unit's process may make it in /run.
before=$(pid)
rm -r /run/rto-agent
check "socket: removed with its directory, it is made again" wait_for 10 answers
is "socket: whose group gets to it" "$(stat -c '%a' /run/rto-agent) $(stat -c '%a %u %g' $socket)" "755 660 0 0"
check "socket: runtime entries are saved again" wait_for 10 test -s /run/rto-agent/manual.json
is "socket: the same process" "$(pid)" "$before"
check "socket: in force" in_force
check "socket: restart" systemctl restart $unit
check "socket: it answers again" answers
check "socket: in force after the restart" in_force
check "socket: the runtime entry outlives it" lists 203.0.113.0/24
check "socket: and is removed" rto-agent remove 203.0.113.0/24

# Reload.
cp $config /run/config.good
sed -i 's|^cidrs = .*|cidrs = ["192.0.2.0/24", "198.51.100.0/24"]|' $config
check "reload: succeeds" systemctl reload $unit
check "reload: the new entry is there" lists 198.51.100.0/24
is "reload: and in force" "$(rto 198.51.100.1)" 100
before=$(pid)
echo 'this is = no [configuration' >>$config
refuse "reload: a bad file is a failure" systemctl reload $unit
is "reload: the service goes on" "$(systemctl is-active $unit)" active
is "reload: the same process" "$(pid)" "$before"
check "reload: with what it had" lists 198.51.100.0/24
check "reload: in force" in_force
cp /run/config.good $config
check "reload: the former file again" systemctl reload $unit
refuse "reload: without the entry" lists 198.51.100.0/24

# Stop, with on_exit = "detach".
check "stop: succeeds" systemctl stop $unit
is "stop: inactive" "$(systemctl is-active $unit)" inactive
is "stop: a success" "$(property Result)" success
check "stop: nothing is pinned" test ! -e $pins
check "stop: out of force" out_of_force
check "start: again" systemctl start $unit
check "start: in force" in_force

# A restart with on_exit = "detach": systemd has what is in force meanwhile.
initial_rtos() { rto-agent stats --json | sed -n 's/.*"initial_rtos_set": *\([0-9]*\).*/\1/p' | sort -n | tail -1; }
before=$(initial_rtos)
check "restart: connections are counted ($before)" test "${before:-0}" -gt 0
check "restart: no moment without the policy" while_in_force systemctl restart $unit
after=$(initial_rtos)
check "restart: counters go on ($after)" test "${after:-0}" -gt "${before:-0}"

# With on_exit = "keep".
sed -i '1i [agent]\non_exit = "keep"\n' $config
check "keep: restart into it" systemctl restart $unit
check "keep: a restart leaves the link pinned all the while" while_pinned systemctl restart $unit
is "keep: active" "$(systemctl is-active $unit)" active
check "keep: in force after the restart" in_force
check "keep: stop" systemctl stop $unit
check "keep: the link stays pinned" test -e "$pins/$link"
check "keep: in force without a daemon" in_force
check "keep: start takes it over" while_pinned systemctl start $unit
check "keep: in force" in_force

# The watchdog.
before=$(pid)
restarts=$(property NRestarts)
begin=$SECONDS
another() { local now; now=$(pid); [[ $now != 0 && $now != "$before" ]] && systemctl -q is-active $unit; }
stopped() { kill -STOP "$before" && in_force && wait_for 60 another; }
check "watchdog: a stopped daemon is replaced, the link pinned all the while" while_pinned stopped
took=$((SECONDS - begin))
check "watchdog: after its 30 s and not much more ($took s)" test $took -ge 14 -a $took -le 45
is "watchdog: one restart more" "$(property NRestarts)" $((restarts + 1))
check "watchdog: it was the watchdog" \
  sh -c "journalctl -b -u $unit | grep -q 'Failed with result .watchdog.'"
check "watchdog: in force" in_force
check "watchdog: the entries are there" lists 192.0.2.0/24

learn_and_reboot
