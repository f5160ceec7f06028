# Checks of the chart with this machine as a Kubernetes node, after lib.sh and container.sh. The control plane runs on
# the machine's host, at 10.0.2.2. Timeouts are generous, because a busy CPU takes long to reach a state.

export HOME=/root KUBECONFIG=/etc/kubernetes/admin.kubeconfig PATH=$PATH:/node/bin
long=600
# RTO values, in ms. A connection that is observed late has a doubled value, often several times; this clock allows
# that.
of_policy='300|600|1200|2400|4800|9600'
of_kernel='1000|2000|4000|8000'
other_in_force() { is_rto "$of_policy" 198.51.100.1; }
namespace=kube-system
values=/run/values.yaml
kube() { kubectl --namespace $namespace "$@"; }
# Installs or upgrades the release with these options of helm.
release() { helm upgrade --install rto-agent /srv/rto-agent-chart-"$version".tgz --namespace $namespace "$@"; }
# Without a guard: connections to addresses that do not answer are an outage.
policies() {
  cat >$values <<END_OF_VALUES
policies:
  same-region:
    cidrs: [$1]
    initial_rto: 300ms
    guard: "off"
END_OF_VALUES
}
node_condition() { kubectl get node localhost -o jsonpath="{.status.conditions[?(@.type=='Ready')].status}"; }
node_ready() { [[ $(node_condition) == True ]]; }
of_release=app.kubernetes.io/instance=rto-agent
# For each pod of the DaemonSet: its uid, image, and number of restarts. A Job that has failed keeps a pod of its own.
pods() {
  local one='{.metadata.uid} {.spec.containers[0].image} {.status.containerStatuses[0].restartCount}'
  kube get pods -l app.kubernetes.io/name=rto-agent,$of_release -o jsonpath="{range .items[*]}$one{\"\\n\"}{end}"
}
pod() { local uid image count; read -r uid image count <<<"$(pods)"; echo "${!1}"; }
broken='this is = no [configuration'
job_says() { kube logs job/rto-agent-check | grep -F "$1"; }
config_has() { kube get configmap rto-agent -o yaml | grep -F "$1"; }
rolled_out() { kube rollout status daemonset/rto-agent --timeout ${long}s; }
status() { kube exec daemonset/rto-agent -- rto-agent status "$@"; }
says_all_sockets() { status | grep -qF "every socket of the host"; }
# Time at which the configuration was read, in seconds since 1970.
reloaded_at() { status --json | sed -n '/"last_reload"/,$ s/.*"at_s": *\([0-9]*\).*/\1/p' | head -1; }
reloaded_since() { local at; at=$(reloaded_at); ((${at:-0} > $1)); }
logged() { grep -qF "$1" /var/log/pods/${namespace}_rto-agent-*/agent/*.log; }
no_pod() { [[ $(kube get pods -l $of_release -o name 2>&1) == "" && $(pid) == 0 ]]; }
# Printed if a check fails.
logs() {
  journalctl -b -u kubelet -u containerd -o short-monotonic --no-pager | tail -60
  kubectl get nodes,pods -A -o wide
  kube describe pods -l $of_release | tail -30
  tail -n 40 /var/log/pods/*/*/*.log
}
give_up() { logs; conclude; exit; }
# second_agent TEXT: another daemon, on the node itself, must end with an error that has the text.
second_agent() {
  local said
  said=$(timeout 120 rto-agent run --log-format text 2>&1) && { echo "succeeded: $said"; return 1; }
  [[ $said == *$1* ]] || { echo "$said"; return 1; }
}

# Prints the RTO of a new connection and the current step.
doing=/run/doing
do_step() { echo "$1" >$doing; }
look_at_rto_and_step() { echo "$(rto 192.0.2.1) $(<$doing)"; }

import() { ctr --namespace k8s.io images import --snapshotter native --base-name "$1" "$2"; }
modprobe virtio_net
wait_for 60 test -e /sys/class/net/eth0
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
agent=docker.io/library/rto-agent
check "image: containerd imports it" import $agent /srv/rto-agent-"$version".oci.tar
check "image: another tag" ctr --namespace k8s.io images tag $agent:"$version" $agent:other
check "image: of the pods' sandboxes" import localhost/pause /srv/pause-"$version".oci.tar
check "node: the kubelet starts" systemctl start kubelet
check "node: Kubernetes has it as ready" wait_for $long node_ready
node_ready || give_up

check "install: out of force before" out_of_force
policies '"192.0.2.0/24"'
check "install: helm installs the chart" release --values $values
check "install: the pod becomes ready" rolled_out
check "install: the daemon is ready" wait_for 60 ready
# Without a ready daemon there is nothing to check.
ready || give_up
check "install: the policy is in force for the node's own connections" in_force
check "install: another address has the kernel's own" is_rto "$of_kernel" 198.51.100.1
check "install: the node's socket lists the entry" lists 192.0.2.0/24
check "install: status in the pod says that every socket of the node is covered" says_all_sockets
confined

# All events that the policy must survive.
steps() {
  local uid restarts

  do_step ConfigMap
  uid=$(pod uid) restarts=$(pod count) before=$(pid)
  policies '"192.0.2.0/24", "198.51.100.0/24"'
  check "ConfigMap: helm changes it" release --values $values
  check "ConfigMap: the change is reloaded" wait_for 300 lists 198.51.100.0/24
  check "ConfigMap: and in force" other_in_force
  is "ConfigMap: the same pod" "$(pod uid)" "$uid"
  is "ConfigMap: no restart" "$(pod count)" "$restarts"
  is "ConfigMap: the same process" "$(pid)" "$before"

  do_step "refused configuration"
  refuse "refused configuration: the hook ends helm's upgrade" release --reuse-values --set-string config="$broken"
  check "refused configuration: the Job's log has the reason" job_says "this is"
  refuse "refused configuration: the ConfigMap is the former one" config_has "this is"

  do_step "bad configuration"
  check "bad configuration: helm puts it into the ConfigMap" \
    release --reuse-values --no-hooks --set-string config="$broken"
  check "bad configuration: the metric reports it" wait_for 300 metric_is last_reload_successful 0.0
  check "bad configuration: the log reports it" logged "the last good configuration stays active"
  check "bad configuration: the former one stays in force" in_force
  check "bad configuration: all of it" other_in_force
  is "bad configuration: the same process" "$(pid)" "$before"
  # The refused upgrade is a revision too, the third, to which helm would return.
  check "bad configuration: helm rolls it back" helm rollback rto-agent 2 --namespace $namespace
  check "bad configuration: the good one is reloaded" wait_for 300 metric_is last_reload_successful 1.0
  is "bad configuration: the same pod" "$(pod uid)" "$uid"

  do_step SIGKILL
  check "SIGKILL: of the daemon's process" kill -KILL "$before"
  check "SIGKILL: the next one takes over" wait_for $long taken_over
  is "SIGKILL: in the same pod" "$(pod uid)" "$uid"
  check "SIGKILL: one more restart" wait_for 120 eval "[[ \$(pod count) == $((restarts + 1)) ]]"
  check "SIGKILL: in force" in_force
  check "SIGKILL: the entry is there" lists 198.51.100.0/24

  do_step upgrade
  before=$(pid)
  check "upgrade: helm sets another tag" release --reuse-values --set image.tag=other
  check "upgrade: the pod is replaced" rolled_out
  check "upgrade: the next daemon takes over" wait_for $long taken_over
  is "upgrade: the image" "$(pod image)" rto-agent:other
  check "upgrade: in force" in_force
  check "upgrade: the entry is there" lists 198.51.100.0/24

  do_step rollback
  before=$(pid)
  check "rollback: helm" helm rollback rto-agent --namespace $namespace
  check "rollback: the pod is replaced" rolled_out
  check "rollback: the next daemon takes over" wait_for $long taken_over
  is "rollback: the image" "$(pod image)" rto-agent:"$version"
  check "rollback: in force" in_force
  check "rollback: the entry is there" lists 198.51.100.0/24

  do_step "second agent"
  before=$(pid) uid=$(pod uid) restarts=$(pod count)
  check "second agent: on the node, it reports the other one" second_agent "another rto-agent"
  is "second agent: the first one keeps running" "$(pid)" "$before"
  is "second agent: in the same pod" "$(pod uid) $(pod count)" "$uid $restarts"
  check "second agent: in force" in_force
}
observe look_at_rto_and_step steps
without=$(grep -cvE "^($of_policy) " $looks)
is "prober: connections without the policy during the steps, of $(wc -l <$looks)" "$without" 0
((without == 0)) || grep -vE "^($of_policy) " $looks | sort | uniq -c
for one in ConfigMap "bad configuration" SIGKILL upgrade rollback "second agent"; do
  check "prober: it observed connections during: $one ($(grep -c " $one\$" $looks))" grep -q " $one\$" $looks
done

# As NOTES.txt recommends.
before_s=$(reloaded_at)
check "removal: helm sets onExit=detach" release --reuse-values --set onExit=detach
check "removal: status in the pod shows the reload" wait_for 300 reloaded_since "${before_s:-99999999999}"
check "removal: in force until then" in_force
check "removal: helm uninstalls" helm uninstall rto-agent --namespace $namespace
check "removal: the pod ends" wait_for $long no_pod
check "removal: nothing is pinned" nothing_left
check "removal: the policy is no longer in force" out_of_force
check "removal: no objects of the release are left in Kubernetes" silent kube get --ignore-not-found --output name \
  --selector $of_release daemonsets,controllerrevisions,jobs,pods,configmaps,secrets
check "removal: its directories can be removed" rm -r /run/rto-agent /var/lib/rto-agent

conclude
