//! Shows a generated page in a real browser, headless Chromium.

use std::{
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// The program, and the Debian package with the same name.
pub const BROWSER: &str = "chromium-headless-shell";
/// Width of the window, pixels: a page's body and its margins.
const WIDTH: u32 = 1100;

/// The colour scheme that the browser reports as preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Dark letters on a light background.
    Light,
    /// Light letters on a dark background.
    Dark,
}

impl Scheme {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Light, Self::Dark];

    /// Name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Light => "light",
            Self::Dark => "dark",
        }
    }

    /// Chromium's number (`blink::mojom::PreferredColorScheme`).
    const fn number(self) -> u8 {
        match self {
            Self::Dark => 0,
            Self::Light => 1,
        }
    }
}

/// How a page was rendered.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Messages on the console, for example script errors.
    pub console: Vec<String>,
    /// URLs that the page requested.
    pub fetched: Vec<String>,
    /// Brightness of its background, 0 to 255.
    pub background: u8,
    /// A screenshot.
    pub screenshot: PathBuf,
}

/// Renders a page and stores a screenshot in `into`. Name resolution is switched off, so nothing leaves the machine.
pub fn look(page: &Path, scheme: Scheme, into: &Path) -> anyhow::Result<Seen> {
    let state = tempfile::tempdir()?;
    let net_log = state.path().join("net.json");
    let stem = page.file_stem().context("no name")?.to_string_lossy();
    std::fs::create_dir_all(into)?;
    let screenshot = into.join(format!("{stem}-{}.png", scheme.name()));
    let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let output = Command::new(BROWSER)
        // Chromium requires this option when run as root; it only shows our own page.
        .args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .args([
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ])
        .arg(format!("--window-size={WIDTH},1400"))
        .arg(format!(
            "--blink-settings=preferredColorScheme={}",
            scheme.number()
        ))
        .arg(option("user-data-dir", state.path()))
        .arg(option("log-net-log", &net_log))
        .arg(option("screenshot", &screenshot))
        .arg(format!("file://{}", page.canonicalize()?.display()))
        .output()
        .context(BROWSER)?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {error}", output.status);
    let console = error.lines().filter(|line| line.contains(":CONSOLE"));
    let net_log: Value = serde_json::from_str(&std::fs::read_to_string(&net_log)?)?;
    Ok(Seen {
        console: console.map(str::to_owned).collect(),
        fetched: fetched(&net_log)?,
        background: background(&screenshot)?,
        screenshot,
    })
}

/// The distinct URLs in Chromium's network log.
fn fetched(net_log: &Value) -> anyhow::Result<Vec<String>> {
    let events = net_log["events"].as_array().context("no events")?;
    // The log is never empty: Chromium logs its own events even if a page requests nothing.
    ensure!(!events.is_empty(), "an empty log");
    let mut fetched: Vec<String> = events
        .iter()
        .filter_map(|event| event["params"]["url"].as_str().map(str::to_owned))
        .collect();
    fetched.sort();
    fetched.dedup();
    Ok(fetched)
}

/// The brightness of the first pixel, where there is no text.
fn background(picture: &Path) -> anyhow::Result<u8> {
    let file = File::open(picture).with_context(|| picture.display().to_string())?;
    let mut reader = png::Decoder::new(BufReader::new(file)).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().context("too large a picture")?];
    reader.next_frame(&mut pixels)?;
    let colours = pixels.get(..3).context("an empty picture")?;
    Ok(colours.iter().copied().max().unwrap_or(0))
}
