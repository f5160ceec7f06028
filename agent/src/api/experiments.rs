//! `/v1/experiments`.

use axum::{
    Extension, Json,
    extract::{Path, State, rejection::JsonRejection},
    http::StatusCode,
    response::Response,
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

pub(super) async fn stop(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    Path(policy): Path<String>,
) -> Response {
    let stop = |policy, reply| Message::StopExperiment(policy, caller, reply);
    tell(&engine, &policy, stop).await
}

pub(super) async fn clear(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    Path(policy): Path<String>,
) -> Response {
    let clear = |policy, reply| Message::ClearExperiment(policy, caller, reply);
    tell(&engine, &policy, clear).await
}

async fn tell(
    engine: &Handle,
    policy: &str,
    message: impl FnOnce(PolicyName, Reply<ExperimentAnswer>) -> Message,
) -> Response {
    match policy.parse::<PolicyName>() {
        Ok(policy) => respond(engine.call(|reply| message(policy, reply)).await),
        Err(e) => answer(StatusCode::BAD_REQUEST, &e.to_string()),
    }
}
