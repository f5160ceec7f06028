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
/// Words that some settings accept besides durations.
const WORDS: [&str; 3] = ["auto", "keep", "off"];
/// The parser's units. It also reads months and years, which are longer than any setting may be.
const UNITS: [&str; 30] = [
    "ns", "nsec", "nanos", "us", "\u{b5}s", "usec", "ms", "msec", "millis", "s", "sec", "secs",
    "second", "seconds", "m", "min", "mins", "minute", "minutes", "h", "hr", "hrs", "hour",
    "hours", "d", "day", "days", "w", "week", "weeks",
];
/// The parser's limit of shares of connections. An error about a share of 0 is left to it.
const HOLDOUT: &str = r"^(95(\.0{1,6})?|(9[0-4]|[0-8]?[0-9])(\.[0-9]{1,6})?)%$";
/// A prefix. Host bits of IPv4 are refused in whole octets.
const CIDR: &str = r"^(\d+(\.0){3}/[0-8]|\d+\.\d+(\.0){2}/(9|1[0-6])|(\d+\.){3}0/(1[7-9]|2[0-4])|(\d+\.){3}\d+(/(2[5-9]|3[0-2]))?|[\da-fA-F:.]*:[\da-fA-F:.]*(/\d+)?)$";

/// The parser's error about this policy.
fn refusal(policy: &str) -> String {
    let text = format!("[policy.p]\ncidrs = ['192.0.2.0/24']\n{policy}\n");
    let read = Config::from_text(Path::new("config.toml"), text, &HOST);
    read.err().map(|e| e.to_string()).unwrap_or_default()
}

/// The pattern of a number with a unit.
fn number() -> String {
    format!("( *[0-9.]+ *({}))+ *", UNITS.join("|"))
}

/// The pattern of a duration, and of the words that the parser accepts for this setting.
fn duration(setting: &impl Fn(&str) -> String) -> String {
    let is_read = |value: &&str| !refusal(&setting(value)).contains("invalid duration");
    let mut choices: Vec<_> = WORDS.into_iter().filter(is_read).collect();
    if is_read(&"auto,x=1") {
        choices.push("auto(,[a-z_]+=[^,]+)+");
    }
    for unit in UNITS {
        assert!(is_read(&&*format!("1{unit}")), "{unit}");
    }
    let number = number();
    choices.push(&number);
    format!("^({})$", choices.join("|"))
}

/// Adds to the properties what the parser accepts for each: durations, words, `auto = true`.
fn restrict(object: &mut Value, setting: impl Fn(&str, &str) -> String) {
    for (name, property) in object["properties"].as_object_mut().unwrap() {
        let text = |value: &str| setting(name, &format!("'{value}'"));
        if refusal(&text("100")).contains("a unit is missing") {
            property["pattern"] = duration(&text).into();
        } else if let Some(words) = words(&refusal(&text("-")))
            && property["type"] == json!(["string", "null"])
        {
            property["enum"] = words.into_iter().chain([Value::Null]).collect();
        } else if name == "auto" {
            *property = json!({ "const": true });
        }
    }
}

/// The words that the parser's error lists: `"a", "b" nor "c"`.
fn words(refusal: &str) -> Option<Vec<Value>> {
    let (_, listed) = refusal.split_once(" is neither ")?;
    let listed = listed.lines().next()?.split('"');
    Some(listed.skip(1).step_by(2).map(Value::from).collect())
}

/// The integers that the parser accepts.
fn range(name: &str) -> [u8; 2] {
    let set = |n: &u8| refusal(&format!("thin_linear = true\n{name} = {n}")).is_empty();
    let accepted: Vec<_> = (0..=u8::MAX).filter(set).collect();
    [accepted[0], accepted[accepted.len() - 1]]
}

/// The schema of a policy that sets something.
fn sets_something() -> Value {
    let refused = refusal("force = true");
    let (_, settings) = refused.split_once("at least one of ").unwrap();
    let settings = settings.lines().next().unwrap_or_default().split(", ");
    let is_set = |name: &str| json!({ "required": [name], "properties": { name: { "not": { "type": "null" } } } });
    json!({ "anyOf": settings.map(is_set).collect::<Value>() })
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
    restrict(&mut policy, |name, value| format!("{name} = {value}"));
    policy["properties"]["holdout"]["pattern"] = HOLDOUT.into();
    let ints = &mut policy["properties"]["linear_retries"];
    [ints["minimum"], ints["maximum"]] = range("linear_retries").map(Value::from);
    definitions.insert("policy".to_owned(), policy);
    definitions["Cidr"]["pattern"] = CIDR.into();
    let choices = &mut definitions["WordOrNumber"]["anyOf"];
    choices[0]["enum"] = words(&refusal("syn_retries = '-'")).into();
    [choices[1]["minimum"], choices[1]["maximum"]] = range("syn_retries").map(Value::from);
    restrict(&mut definitions["AutoInitialRto"], |name, value| {
        format!("initial_rto = {{ auto = true, {name} = {value} }}")
    });
    definitions
}

#[test]
fn chart_values_are_those_of_parser() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/rto-agent/values.schema.json");
    let mut schema: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let agent = &mut schema["properties"]["agent"]["properties"];
    for key in agent.as_object().unwrap().keys() {
        assert!(AGENT_KEYS.iter().any(|known| known.name == key), "{key}");
    }
    agent["rtt_sampling"]["pattern"] = format!("^(off|end|{})$", number()).into();
    let defs = schema["$defs"].as_object_mut().unwrap();
    defs.retain(|name, _| OWN.contains(&&**name));
    defs.append(&mut definitions());
    // Settings may be in the `[defaults]` of this text, in any of TOML's forms.
    let has_defaults =
        json!({ "properties": { "config": { "pattern": r"(^|\n)\s*\[?\s*defaults\b" } } });
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
