//! `add` and `remove`: functions from the desired state to the next, applied or refused completely.

use rto_agent_core::{
    config::{Config, save},
    policy::{
        Cidr, Location, PolicyName, Settings, Terms,
        compile::{
            SettingError, check_is_counted, check_prefix_width, compile, short_for_width,
            uncounted_holdout,
        },
    },
    printable,
    progress::stepping,
    wire::{
        ttl::parse_ttl,
        types::{AddRequest, Caller, ChangeAnswer, RemoveRequest},
    },
};
use rto_agent_kernel::kernel::clock::boottime_ms;

use super::{
    audit::Cause,
    change::{Engine, Persist},
    desired::Desired,
    error::{EngineError, refused},
    files,
    health::verify_entries,
    memory::{self, Need},
    notes::Notes,
    reload::{note_detached, take_over},
    runtime::{Removal, RuntimeEntries, RuntimeEntry},
};

pub(super) fn add(
    engine: &mut Engine,
    mut request: AddRequest,
    by: Caller,
) -> Result<ChangeAnswer, EngineError> {
    let cidrs = parse_cidrs(std::mem::take(&mut request.cidrs))?;
    memory::check(&need_of(&engine.desired().runtime, &cidrs))?;
    let ttl = request.ttl.as_deref().map(parse_ttl).transpose();
    let ttl = ttl.map_err(|e| EngineError::Refused(format!("--ttl {e}")))?;
    let (name, settings) = policy_for(engine.desired(), &request)?;
    let terms = match request.settings {
        Some(_) => Terms::Options,
        None => Terms::File,
    };
    let refusal = |error: SettingError| EngineError::Refused(error.text(terms));
    for cidr in &cidrs {
        check_prefix_width(cidr, &settings).map_err(refusal)?;
    }
    if !engine.config.config.agent.statistics {
        check_is_counted(&settings).map_err(refusal)?;
    }
    if request.settings.is_some() {
        // Their user does not know the name that the policy gets.
        compile(&name, &settings, &engine.desired().host).map_err(|errors| {
            let lines: Vec<_> = errors.iter().map(|error| error.text(terms)).collect();
            EngineError::Refused(lines.join("\n"))
        })?;
    }
    verify_entries(engine, &cidrs, &name);
    let mut taken = Notes::default();
    taken.add_taken(&engine.resolved.set.entries, &cidrs, &name);
    let mut answer = if request.save {
        if ttl.is_some() {
            return refused("--ttl and --save cannot be combined: a saved entry does not expire");
        }
        let is_new = !engine
            .desired()
            .files
            .config
            .set
            .policies
            .contains_key(&name);
        let inline = (is_new || request.settings.is_some()).then_some(&settings);
        save(engine, by, "add --save", &cidrs, |file| {
            save::add(file, &cidrs, &name, inline)
        })?
    } else {
        let expires_ms = ttl.map(|ttl| {
            boottime_ms().saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))
        });
        let entry = RuntimeEntry {
            policy: name.clone(),
            by,
            expires_ms,
        };
        let desired = engine.desired();
        let lifetimes_changed = desired.runtime.other_expiries(&cidrs, expires_ms);
        let next = desired.with_entries(&cidrs, &entry, &settings);
        let change = engine.change(&next, &Persist::Runtime, &Cause::done("add", by))?;
        let compiled = engine.resolved.policies.get(&name);
        let warnings = compiled.into_iter().flat_map(|compiled| &compiled.warnings);
        let mut notes: Vec<_> = warnings.map(|text| text.text(terms).to_owned()).collect();
        let others = [
            cidrs
                .iter()
                .find_map(|cidr| short_for_width(cidr, &settings)),
            uncounted_holdout(&settings).filter(|_| !engine.config.config.agent.statistics),
        ];
        notes.extend(
            others
                .iter()
                .flatten()
                .map(|text| text.text(terms).to_owned()),
        );
        let mut overrides = Notes::default();
        for cidr in stepping(&cidrs) {
            if let Some(at) = location_in_files(engine.desired(), cidr) {
                overrides.push(|| format!("{cidr} overrides the entry of {at}"));
            }
        }
        notes.extend(overrides.end());
        ChangeAnswer {
            changed: change.summary,
            lifetimes_changed,
            expires_in_s: ttl.map(|ttl| {
                let seconds = ttl.as_millis().div_ceil(1000);
                u64::try_from(seconds).unwrap_or(u64::MAX)
            }),
            notes,
            ..ChangeAnswer::default()
        }
    };
    answer.notes.extend(taken.end());
    answer.effects = engine.resolved.effects(&name).to_vec();
    answer.policy = Some(name);
    note_detached(engine, &mut answer);
    Ok(answer)
}

