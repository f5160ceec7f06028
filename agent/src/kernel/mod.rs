//! What this kernel is: HZ, cgroup2 mount, features, other programs.
