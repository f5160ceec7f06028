//! `rto-lab advise`.

use std::{
    fs::File,
    io::{self, Read},
    net::IpAddr,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use flate2::read::MultiGzDecoder;
use rto_agent_core::{
    advice::{answer, share},
    policy::{Cidr, HostFacts},
    printable,
};
use rto_model::{advice::Question, tune::law};
use rto_testbed::machine::Machine;

use super::{predict::duration, print};
use crate::{
    advise,
    capture::{self, Limits},
    summary::micros,
};

/// Maximum size of a capture, which is read into memory.
const LARGEST: u64 = 2 << 30;

/// `TCP_DELACK_MAX`.
const LONGEST_DELACK: Duration = Duration::from_millis(200);

/// `rto-lab advise`.
#[derive(Debug, Args)]
pub struct Advise {
    /// A capture (pcap or pcapng, also compressed with gzip; "-": standard input), or the files of one, taken on the
    /// host that the settings are for: tcpdump -s 128 -w FILE tcp
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pcap: Vec<PathBuf>,
    /// Only connections with a peer in this prefix; may be repeated
    #[arg(long, short, value_name = "CIDR")]
    cidr: Vec<Cidr>,
    /// An address of the host where the capture was taken; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    host: Vec<IpAddr>,
    /// Maximum share of spurious retransmissions, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    spurious: String,
    /// Maximum ACK delay of the peers: their delack_max, or rto_min if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms", value_parser = delack)]
    peer_delack: Duration,
    /// The capture has only one in this many packets, drawn at random, as sFlow exports them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    sampled: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Advise) -> anyhow::Result<()> {
    let files = args.pcap.iter().map(|path| read_capture(path));
    let files = files.collect::<anyhow::Result<Vec<_>>>()?;
    let names: Vec<_> = args
        .pcap
        .iter()
        .map(|path| path.to_string_lossy())
        .collect();
    let names = PathBuf::from(names.join(", "));
    let at = || printable::path(&names);
    let parts: Vec<&[u8]> = files.iter().map(Vec::as_slice).collect();
    let mut capture = capture::read_parts(&parts, Limits::default()).with_context(at)?;
    drop(files);
    if let Some(every) = args.sampled {
        capture::retain_sampled(&mut capture, every).with_context(at)?;
    }
    let here = Machine::here()?;
    let question = Question {
        hz: u32::try_from(here.hz)?,
        share: share(&args.spurious).map_err(anyhow::Error::msg)?,
        min_us: law::Settings::new(u32::try_from(here.hz)?).min_us,
        peer_delack_us: micros(args.peer_delack),
    };
    let evidence =
        advise::evidence(&names, capture, &args.cidr, &args.host, question.hz).with_context(at)?;
    let host = HostFacts::of_kernel(version(&here.kernel)?, question.hz);
    let answer = answer(evidence, &question, &host);
    print(args.json, &answer, || advise::text(&answer))
}

/// How long a peer delays an ACK.
fn delack(text: &str) -> Result<Duration, String> {
    let delay = duration(text)?;
    if delay > LONGEST_DELACK {
        return Err("must be at most 200ms, the longest time that Linux delays an ACK".to_owned());
    }
    Ok(delay)
}

/// The major and minor version of a kernel's release.
fn version(release: &str) -> anyhow::Result<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => bail!("the kernel's release is not a version: {release}"),
    }
}

/// A capture's bytes ("-": of standard input), decompressed if they are of gzip.
pub(crate) fn read_capture(path: &Path) -> anyhow::Result<Vec<u8>> {
    let at = || printable::path(path);
    let mut input: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(at)?;
        // Which may never end.
        ensure!(
            !file
                .metadata()
                .with_context(at)?
                .file_type()
                .is_char_device(),
            "{}: a device, not a capture",
            at()
        );
        Box::new(file)
    };
    let mut magic = Vec::new();
    let mut start = (&mut input).take(2);
    start.read_to_end(&mut magic).with_context(at)?;
    let is_gzip = magic == [0x1f, 0x8b];
    let whole = io::Cursor::new(magic).chain(input);
    let whole: Box<dyn Read> = match is_gzip {
        true => Box::new(MultiGzDecoder::new(whole)),
        false => Box::new(whole),
    };
    let mut bytes = Vec::new();
    whole
        .take(LARGEST + 1)
        .read_to_end(&mut bytes)
        .with_context(at)?;
    ensure!(
        bytes.len() as u64 <= LARGEST,
        "{}: larger than 2 GiB; pass a part of it (editcap -c 1000000), or capture less of each packet (tcpdump -s 128)",
        at()
    );
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_decompressed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.pcap.gz");
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        io::Write::write_all(&mut packed, b"capture").unwrap();
        let packed = packed.finish().unwrap();
        // gzip files may be concatenated.
        std::fs::write(&path, [&packed[..], &packed].concat()).unwrap();
        assert_eq!(read_capture(&path).unwrap(), b"capturecapture");
        std::fs::write(&path, &packed[..packed.len() - 9]).unwrap();
        let error = format!("{:#}", read_capture(&path).unwrap_err());
        assert!(error.contains("a.pcap.gz"), "{error}");
        std::fs::write(&path, b"x").unwrap();
        assert_eq!(read_capture(&path).unwrap(), b"x");
    }

    #[test]
    fn endless_or_oddly_named_capture_is_refused() {
        let error = read_capture(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("a device, not a capture"), "{error}");
        let error = read_capture(Path::new("/no/\u{1b}[31m.pcap")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("\\u{1b}[31m.pcap"), "{error}");
    }
}
