//! `cargo xtask ansible`: the tests of the Ansible role, on a copy of this machine's file system.

use crate::{
    process::{as_root, run as run_command},
    root, test, tools,
};

const ANSIBLE: &str = "ansible-core==2.19.14";
/// Checks the prepared answers of the tests against docs/api.schema.json.
const JSONSCHEMA: &str = "jsonschema==4.26.0";

pub(crate) fn run() -> anyhow::Result<()> {
    let ansible = tools::python("ansible", &[ANSIBLE, JSONSCHEMA], "the Ansible role")?;
    test::build_programs()?;
    run_command(
        as_root("unshare")
            .args(["--mount", "deploy/ansible/tests/run.sh"])
            .arg(ansible.join("bin/ansible-playbook"))
            .arg(root().join("target/debug/rto-agent"))
            .current_dir(root()),
    )
}
