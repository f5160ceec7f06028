//! The options of `rto-agent add`, from the table of settings.

use clap::{
    Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, Error, FromArgMatches, Id,
    builder::Resettable, error::ErrorKind,
};

use rto_agent_core::policy::{SETTINGS, Setting, Settings};

/// The settings that are given as options.
#[derive(Clone, Debug, Default)]
pub struct SettingsArgs(pub(crate) Settings);

const GROUP: &str = "Settings";

fn option(setting: &'static Setting) -> Arg {
    let help = setting.key.paragraphs();
    let (flag, value) = setting.flag();
    let mut arg = Arg::new(setting.key.name)
        .long(flag.trim_start_matches('-'))
        .help(help[0].clone());
    if help.len() > 1 {
        arg = arg.long_help(help.join("\n\n"));
    }
    let parser =
        |text: &str| (setting.read)(&mut Settings::default(), text).map(|()| text.to_owned());
    match value {
        None => arg
            .action(ArgAction::SetTrue)
            .help_heading(Resettable::Reset),
        Some("BOOL") => arg
            .value_name("BOOL")
            .value_parser(["true", "false"])
            .num_args(0..=1)
            .default_missing_value("true"),
        Some(name) => arg.value_name(name).value_parser(parser),
    }
}

impl Args for SettingsArgs {
    fn group_id() -> Option<Id> {
        Some(GROUP.into())
    }

    fn augment_args(command: Command) -> Command {
        let names = SETTINGS.iter().map(|setting| setting.key.name);
        command
            .next_help_heading("Settings, instead of --policy")
            .group(ArgGroup::new(GROUP).args(names).multiple(true))
            .args(SETTINGS.iter().map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingsArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut settings = Self::default();
        settings.update_from_arg_matches(matches).map(|()| settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for setting in SETTINGS {
            let value = match setting.flag() {
                (_, None) => matches
                    .get_flag(setting.key.name)
                    .then(|| "true".to_owned()),
                _ => matches.get_one(setting.key.name).cloned(),
            };
            if let Some(value) = value {
                (setting.read)(&mut self.0, &value)
                    .map_err(|e| Error::raw(ErrorKind::ValueValidation, e))?;
            }
        }
        Ok(())
    }
}
