# Checks of the container without Kubernetes, after container.sh.

config=/srv/config
logs() { podman logs rto-agent; }
logged() { logs 2>&1 | grep -qF "$1"; }

# Updates the configuration from stdin as the kubelet updates a ConfigMap: a new directory, to which the link is moved.
configure() {
  local former next
  former=$(readlink $config/..data)
  next=..$((${former#..} + 1))
  mkdir -p $config/$next
  cat >$config/$next/config.toml
  ln -s $next $config/..data_tmp
  mv -T $config/..data_tmp $config/..data
  [[ -L $config/config.toml ]] || ln -s ..data/config.toml $config/config.toml
  [[ -z $former ]] || rm -r "${config:?}/$former"
}
# The configuration of charts/rto-agent/templates/configmap.yaml, with these CIDRs.
policies() {
  cat <<END
[agent]
cgroup = "/host/cgroup"
pin_dir = "/host/bpf/rto-agent"
metrics = "127.0.0.1:9464"
on_exit = "${on_exit:-keep}"

[policy.same-region]
cidrs = [$1]
initial_rto = "100ms"
END
}
# podman's default profile allows bpf(2) only under CAP_SYS_ADMIN; the profiles of Docker, containerd and cri-o also
# allow it under CAP_BPF.
seccomp=/srv/seccomp.json
sed -e '/"bpf",/d' -e 's/"syscalls": \[/&{"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_BPF"]}},/' \
  /usr/share/containers/seccomp.json >$seccomp
# The settings of charts/rto-agent/templates/daemonset.yaml.
confinement=(--network host --cgroupns private --cap-drop ALL --cap-add BPF,PERFMON,NET_ADMIN
  --security-opt no-new-privileges --read-only --read-only-tmpfs=false --memory 1g
  --volume $config:/etc/rto-agent:ro --volume /sys/fs/bpf:/host/bpf)
host=(--volume /sys/fs/cgroup:/host/cgroup:ro --volume /run/rto-agent:/run/rto-agent
  --volume /var/lib/rto-agent:/var/lib/rto-agent)
# start TAG
start() {
  podman run --detach --name rto-agent --restart always "${confinement[@]}" "${host[@]}" \
    localhost/rto-agent:"$1" run --log-format text
}
stop() { podman stop rto-agent && podman rm rto-agent; }
# The same image under another tag.
replace() { stop && start "$1" && wait_for 60 taken_over; }
# alone TEXT [OPTIONS...]: starts another container, which must fail with an error that contains the text.
alone() {
  local text=$1 said
  shift
  said=$(timeout 120 podman run --rm "${confinement[@]}" "$@" localhost/rto-agent:"$version" run --log-format text 2>&1) \
    && { echo "succeeded: $said"; return 1; }
  [[ $said == *$text* ]] || { echo "$said"; return 1; }
}

# The Job of charts/rto-agent/templates/check.yaml.
validates() {
  timeout 120 podman run --rm --user 65534 --network host --cap-drop ALL --security-opt no-new-privileges --read-only \
    --volume $config:/etc/rto-agent:ro localhost/rto-agent:"$version" check --fleet /etc/rto-agent
}

mkdir -p /run/rto-agent /var/lib/rto-agent
policies '"192.0.2.0/24"' | configure
check "image: loads" podman load --input /srv/rto-agent-"$version".oci.tar
image=$(podman images --quiet)
check "image: has a tag" podman tag "$image" localhost/rto-agent:"$version" localhost/rto-agent:other
check "seccomp: with podman's default profile it is refused" alone "Operation not permitted" "${host[@]}"
check "the chart's hook: accepts a good configuration" validates
# The following checks use the adapted profile.
confinement+=(--security-opt seccomp=$seccomp)
check "start: out of force before" out_of_force
check "start: the container starts" start "$version"
check "start: it becomes ready" wait_for 60 ready
# Without a ready daemon there is nothing to check.
ready || { logs; conclude; exit; }
check "start: the policy is in force for the host's connections" in_force
is "start: another address has the kernel's own" "$(rto 198.51.100.1)" 1000
check "start: the host's socket lists the entry" lists 192.0.2.0/24
confined

before=$(pid)
policies '"192.0.2.0/24", "198.51.100.0/24"' | configure
check "configuration: a change is reloaded" wait_for 30 lists 198.51.100.0/24
is "configuration: and in force" "$(rto 198.51.100.1)" 100
is "configuration: without a restart" "$(pid)" "$before"
echo 'this is = no [configuration' | configure
refuse "the chart's hook: refuses a bad configuration" validates
check "configuration: the metric reports a bad one" wait_for 30 metric_is last_reload_successful 0.0
check "configuration: the log reports it" logged "the last good configuration stays active"
check "configuration: the former one stays in force" in_force
is "configuration: all of it" "$(rto 198.51.100.1)" 100
is "configuration: the same process" "$(pid)" "$before"
policies '"192.0.2.0/24"' | configure
check "configuration: the next good one is in force" wait_for 30 metric_is last_reload_successful 1.0
is "configuration: the entry is removed" "$(rto 198.51.100.1)" 1000

before=$(pid)
killed() { kill -KILL "$before" && wait_for 60 taken_over; }
check "SIGKILL: the next one takes over, no moment without the policy" while_in_force killed
check "SIGKILL: ready" ready
before=$(pid)
check "upgrade: no moment without the policy" while_in_force replace other
check "upgrade: the entry is there" lists 192.0.2.0/24
before=$(pid)
check "rollback: no moment without the policy" while_in_force replace "$version"
check "rollback: the entry is there" lists 192.0.2.0/24

before=$(pid)
check "second agent: refused, with the directory it shares" alone "another rto-agent" "${host[@]}"
check "second agent: with directories of its own refused for the pins" \
  alone "another rto-agent holds /host/bpf/rto-agent" --volume /sys/fs/cgroup:/host/cgroup:ro --tmpfs /run/rto-agent:mode=0755
is "second agent: the first one keeps running" "$(pid)" "$before"
check "second agent: in force" in_force

policies '"192.0.2.0/24"' | sed '/^cgroup = /d' | configure
check "cgroup namespace: without the host's mount it is refused, and the mount named" \
  alone "--volume /sys/fs/cgroup:/host/cgroup:ro" --tmpfs /run/rto-agent:mode=0755

on_exit=detach
policies '"192.0.2.0/24", "198.51.100.0/24"' | configure
check "removal: the change to on_exit = \"detach\" is reloaded" wait_for 30 lists 198.51.100.0/24
check "removal: the container stops" stop
check "removal: nothing is pinned" nothing_left
check "removal: the policy is no longer in force" out_of_force
is "removal: no daemon runs" "$(pid)" 0

conclude
