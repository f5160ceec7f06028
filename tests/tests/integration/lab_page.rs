//! The lab's pages in a browser: no errors, no requests, light and dark.

use rto_tests::browser::{Scheme, Seen, look};

use crate::prelude::*;

/// The directory for screenshots: `target/screenshots`.
fn pictures() -> anyhow::Result<PathBuf> {
    let program = beside("rto-lab")?;
    let target = program.ancestors().nth(2).context("no target directory")?;
    Ok(target.join("screenshots"))
}

/// The faults of a rendered page.
fn faults(seen: &Seen, scheme: Scheme) -> Vec<String> {
    let mut faults = seen.console.clone();
    faults.extend(seen.fetched.iter().map(|url| format!("fetched {url}")));
    let as_asked = match scheme {
        Scheme::Light => seen.background > 230,
        Scheme::Dark => seen.background < 60,
    };
    if !as_asked {
        faults.push(format!("{scheme:?}: the background is {}", seen.background));
    }
    faults
}

/// Writes a copy of a page with `with` at the end of its body.
fn spoilt(page: &Path, with: &str) -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string(page)?;
    let (before, after) = text.split_once("</body>").context("no body")?;
    let path = page.with_file_name("spoilt.html");
    fs::write(&path, format!("{before}{with}</body>{after}"))?;
    Ok(path)
}

test!(a_page_has_no_error_and_fetches_nothing, needs = [BROWSER]);
fn a_page_has_no_error_and_fetches_nothing() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let args = [
        "--mechanism",
        "agent,kernel",
        "--rto-min",
        "8ms",
        "--disruption",
        "10ms,60ms",
    ];
    quick("blackout", out.path(), &args)?;
    let page = out.path().join("blackout.html");
    let pictures = pictures()?;
    let mut sizes = Vec::new();
    for scheme in Scheme::BOTH {
        let seen = look(&page, scheme, &pictures)?;
        let faults = faults(&seen, scheme);
        ensure!(faults.is_empty(), "{scheme:?}: {faults:#?}");
        sizes.push(fs::metadata(&seen.screenshot)?.len());
    }
    // Text and charts; a screenshot of an empty page is about 10 kB.
    ensure!(sizes.iter().all(|size| *size > 30_000), "{sizes:?}");
    // The control: each fault is detected.
    for (with, fault) in [
        ("<script>draw(undefined)</script>", "draw is not defined"),
        ("<script>const a = ;</script>", "SyntaxError"),
        (
            "<img src=\"https://example.com/a.png\">",
            "fetched https://example.com/a.png",
        ),
        (
            "<style>body { background: #fff !important }</style>",
            "the background is 255",
        ),
    ] {
        let spoilt = spoilt(&page, with)?;
        let seen = look(&spoilt, Scheme::Dark, out.path())?;
        let faults = faults(&seen, Scheme::Dark);
        ensure!(
            matches!(&faults[..], [only] if only.contains(fault)),
            "{with}: {faults:#?}"
        );
    }
    Ok(())
}
