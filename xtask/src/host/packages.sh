# Checks of the packages, after lib.sh: /srv has those of this version, and in /srv/older those of an older one, whose
# configuration file differs.

deb() { DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold "$@"; }
# The package database is empty: this is a Debian. The file system is in memory and does not tell its size.
rpm() { command rpm --nodeps --ignoresize --nosignature "$@"; }
new_deb=(/srv/*.deb) old_deb=(/srv/older/*.deb)
new_rpm=(/srv/*.rpm) old_rpm=(/srv/older/*.rpm)
state() { echo "$(systemctl is-enabled $unit 2>/dev/null) $(systemctl is-active $unit)"; }
has() { grep -qF "$1" $config; }
# Whether each connection that was begun while a command ran had the policy.
while_in_force() {
  local looks=/run/looks watcher rto
  : >$looks
  (while :; do rto=$(rto 192.0.2.1); echo "$rto" >>$looks; done) &
  watcher=$!
  "$@"
  local status=$?
  kill $watcher
  wait $watcher 2>/dev/null
  [[ -s $looks ]] || { echo "nobody looked"; return 1; }
  local without
  without=$(grep -cvx 100 $looks)
  ((without == 0)) || { echo "$without of $(wc -l <$looks) looks without"; return 1; }
  return $status
}
restarted() { [[ $(pid) != 0 && $(pid) != "$before" ]]; }
keep() { sed -i 's/^\[agent\]$/&\non_exit = "keep"/' $config; }
# Everything of the package in the file system. Of systemd's directories those that go with the unit are its own.
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

# deb: the first installation.
is "deb: before it nothing is there" "$(left)" ""
check "deb: installs" deb -i "${new_deb[@]}"
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
is "deb: files as packed" "$(dpkg --verify rto-agent)" ""

# Other versions. The configuration file, as nobody has changed it, is replaced.
before=$(pid)
check "deb: a downgrade leaves no moment without the policy" while_in_force deb -i "${old_deb[@]}"
check "deb: another daemon runs" restarted
check "deb: an unchanged configuration file becomes the older version's" has "older version"
before=$(pid)
check "deb: an upgrade leaves no moment without the policy" while_in_force deb -i "${new_deb[@]}"
check "deb: another daemon runs" restarted
refuse "deb: an unchanged configuration file becomes the newer version's" has "older version"
echo "# edited here" >>$config
check "deb: a downgrade with an edited configuration file" deb -i "${old_deb[@]}"
check "deb: an upgrade with an edited configuration file" deb -i "${new_deb[@]}"
check "deb: an edited configuration file survives both" has "edited here"
is "deb: the service is still enabled and active" "$(state)" "enabled active"

# What the administrator switched off stays off.
systemctl -q disable --now $unit
check "deb: a downgrade of a disabled service" deb -i "${old_deb[@]}"
is "deb: stays off" "$(state)" "disabled inactive"
check "deb: an upgrade of a disabled service" deb -i "${new_deb[@]}"
is "deb: stays off" "$(state)" "disabled inactive"
check "deb: out of force" out_of_force
systemctl -q enable --now $unit

# Removal, although the policies are to be kept when the daemon stops.
keep
systemctl restart $unit
check "deb: in force with on_exit = \"keep\"" in_force
check "deb: is removed" deb -r rto-agent
check "deb: removed, nothing is pinned" test ! -e $pins
check "deb: removed, the policy is out of force" out_of_force
is "deb: removed, no daemon runs" "$(pidof rto-agent)" ""
check "deb: removed, the configuration is kept" has "edited here"
check "deb: removed, it can be installed again" deb -i "${new_deb[@]}"
is "deb: the service is enabled and active again" "$(state)" "enabled active"
check "deb: with the configuration that was kept" has "edited here"
check "deb: in force" in_force

# Purge, with what the daemon and its user wrote.
check "deb: an entry that is saved" rto-agent add 203.0.113.0/24 --policy same-region --save
check "deb: is purged" deb -P rto-agent
is "deb: purged, nothing is left" "$(left)" ""
refuse "deb: purged, the group is gone" getent group rto-agent
check "deb: purged, nothing is pinned" test ! -e $pins
check "deb: purged, the policy is out of force" out_of_force
is "deb: nothing else of the system has failed" \
  "$(systemctl list-units --failed --plain --no-legend | tr '\n' ' ')" ""

# rpm: its scripts, by the rpm of Debian. The presets of this system enable what is installed; nothing is started.
check "rpm: installs" rpm -i "${new_rpm[@]}"
is "rpm: the service is enabled, and not started" "$(state)" "enabled inactive"
check "rpm: the group of the control socket" getent group rto-agent
check "rpm: a manual page for each verb" pages
check "rpm: completions for zsh" test -s /usr/share/zsh/site-functions/_rto-agent
is "rpm: files as packed" "$(rpm -V rto-agent)" ""
check "rpm: starts" systemctl start $unit
check "rpm: in force" in_force
before=$(pid)
check "rpm: a downgrade leaves no moment without the policy" while_in_force rpm -U --oldpackage "${old_rpm[@]}"
check "rpm: another daemon runs" restarted
check "rpm: an unchanged configuration file becomes the older version's" has "older version"
before=$(pid)
check "rpm: an upgrade leaves no moment without the policy" while_in_force rpm -U "${new_rpm[@]}"
check "rpm: another daemon runs" restarted
refuse "rpm: an unchanged configuration file becomes the newer version's" has "older version"
echo "# edited here" >>$config
check "rpm: a downgrade with an edited configuration file" rpm -U --oldpackage "${old_rpm[@]}"
check "rpm: an upgrade with an edited configuration file" rpm -U "${new_rpm[@]}"
check "rpm: an edited configuration file survives both" has "edited here"
is "rpm: the service is still enabled and active" "$(state)" "enabled active"
systemctl -q disable --now $unit
check "rpm: a downgrade of a disabled service" rpm -U --oldpackage "${old_rpm[@]}"
check "rpm: an upgrade of a disabled service" rpm -U "${new_rpm[@]}"
is "rpm: stays off" "$(state)" "disabled inactive"
systemctl -q enable --now $unit
keep
systemctl restart $unit
check "rpm: in force with on_exit = \"keep\"" in_force
check "rpm: is removed" rpm -e rto-agent
check "rpm: removed, nothing is pinned" test ! -e $pins
check "rpm: removed, the policy is out of force" out_of_force
is "rpm: removed, no daemon runs" "$(pidof rto-agent)" ""
check "rpm: removed, the edited configuration is kept as .rpmsave" grep -q "edited here" $config.rpmsave
is "rpm: removed, nothing else is left but what was learnt" \
  "$(left | grep -v -e '^/etc/rto-agent$' -e '\.rpmsave$' -e '\.rpmnew$' -e '^/var/lib/rto-agent' | tr '\n' ' ')" ""

conclude
