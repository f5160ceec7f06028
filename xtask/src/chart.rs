//! `cargo xtask chart`: renders the Helm chart with each file of `charts/rto-agent/ci`, and validates the result and the
//! dashboard.
//!
//! The first line of a values file states the expected result: `# renders: KIND...`, or `# refused: TEXT` below
//! `ci/refused`.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::{
    dist::{Release, VERSION},
    process::{have, output, run as run_command},
    root, setup, test, tools,
};

const CHART: &str = "charts/rto-agent";
const RULES: [&str; 2] = [
    "config/prometheus/alerts.yml",
    "config/prometheus/recording.yml",
];
/// The oldest version that the chart supports (`kubeVersion` in Chart.yaml), and the newest with published schemas.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];
/// The API of prometheus-operator, whose kinds are not in Kubernetes' schemas.
const OPERATOR: &str = "monitoring.coreos.com/v1";
const VALIDATE: &str = "kubernetes-validate==1.37.0";
/// Grafana's schema of dashboards, as of 10.1.
const GRAFANA: &str = "grafana-foundation-sdk==1769699998!10.1.0";
const DASHBOARD: &str = "config/grafana/rto-agent.json";
/// Converts YAML documents to a JSON list.
const TO_JSON: &str = "import json, sys, yaml; json.dump([d for d in yaml.safe_load_all(open(sys.argv[1])) if d], sys.stdout)";

pub(crate) fn run() -> anyhow::Result<()> {
    let chart = Chart::new()?;
    run_command(chart.helm("lint", CHART).arg("--strict"))?;
    let kept = chart.values("ci")?;
    for (values, expected) in &kept {
        let kinds = expected.strip_prefix("renders: ").context("renders: ...")?;
        chart
            .check(values, kinds)
            .with_context(|| values.display().to_string())?;
    }
    let agent = root().join("target/debug/rto-agent");
    let check = ["check", "--fleet"];
    run_command(Command::new(agent).args(check).arg(&chart.fleet))?;
    let refused = chart.values("ci/refused")?;
    for (values, expected) in &refused {
        let text = expected.strip_prefix("refused: ").context("refused: ...")?;
        let output = chart.template(CHART, values)?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && message.contains(text),
            "{}: not refused by {text:?}: {message}",
            values.display()
        );
    }
    chart.restarts()?;
    chart.packages()?;
    dashboard()?;
    println!(
        "{} renderings valid for Kubernetes {}; {} values refused",
        kept.len(),
        KUBERNETES.join(" and "),
        refused.len()
    );
    Ok(())
}

struct Chart {
    helm: PathBuf,
    python: PathBuf,
    /// The rendered configurations.
    fleet: PathBuf,
    dir: tempfile::TempDir,
}

impl Chart {
    fn new() -> anyhow::Result<Self> {
        if !have("promtool") {
            setup::run()?;
        }
        let python = tools::python("kubernetes", &[VALIDATE], "schemas of Kubernetes")?.join("bin");
        let helm = tools::helm()?.join("helm");
        test::build_programs()?;
        let dir = tempfile::tempdir()?;
        let fleet = dir.path().join("fleet");
        fs::create_dir(&fleet)?;
        Ok(Self {
            helm,
            python,
            fleet,
            dir,
        })
    }

    fn helm(&self, verb: &str, chart: impl AsRef<OsStr>) -> Command {
        let mut helm = Command::new(&self.helm);
        helm.arg(verb).arg(chart).current_dir(root());
        helm
    }

