//! A virtual machine and its console.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use crate::{
    arch::Arch,
    process::{KillOnDrop, output},
};

/// The processor of a machine and its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clock {
    /// Emulated, with a clock that counts instructions: timers are exact under any load of this host, and waiting takes
    /// no time.
    Instructions,
    /// Emulated, with this host's time.
    Host,
    /// Emulated, with a clock that runs this many times as fast as this host's, in step with other machines of the same
    /// speed. In the machine, the CPU appears slower by the same factor.
    Faster(f64),
    /// This host's CPU, with KVM.
    Kvm,
}

pub(crate) struct Machine<'a> {
    pub(crate) arch: Arch,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// A raw image, /dev/vda. A machine with a disk may reboot; without one it ends instead.
    pub(crate) disk: Option<&'a Path>,
    /// The argument of QEMU's `-nic`; without it there is no network.
    pub(crate) network: Option<&'a str>,
    pub(crate) clock: Clock,
    /// Number of CPUs; a machine that counts instructions has one.
    pub(crate) processors: u32,
    pub(crate) memory_mib: u32,
    /// Added to the kernel's command line.
    pub(crate) command_line: &'a str,
    /// Time after which the machine is stopped.
    pub(crate) limit: Duration,
}

impl Machine<'_> {
    /// Boots the machine and passes each line of its console to `line` until it powers off.
    pub(crate) fn boot(&self, mut line: impl FnMut(&str)) -> anyhow::Result<()> {
        let program = format!("qemu-system-{}", self.arch.rpm());
        // The minimum that Debian's kernels need.
        let (cpu, console) = match self.arch {
            // Linux counts ticks for a moment, and panics if there are too few, as on a busy host.
            Arch::Amd64 => ("Nehalem", "ttyS0 no_timer_check"),
            Arch::Arm64 => ("cortex-a57", "ttyAMA0"),
        };
        let processors = self.processors.to_string();
        let mut qemu = Command::new(&program);
        if self.arch == Arch::Arm64 {
            qemu.args(["-machine", "virt"]);
        }
        match self.clock {
            // 2 ns per instruction, like a slow CPU.
            Clock::Instructions => qemu
                .args(["-accel", "tcg,thread=single", "-cpu", cpu])
                .args(["-icount", "shift=1,sleep=off", "-rtc", "clock=vm"])
                .args(["-smp", "1"]),
            Clock::Host | Clock::Faster(_) => qemu
                .args(["-accel", "tcg,thread=multi", "-cpu", cpu])
                .args(["-smp", &processors]),
            Clock::Kvm => qemu
                .args(["-accel", "kvm", "-cpu", "host"])
                .args(["-smp", &processors]),
        };
        if let Clock::Faster(speed) = self.clock {
            qemu.envs(faster(speed)?);
        }
        match self.disk {
            Some(disk) => qemu.arg("-drive").arg(format!(
                "file={},format=raw,if=virtio,cache=unsafe",
                disk.display()
            )),
            None => qemu.arg("-no-reboot"),
        };
        qemu.args(["-nic", self.network.unwrap_or("none")])
            .args(["-nographic", "-m"])
            .arg(self.memory_mib.to_string())
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .arg("-append")
            .arg(format!(
                "console={console} quiet panic=-1 mitigations=off {}",
                self.command_line
            ));
        let mut machine = KillOnDrop(
            qemu.stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .context(program)?,
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
                    bail!("the virtual machine did not end within {:?}", self.limit)
                }
            }
        }
    }
}

/// The environment that accelerates a program's clocks by this factor: libfaketime, located with `faketime`. `faketime`
/// itself would be a process that waits in front of the machine's.
fn faster(speed: f64) -> anyhow::Result<[(&'static str, String); 2]> {
    const LIBRARY: &str = "LD_PRELOAD";
    let mut faketime = Command::new("faketime");
    // "-m": the library for programs with threads.
    let library = output(faketime.args(["-m", "-f", "+0", "printenv", LIBRARY]))?;
    Ok([(LIBRARY, library), ("FAKETIME", format!("+0 x{speed}"))])
}
