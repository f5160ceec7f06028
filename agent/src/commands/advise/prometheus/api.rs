//! A client for instant queries of Prometheus's HTTP API.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use rto_agent_core::printable;
use serde::Deserialize;
use tokio::{net::TcpStream, time::timeout};

/// Prometheus's own timeout of a query, by default (`--query.timeout`).
const TIMEOUT: Duration = Duration::from_secs(120);
/// Longest answer, bytes: a hundred thousand series with a dozen labels.
const MAX_BODY: usize = 64 << 20;
/// For a URL without a port.
const PORT: u16 = 80;
/// The most characters shown of a text from the server.
const SHOWN: usize = 200;
/// 2^53: above it not every integer is a double.
const LARGEST_COUNT: f64 = 9_007_199_254_740_992.0;

/// A sample of an instant vector.
#[derive(Debug, Deserialize)]
pub(super) struct Sample {
    pub(super) metric: BTreeMap<String, String>,
    /// The time (Unix seconds), and the value as text; of a native histogram: nothing.
    #[serde(default)]
    pub(super) value: (f64, String),
    /// The time, and the value of a native histogram.
    #[serde(default)]
    pub(super) histogram: Option<(f64, Native)>,
}

/// A native histogram, also one with the buckets of a classic one.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Native {
    /// Which bounds belong to the bucket, its lower and upper bound, and its count.
    #[serde(default)]
    buckets: Vec<(u8, String, String, String)>,
}

impl Native {
    /// The upper bound of each bucket, seconds, and the count up to it.
    pub(super) fn cumulative(&self) -> anyhow::Result<Vec<(f64, u64)>> {
        let mut below = 0.0;
        let buckets = self.buckets.iter().map(|(_, _, end, count)| {
            below += count.parse::<f64>().context("count")?;
            Ok((end.parse().context("bound")?, count_of(below)?))
        });
        buckets.collect()
    }
}

/// A value as a count. It may have a fraction, because `increase()` extrapolates.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value lies between 0 and 2^53"
)]
fn count_of(value: f64) -> anyhow::Result<u64> {
    ensure!(
        (0.0..LARGEST_COUNT).contains(&value),
        "the value {value} is not a count: a recording rule or a proxy may change these series"
    );
    Ok(value.round() as u64)
}

impl Sample {
    pub(super) fn label(&self, name: &str) -> &str {
        self.metric.get(name).map_or("", String::as_str)
    }

    /// The sample as a count.
    pub(super) fn count(&self) -> anyhow::Result<u64> {
        let text = &self.value.1;
        count_of(text.parse().unwrap_or(f64::NAN)).with_context(|| shown(text))
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
        let response = runtime.block_on(async { timeout(TIMEOUT, self.post(query)).await });
        let (status, body) =
            response.with_context(|| format!("no answer within {} s", TIMEOUT.as_secs()))??;
        self.samples(status, &body)
            .with_context(|| query.to_owned())
    }

    /// The samples of an answer; keeps its warnings.
    fn samples(&mut self, status: StatusCode, body: &[u8]) -> anyhow::Result<Vec<Sample>> {
        let text = shown(&String::from_utf8_lossy(body));
        let (samples, warnings, is_partial) = match serde_json::from_slice(body) {
            Ok(Answer::Error { error_type, error }) => {
                let text = [error_type, error].map(|text| shown(&text));
                bail!("status {status}: {}", text.join(": "));
            }
            _ if !status.is_success() => {
                bail!("status {status}: {}", self.hint(status, &text))
            }
            Ok(Answer::Success {
                data: Data::Vector(samples),
                warnings,
                is_partial,
            }) => (samples, warnings, is_partial),
            Err(error) => {
                let what = format!("not an answer of the Prometheus API: {text}");
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
    fn hint(&self, status: StatusCode, text: &str) -> String {
        match status.as_u16() {
            300..=399 => "redirected: give the final address (http:// only; TLS and logins need a \
                          proxy)"
                .to_owned(),
            401 | 403 => {
                "a login is needed: give --header \"Authorization: Bearer TOKEN\", or use a proxy"
                    .to_owned()
            }
            404 | 405 => {
                let path = &self.path;
                format!("there is no Prometheus API at {path}: check the path of the URL")
            }
            500..=599 => {
                "the server, or a proxy in front of it, failed: see its log, then try again"
                    .to_owned()
            }
            _ => format!("the query was rejected: \"{text}\""),
        }
    }

    /// The server's warnings, one sentence each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.iter().map(|warning| {
            format!(
                "Prometheus warns: {warning}; if hosts are missing from the answer, the advice does not cover them"
            )
        });
        warnings.collect()
    }

