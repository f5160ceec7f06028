//! `add` and `remove`: tried on a copy, written to disk and kernel, or refused as a whole.

use super::{
    Engine, EngineError,
    audit::Cause,
    manual::{Manual, ManualEntry, Removal, boottime_ms},
};
use crate::{
    config::{Config, save},
    policy::{
        Cidr, Location, PolicyName, Settings,
        compile::{check_prefix_width, compile},
        plan::ChangeSummary,
    },
    wire::{
        ttl::parse_ttl,
        types::{AddRequest, Caller, ChangeAnswer, RemoveRequest},
    },
};

/// CIDRs of a request that are told to be wrong.
const SHOWN_ERRORS: usize = 50;

impl Engine {
    pub(super) fn add(
        &mut self,
        request: &AddRequest,
        by: Caller,
    ) -> Result<ChangeAnswer, EngineError> {
        let cidrs = parse_cidrs(&request.cidrs)?;
        let ttl = request.ttl.as_deref().map(parse_ttl).transpose();
        let ttl = ttl.map_err(|e| EngineError::Refused(format!("--ttl {e}")))?;
        let (name, settings) = self.policy_for(request)?;
        for cidr in &cidrs {
            check_prefix_width(cidr, &settings).map_err(|e| EngineError::Refused(e.to_string()))?;
        }
        let mut answer = if request.save {
            if ttl.is_some() {
                return refused("--ttl and --save exclude each other: a saved entry has no end");
            }
            let inline = request.settings.is_some().then_some(&settings);
            self.save_and_reload(by, "add --save", |file| {
                save::add(file, &cidrs, &name, inline)
            })?
        } else {
            let mut manual = self.manual.clone();
            let expires_ms = ttl.map(|ttl| {
                boottime_ms().saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))
            });
            for cidr in &cidrs {
                let entry = ManualEntry {
                    policy: name.clone(),
                    by,
                    expires_ms,
                };
                manual.add(*cidr, entry, settings.clone());
            }
            let changed = self.become_manual(manual, "add", by)?;
            // It compiled: these are what check would say of it.
            let warnings = compile(&name, &settings, self.state.host()).map(|c| c.warnings);
            ChangeAnswer {
                changed,
                notes: warnings.unwrap_or_default(),
                effects: Vec::new(),
            }
        };
        for cidr in &cidrs {
            if !request.save
                && let Some(at) = self.location_in_files(cidr)
            {
                answer
                    .notes
                    .push(format!("{cidr} overrides the entry of {at}"));
            }
        }
        answer.effects = self.state.effects(&name).to_vec();
        self.note_detached(&mut answer);
        Ok(answer)
    }

    pub(super) fn remove(
        &mut self,
        request: &RemoveRequest,
        by: Caller,
    ) -> Result<ChangeAnswer, EngineError> {
        let cidrs = parse_cidrs(&request.cidrs)?;
        let mut answer = if request.save {
            self.save_and_reload(by, "remove --save", |file| save::remove(file, &cidrs))?
        } else {
            let mut manual = self.manual.clone();
            let mut notes = Vec::new();
            for cidr in &cidrs {
                let note = if request.undo {
                    self.unmask(&mut manual, cidr)?
                } else {
                    self.remove_one(&mut manual, cidr)?
                };
                notes.extend(note);
            }
            let action = if request.undo {
                "remove --undo"
            } else {
                "remove"
            };
            let changed = self.become_manual(manual, action, by)?;
            ChangeAnswer {
                changed,
                notes,
                effects: Vec::new(),
            }
        };
        self.note_detached(&mut answer);
        Ok(answer)
    }

    fn remove_one(&self, manual: &mut Manual, cidr: &Cidr) -> Result<Option<String>, EngineError> {
        let of_file = self.location_in_files(cidr);
        match (manual.remove(cidr, &self.config.set), of_file) {
            (Some(Removal::Entry), None) => Ok(None),
            (Some(Removal::Entry), Some(at)) => Ok(Some(format!(
                "{cidr}: the entry of {at} is in force again; remove {cidr} once more to switch it off"
            ))),
            (Some(Removal::Masked), at) => {
                let at = at.map(|at| format!(" of {at}")).unwrap_or_default();
                Ok(Some(format!(
                    "{cidr}: the entry{at} is switched off until the boot ends; to remove it for \
                     good edit the file, to undo this: rto-agent remove --undo {cidr}"
                )))
            }
            (None, _) if manual.masked().contains(cidr) => {
                refused(&format!("{cidr} is already switched off"))
            }
            (None, _) => refused(&format!(
                "there is no entry {cidr}{}",
                self.state
                    .set()
                    .entries
                    .covering_cidr(cidr)
                    .map(|c| format!("; it lies within {c}"))
                    .unwrap_or_default()
            )),
        }
    }

    fn unmask(&self, manual: &mut Manual, cidr: &Cidr) -> Result<Option<String>, EngineError> {
        if manual.unmask(cidr) {
            Ok(None)
        } else {
            refused(&format!("{cidr} was not switched off by rto-agent remove"))
        }
    }

    fn location_in_files(&self, cidr: &Cidr) -> Option<Location> {
        self.config.set.entries.get(cidr)?.location()
    }

    /// The policy a request means: one by name, or its own settings under a name made of them.
    fn policy_for(&self, request: &AddRequest) -> Result<(PolicyName, Settings), EngineError> {
        match (&request.policy, &request.settings) {
            (Some(name), None) => {
                let name: PolicyName = name
                    .parse()
                    .map_err(|e: crate::policy::NameError| EngineError::Refused(e.to_string()))?;
                let of_files = self.config.set.policies.get(&name).map(|p| &p.settings);
                match of_files.or_else(|| self.manual.policy(&name)) {
                    Some(settings) => Ok((name.clone(), settings.clone())),
                    None => refused(&self.unknown_policy(&name)),
                }
            }
            (None, Some(settings)) if !settings.is_empty() => {
                Ok((PolicyName::for_settings(settings), settings.clone()))
            }
            (Some(_), Some(_)) => refused("give either --policy or settings, not both"),
            (None, _) => {
                refused("no policy: give --policy NAME, or settings such as --initial-rto 100ms")
            }
        }
    }

    fn unknown_policy(&self, name: &PolicyName) -> String {
        let known: Vec<&str> = self
            .config
            .set
            .policies
            .keys()
            .map(PolicyName::as_str)
            .collect();
        if known.is_empty() {
            format!("unknown policy {name}: the configuration has none; give settings instead")
        } else {
            format!(
                "unknown policy {name}; the configuration has: {}",
                known.join(", ")
            )
        }
    }

    /// Puts a changed set of hand-made entries in force and on disk, or neither.
    fn become_manual(
        &mut self,
        mut manual: Manual,
        action: &'static str,
        by: Caller,
    ) -> Result<ChangeSummary, EngineError> {
        let _busy = self.busy.begin();
        let set = manual.over(&self.config.set);
        let unsaved = |e: std::io::Error| EngineError::Failed(format!("{e}; nothing was changed"));
        let saved = self.shelf.draft(&manual).map_err(unsaved)?;
        self.put_in_force(set, action, &Cause::done(action, by), |engine| {
            engine.shelf.commit(saved).map_err(unsaved)?;
            engine.manual = manual;
            Ok(())
        })
    }

    /// Edits `policies.d/50-cli.toml` and takes the files over; if they are refused with the
    /// edit, the file is put back as it was.
    fn save_and_reload(
        &mut self,
        by: Caller,
        what: &'static str,
        edit: impl FnOnce(&std::path::Path) -> Result<save::Undo, save::SaveError>,
    ) -> Result<ChangeAnswer, EngineError> {
        let file = Config::saved_path(&self.start.config_path);
        // An edit of files that are refused as they are would be lost in their errors.
        if let Err(e) = Config::load(&self.start.config_path, self.state.host()) {
            return refused(&format!(
                "nothing was saved: the files are refused as they are\n{e}"
            ));
        }
        let undo = edit(&file).map_err(|e| EngineError::Refused(e.to_string()))?;
        match self.reload(&Cause::done(what, by)) {
            Ok(mut answer) => {
                answer
                    .notes
                    .insert(0, format!("saved to {}", file.display()));
                Ok(answer)
            }
            Err(e) => {
                undo.undo().map_err(|undo| {
                    EngineError::Failed(format!(
                        "{e}\n{} could not be put back: {undo}",
                        file.display()
                    ))
                })?;
                match self.reload(&Cause::put_back(by)) {
                    Ok(_) => Err(e),
                    Err(back) => Err(EngineError::Failed(format!("{e}\n{back}"))),
                }
            }
        }
    }

    fn note_detached(&self, answer: &mut ChangeAnswer) {
        if let Some(by) = self.detached_by {
            answer.notes.push(format!(
                "nothing is in force: detached by {by}; rto-agent reload attaches again"
            ));
        }
    }
}

fn parse_cidrs(texts: &[String]) -> Result<Vec<Cidr>, EngineError> {
    if texts.is_empty() {
        return refused("no CIDR given");
    }
    let mut cidrs = Vec::with_capacity(texts.len());
    let mut errors = Vec::new();
    let mut more = 0;
    for text in texts {
        match text.parse() {
            Ok(cidr) => cidrs.push(cidr),
            Err(_) if errors.len() == SHOWN_ERRORS => more += 1,
            Err(e) => errors.push(crate::policy::CidrError::to_string(&e)),
        }
    }
    if errors.is_empty() {
        cidrs.sort_unstable();
        cidrs.dedup();
        Ok(cidrs)
    } else {
        if more != 0 {
            errors.push(format!("... and {more} more"));
        }
        Err(EngineError::Refused(errors.join("\n")))
    }
}

fn refused<T>(text: &str) -> Result<T, EngineError> {
    Err(EngineError::Refused(text.to_owned()))
}
