//! A virtual machine, and what it prints.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_testbed::process::KillOnDrop;

/// How a machine's processor is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// Emulated, and its time is the count of its instructions: a timer fires when it should however
    /// busy this host is, and waiting takes no time at all.
    Instructions,
    /// Emulated, and its time is this host's.
    Host,
    /// The host's processor, by KVM.
    Kvm,
}

/// A machine without network and without disk.
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) clock: Clock,
    pub(crate) memory_mib: u32,
    /// Added to the kernel's command line.
    pub(crate) command_line: &'a str,
    /// Stopped after this.
    pub(crate) limit: Duration,
}

impl Machine<'_> {
    /// Boots it and gives each line that it prints to `line`, until it is off.
    pub(crate) fn boot(&self, mut line: impl FnMut(&str)) -> anyhow::Result<()> {
        let mut qemu = Command::new("qemu-system-x86_64");
        match self.clock {
            // Of 2 ns for an instruction, so that a second of the machine's own is worth what one of
            // a slow processor is.
            Clock::Instructions => qemu
                .args(["-accel", "tcg,thread=single", "-cpu", "Nehalem"])
                .args(["-icount", "shift=1,sleep=off", "-rtc", "clock=vm"])
                .args(["-smp", "1"]),
            Clock::Host => qemu
                .args(["-accel", "tcg,thread=multi", "-cpu", "Nehalem"])
                .args(["-smp", "2"]),
            Clock::Kvm => qemu
                .args(["-accel", "kvm", "-cpu", "host"])
                .args(["-smp", "2"]),
        };
        qemu.args(["-nic", "none", "-nographic", "-no-reboot", "-m"])
            .arg(self.memory_mib.to_string())
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 mitigations=off {}",
                self.command_line
            ));
        let mut machine = KillOnDrop(
            qemu.stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .context("qemu-system-x86_64")?,
        );
        let stdout = machine.0.stdout.take().context("no stdout")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let end = Instant::now() + self.limit;
        loop {
            match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(bytes) => {
                    let text = String::from_utf8_lossy(&bytes);
                    line(text.trim_end_matches('\r'));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the virtual machine was not done after {:?}", self.limit)
                }
            }
        }
    }
}