    /// The values files in this directory of the chart, each with its first line.
    fn values(&self, dir: &str) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(root().join(CHART).join(dir))? {
            let path = entry?.path();
            if path.is_file() {
                let text = fs::read_to_string(&path)?;
                let first = text.lines().next().unwrap_or_default();
                files.push((path, first.trim_start_matches("# ").to_owned()));
            }
        }
        ensure!(!files.is_empty(), "{dir} has no values");
        files.sort();
        Ok(files)
    }

    fn template(&self, chart: impl AsRef<OsStr>, values: &Path) -> anyhow::Result<Output> {
        let mut helm = self.helm("template", chart);
        helm.arg("--values").arg(values);
        Ok(helm.args(["--namespace", "kube-system"]).output()?)
    }

    /// Renders a chart with these values, into a file and as JSON.
    fn rendered(
        &self,
        chart: impl AsRef<OsStr>,
        values: &Path,
    ) -> anyhow::Result<(PathBuf, Vec<Value>)> {
        let output = self.template(chart, values)?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        }
        let file = self.dir.path().join("rendered.yaml");
        fs::write(&file, &output.stdout)?;
        Ok((file.clone(), self.json(&file)?))
    }

    fn json(&self, yaml: &Path) -> anyhow::Result<Vec<Value>> {
        let mut python = Command::new(self.python.join("python"));
        let text = output(python.args(["-c", TO_JSON]).arg(yaml))?;
        Ok(serde_json::from_str(&text)?)
    }

    fn check(&self, values: &Path, kinds: &str) -> anyhow::Result<()> {
        let (file, resources) = self.rendered(CHART, values)?;
        let rendered: Vec<_> = resources.iter().map(|r| text(&r["kind"])).collect();
        ensure!(rendered.join(" ") == kinds, "renders {rendered:?}");
        for version in KUBERNETES {
            let message = output(
                Command::new(self.python.join("kubernetes-validate"))
                    .args(["--strict", "--no-warn", "-k", version])
                    .arg(&file),
            )?;
            let own = resources.iter().filter(|r| r["apiVersion"] != OPERATOR);
            let (passed, own) = (
                message.matches(" passed for resource ").count(),
                own.count(),
            );
            ensure!(
                passed == own,
                "{passed} of {own} valid for {version}: {message}"
            );
        }
        // The configuration, as of one host of a fleet.
        let name = values.with_extension("toml");
        let config = self.fleet.join(name.file_name().context("a name")?);
        let map = find(&resources, "ConfigMap")?;
        fs::write(config, text(&map["data"]["config.toml"]))?;
        check_pod(find(&resources, "DaemonSet")?)?;
        match find(&resources, "PrometheusRule") {
            Ok(rule) => self.check_rules(values, rule),
            Err(_) => Ok(()),
        }
    }

    /// The rules are the same as in config/prometheus, and promtool accepts them.
    fn check_rules(&self, values: &Path, rule: &Value) -> anyhow::Result<()> {
        let is_recorded = fs::read_to_string(values)?.contains("recording: true");
        let mut groups = Vec::new();
        for file in &RULES[..1 + usize::from(is_recorded)] {
            for mut document in self.json(&root().join(file))? {
                groups.append(document["groups"].as_array_mut().context(*file)?);
            }
        }
        ensure!(rule["spec"]["groups"] == Value::from(groups), "other rules");
        // JSON is valid YAML.
        let rules = self.dir.path().join("rules.yml");
        fs::write(&rules, rule["spec"].to_string())?;
        let check = ["check", "rules"];
        output(Command::new("promtool").args(check).arg(&rules)).map(drop)
    }

    /// A change of policies is reloaded in place; a change of a setting that is read only at the start restarts the
    /// pods.
    fn restarts(&self) -> anyhow::Result<()> {
        let changed = self.dir.path().join("changed.yaml");
        let template = |values: &str| -> anyhow::Result<(Value, Value)> {
            fs::write(&changed, values)?;
            let (_, resources) = self.rendered(CHART, &changed)?;
            let config = find(&resources, "ConfigMap")?["data"].clone();
            let pod = find(&resources, "DaemonSet")?["spec"]["template"].clone();
            Ok((config, pod))
        };
        let before = template("{}")?;
        for values in [
            "policies: {near: {cidrs: [192.0.2.0/24], initial_rto: 300ms}}",
            "onExit: detach",
            "attach: false",
            "agent: {max_entries: 65536}",
        ] {
            let after = template(values)?;
            ensure!(after.0 != before.0, "{values} changes nothing");
            ensure!(after.1 == before.1, "{values} restarts the pods");
        }
        for values in ["agent: {sampling: 1}", "metrics: {port: 9465}"] {
            ensure!(template(values)?.1 != before.1, "{values} restarts nothing");
        }
        Ok(())
    }

    /// A package, made by helm or for a release, contains the rules instead of links to them, and renders the same.
    fn packages(&self) -> anyhow::Result<()> {
        let dir = self.dir.path().join("package");
        output(self.helm("package", CHART).arg("--destination").arg(&dir))?;
        let of_helm = fs::read_dir(&dir)?.next().context("no package")??.path();
        let release = Release::of(root())?;
        let released = release.chart(self.dir.path())?;
        let values = root().join(CHART).join("ci/monitoring-values.yaml");
        let (_, of_tree) = self.rendered(CHART, &values)?;
        let version =
            &find(&of_tree, "DaemonSet")?["metadata"]["labels"]["app.kubernetes.io/version"];
        ensure!(
            of_helm.ends_with(format!("rto-agent-{VERSION}.tgz")) && text(version) == VERSION,
            "Chart.yaml has another version than the workspace: {VERSION}"
        );
        for (package, version) in [(of_helm, VERSION.to_owned()), (released, release.tag())] {
            let (_, of_package) = self.rendered(&package, &values)?;
            let expected = Value::from(of_tree.clone()).to_string();
            let expected: Vec<Value> = serde_json::from_str(&expected.replace(VERSION, &version))?;
            let name = package.display();
            ensure!(of_package == expected, "{name} renders otherwise");
        }
        Ok(())
    }
}

