//! `/v1/tune`.

use axum::{
    Extension, Json,
    extract::{
        Query, State,
        rejection::{JsonRejection, QueryRejection},
    },
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use serde::Deserialize;

use super::server::{answer, error, respond};
use crate::{
    engine::{Handle, Message},
    policy::PolicyName,
    wire::{
        tune::{TuneAction, TuneRequest},
        types::Caller,
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TuneQuery {
    #[serde(default)]
    policy: Option<String>,
}

pub(super) async fn show(
    State(engine): State<Handle>,
    query: Result<Query<TuneQuery>, QueryRejection>,
) -> Response {
    let policy = match query {
        Ok(Query(query)) => query.policy,
        Err(e) => return answer(e.status(), &e.body_text()),
    };
    let tuned = match engine.started().await {
        Ok(snapshot) => snapshot.tune(),
        Err(e) => return error(&e),
    };
    match policy.as_deref().map(str::parse::<PolicyName>) {
        None => Json(&*tuned).into_response(),
        Some(Ok(policy)) => {
            let only = tuned.only(&policy);
            match only.policies.is_empty() {
                false => Json(only).into_response(),
                true => answer(
                    StatusCode::UNPROCESSABLE_ENTITY,
                    &format!("policy {policy} learns no value and has no guard"),
                ),
            }
        }
        Some(Err(e)) => answer(StatusCode::BAD_REQUEST, &e.to_string()),
    }
}

type TuneBody = Result<Json<TuneRequest>, JsonRejection>;

/// `POST /v1/tune/freeze`, `resume` and `reset`.
pub(super) fn on(action: TuneAction) -> MethodRouter<Handle> {
    let tune =
        async move |engine: State<Handle>, caller: Extension<Caller>, body: TuneBody| match body {
            Ok(Json(TuneRequest { policy })) => {
                let asked = engine.call(|reply| Message::Tune(action, policy, caller.0, reply));
                respond(asked.await)
            }
            Err(e) => answer(e.status(), &e.body_text()),
        };
    post(tune)
}
