//! A list of CIDRs (`cidrs_file`): one a line, with comments after `#`.

use super::{
    parse::ListedCidr,
    source::{ConfigError, MOST_ERRORS, Source},
};
use crate::{policy::Cidr, progress};

/// The error about a line of JSON, which cloud providers publish.
const JSON: &str = "this is JSON, not a CIDR; write one CIDR a line: \
                    jq -r '.prefixes[] | .ip_prefix // .ipv4Prefix // .ipv6Prefix' ranges.json > list.txt";
/// The error about a file without a CIDR. Its lines are not shown: the daemon reads it as root, every member of the
/// socket's group sees the error, and the name may lead to a secret.
const NO_LIST: &str = "no line of this file is a CIDR; write one a line, or remove cidrs_file (its lines are not shown, \
                       because [agent] group may read errors)";

/// An upper bound of the number of CIDRs.
pub(super) fn lines(text: &str) -> usize {
    memchr::memchr_iter(b'\n', text.as_bytes()).count() + 1
}

/// Calls `add` with each CIDR; adds its errors and those of the list.
pub(super) fn parse(
    list: &Source,
    errors: &mut Vec<ConfigError>,
    mut add: impl FnMut(ListedCidr) -> Option<ConfigError>,
) {
    let text: &str = list.text.trim_start_matches('\u{feff}');
    let mut begin = list.text.len() - text.len();
    let mut found = Vec::new();
    let mut has_cidr = false;
    for (line, number) in progress::stepping(text.split('\n').zip(1..)) {
        let content = content(line);
        if let Ok(cidr) = content.parse() {
            has_cidr = true;
            found.extend(add(ListedCidr { cidr, line: number }));
        } else if !content.is_empty() {
            let at = begin + line.len() - line.trim_start().len();
            let span = at..at + content.len();
            if content.starts_with(['{', '}', '[', ']', '"']) {
                found.push(list.error(span, JSON));
                // Other lines of JSON are consequences.
                break;
            }
            let error = content.parse::<Cidr>().err();
            found.extend(error.map(|e| list.error(span, e.to_string())));
        }
        if errors.len() + found.len() >= MOST_ERRORS {
            break;
        }
        begin += line.len() + 1;
    }
    if has_cidr || text.lines().any(is_cidr) {
        errors.extend(found);
    } else {
        let is_json = text.trim_start().starts_with(['{', '[']);
        errors.push(ConfigError::whole(
            &list.path,
            if is_json { JSON } else { NO_LIST },
        ));
    }
}

fn is_cidr(line: &str) -> bool {
    content(line).parse::<Cidr>().is_ok()
}

/// A line without its comment.
fn content(line: &str) -> &str {
    line.split('#').next().unwrap_or_default().trim()
}
