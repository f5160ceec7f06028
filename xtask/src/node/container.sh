# Functions of podman.sh and kubernetes.sh, after lib.sh.

version=$(</srv/version)
# The daemon's process id on this host; 0 if none runs.
pid() {
  local dir word
  for dir in /proc/[0-9]*; do
    mapfile -d '' -t word 2>/dev/null <"$dir/cmdline" || continue
    [[ ${word[0]-} == /usr/bin/rto-agent && ${word[1]-} == run ]] && { echo "${dir#/proc/}"; return; }
  done
  echo 0
}
restarted() { [[ $(pid) != 0 && $(pid) != "$before" ]]; }
# The answer of the metrics endpoint on the loopback interface.
get() {
  (exec 3<>/dev/tcp/127.0.0.1/9464 && printf 'GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' "$1" >&3 &&
    exec timeout 20 cat <&3) 2>/dev/null
}
ready() { [[ $(get /readyz) == "HTTP/1.1 200 "* ]]; }
metric() { get /metrics | sed -n "s/^rto_agent_$1 //p"; }
metric_is() { [[ $(metric "$1") == "$2" ]]; }
# A daemon other than $before has taken over.
taken_over() { restarted && ready; }
nothing_left() { [[ -z $(find /sys/fs/bpf -path '*rto*') ]]; }
namespaces() { readlink "/proc/$1/ns/cgroup" "/proc/$1/ns/net" | tr '\n' ' '; }

# Privileges of the process in the container.
confined() {
  local own first set
  own=$(namespaces "$(pid)")
  first=$(namespaces 1)
  is "confinement: the network namespace is the host's" "${own#* }" "${first#* }"
  refuse "confinement: the cgroup namespace is not" test "${own%% *}" = "${first%% *}"
  for set in CapPrm CapEff CapBnd; do
    is "confinement: $set of each thread is BPF, PERFMON, NET_ADMIN" "$(of_threads $set)" 000000c000001000
  done
  is "confinement: no new privileges" "$(of_threads NoNewPrivs)" 1
  is "confinement: seccomp filters system calls" "$(of_threads Seccomp)" 2
  check "confinement: the root is read-only" grep -q ' / / ro[, ]\| / ro[, ]' "/proc/$(pid)/mountinfo"
  check "confinement: cgroup2 is read-only" grep -q ' /host/cgroup ro[, ]' "/proc/$(pid)/mountinfo"
  check "confinement: AppArmor enforces $(cat "/proc/$(pid)/attr/current")" \
    grep -q '(enforce)' "/proc/$(pid)/attr/current"
}
