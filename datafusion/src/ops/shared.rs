//! Inputs that several outputs share: each batch goes to the output that asks first.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Error};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use futures_core::Stream;

use crate::metrics::shareable;
use crate::stream::SendableDeviceStream;

type Item = arrow_device::Result<DeviceRecordBatch>;

/// The state of a repartitioning node: the runs of its inputs.
///
/// A run belongs to the node, as in DataFusion: its outputs may be started with one task context or with one each, at any time, even
/// after others have been dropped. Starting an output again begins the next run. While runs overlap, contexts tell them apart; what they cannot
/// tell is an error, since rows would be lost otherwise.
#[derive(Default)]
pub(super) struct Shared(Mutex<Runs>);

#[derive(Default)]
struct Runs {
    /// Those of which outputs are still to be started.
    open: Vec<Run>,
    /// Who has started the outputs of the others, if they were several.
    closed: Vec<Started>,
}

struct Run {
    inputs: Arc<Inputs>,
    started: Started,
}

/// With which context each output has been started, if it has. Weak, so that no other context has the same address.
struct Started(Vec<Option<Weak<TaskContext>>>);

impl Started {
    fn with(&self, output: usize, context: &Arc<TaskContext>) -> bool {
        let own = self.0[output].as_ref();
        own.is_some_and(|own| own.as_ptr() == Arc::as_ptr(context))
    }

    fn any_with(&self, context: &Arc<TaskContext>) -> bool {
        (0..self.0.len()).any(|output| self.with(output, context))
    }
}

impl Run {
    fn has(&self, output: usize) -> bool {
        self.started.0[output].is_some()
    }

    /// Whether an output's stream is there.
    fn is_read(&self) -> bool {
        Arc::strong_count(&self.inputs) > 1
    }
}

impl Shared {
    /// The stream of output number `output` of `outputs`. The first output of a run starts the inputs.
    ///
    /// # Errors
    /// Returns the error of `start`, and an error if it cannot be told which run the output belongs to.
    pub(super) fn output(
        &self,
        output: usize,
        outputs: usize,
        context: &Arc<TaskContext>,
        start: impl FnOnce(&Arc<TaskContext>) -> Result<Vec<SendableDeviceStream>>,
        schema: SchemaRef,
        device_type: ArrowDeviceType,
    ) -> Result<Output> {
        // They are dropped after the lock.
        let mut abandoned = Vec::new();
        let mut runs = unpoisoned(&self.0);
        let Runs { open, closed } = &mut *runs;
        closed.retain(|started| started.0.iter().flatten().any(|c| c.strong_count() > 0));
        let taken = |run: &Started| run.any_with(context) && !run.with(output, context);
        if closed.iter().any(taken) {
            // Another run has got this output of the context's own.
            return Err(ambiguous(output));
        }
        let mut own = open.iter().position(|run| run.started.any_with(context));
        if own.is_none() && open.len() > 1 {
            abandoned.extend(open.extract_if(.., |run| !run.is_read()));
        }
        match (own, &open[..]) {
            (None, [run]) if !run.has(output) => own = Some(0),
            (None, [run]) if !run.is_read() => abandoned.extend(open.pop()),
            (None, [_, _, ..]) => return Err(ambiguous(output)),
            (Some(i), _) if open[i].has(output) && open[i].is_read() => {
                return Err(ambiguous(output));
            }
            (Some(i), _) if open[i].has(output) => {
                abandoned.push(open.swap_remove(i));
                own = None;
            }
            _ => {}
        }
        let mut run = match own {
            Some(i) => open.swap_remove(i),
            None => Run {
                inputs: Arc::new(Inputs::new(start(context)?, outputs)),
                started: Started(vec![None; outputs]),
            },
        };
        run.started.0[output] = Some(Arc::downgrade(context));
        let inputs = run.inputs.clone();
        if run.started.0.iter().any(Option::is_none) {
            open.push(run);
        } else if (0..outputs).any(|output| !run.started.with(output, context)) {
            // From here on, the outputs alone keep the inputs.
            closed.push(run.started);
        }
        Ok(Output {
            inputs,
            number: output,
            schema,
            device_type,
        })
    }
}

fn ambiguous(output: usize) -> DataFusionError {
    DataFusionError::Execution(format!(
        "DeviceRepartitionExec: partition {output} was started twice, or by a second run, while other partitions of the first run have not \
         been started; give each run of a plan a task context of its own and start all of its partitions, or reset the plan's state"
    ))
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

/// What a panic left is used only where no panic could have happened in between.
fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tasks that wait for an input, by output.
struct Waiting(Mutex<Vec<Option<Waker>>>);

impl Waiting {
    fn set(&self, output: usize, waker: Option<Waker>) {
        let before = std::mem::replace(&mut unpoisoned(&self.0)[output], waker);
        drop(before);
    }

    fn wake_all(&self) {
        let wakers: Vec<_> = unpoisoned(&self.0)
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// What an input wakes: all outputs that wait, of which the first polls it. It is polled once for each wake-up, however many they are.
struct Signal {
    waiting: Arc<Waiting>,
    /// There may be something: it has called since its stream last had nothing.
    called: AtomicBool,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.called.store(true, SeqCst);
        self.waiting.wake_all();
    }
}

/// An input. An output takes the stream out to poll it.
#[derive(Default)]
struct Input {
    /// `None` while an output polls it, and after the end.
    stream: Option<SendableDeviceStream>,
    polled: bool,
    panicked: bool,
    /// The outputs that came while another polled it.
    passed: Vec<Waker>,
}

/// Says so if polling an input panics.
struct OnPanic<'a>(&'a Inputs, &'a Mutex<Input>);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            unpoisoned(self.1).panicked = true;
            self.0.waiting.wake_all();
        }
    }
}

