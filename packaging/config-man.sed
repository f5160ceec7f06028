# Turns docs/operate/configuration.md into the source of a manual page, whose tables would not fit a terminal: each row
# of a table becomes an item of a list.
1s/.*/# NAME\
\
rto-agent-config - the configuration file of rto-agent\
\
# DESCRIPTION/
s/^##* \(.*\)/# \1/
/^| --- \|^|---/d
/^| key |/d
/^| refused | because |/d
s/^| \(`[^|]*`\) | \([^|]*\) | \([^|]*\) | \([^|]*\) |.*/- **\1**: \2 (default: \3). \4/
s/^| \([^|]*\) | \([^|]*\) |$/- \1: \2/
