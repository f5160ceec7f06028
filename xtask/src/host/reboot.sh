# Checks of the state that survives a reboot, after lib.sh and before checks.sh, which is the first stage. The disk
# records the next stage, and the values before the reboot.
kept=/kept
state=/var/lib/rto-agent

# json EXPRESSION: evaluates it on the document on stdin, which is $_.
json() { perl -MJSON::PP -0777 -e '$_ = decode_json(<STDIN>); print eval(shift) // "none"' "$1"; }
# tuned POLICY EXPRESSION: evaluates it on the policy's timer for connections that this host opens.
tuned() { rto-agent tune "$1" --json | json "\$_->{policies}{$1}{timers}[0]$2"; }
# The same, from the file on the disk.
stored() { json "\$_->{content}{policies}{$1}{timers}{active}{tuner}$2" <$state/tuning.json; }
tried() { rto-agent status --json | json "\$_->{holdouts}{tried}$1"; }
attempts() { tried '{treated}{attempts} + $_->{holdouts}{tried}{control}{attempts}'; }
counting() { [[ $(tried '{since_ms}') != none ]]; }
attempts_are() { [[ $(attempts) == "$1" ]] || { echo "$(attempts) attempts"; return 1; }; }
state_is() { [[ $(tuned "$1" '{state}') == "$2" ]]; }
# The timer of a policy is in force: what the kernel tells is in hundredths of a second.
value_in_force() {
  local us now
  us=$(tuned "$1" '{value_us}')
  now=$(rto "$2")
  ((us > 0 && now == us / 10000 * 10)) || { echo "rto $now, value $us us"; return 1; }
}

serve() {
  perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 1024, LocalPort => 7000, ReuseAddr => 1) or die;
    while ($c = $s->accept) { close $c }' >/dev/null 2>&1 &
  wait_for 10 connect 10.98.4.1 1
}
# connect ADDRESS COUNT: connects to the server, one connection after the other.
connect() {
  local i
  for ((i = 0; i < $2; i++)); do
    { exec 3<>"/dev/tcp/$1/7000"; } 2>/dev/null || return 1
    exec 3>&-
  done
}
# Connections whose answer takes longer than the timer, until fallback (spurious) begins.
alarm() {
  tc qdisc add dev lo root netem delay 50ms
  connect 10.98.2.1 60
  tc qdisc del dev lo root
  wait_for 30 state_is held fallback-spurious
}
# Connects until path RTTs below a millisecond have lowered the value to this, microseconds.
lower_to() {
  local round
  for round in {1..8}; do
    connect 127.0.0.1 400 || return 1
    # The value is lowered at most once a minute.
    sleep 65
    lowered "$1" && return
  done
  rto-agent tune near
  return 1
}
lowered() {
  local us
  us=$(tuned near '{value_us}')
  [[ $us != none ]] && ((us <= $1))
}

remember() {
  {
    echo "count=$count failed=$failed before_boot=$(</proc/sys/kernel/random/boot_id)"
    echo "near_us=$(tuned near '{value_us}') hold_until_ms=$(stored held '{hold_until_ms}') attempts=$(attempts)"
  } >$kept/before
  cat $kept/before
  echo "$1" >$kept/stage
  sync $kept/before $kept/stage
}
# What was learnt and counted is on the disk, later than this file.
saved_since() { [[ $state/tuning.json -nt $1 ]]; }
# Conditions after each reboot.
kept_over() {
  local when=$1
  is "$when: the machine has rebooted" "$([[ $(</proc/sys/kernel/random/boot_id) != "$before_boot" ]] && echo yes)" yes
  check "$when: the service is active" systemctl is-active $unit
  is "$when: a learnt value is kept" "$(tuned near '{value_us}')" "$near_us"
  check "$when: and is in force" value_in_force near 198.51.100.1
  is "$when: a hold continues" "$(tuned held '{state} . " " . $_->{policies}{held}{timers}[0]{next}{kind}')" "fallback-spurious hold-ends"
  is "$when: until the same moment" "$(stored held '{hold_until_ms}')" "$hold_until_ms"
  is "$when: the kernel's own timer is in force" "$(rto 203.0.113.1)" 1000
  is "$when: a comparison continues with its share" "$(tried '{verdict} . " " . $_->{holdouts}{tried}{share}')" "not-yet 40%"
  check "$when: with its counts ($attempts)" attempts_are "$attempts"
  # What is counted in the first two seconds after a start is left out.
  sleep 5
  check "$when: further connections" connect 10.98.3.1 100
  check "$when: it counts them" wait_for 30 attempts_are $((attempts + 100))
  refuse "$when: no warning of status that something was lost" sh -c "rto-agent status | grep -iE 'values are lost|were lost|unreadable|moved aside'"
  refuse "$when: none of doctor" sh -c "rto-agent doctor | grep -iE 'values are lost|were lost|unreadable|moved aside'"
  check "$when: nothing was moved aside" silent find $state -name '*unreadable*'
}

# After all checks of the first boot.
learn_and_reboot() {
  cat >>$config <<'END'
[policy.near]
cidrs = ["127.0.0.1/32", "198.51.100.0/24"]
initial_rto = "auto"
[policy.held]
cidrs = ["10.98.2.1/32", "203.0.113.0/24"]
initial_rto = "20ms"
guard = "on"
[policy.tried]
cidrs = ["10.98.3.1/32"]
initial_rto = "100ms"
holdout = "40%"
END
  check "learn: a configuration with more policies" systemctl reload $unit
  check "learn: a server" serve
  check "learn: a comparison begins" wait_for 30 counting
  check "learn: connections of it" connect 10.98.3.1 250
  # The connections that the host opens count.
  check "learn: it counts them" wait_for 30 attempts_are 250
  check "learn: 64 ms is learnt for the loopback" lower_to 64000
  check "learn: and in force" value_in_force near 198.51.100.1
  check "learn: answers that come late bring a hold" alarm
  remember rebooted
  systemctl reboot
  exec sleep infinity
}

after_reboot() {
  kept_over "reboot"
  # A power failure costs what was counted since the last save, which comes once a minute; if none comes, all was saved
  # before.
  touch $kept/counted
  wait_for 90 saved_since $kept/counted || true
  # The hold outlives the power failure too: ten minutes are longer than the minute and both boots.
  remember power_cut
  # Simulates a power failure.
  echo b >/proc/sysrq-trigger
  exec sleep infinity
}

after_power_cut() {
  kept_over "power cut"
  conclude
}

stage=$(cat $kept/stage 2>/dev/null || echo first)
[[ $stage == first ]] || . $kept/before
# The next boot is one that was asked for.
echo unasked >$kept/stage
for address in 10.98.{2,3,4}.1; do ip address add $address/32 dev lo; done
ip route add 203.0.113.0/24 dev lo src 10.98.0.1
case $stage in
  first) ;;
  rebooted) serve; after_reboot ;;
  power_cut) serve; after_power_cut ;;
  *) not_ok "an unexpected reboot" "the machine restarted by itself"; conclude ;;
esac