pub(super) fn remove(
    engine: &mut Engine,
    request: RemoveRequest,
    by: Caller,
) -> Result<ChangeAnswer, EngineError> {
    let cidrs = parse_cidrs(request.cidrs)?;
    let mut answer = if request.save {
        let desired = engine.desired();
        let is_unsaved = |cidr: &&Cidr| {
            desired.runtime.get(cidr).is_some() && location_in_files(desired, cidr).is_none()
        };
        if let Some(cidr) = cidrs.iter().find(is_unsaved) {
            return refused(format!(
                "{cidr} is a runtime entry and not saved: remove it without --save"
            ));
        }
        save(engine, by, "remove --save", &cidrs, |file| {
            save::remove(file, &cidrs)
        })?
    } else {
        let (next, notes, action) = if request.undo {
            let (next, not_masked) = engine.desired().with_unmasked(&cidrs);
            if let Some(cidr) = not_masked {
                return refused(format!("{cidr} was not switched off by rto-agent remove"));
            }
            (next, Vec::new(), "remove --undo")
        } else {
            let (next, notes) = removed(engine, &cidrs)?;
            (next, notes, "remove")
        };
        let change = engine.change(&next, &Persist::Runtime, &Cause::done(action, by))?;
        ChangeAnswer {
            changed: change.summary,
            notes,
            ..ChangeAnswer::default()
        }
    };
    note_detached(engine, &mut answer);
    Ok(answer)
}

/// The desired state without some entries, and notes for the answer.
fn removed(engine: &Engine, cidrs: &[Cidr]) -> Result<(Desired, Vec<String>), EngineError> {
    let desired = engine.desired();
    let (next, removals) = desired.without_entries(cidrs);
    let mut notes = Notes::default();
    for (cidr, removal) in stepping(cidrs).zip(removals) {
        match removal {
            Some(Removal::Entry) => {}
            Some(Removal::Masked) => notes.push(|| {
                let at = location_in_files(desired, cidr);
                let at = at.map(|at| format!(" of {at}")).unwrap_or_default();
                format!(
                    "{cidr}: the entry{at} is switched off until the next reboot; edit the \
                     file to remove it permanently, or undo this with rto-agent remove --undo \
                     {cidr}"
                )
            }),
            None if desired.runtime.masked().contains(cidr) => {
                return refused(format!("{cidr} is already switched off"));
            }
            None => {
                let entries = &engine.resolved.set.entries;
                let around = entries.covering_cidr(cidr);
                let around = around.map(|c| format!("; it lies within {c}"));
                let around = around.unwrap_or_default();
                return refused(format!("there is no entry {cidr}{around}"));
            }
        }
    }
    Ok((next, notes.end()))
}

/// Edits `policies.d/50-cli.toml` and applies the edited files, without what overrides them for
/// these CIDRs. The edit is moved into place once the kernel has the change.
fn save(
    engine: &mut Engine,
    by: Caller,
    what: &'static str,
    cidrs: &[Cidr],
    edit: impl FnOnce(&std::path::Path) -> Result<save::Edit, save::SaveError>,
) -> Result<ChangeAnswer, EngineError> {
    let file = Config::saved_path(&engine.config.config_path);
    let mut files = engine.files.read()?;
    if files.fingerprint() != engine.desired().files.fingerprint {
        // Errors of the existing files would hide errors of the edit.
        if let Err(e) = files::load(&files, engine.desired()) {
            return refused(format!(
                "nothing was saved, because the files already have errors:\n{e}"
            ));
        }
        files = engine.files.read()?;
    }
    let edit = edit(&file)?;
    let files = files.with(edit.path(), edit.text().to_owned());
    let fingerprint = files.fingerprint();
    engine.systemd.reloading();
    let (persist, cause) = (Persist::File(edit), Cause::done(what, by));
    let taken = take_over(engine, files, cidrs, &persist, true, &cause);
    engine.systemd.reloaded();
    let mut answer = taken?;
    engine.files.fingerprint = Some(fingerprint);
    engine.publish();
    let saved = format!("saved to {}", printable::path(&file));
    answer.notes.insert(0, saved);
    Ok(answer)
}

/// The memory that an `add` of these CIDRs needs.
fn need_of(runtime: &RuntimeEntries, cidrs: &[Cidr]) -> Need {
    let added = stepping(cidrs).filter(|cidr| runtime.get(cidr).is_none());
    let known = runtime.len() + runtime.masked().len();
    Need::of_runtime(added.count(), known)
}

fn location_in_files(desired: &Desired, cidr: &Cidr) -> Option<Location> {
    desired.files.config.set.entries.get(cidr)?.location()
}

