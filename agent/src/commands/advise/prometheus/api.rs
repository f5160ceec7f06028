//! A client for instant queries of Prometheus's HTTP API.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION},
};
use hyper_util::rt::TokioIo;
use rto_agent_core::printable;
use serde::Deserialize;
use tokio::{net::TcpStream, time::timeout};

/// Prometheus's own timeout of a query, by default (`--query.timeout`).
const TIMEOUT: Duration = Duration::from_secs(120);
/// For a URL without a port.
const PORT: u16 = 80;
/// The most characters shown of a text from the server.
const SHOWN: usize = 200;
/// The most warnings shown; each store of a fleet can add one.
const WARNINGS: usize = 8;
/// 2^53: above it not every integer is a double.
const LARGEST_COUNT: f64 = 9_007_199_254_740_992.0;

/// A sample of an instant vector.
#[derive(Debug, Deserialize)]
pub(super) struct Sample {
    pub(super) metric: BTreeMap<String, String>,
    /// The time (Unix seconds), and the value as text.
    pub(super) value: (f64, String),
}

impl Sample {
    pub(super) fn label(&self, name: &str) -> &str {
        self.metric.get(name).map_or("", String::as_str)
    }

    /// The sample as a count. It may have a fraction, because `increase()` extrapolates.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value lies between 0 and 2^53"
    )]
    pub(super) fn count(&self) -> anyhow::Result<u64> {
        let value: f64 = self.value.1.parse().unwrap_or(f64::NAN);
        ensure!(
            (0.0..LARGEST_COUNT).contains(&value),
            "the value {} is not a count: a recording rule or a proxy may change these series",
            shown(&self.value.1)
        );
        Ok(value.round() as u64)
    }
}

/// The server that a URL names.
pub(super) struct Server {
    authority: String,
    host: String,
    port: u16,
    /// The path of its API.
    path: String,
    headers: HeaderMap,
    /// The server's warnings, for example about a store that did not answer.
    warnings: BTreeSet<String>,
}

/// The server's JSON answer.
#[derive(Deserialize)]
#[serde(tag = "status", rename_all = "lowercase")]
enum Answer {
    #[serde(rename_all = "camelCase")]
    Success {
        data: Data,
        #[serde(default)]
        warnings: Vec<String>,
        /// `VictoriaMetrics`: a storage node did not answer.
        #[serde(default)]
        is_partial: bool,
    },
    #[serde(rename_all = "camelCase")]
    Error {
        #[serde(default)]
        error_type: String,
        #[serde(default)]
        error: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "resultType", content = "result", rename_all = "lowercase")]
enum Data {
    Vector(Vec<Sample>),
}

/// An HTTP response.
struct Response {
    status: StatusCode,
    location: Option<String>,
    body: Bytes,
}

impl Server {
    pub(super) fn new(url: &str, headers: &[String]) -> anyhow::Result<Self> {
        let uri: Uri = url.parse().context("no URL")?;
        ensure!(
            uri.scheme_str() == Some("http"),
            "write http://HOST:PORT; to reach a server with TLS or a login, use a proxy on this \
             host, or kubectl port-forward"
        );
        let authority = uri.authority().context("no host")?;
        let mut server = Self {
            authority: authority.to_string(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(PORT),
            path: format!("{}/api/v1/query", uri.path().trim_end_matches('/')),
            headers: HeaderMap::new(),
            warnings: BTreeSet::new(),
        };
        for header in headers {
            let (name, value) = header
                .split_once(':')
                .with_context(|| format!("--header {header}: write NAME: VALUE"))?;
            let value: HeaderValue = value.trim().parse()?;
            server.headers.insert(name.parse::<HeaderName>()?, value);
        }
        Ok(server)
    }

    /// The instant vector that a query returns.
    pub(super) fn query(&mut self, query: &str) -> anyhow::Result<Vec<Sample>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let asked = runtime.block_on(async { timeout(TIMEOUT, self.post(query)).await });
        let response =
            asked.with_context(|| format!("no answer within {} s", TIMEOUT.as_secs()))??;
        self.samples(&response).with_context(|| query.to_owned())
    }

    /// The samples of an answer; keeps its warnings.
    fn samples(&mut self, response: &Response) -> anyhow::Result<Vec<Sample>> {
        let status = response.status;
        let (samples, warnings, is_partial) = match serde_json::from_slice(&response.body) {
            Ok(Answer::Error { error_type, error }) => {
                let text = [error_type, error].map(|text| shown(&text));
                bail!("status {status}: {}", text.join(": "));
            }
            _ if !status.is_success() => bail!("status {status}: {}", self.hint(response)),
            Ok(Answer::Success {
                data: Data::Vector(samples),
                warnings,
                is_partial,
            }) => (samples, warnings, is_partial),
            Err(error) => {
                let body = shown(&String::from_utf8_lossy(&response.body));
                let what = format!("not an answer of the Prometheus API: {body}");
                return Err(anyhow::Error::new(error).context(what));
            }
        };
        self.warnings
            .extend(warnings.iter().map(|text| shown(text)));
        if is_partial {
            self.warnings
                .insert("isPartial: a storage node did not answer".to_owned());
        }
        Ok(samples)
    }

    /// What the operator can do about an HTTP status.
    fn hint(&self, response: &Response) -> String {
        let path = &self.path;
        match response.status.as_u16() {
            300..=399 => match &response.location {
                Some(to) => format!(
                    "redirected to {}: give the final address (http:// only; TLS and logins need a \
                     proxy)",
                    shown(to)
                ),
                None => "redirected: give the final address".to_owned(),
            },
            401 | 403 => {
                "a login is needed: give --header \"Authorization: Bearer TOKEN\", or use a proxy"
                    .to_owned()
            }
            404 | 405 => {
                format!("there is no Prometheus API at {path}: check the path of the URL")
            }
            500..=599 => {
                "the server, or a proxy in front of it, failed: see its log, then try again"
                    .to_owned()
            }
            _ => format!(
                "the query was rejected: \"{}\"",
                shown(&String::from_utf8_lossy(&response.body))
            ),
        }
    }

