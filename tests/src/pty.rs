//! A private terminal with a program on it, whose screen a test reads.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    num::NonZeroU16,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::{fs::OpenOptionsExt as _, process::CommandExt as _},
    },
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    fcntl::OFlag,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    pty::{PtyMaster, Winsize, grantpt, posix_openpt, ptsname_r, unlockpt},
    sys::{
        signal::{Signal, kill},
        termios::{Termios, tcgetattr},
    },
    unistd::{Pid, setsid},
};
use rto_testbed::{
    process::KillOnDrop,
    wait::{TIMEOUT, eventually},
};

/// Rows and columns: the size in which everything must work.
const SIZE: (u16, u16) = (24, 80);
/// The same width, and rows for everything that a verb prints.
const TALL: (u16, u16) = (2_000, 80);
/// Pause between two checks of a program that may have ended.
const STEP: Duration = Duration::from_millis(20);

/// A pseudo-terminal and the program on it; killed by its pid and reaped when dropped.
pub struct Terminal {
    master: PtyMaster,
    /// Kept open, so that the terminal settings can be read after the program has ended.
    slave: File,
    before: Termios,
    child: KillOnDrop,
    parser: vt100::Parser,
}

/// The state of the terminal after the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Exit status.
    pub status: ExitStatus,
    /// Whether the terminal settings are restored.
    pub settings: bool,
    /// Whether the original screen and the cursor are restored.
    pub screen: bool,
}

impl Left {
    /// Whether the program succeeded and restored the terminal.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.status.success() && self.settings && self.screen
    }
}

impl Terminal {
    /// Starts a program with a new terminal of 80 columns and 24 rows as its controlling terminal.
    pub fn start(command: Command) -> anyhow::Result<Self> {
        Self::of_size(command, SIZE)
    }

    /// All that a program prints on a terminal of 80 columns. Lines that are wider are joined.
    pub fn all_printed(command: Command) -> anyhow::Result<String> {
        Self::of_size(command, TALL)?.printed()
    }

    fn of_size(mut command: Command, size: (u16, u16)) -> anyhow::Result<Self> {
        let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let master = posix_openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let slave = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open(ptsname_r(&master)?)?;
        set_size(&slave, size)?;
        let before = tcgetattr(&slave)?;
        command
            .env("TERM", "xterm-256color")
            .stdin(slave.try_clone()?)
            .stdout(slave.try_clone()?)
            .stderr(slave.try_clone()?);
        // SAFETY: between fork and exec only system calls are made; nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                // Stdin is the terminal by now.
                if libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        Ok(Self {
            child: KillOnDrop(command.spawn()?),
            master,
            slave,
            before,
            parser: vt100::Parser::new(one(size.0), one(size.1), 0),
        })
    }

    /// Types text, and control characters as a keyboard sends them.
    pub fn press(&mut self, keys: &str) -> anyhow::Result<()> {
        Ok(self.master.write_all(keys.as_bytes())?)
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.0.id())?);
        Ok(kill(pid, signal)?)
    }

    /// Resizes the terminal; the kernel sends the program SIGWINCH.
    pub fn resize(&mut self, rows: u16, columns: u16) -> anyhow::Result<()> {
        self.parser.screen_mut().set_size(one(rows), one(columns));
        Ok(set_size(&self.slave, (rows, columns))?)
    }

    /// Waits until the screen satisfies a condition; returns its text.
    pub fn wait_for(&mut self, what: &str, is: impl Fn(&str) -> bool) -> anyhow::Result<String> {
        let shown = eventually(what, TIMEOUT, || {
            // The status is taken first, so that everything written before the exit is then read.
            let ended = self.child.0.try_wait()?;
            while self.read(STEP)? && ended.is_some() {}
            let text = self.parser.screen().contents();
            if is(&text) {
                return Ok(Some(text));
            }
            if let Some(status) = ended {
                bail!("{status} before it was shown");
            }
            Ok(None)
        });
        shown.with_context(|| format!("the screen shows:\n{}", self.parser.screen().contents()))
    }

    /// Whether the screen has any colour.
    #[must_use]
    pub fn has_colours(&self) -> bool {
        let screen = self.parser.screen();
        let (rows, columns) = screen.size();
        let columns = columns.get();
        let cells = (0..rows.get()).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let mut cells = cells.filter_map(|(row, column)| screen.cell(row, column));
        cells.any(|cell| cell.fgcolor() != vt100::Color::Default)
    }

    /// Waits until the program exits, and returns what it has printed, at most a screen. Lines that are wider than the
    /// terminal are joined.
    pub fn printed(mut self) -> anyhow::Result<String> {
        self.end()?;
        Ok(self.parser.screen().contents().trim_end().to_owned())
    }

    /// Waits until the program exits.
    pub fn left(mut self) -> anyhow::Result<Left> {
        let status = self.end()?;
        let screen = self.parser.screen();
        Ok(Left {
            status,
            settings: tcgetattr(&self.slave)? == self.before,
            screen: !screen.alternate_screen() && !screen.hide_cursor(),
        })
    }

    /// Waits until the program exits, and reads everything it has written.
    fn end(&mut self) -> anyhow::Result<ExitStatus> {
        let status = eventually("end of the program", TIMEOUT, || {
            // Output that is not read may keep the program from exiting.
            self.read(STEP)?;
            Ok(self.child.0.try_wait()?)
        });
        let status = status.with_context(|| self.parser.screen().contents())?;
        while self.read(Duration::ZERO)? {}
        Ok(status)
    }

    /// Reads what the program has written; returns whether there was any within `limit`.
    fn read(&mut self, limit: Duration) -> anyhow::Result<bool> {
        let mut fds = [PollFd::new(self.master.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::try_from(limit)?)? == 0 {
            return Ok(false);
        }
        let mut buffer = [0; 4096];
        let length = self.master.read(&mut buffer)?;
        self.parser.process(&buffer[..length]);
        Ok(length > 0)
    }
}

/// A dimension of a screen, which is at least 1.
fn one(length: u16) -> NonZeroU16 {
    NonZeroU16::new(length).unwrap_or(NonZeroU16::MIN)
}

fn set_size(terminal: &File, (rows, columns): (u16, u16)) -> io::Result<()> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the file is open and the kernel only reads the size.
    let done = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
