//! `charts/rto-agent/values.schema.json`: its definitions of policies are generated from the
//! settings, and its keys of `[agent]` are checked against the parser's. `UPDATE=1 cargo test -p
//! rto-agent-core --lib config::chart` rewrites it.

use std::{fs, path::Path};

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::AGENT_KEYS;
use crate::policy::{Cidr, Settings};

/// Definitions that are only in the chart.
const OWN: [&str; 2] = ["path", "strings"];

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
    definitions.insert("policy".to_owned(), policy);
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