    async fn post(&self, query: &str) -> anyhow::Result<(StatusCode, Bytes)> {
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
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
        let body = body.map_err(|e| anyhow!("the answer, of at most {MAX_BODY} bytes: {e}"))?;
        let body = body.to_bytes();
        driver.abort();
        Ok((status, body))
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

    fn answered(status: u16, body: &str) -> (Server, anyhow::Result<Vec<Sample>>) {
        let mut server = Server::new("http://x", &[]).unwrap();
        let samples = server.samples(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        (server, samples)
    }

    const ONE: &str = r#""status":"success","data":{"resultType":"vector","result":[
        {"metric":{"le":"1"},"value":[1435781451.781,"1"]}]}"#;

    #[test]
    fn urls_and_headers_are_parsed() {
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
    fn endless_answer_is_refused() {
        use std::io::{Read as _, Write as _};

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let endless = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            // A client takes no answer before its request.
            assert!(client.read(&mut [0; 1024]).unwrap() > 0);
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            let piece = vec![b' '; 1 << 20];
            let mut sent = 0;
            while client.write_all(&piece).is_ok() {
                sent += piece.len();
            }
            sent
        });
        let error = Server::new(&url, &[]).unwrap().query("up").unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("at most 67108864 bytes"), "{error}");
        assert!(endless.join().unwrap() < 2 * MAX_BODY);
    }

    #[test]
    fn http_error_status_names_fix() {
        let error = r#"{"status":"error","errorType":"unavailable","error":"tsdb not ready"}"#;
        let only_type = r#"{"status":"error","errorType":"bad_data"}"#;
        let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}"#;
        for (status, body, message) in [
            (301, "", "status 301 Moved Permanently: redirected"),
            (401, "", "status 401 Unauthorized: a login is needed"),
            (403, "<html>", "--header"),
            (404, "404 page not found\n", "status 404 Not Found"),
            (405, "", "/api/v1/query"),
            (502, "<html>", "status 502 Bad Gateway"),
            (503, error, "unavailable: tsdb not ready"),
            (400, only_type, "status 400 Bad Request: bad_data"),
            (418, "a\u{1b}[31mpot", "was rejected: \"a\\u{1b}[31mpot\""),
            (
                200,
                "<!DOCTYPE html>",
                "not an answer of the Prometheus API: <!DOCTYPE",
            ),
            (200, scalar, "resultType\":\"scalar\""),
        ] {
            let error = answered(status, body).1.unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(message), "{message}: {error}");
        }
    }

    #[test]
    fn partial_answer_is_a_warning() {
        let (server, samples) = answered(200, &format!("{{{ONE}}}"));
        assert_eq!(samples.unwrap()[0].count().unwrap(), 1);
        assert_eq!(server.warnings(), [""; 0]);
        for (more, message) in [
            (r#""isPartial":true"#, "a storage node did not answer"),
            (
                r#""warnings":["store 10.0.0.9 is away"]"#,
                "store 10.0.0.9 is away",
            ),
        ] {
            let (server, samples) = answered(200, &format!("{{{ONE},{more}}}"));
            samples.unwrap();
            let [warning] = &server.warnings()[..] else {
                panic!("{:?}", server.warnings());
            };
            assert!(warning.contains(message), "{warning}");
        }
    }

    #[test]
    fn invalid_count_is_refused() {
        for value in ["NaN", "+Inf", "-1", "1e30", "x"] {
            let sample = Sample {
                metric: BTreeMap::new(),
                value: (0.0, value.to_owned()),
                histogram: None,
            };
            let error = sample.count().unwrap_err().to_string();
            assert!(error.contains(value), "{error}");
        }
    }
}
