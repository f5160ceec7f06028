//! Examples at the end of each verb's `--help`.

pub(super) const RUN: &str = "\
Examples:
  rto-agent run
  rto-agent run --config ./config.toml --log-format json";

pub(super) const CHECK: &str = "\
Examples:
  rto-agent check
  rto-agent check --config ./config.toml
  rto-agent check --fleet ./hosts
  rto-agent check --kernel 5.14 --hz 1000";

pub(super) const ADD: &str = "\
Examples:
  rto-agent add 10.1.2.0/24 --policy same-zone
  rto-agent add 10.1.2.0/24 fd00:1::/64 --initial-rto 100ms --ttl 10m
  rto-agent add 192.0.2.7 --rto-min 20ms --thin-linear --save";

pub(super) const REMOVE: &str = "\
Examples:
  rto-agent remove 10.1.2.0/24
  rto-agent remove --policy same-zone
  rto-agent remove 10.1.2.0/24 --undo      # an entry of the files
  rto-agent remove 10.1.2.0/24 --save      # from policies.d/50-cli.toml";

pub(super) const LIST: &str = "\
Examples:
  rto-agent list
  rto-agent list --policy same-zone --runtime
  rto-agent list --json | jq '.entries[].cidr'";

pub(super) const LOOKUP: &str = "\
Examples:
  rto-agent lookup 10.1.2.3
  rto-agent lookup fd00:1::7 192.0.2.1:443";

pub(super) const STATS: &str = "\
Examples:
  rto-agent stats
  rto-agent stats --policy same-zone       # with histograms
  rto-agent stats --watch --interval 10s";

pub(super) const WATCH: &str = "\
Examples:
  rto-agent watch
  rto-agent watch --policy same-zone --cidr 10.1.2.0/24";

pub(super) const TOP: &str = "\
Examples:
  rto-agent top
  rto-agent top --interval 5s";

pub(super) const TUNE: &str = "\
Examples:
  rto-agent tune
  rto-agent tune --policy same-region --json | jq '.policies[].timers[].next'
  rto-agent tune freeze same-region        # until resume";

pub(super) const STATUS: &str = "\
Examples:
  rto-agent status
  rto-agent status --json | jq .problems";

pub(super) const EXPLAIN: &str = "\
Examples:
  rto-agent explain 4711
  rto-agent explain :5432
  rto-agent explain 10.1.2.3:443 --json | jq '.connections[].rto_us'";

pub(super) const RELOAD: &str = "\
Examples:
  rto-agent reload
  rto-agent reload --dry-run
  rto-agent reload --allow-empty           # if no policy is left";

pub(super) const VERIFY: &str = "\
Examples:
  rto-agent verify
  rto-agent verify --json | jq .differences";

pub(super) const ADVISE: &str = "\
Examples:
  rto-agent advise 10.1.2.0/24
  rto-agent advise --policy same-zone --spurious 1%
  rto-agent advise --policy same-zone --peer-delack 5ms
  rto-agent advise --policy same-zone --prometheus http://localhost:9090";

pub(super) const DISCOVER: &str = "\
Examples:
  rto-agent discover
  rto-agent discover --limit 5
  rto-agent discover --json | jq -r .snippet";

pub(super) const APPLY: &str = "\
Examples:
  rto-agent apply
  rto-agent apply --new-only";

pub(super) const DETACH: &str = "\
Examples:
  rto-agent detach
  rto-agent detach --restore";

pub(super) const ATTACH: &str = "\
Examples:
  rto-agent attach";

pub(super) const DOCTOR: &str = "\
Examples:
  rto-agent doctor
  rto-agent doctor --cgroup /sys/fs/cgroup/system.slice
  rto-agent doctor --self-test --json > report.json";

pub(super) const COMPLETIONS: &str = "\
Examples:
  rto-agent completions bash > /etc/bash_completion.d/rto-agent
  rto-agent completions zsh > /usr/local/share/zsh/site-functions/_rto-agent
  rto-agent completions fish > /etc/fish/completions/rto-agent.fish";

pub(super) const MAN: &str = "\
Examples:
  rto-agent man | man -l -
  rto-agent man add | man -l -
  rto-agent man --dir /usr/local/share/man/man1";
