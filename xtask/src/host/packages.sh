# Checks of the packages, after lib.sh: /srv has the packages of this version, and /srv/older the packages of the commit
# before it, with a different configuration file.

deb() { DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold "$@"; }
# On Debian, the rpm database is empty.
rpm() { command rpm --nodeps --nosignature "$@"; }
# The file system is in memory and does not report its size.
install_rpm() { rpm --ignoresize "$@"; }
# Installs a version over another one, or for the first time.
new_deb() { deb -i /srv/rto-agent_*.deb; }
old_deb() { deb -i /srv/older/*.deb; }
new_rpm() { install_rpm -U /srv/rto-agent-*.rpm; }
old_rpm() { install_rpm -U --oldpackage /srv/older/*.rpm; }
version() { dpkg-deb --field "$1" Version; }
state() { echo "$(systemctl is-enabled $unit 2>/dev/null) $(systemctl is-active $unit)"; }
has() { grep -qF "$1" $config; }
restarted() { [[ $(pid) != 0 && $(pid) != "$before" ]]; }
keep() { sed -i 's/^\[agent\]$/&\non_exit = "keep"/' $config; }
# All files of the package in the file system. Of systemd's directories, the ones that belong to the unit are included.
left() { find / -xdev \( -path /srv -o -path /proc -o -path /sys \) -prune -o -path '*rto-agent*' -print; }
verbs() { rto-agent --help | sed -n '/^Commands:/,/^Options:/s/^  \([a-z]\+\) .*/\1/p'; }
pages() {
  local verb count=0
  for verb in $(verbs); do
    [[ $verb == help ]] && continue
    zcat "/usr/share/man/man1/rto-agent-$verb.1.gz" | grep -q '^\.SH NAME' || { echo "$verb has none"; return 1; }
    count=$((count + 1))
  done
  ((count >= 15)) || { echo "only $count verbs"; return 1; }
}

# versions NAME OLD NEW: installs one version over the other with these commands, while the service runs.
versions() {
  local name=$1 old=$2 new=$3 before
  # An unedited configuration file is replaced.
  before=$(pid)
  check "$name: a downgrade leaves no moment without the policy" while_in_force "$old"
  check "$name: another daemon runs" restarted
  check "$name: an unchanged configuration file becomes the older version's" has "older version"
  before=$(pid)
  check "$name: an upgrade leaves no moment without the policy" while_in_force "$new"
  check "$name: another daemon runs" restarted
  refuse "$name: an unchanged configuration file becomes the newer version's" has "older version"
  echo "# edited here" >>$config
  check "$name: a downgrade with an edited configuration file" "$old"
  check "$name: an upgrade with an edited configuration file" "$new"
  check "$name: an edited configuration file survives both" has "edited here"
  is "$name: the service is still enabled and active" "$(state)" "enabled active"

  # A service that the administrator has disabled stays disabled.
  systemctl -q disable --now $unit
  check "$name: a downgrade of a disabled service" "$old"
  is "$name: stays disabled" "$(state)" "disabled inactive"
  check "$name: an upgrade of a disabled service" "$new"
  is "$name: stays disabled" "$(state)" "disabled inactive"
  check "$name: the policy is not in force" out_of_force
  systemctl -q enable --now $unit
}
# removal NAME COMMAND...: removes the package, although the daemon is set to keep the policies when it stops.
removal() {
  local name=$1
  shift
  keep
  systemctl restart $unit
  check "$name: in force with on_exit = \"keep\"" in_force
  check "$name: is removed" "$@"
  check "$name: removed, nothing is pinned" test ! -e $pins
  check "$name: removed, the policy is no longer in force" out_of_force
  is "$name: removed, no daemon runs" "$(pidof rto-agent)" ""
}

# deb: the first installation.
is "deb: no files before the installation" "$(left)" ""
check "deb: installs" new_deb
is "deb: the service is enabled and active" "$(state)" "enabled active"
check "deb: the policy of the configuration file is in force" in_force
check "deb: the directory for more policies" test -d /etc/rto-agent/policies.d
check "deb: the group of the control socket" getent group rto-agent
check "deb: a manual page for each verb" pages
for file in bash-completion/completions/rto-agent zsh/vendor-completions/_rto-agent \
  fish/vendor_completions.d/rto-agent.fish; do
  check "deb: completions: $file" grep -q rto-agent /usr/share/$file
done
check "deb: completions that bash reads" bash -n /usr/share/bash-completion/completions/rto-agent
check "deb: the manual page of the configuration" zgrep -q initial_rto /usr/share/man/man5/rto-agent-config.5.gz
for file in alerts.yml recording.yml rto-agent.json open-sockets.conf; do
  check "deb: example: $file" test -s /usr/share/doc/rto-agent/examples/$file
done
check "deb: files as packed" silent dpkg --verify rto-agent
check "deb: the version is higher than that of the commit before" \
  dpkg --compare-versions "$(version /srv/rto-agent_*.deb)" gt "$(version /srv/older/*.deb)"

# deb: the lab; the machine lacks what it emulates links with.
check "deb: installs the lab" deb --force-depends -i /srv/rto-lab_*.deb
check "deb: the lab runs" rto-lab --version
check "deb: the lab's files as packed" silent dpkg --verify rto-lab
check "deb: removes the lab" deb -P rto-lab

versions deb old_deb new_deb

removal deb deb -r rto-agent
check "deb: removed, the configuration is kept" has "edited here"
check "deb: removed, it can be installed again" new_deb
is "deb: the service is enabled and active again" "$(state)" "enabled active"
check "deb: the kept configuration is used" has "edited here"
check "deb: in force" in_force

# Purge, including files that the daemon and its user wrote.
check "deb: an entry is saved" rto-agent add 203.0.113.0/24 --policy same-region --save
check "deb: is purged" deb -P rto-agent
is "deb: purged, nothing is left" "$(left)" ""
refuse "deb: purged, the group is gone" getent group rto-agent
check "deb: purged, nothing is pinned" test ! -e $pins
check "deb: purged, the policy is no longer in force" out_of_force
is "deb: nothing else of the system has failed" \
  "$(systemctl list-units --failed --plain --no-legend | tr '\n' ' ')" ""

# rpm: its scripts, run by Debian's rpm. The presets of this system enable the installed service; nothing is started.
check "rpm: installs" install_rpm -i /srv/rto-agent-*.rpm
is "rpm: the service is enabled, and not started" "$(state)" "enabled inactive"
check "rpm: the group of the control socket" getent group rto-agent
check "rpm: a manual page for each verb" pages
check "rpm: completions for zsh" test -s /usr/share/zsh/site-functions/_rto-agent
check "rpm: files as packed" silent rpm -V rto-agent
check "rpm: starts" systemctl start $unit
check "rpm: in force" in_force
versions rpm old_rpm new_rpm
removal rpm rpm -e rto-agent
check "rpm: removed, the edited configuration is kept as .rpmsave" grep -q "edited here" $config.rpmsave
is "rpm: removed, only the learnt values are left" \
  "$(left | grep -v -e '^/etc/rto-agent$' -e '\.rpmsave$' -e '\.rpmnew$' -e '^/var/lib/rto-agent' | tr '\n' ' ')" ""

conclude
