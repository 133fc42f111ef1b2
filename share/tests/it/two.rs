//! Two processes: a test runs a part of itself in a child.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use arrow_device_share::{Error, socket_pair};

/// Which part a child runs.
const ROLE: &str = "ARROW_DEVICE_SHARE_ROLE";

/// What a child says at the start of each line that is for its parent, since the test harness writes, too.
const MARK: &str = "#> ";

/// A child that runs a test of this program as another part of it.
pub(crate) struct Other {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

/// Returns the part that this process is to run of a test, if it is a child.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Says something to the parent.
pub(crate) fn say(what: &str) {
    println!("{MARK}{what}");
    std::io::stdout().flush().unwrap();
}

/// The socket that the parent has given to this child.
pub(crate) fn socket() -> OwnedFd {
    use std::os::fd::AsFd;
    std::io::stdin().as_fd().try_clone_to_owned().unwrap()
}

/// Stays until it is killed.
pub(crate) fn stay() -> ! {
    loop {
        std::thread::park();
    }
}

impl Other {
    /// Starts a child that runs the test of this name as `role`, with this as its standard input.
    pub(crate) fn start(test: &str, role: &str, input: impl Into<Stdio>) -> Self {
        Self::of(
            Command::new(std::env::current_exe().unwrap()),
            test,
            role,
            input,
        )
    }

    pub(crate) fn of(
        mut command: Command,
        test: &str,
        role: &str,
        input: impl Into<Stdio>,
    ) -> Self {
        let arguments = ["--exact", "--nocapture", "--test-threads=1", test];
        let mut child = command
            .args(arguments)
            .env(ROLE, role)
            .stdin(input)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// As [`start`](Self::start), with a socket to the child.
    pub(crate) fn connected(test: &str, role: &str) -> Result<(Self, OwnedFd), Error> {
        let (here, there) = socket_pair()?;
        Ok((Self::start(test, role, there), here))
    }

    /// Waits until the child says this.
    #[track_caller]
    pub(crate) fn expect(&mut self, what: &str) {
        assert_eq!(self.line().as_deref(), Some(what));
    }

    /// Returns what the child says next.
    pub(crate) fn line(&mut self) -> Option<String> {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        // The harness writes the test's name before, without an end of the line.
        lines.find_map(|line| Some(line.split_once(MARK)?.1.to_owned()))
    }

    /// Ends the child at once, wherever it is.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the child's test has passed.
    #[track_caller]
    pub(crate) fn passed(mut self) {
        while self.line().is_some() {}
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the other process: {status}");
    }
}

/// Runs a test in a process of its own, in which no other test opens or maps anything. Returns whether this is that process.
pub(crate) fn alone(test: &str) -> bool {
    if role().as_deref() == Some("alone") {
        return true;
    }
    if role().is_none() {
        Other::start(test, "alone", Stdio::null()).passed();
    }
    false
}

/// What this process has open, and mapped of memory files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    files: usize,
    mappings: usize,
}

impl Held {
    /// Waits until this process has what it had then: nobody waits for the thread of a publisher that is gone.
    #[track_caller]
    pub(crate) fn assert_again(self, what: &str) {
        let start = std::time::Instant::now();
        while Self::now() != self && start.elapsed() < std::time::Duration::from_secs(60) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(Self::now(), self, "{what}");
    }

    pub(crate) fn now() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            files: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: maps.matches("memfd:arrow-device").count(),
        }
    }
}
