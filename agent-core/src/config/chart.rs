//! `charts/rto-agent/values.schema.json`: its definitions of policies are generated from the
//! settings, and its keys of `[agent]` are checked against the parser's. `UPDATE=1 cargo test -p
//! rto-agent-core --lib config::chart` rewrites it.

use std::{fs, path::Path};

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::{AGENT_KEYS, Config};
use crate::{
    policy::{Cidr, Settings},
    testing::HOST,
};

/// Definitions that are only in the chart.
const OWN: [&str; 2] = ["path", "strings"];
/// A duration, or a word. Helm shows patterns to users, so they are short.
const DURATION: &str = "^([a-z]+|( *[0-9.]+ *[A-Za-z\u{b5}]+ *)+)$";
/// A prefix. Host bits of IPv4 are refused in whole octets.
const CIDR: &str = r"^(\d+(\.0){3}/[0-8]|\d+\.\d+(\.0){2}/(9|1[0-6])|(\d+\.){3}0/(1[7-9]|2[0-4])|(\d+\.){3}\d+(/(2[5-9]|3[0-2]))?|[\da-fA-F:.]*:[\da-fA-F:.]*(/\d+)?)$";

/// The parser's error about this policy.
fn refusal(policy: &str) -> String {
    let text = format!("[policy.p]\ncidrs = ['192.0.2.0/24']\n{policy}\n");
    let read = Config::from_text(Path::new("config.toml"), text, &HOST);
    read.err().map(|e| e.to_string()).unwrap_or_default()
}

/// Adds the pattern of a duration to the properties for which the parser misses a unit.
fn require_units(object: &mut Value, setting: impl Fn(&str) -> String) {
    for (name, property) in object["properties"].as_object_mut().unwrap() {
        if refusal(&setting(name)).contains("a unit is missing") {
            property["pattern"] = DURATION.into();
        }
    }
}

/// The schema of a policy that sets something.
fn sets_something() -> Value {
    let refused = refusal("force = true");
    let (_, settings) = refused.split_once("at least one of ").unwrap();
    let settings = settings.lines().next().unwrap_or_default().split(", ");
    json!({ "anyOf": settings.map(|name| json!({ "required": [name] })).collect::<Value>() })
}

/// The definition of a policy, and those it depends on.
fn definitions() -> Map<String, Value> {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let settings = generator.subschema_for::<Settings>();
    let cidr = generator.subschema_for::<Cidr>();
    let mut definitions = generator.take_definitions(true);
    let name = settings.as_value()["$ref"].as_str().unwrap();
    let name = name.strip_prefix("#/$defs/").unwrap();
    let mut policy = definitions.remove(name).unwrap();
    policy["properties"]["description"] = json!({ "type": "string", "maxLength": 200 });
    policy["properties"]["cidrs"] = json!({ "type": "array", "items": cidr });
    require_units(&mut policy, |name| format!("{name} = '100'"));
    definitions.insert("policy".to_owned(), policy);
    definitions["Cidr"]["pattern"] = CIDR.into();
    for (of, setting) in [("AutoInitialRto", "initial_rto"), ("AutoRtoMin", "rto_min")] {
        let table = |name: &str| format!("{setting} = {{ auto = true, {name} = '100' }}");
        require_units(&mut definitions[of], table);
    }
    definitions
}

#[test]
fn the_values_of_the_chart_are_those_of_the_parser() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/rto-agent/values.schema.json");
    let mut schema: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let agent = schema["properties"]["agent"]["properties"].as_object();
    for key in agent.unwrap().keys() {
        assert!(AGENT_KEYS.iter().any(|known| known.name == key), "{key}");
    }
    let defs = schema["$defs"].as_object_mut().unwrap();
    defs.retain(|name, _| OWN.contains(&&**name));
    defs.append(&mut definitions());
    // Settings may be in the `[defaults]` of this text.
    let has_defaults = json!({ "properties": { "config": { "pattern": r"\[\s*defaults" } } });
    let policies = json!({ "additionalProperties": sets_something() });
    schema["anyOf"] = json!([has_defaults, { "properties": { "policies": policies } }]);
    let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        text,
        "UPDATE=1 cargo test -p rto-agent-core --lib config::chart"
    );
}
