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

/// The state of a repartitioning node: the runs of its inputs of which outputs are still to be started, at most one for each
/// task context.
///
/// The outputs that one task context starts share a run. The node keeps a run for the outputs that are still to be started,
/// even if all others have been dropped (each may be read by a task of its own, of which one can end before another begins),
/// until all of them have been started or the context is gone, when nobody can start one. It notices the latter when an output
/// is started or dropped.
#[derive(Default)]
pub(super) struct Shared(Arc<Mutex<Vec<Run>>>);

struct Run {
    context: Weak<TaskContext>,
    inputs: Arc<Inputs>,
    /// Which outputs have been started.
    started: Vec<bool>,
}

impl Shared {
    /// The stream of output number `output` of `outputs`. A context's first output starts the inputs, with a context of their
    /// own. An output that is started again begins a run of its own.
    ///
    /// # Errors
    /// Returns the error of `start`, and an error if the context has started this output already while not all outputs of that
    /// run have been started and some are being read: it could not be told whose the next outputs are.
    pub(super) fn output(
        &self,
        output: usize,
        outputs: usize,
        context: &Arc<TaskContext>,
        start: impl FnOnce(&Arc<TaskContext>) -> Result<Vec<SendableDeviceStream>>,
        schema: SchemaRef,
        device_type: ArrowDeviceType,
    ) -> Result<Output> {
        drop(without_context(&self.0));
        // It is dropped after the lock.
        let _abandoned;
        let mut runs = unpoisoned(&self.0);
        let same = |run: &Run| run.context.as_ptr() == Arc::as_ptr(context);
        let mut own = runs.iter().position(same).map(|i| runs.swap_remove(i));
        if own.as_ref().is_some_and(|run| run.started[output]) {
            if let Some(run) = own.take_if(|run| Arc::strong_count(&run.inputs) > 1) {
                runs.push(run);
                return Err(DataFusionError::Execution(format!(
                    "DeviceRepartitionExec: partition {output} was started twice with one task context, while other partitions of \
                     the first run have not been started; give each run of a plan a task context of its own"
                )));
            }
            _abandoned = own.take();
        }
        let mut run = match own {
            Some(run) => run,
            None => Run {
                context: Arc::downgrade(context),
                inputs: Arc::new(Inputs::new(start(&copy_of(context))?, outputs)),
                started: vec![false; outputs],
            },
        };
        run.started[output] = true;
        let inputs = run.inputs.clone();
        // From the last on, the outputs alone keep the inputs.
        if run.started.contains(&false) {
            runs.push(run);
        }
        Ok(Output {
            inputs,
            number: output,
            schema,
            device_type,
            runs: Arc::downgrade(&self.0),
        })
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

/// Takes the runs whose context is gone, to be dropped without the lock.
fn without_context(runs: &Mutex<Vec<Run>>) -> Vec<Run> {
    let gone = |run: &mut Run| run.context.strong_count() == 0;
    unpoisoned(runs).extract_if(.., gone).collect()
}

/// A context for inputs. What they keep of it does not keep the one that it was made of, whose end is the end of the run.
fn copy_of(context: &TaskContext) -> Arc<TaskContext> {
    Arc::new(TaskContext::new(
        context.task_id(),
        context.session_id(),
        context.session_config().clone(),
        context.scalar_functions().clone(),
        context.higher_order_functions().clone(),
        context.aggregate_functions().clone(),
        context.window_functions().clone(),
        context.runtime_env(),
    ))
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
    runs: Weak<Mutex<Vec<Run>>>,
}

impl Drop for Output {
    fn drop(&mut self) {
        self.inputs.waiting.set(self.number, None);
        if let Some(runs) = self.runs.upgrade() {
            drop(without_context(&runs));
        }
    }
}

impl Stream for Output {
    type Item = Item;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.inputs.poll(self.number, cx)
    }
}

impl DeviceRecordBatchStream for Output {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
