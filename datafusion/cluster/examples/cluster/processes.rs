//! The cluster's processes: each is this program again, with a role.
//!
//! A process says when it is ready, and then what it has done, in lines of its standard output. It ends when its standard input ends,
//! so it ends with the program that has started it, in every case.

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use datafusion::error::{DataFusionError, Result};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::report::Task;

/// How long a process may take to start, or to answer.
const LONG: Duration = Duration::from_secs(60);

/// A process with a role.
pub(crate) struct Process {
    name: String,
    child: Child,
    input: ChildStdin,
    /// Where it is and what device it has, as it said when it was ready.
    address: String,
    device: String,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a process and waits until it is ready.
    pub(crate) async fn start(engine: &str, name: &str, role: &[&str]) -> Result<Self> {
        Self::start_program(&std::env::current_exe()?, engine, name, role).await
    }

    /// Starts a process of this program, which is this example.
    pub(crate) async fn start_program(
        program: &Path,
        engine: &str,
        name: &str,
        role: &[&str],
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command.args([engine, "--role"]).args(role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = pipes else {
            return Err(failed(name, "has no pipes"));
        };
        let mut this = Self {
            name: name.to_owned(),
            child,
            input,
            address: String::new(),
            device: String::new(),
            output: BufReader::new(output).lines(),
        };
        loop {
            let line = this.line().await?;
            if let ["ready", address, device] = line.split('\t').collect::<Vec<_>>()[..] {
                this.address = address.to_owned();
                this.device = device.to_owned();
                return Ok(this);
            }
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What [`ready`] was given.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Prints what it is.
    pub(crate) fn describe(&self) {
        let id = self.child.id().unwrap_or_default();
        let (name, address, device) = (&self.name, &self.address, &self.device);
        println!("  {name}: process {id}, port {address}, {device}");
    }

    /// The tasks that it has run since it was last asked.
    pub(crate) async fn tasks(&mut self) -> Result<Vec<Task>> {
        self.input.write_all(b"?\n").await?;
        let mut tasks = Vec::new();
        loop {
            let line = self.line().await?;
            if line == "!" {
                return Ok(tasks);
            }
            tasks.extend(Task::from_line(&line));
        }
    }

    /// Ends it at once.
    pub(crate) async fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    async fn line(&mut self) -> Result<String> {
        match tokio::time::timeout(LONG, self.output.next_line()).await {
            Ok(Ok(Some(line))) => Ok(line),
            Ok(Ok(None)) => Err(failed(&self.name, "has ended")),
            Ok(Err(e)) => Err(e.into()),
            Err(_) => Err(failed(&self.name, "does not answer")),
        }
    }
}

fn failed(name: &str, what: &str) -> DataFusionError {
    DataFusionError::Execution(format!("the process of {name} {what}"))
}

/// In a process: says that it is ready, where, and which device it has.
pub(crate) fn ready(address: &str, device: &str) {
    println!("ready\t{address}\t{device}");
}

/// In a process: the tasks that have not been asked for yet.
#[derive(Clone, Default)]
pub(crate) struct Tasks(Arc<Mutex<Vec<Later>>>);

/// Says what a task has done.
type Later = Box<dyn FnOnce() -> Task + Send>;

impl Tasks {
    pub(crate) fn add(&self, task: Task) {
        self.add_later(move || task);
    }

    /// Adds a task that says what it has done once it is asked for.
    pub(crate) fn add_later(&self, task: impl FnOnce() -> Task + Send + 'static) {
        if let Ok(mut tasks) = self.0.lock() {
            tasks.push(Box::new(task));
        }
    }

    /// Answers until nobody can ask any more.
    pub(crate) async fn answer(&self) -> Result<()> {
        let mut input = BufReader::new(tokio::io::stdin()).lines();
        while let Some(line) = input.next_line().await? {
            if line == "?" {
                let tasks = self.0.lock().map(|mut tasks| std::mem::take(&mut *tasks));
                let tasks = tasks.unwrap_or_default();
                let tasks = tasks.into_iter().map(|task| task());
                tasks.for_each(|task| println!("{}", task.to_line()));
                println!("!");
            }
        }
        Ok(())
    }
}
