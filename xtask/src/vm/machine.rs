//! A virtual machine and its console.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::{arch::Arch, process::output};

/// The processor of a machine and its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clock {
    /// Emulated, with a clock that counts instructions: timers are exact under any load of this host, and waiting takes
    /// no time.
    Instructions,
    /// Emulated, with a clock that runs this many times as fast as this host's, in step with other machines of the same
    /// speed. In the machine, the CPU appears slower by the same factor.
    Host { speed: f64 },
}

impl Clock {
    /// This host's time.
    pub(crate) const HOST: Self = Self::Host { speed: 1.0 };
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

impl<'a> Machine<'a> {
    /// An amd64 machine without disk and network, whose clock counts instructions.
    pub(crate) fn new(kernel: &'a Path, initramfs: &'a Path, limit: Duration) -> Self {
        Self {
            arch: Arch::Amd64,
            kernel,
            initramfs,
            disk: None,
            network: None,
            clock: Clock::Instructions,
            processors: 2,
            memory_mib: 2048,
            command_line: "",
            limit,
        }
    }

    /// Boots the machine and passes each line of its console to `line` until it powers off.
    pub(crate) fn boot(&self, mut line: impl FnMut(&str)) -> anyhow::Result<()> {
        /// Exit status of timeout(1).
        const TIMED_OUT: i32 = 124;
        let mut machine = self
            .command()?
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("timeout")?;
        let stdout = machine.stdout.take().context("no stdout")?;
        for bytes in BufReader::new(stdout).split(b'\n') {
            line(String::from_utf8_lossy(&bytes?).trim_end_matches('\r'));
        }
        let status = machine.wait()?;
        if status.code() == Some(TIMED_OUT) {
            bail!("the virtual machine did not end within {:?}", self.limit);
        }
        if !status.success() {
            bail!("QEMU: {status}");
        }
        Ok(())
    }

    fn command(&self) -> anyhow::Result<Command> {
        // The minimum that Debian's kernels need.
        let (cpu, console) = match self.arch {
            // Linux counts ticks for a moment, and panics if there are too few, as on a busy host.
            Arch::Amd64 => ("Nehalem", "ttyS0 no_timer_check"),
            Arch::Arm64 => ("cortex-a57", "ttyAMA0"),
        };
        let processors = self.processors.to_string();
        let mut qemu = Command::new("timeout");
        // In the foreground, so that the terminal's signals reach QEMU.
        qemu.args(["--foreground", "--kill-after=10"])
            .arg(self.limit.as_secs_f64().to_string());
        if let Clock::Host { speed } = self.clock
            && speed > 1.0
        {
            qemu.arg("env").args(faster(speed)?);
        }
        qemu.arg(format!("qemu-system-{}", self.arch.rpm()));
        if self.arch == Arch::Arm64 {
            qemu.args(["-machine", "virt"]);
        }
        match self.clock {
            // 2 ns per instruction, like a slow CPU.
            Clock::Instructions => qemu
                .args(["-accel", "tcg,thread=single", "-cpu", cpu, "-smp", "1"])
                .args(["-icount", "shift=1,sleep=off", "-rtc", "clock=vm"]),
            Clock::Host { .. } => qemu
                .args(["-accel", "tcg,thread=multi", "-cpu", cpu])
                .args(["-smp", &processors]),
        };
        match self.disk {
            Some(disk) => qemu.arg("-drive").arg(format!(
                "file={},format=raw,if=virtio,cache=unsafe",
                disk.display()
            )),
            None => qemu.arg("-no-reboot"),
        };
        qemu.args(["-nic", self.network.unwrap_or("none"), "-nographic"])
            .args(["-m", &self.memory_mib.to_string()])
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .arg("-append")
            .arg(format!(
                "console={console} quiet panic=-1 mitigations=off {}",
                self.command_line
            ));
        Ok(qemu)
    }
}

/// The environment that accelerates a program's clocks by this factor: libfaketime, located with `faketime`. `faketime`
/// itself would be a process that waits in front of the machine's.
fn faster(speed: f64) -> anyhow::Result<[String; 2]> {
    let mut faketime = Command::new("faketime");
    // "-m": the library for programs with threads.
    let library = output(faketime.args(["-m", "-f", "+0", "printenv", "LD_PRELOAD"]))?;
    Ok([
        format!("LD_PRELOAD={library}"),
        format!("FAKETIME=+0 x{speed}"),
    ])
}