    /// The server's warnings, one sentence each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.iter().map(|warning| {
            format!(
                "Prometheus warns: {warning}; if hosts are missing from the answer, the advice does not cover them"
            )
        });
        let mut shown: Vec<_> = warnings.take(WARNINGS).collect();
        let more = self.warnings.len() - shown.len();
        if more > 0 {
            shown.push(format!("Prometheus warns of {more} more"));
        }
        shown
    }

    async fn post(&self, query: &str) -> anyhow::Result<Response> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let form = form_urlencoded::Serializer::new(String::new())
            .append_pair("query", query)
            .finish();
        let mut request = Request::post(&self.path).body(Full::new(Bytes::from(form)))?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.authority.parse()?);
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        headers.insert(CONTENT_TYPE, form);
        headers.extend(self.headers.clone());
        let response = sender.send_request(request).await?;
        let location = response.headers().get(LOCATION);
        let location = location.map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        driver.abort();
        Ok(Response {
            status,
            location,
            body,
        })
    }
}

/// The start of a server's text, as one line.
fn shown(text: &str) -> String {
    let mut start: String = text.chars().take(SHOWN).collect();
    if start.len() < text.len() {
        start.push_str("...");
    }
    printable::text(&start).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(
        status: u16,
        location: Option<&str>,
        body: &str,
    ) -> (Server, anyhow::Result<Vec<Sample>>) {
        let mut server = Server::new("http://x", &[]).unwrap();
        let response = Response {
            status: StatusCode::from_u16(status).unwrap(),
            location: location.map(str::to_owned),
            body: Bytes::from(body.to_owned()),
        };
        let samples = server.samples(&response);
        (server, samples)
    }

    const ONE: &str = r#""status":"success","data":{"resultType":"vector","result":[
        {"metric":{"le":"1"},"value":[1435781451.781,"1"]}]}"#;

    #[test]
    fn urls_and_headers() {
        let headers = ["X-Scope-OrgID: fleet".to_owned()];
        let server = Server::new("http://[::1]:9009/prometheus/", &headers).unwrap();
        assert_eq!((&*server.host, server.port), ("::1", 9009));
        assert_eq!(server.path, "/prometheus/api/v1/query");
        assert_eq!(server.headers["x-scope-orgid"], "fleet");
        assert_eq!(Server::new("http://x", &[]).unwrap().port, 80);
        for (url, header) in [("https://x", "a: b"), ("x:9090", "a: b"), ("http://x", "a")] {
            assert!(Server::new(url, &[header.to_owned()]).is_err(), "{url}");
        }
    }

    #[test]
    fn http_status_without_an_answer_is_named_with_a_fix() {
        let error = r#"{"status":"error","errorType":"unavailable","error":"tsdb not ready"}"#;
        let only_type = r#"{"status":"error","errorType":"bad_data"}"#;
        let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}"#;
        for (status, location, body, said) in [
            (301, None, "", "status 301 Moved Permanently: redirected"),
            (302, Some("https://x/"), "", "redirected to https://x/"),
            (401, None, "", "status 401 Unauthorized: a login is needed"),
            (403, None, "<html>", "--header"),
            (404, None, "404 page not found\n", "status 404 Not Found"),
            (405, None, "", "/api/v1/query"),
            (502, None, "<html>", "status 502 Bad Gateway"),
            (503, None, error, "unavailable: tsdb not ready"),
            (400, None, only_type, "status 400 Bad Request: bad_data"),
            (
                418,
                None,
                "a\u{1b}[31mpot",
                "the query was rejected: \"a\\u{1b}[31mpot\"",
            ),
            (
                200,
                None,
                "<!DOCTYPE html>",
                "not an answer of the Prometheus API: <!DOCTYPE",
            ),
            (200, None, scalar, "resultType\":\"scalar\""),
        ] {
            let error = answered(status, location, body).1.unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(said), "{said}: {error}");
        }
    }

    #[test]
    fn partial_answer_is_a_warning() {
        let (server, samples) = answered(200, None, &format!("{{{ONE}}}"));
        assert_eq!(samples.unwrap()[0].count().unwrap(), 1);
        assert_eq!(server.warnings(), [""; 0]);
        for (more, said) in [
            (r#""isPartial":true"#, "a storage node did not answer"),
            (
                r#""warnings":["store 10.0.0.9 is away"]"#,
                "store 10.0.0.9 is away",
            ),
        ] {
            let (server, samples) = answered(200, None, &format!("{{{ONE},{more}}}"));
            samples.unwrap();
            let [warning] = &server.warnings()[..] else {
                panic!("{:?}", server.warnings());
            };
            assert!(warning.contains(said), "{warning}");
        }
        let many: Vec<_> = (0..20).map(|n| format!("\"store {n}\"")).collect();
        let body = format!("{{{ONE},\"warnings\":[{}]}}", many.join(","));
        let warnings = answered(200, None, &body).0.warnings();
        assert_eq!(warnings.len(), WARNINGS + 1);
        assert!(warnings[WARNINGS].contains("12 more"), "{warnings:?}");
    }

    #[test]
    fn value_that_is_no_count_is_refused() {
        for value in ["NaN", "+Inf", "-1", "1e30", "x"] {
            let sample = Sample {
                metric: BTreeMap::new(),
                value: (0.0, value.to_owned()),
            };
            let error = sample.count().unwrap_err().to_string();
            assert!(error.contains(value), "{error}");
        }
    }
}