fn dashboard() -> anyhow::Result<()> {
    let python = tools::python("grafana", &[GRAFANA], "Grafana's schema")?.join("bin/python");
    let mut check = Command::new(python);
    check.args(["-c", include_str!("dashboard.py"), DASHBOARD]);
    run_command(check.current_dir(root()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn find<'a>(resources: &'a [Value], kind: &str) -> anyhow::Result<&'a Value> {
    with(resources, "kind", kind)
}

/// The value with this field.
fn with<'a>(values: &'a [Value], field: &str, is: &str) -> anyhow::Result<&'a Value> {
    let mut found = values.iter().filter(|value| value[field] == is);
    found.next().with_context(|| format!("no {is}"))
}

/// Checks that the pod has only the privileges that docs/reference/security.md gives reasons for, with any values.
fn check_pod(daemon_set: &Value) -> anyhow::Result<()> {
    let pod = &daemon_set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let all = ["BPF", "PERFMON", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"];
    let (capabilities, app_armor) = if pod["hostPID"] == true {
        (&all[..], "Unconfined")
    } else {
        (&all[..3], "RuntimeDefault")
    };
    let mut security = container["securityContext"].clone();
    security
        .as_object_mut()
        .context("a security context")?
        .remove("seLinuxOptions");
    let expected = json!({
        "runAsUser": 0,
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"], "add": capabilities},
        "seccompProfile": {"type": "RuntimeDefault"},
        "appArmorProfile": {"type": app_armor},
    });
    ensure!(security == expected, "{security} is not {expected}");
    ensure!(pod["automountServiceAccountToken"] == false, "a token");
    let mounts = container["volumeMounts"].as_array().context("mounts")?;
    for path in ["/host/cgroup", "/host/security"] {
        let mount = with(mounts, "mountPath", path)?;
        ensure!(mount["readOnly"] == true, "{mount}");
        let volumes = pod["volumes"].as_array().context("volumes")?;
        let volume = with(volumes, "name", text(&mount["name"]))?;
        let source = text(&volume["hostPath"]["path"]);
        ensure!(source.starts_with("/sys/"), "{path} is {source}");
    }
    ensure!(
        mounts.iter().all(|mount| mount["subPath"].is_null()),
        "a subPath is never updated"
    );
    Ok(())
}