struct Inputs {
    inputs: Vec<(Mutex<Input>, Arc<Signal>)>,
    /// The first error, which every output returns.
    error: OnceLock<Error>,
    waiting: Arc<Waiting>,
}

impl Inputs {
    fn new(streams: Vec<SendableDeviceStream>, outputs: usize) -> Self {
        let waiting = Arc::new(Waiting(Mutex::new(vec![None; outputs])));
        let input = |stream| {
            let input = Input {
                stream: Some(stream),
                ..Input::default()
            };
            let signal = Signal {
                waiting: waiting.clone(),
                called: AtomicBool::new(true),
            };
            (Mutex::new(input), Arc::new(signal))
        };
        Self {
            inputs: streams.into_iter().map(input).collect(),
            error: OnceLock::new(),
            waiting,
        }
    }

    /// The next batch of an input that is ready: of the output's own if possible. An input that another output polls at the
    /// moment is left to it; that output wakes this one when it is done.
    fn poll(&self, output: usize, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.waiting.set(output, Some(cx.waker().clone()));
        let mut pending = false;
        for i in 0..self.inputs.len() {
            if let Some(e) = self.error.get() {
                return Poll::Ready(Some(Err(e.clone())));
            }
            let (input, signal) = &self.inputs[(output + i) % self.inputs.len()];
            match self.poll_input(input, signal, cx.waker()) {
                Poll::Ready(Some(item)) => {
                    self.waiting.set(output, None);
                    return Poll::Ready(Some(item));
                }
                Poll::Ready(None) => {}
                Poll::Pending => pending = true,
            }
        }
        match self.error.get() {
            // It came after this output had asked; the wake-up may have come before it waited.
            Some(e) => Poll::Ready(Some(Err(e.clone()))),
            None if pending => Poll::Pending,
            None => Poll::Ready(None),
        }
    }

    /// Polls an input that has called, unless another output does: then `own` is woken after it.
    fn poll_input(
        &self,
        input: &Mutex<Input>,
        signal: &Arc<Signal>,
        own: &Waker,
    ) -> Poll<Option<Item>> {
        let mut state = unpoisoned(input);
        if state.panicked {
            drop(state);
            return Poll::Ready(Some(self.fail(Error::Panic {
                operation: "DeviceRepartitionExec",
                message: "another partition's task panicked in an input".into(),
            })));
        }
        if state.polled {
            state.passed.push(own.clone());
            return Poll::Pending;
        }
        let Some(mut stream) = state.stream.take() else {
            return Poll::Ready(None);
        };
        // What calls from here on is for the next poll.
        if !signal.called.swap(false, SeqCst) {
            state.stream = Some(stream);
            return Poll::Pending;
        }
        state.polled = true;
        drop(state);
        let on_panic = OnPanic(self, input);
        let waker = Waker::from(signal.clone());
        let next = stream.as_mut().poll_next(&mut Context::from_waker(&waker));
        drop(on_panic);

        let mut state = unpoisoned(input);
        state.polled = false;
        let passed = std::mem::take(&mut state.passed);
        if next.is_ready() {
            // There may be more.
            signal.called.store(true, SeqCst);
        }
        let goes_on = matches!(next, Poll::Pending | Poll::Ready(Some(Ok(_))));
        // An error of another input ends this one, too.
        if goes_on && self.error.get().is_none() {
            state.stream = Some(stream);
            drop(state);
        } else {
            drop(state);
            drop(stream);
        }
        let next = match next {
            Poll::Ready(Some(Err(e))) => Poll::Ready(Some(self.fail(e))),
            next => {
                // After the end, an output may wait for nothing any more.
                if matches!(next, Poll::Ready(None)) {
                    self.waiting.wake_all();
                }
                next
            }
        };
        passed.into_iter().for_each(Waker::wake);
        next
    }

    /// Ends all inputs with an error.
    fn fail(&self, e: Error) -> Item {
        let e = self.error.get_or_init(|| shareable(e)).clone();
        for (input, _) in &self.inputs {
            // One that is being polled is dropped by the output that polls it.
            let stream = unpoisoned(input).stream.take();
            drop(stream);
        }
        self.waiting.wake_all();
        Err(e)
    }
}

/// An output's stream.
pub(super) struct Output {
    inputs: Arc<Inputs>,
    number: usize,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl Drop for Output {
    fn drop(&mut self) {
        self.inputs.waiting.set(self.number, None);
    }
}

impl Stream for Output {
    type Item = Item;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.inputs.poll(self.number, cx)
    }
}

impl DeviceRecordBatchStream for Output {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
