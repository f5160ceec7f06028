//! `docs/api.schema.json`, generated from the types: `UPDATE=1 cargo test -p rto-agent-core schema` rewrites it.

use std::{borrow::Cow, fs, path::Path};

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{discover, events, stats, tune, types};
use crate::{
    policy::{Cidr, PolicyName, Share},
    wire::kernel::Verdict,
};

macro_rules! text {
    ($type:ident, inline $inline:literal, $schema:tt) => {
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                $inline
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                schemars::json_schema!($schema)
            }
        }
    };
}

text!(Cidr, inline false, {
    "type": "string",
    "description": "An IPv4 or IPv6 prefix without host bits.",
    "examples": ["10.1.2.0/24", "fd00:1::/64"],
});
text!(PolicyName, inline true, {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
});
text!(Share, inline true, { "type": "string", "pattern": "^[0-9]+(\\.[0-9]{1,6})?%$" });

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().into()
}

fn document() -> Value {
    let mut all = SchemaSettings::draft2020_12().into_generator();
    let g = &mut all;
    let mut routes = Map::new();
    let mut route = |name: &str, request: Option<Value>, answer: Value| {
        let mut route = Map::new();
        route.extend(request.map(|request| ("request".to_owned(), request)));
        route.insert("answer".to_owned(), answer);
        routes.insert(name.to_owned(), route.into());
    };
    route("GET /v1/status", None, of::<types::StatusAnswer>(g));
    route("GET /v1/stats", None, of::<stats::StatsAnswer>(g));
    route("GET /v1/events", None, of::<events::StreamItem>(g));
    route("GET /v1/entries", None, of::<types::ListAnswer>(g));
    route("GET /v1/lookup", None, of::<types::LookupAnswer>(g));
    route("GET /v1/discover", None, of::<discover::DiscoverAnswer>(g));
    route("GET /v1/apply", None, of::<types::WalkView>(g));
    let change = of::<types::ChangeAnswer>(g);
    route(
        "POST /v1/entries",
        Some(of::<types::AddRequest>(g)),
        change.clone(),
    );
    route(
        "POST /v1/entries/remove",
        Some(of::<types::RemoveRequest>(g)),
        change.clone(),
    );
    route(
        "POST /v1/reload",
        Some(of::<types::ReloadRequest>(g)),
        change,
    );
    let tuned = of::<tune::TuneAnswer>(g);
    route("GET /v1/tune", None, tuned.clone());
    for action in tune::TuneAction::ALL {
        route(
            &format!("POST /v1/tune/{}", action.name()),
            Some(of::<tune::TuneRequest>(g)),
            tuned.clone(),
        );
    }
    route("POST /v1/verify", None, of::<types::VerifyAnswer>(g));
    route(
        "POST /v1/detach",
        Some(of::<types::DetachRequest>(g)),
        of::<types::DetachAnswer>(g),
    );
    route(
        "POST /v1/apply",
        Some(of::<types::ApplyRequest>(g)),
        of::<types::WalkView>(g),
    );
    route(
        "POST /v1/probe",
        Some(of::<Verdict>(g)),
        json!({ "type": "null" }),
    );
    let error = of::<types::ErrorAnswer>(g);
    let definitions = all.take_definitions(true);
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rto-agent: HTTP and JSON on the control socket",
        "description": "Generated from the types; a test keeps it current. The guide is docs/reference/api.md.",
        "routes": routes,
        "error": error,
        "$defs": definitions,
    })
}

#[test]
fn api_schema_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.schema.json");
    let text = serde_json::to_string_pretty(&document()).unwrap() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "docs/api.schema.json is not current: UPDATE=1 cargo test -p rto-agent-core schema"
    );
}
