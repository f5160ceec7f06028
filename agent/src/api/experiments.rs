//! `/v1/experiments`.

use axum::{
    Extension, Json,
    extract::{Path, State, rejection::JsonRejection},
    http::StatusCode,
    response::Response,
    routing::{MethodRouter, post},
};

use super::server::{answer, read, respond};
use crate::{
    engine::{Handle, Message, Reply},
    policy::PolicyName,
    wire::{
        experiments::{ExperimentAnswer, StartRequest},
        types::Caller,
    },
};

pub(super) async fn show(State(engine): State<Handle>) -> Response {
    let experiments = read(engine.snapshot(), |snapshot| Ok(snapshot.experiments()));
    respond(experiments.await)
}

pub(super) async fn start(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    Path(policy): Path<String>,
    body: Result<Json<StartRequest>, JsonRejection>,
) -> Response {
    let policy = match policy.parse::<PolicyName>() {
        Ok(policy) => policy,
        Err(e) => return answer(StatusCode::BAD_REQUEST, &e.to_string()),
    };
    match body {
        Ok(Json(request)) => {
            let request = Box::new(request);
            let asked =
                engine.call(|reply| Message::StartExperiment(policy, request, caller, reply));
            respond(asked.await)
        }
        Err(e) => answer(e.status(), &e.body_text()),
    }
}

/// `POST /v1/experiments/{policy}/stop` and `clear`.
pub(super) fn on(
    message: fn(PolicyName, Caller, Reply<ExperimentAnswer>) -> Message,
) -> MethodRouter<Handle> {
    let tell = async move |engine: State<Handle>,
                           caller: Extension<Caller>,
                           Path(policy): Path<String>| {
        match policy.parse::<PolicyName>() {
            Ok(policy) => respond(engine.call(|reply| message(policy, caller.0, reply)).await),
            Err(e) => answer(StatusCode::BAD_REQUEST, &e.to_string()),
        }
    };
    post(tell)
}