/// The policy of a request: a named policy, or the request's own settings under a name derived from
/// them.
fn policy_for(
    desired: &Desired,
    request: &AddRequest,
) -> Result<(PolicyName, Settings), EngineError> {
    match (&request.policy, &request.settings) {
        (Some(name), None) => {
            let name: PolicyName =
                name.parse()
                    .map_err(|e: rto_agent_core::policy::NameError| {
                        EngineError::Refused(e.to_string())
                    })?;
            let of_files = &desired.files.config.set.policies;
            let of_files = of_files.get(&name).map(|p| &p.settings);
            match of_files.or_else(|| desired.runtime.policy(&name)) {
                Some(settings) => Ok((name.clone(), settings.clone())),
                None => refused(desired.unknown_policy(&name)),
            }
        }
        (None, Some(settings)) if !settings.is_empty() => {
            let of_files = &desired.files.config.set.policies;
            let name = PolicyName::for_settings(settings, |name| {
                let known = of_files.get(name).map(|policy| &policy.settings);
                let known = known.or_else(|| desired.runtime.policy(name));
                known.is_some_and(|known| known != settings)
            });
            Ok((name, settings.clone()))
        }
        (Some(_), Some(_)) => refused("give either --policy or settings, not both"),
        (None, _) => {
            refused("no policy: give --policy NAME, or settings such as --initial-rto 100ms")
        }
    }
}

fn parse_cidrs(texts: Vec<String>) -> Result<Vec<Cidr>, EngineError> {
    if texts.is_empty() {
        return refused("no CIDR given");
    }
    let mut cidrs = Vec::with_capacity(texts.len());
    let mut errors = Notes::default();
    for text in stepping(texts) {
        match text.parse::<Cidr>() {
            Ok(cidr) => cidrs.push(cidr),
            Err(e) => errors.push(|| e.to_string()),
        }
    }
    let errors = errors.end();
    if !errors.is_empty() {
        return refused(errors.join("\n"));
    }
    cidrs.sort_unstable();
    cidrs.dedup();
    Ok(cidrs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{
        desired::tests::{NEAR, desired, entry, files},
        notes::SHOWN,
    };

    #[test]
    fn bad_cidrs_are_named_or_counted() {
        let texts = (0..SHOWN + 7).map(|n| format!("bad{n}"));
        let texts = std::iter::once("10.0.0.0/8".to_owned()).chain(texts);
        let error = parse_cidrs(texts.collect()).unwrap_err().to_string();
        assert!((0..SHOWN).all(|n| error.contains(&format!("\"bad{n}\""))));
        assert!(error.ends_with("\n... and 7 more"), "{error}");
        let good = ["10.1.0.0/16", "10.0.0.0/16", "10.1.0.0/16"].map(ToOwned::to_owned);
        let cidrs = parse_cidrs(good.to_vec()).unwrap();
        assert!(cidrs.len() == 2 && cidrs.is_sorted());
        assert!(parse_cidrs(Vec::new()).is_err());
    }

    #[test]
    fn existing_entry_is_not_added() {
        let [known, new] = ["10.1.0.0/16", "10.2.0.0/16"].map(|text| text.parse().unwrap());
        let entry = entry("near", None);
        let mut runtime = RuntimeEntries::default();
        runtime.add(&[known], &entry, &Settings::default());
        assert_eq!(need_of(&runtime, &[known]), Need::of_runtime(0, 1));
        assert_eq!(need_of(&runtime, &[known, new]), Need::of_runtime(1, 1));
        // Masked entries are kept, too.
        let files = &files(NEAR).config.set;
        let switched_off = "10.1.0.0/16".parse().unwrap();
        runtime.remove(&known, files);
        runtime.remove(&switched_off, files);
        runtime.add(&[new], &entry, &Settings::default());
        assert_eq!(need_of(&runtime, &[new]), Need::of_runtime(0, 2));
    }

    #[test]
    fn add_takes_one_policy_or_settings() {
        let desired = desired(NEAR);
        let settings = Settings {
            delack_max: Some(std::time::Duration::from_millis(8)),
            ..Settings::default()
        };
        let of = |policy: Option<&str>, settings: Option<&Settings>| {
            let request = AddRequest {
                policy: policy.map(ToOwned::to_owned),
                settings: settings.cloned(),
                ..AddRequest::default()
            };
            policy_for(&desired, &request).map_err(|e| e.to_string())
        };
        assert_eq!(of(Some("near"), None).unwrap().0.as_str(), "near");
        let (name, own) = of(None, Some(&settings)).unwrap();
        assert_eq!(
            (name, &own),
            (PolicyName::for_settings(&settings, |_| false), &settings)
        );
        for (policy, settings, why) in [
            (None, None, "no policy"),
            (None, Some(&Settings::default()), "no policy"),
            (Some("near"), Some(&settings), "not both"),
            (
                Some("far"),
                None,
                "unknown policy far; the configuration has: near",
            ),
            (Some("-"), None, "invalid policy name"),
        ] {
            let error = of(policy, settings).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
