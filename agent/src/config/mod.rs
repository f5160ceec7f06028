//! TOML text -> validated [`PolicySet`](crate::policy::PolicySet), with errors that point at the line.
