//! Kernels in the order of queues, with much work under way: a missing wait would be a wrong value.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Float64Array, Int64Array, RecordBatch};
use arrow_device::device::DevicePtr;
use arrow_device::{Device, DeviceArray, DeviceBufferMut, ExportOptions, Queue, SyncPolicy};
use arrow_schema::{DataType, Field};
use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

use super::example;
use crate::gpu_suite::everywhere;
use crate::kernel_suite::{self, Kernels};
use crate::support::assert_same;
use crate::vendor::{DEVICE, MEMORIES};

const ROUNDS: usize = 200;
/// Rounds that are under way at once.
const AHEAD: usize = 4;

/// The kernel `fill_i64(out, value, n)`.
pub(crate) fn fill_kernel(device: &Device) -> CudaFunction {
    let context = device.cuda_context().unwrap();
    let module = context.load_module(Ptx::from_src(include_str!("fill.ptx")));
    module.unwrap().load_function("fill_i64").unwrap()
}

/// Queues `fill_i64` at an address.
pub(crate) fn fill_at(kernel: &CudaFunction, queue: &Queue, at: DevicePtr, value: i64, n: usize) {
    let stream = queue.cuda_stream().unwrap();
    let address = at.address() as u64;
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&address).arg(&value).arg(&n);
    // SAFETY: the arguments are the kernel's parameters. Callers pass memory for `n` values; one
    // test passes none, so that the kernel fails.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32)) }.unwrap();
}

/// A column of `rows` times `value`, made by a kernel.
fn filled(kernel: &CudaFunction, queue: &Queue, value: i64, rows: usize) -> DeviceArray {
    let memory = DeviceBufferMut::allocate(queue, rows * 8).unwrap();
    fill_at(kernel, queue, memory.address(), value, rows);
    let values = memory.freeze().unwrap();
    DeviceArray::from_values(DataType::Int64, rows, values, None).unwrap()
}

#[test]
fn a_kernels_results_are_ready_before_they_are_read() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let kernel = fill_kernel(&device);
            let context = device.cuda_context().unwrap();
            let given = Queue::from_cuda_stream(&device, context.new_stream().unwrap()).unwrap();
            let queues = [device.default_queue(), device.new_queue().unwrap(), given];
            let check = |value: usize, column: DeviceArray| {
                let back = column.to_host().unwrap();
                let back = back.as_primitive::<Int64Type>();
                let wrong = back.values().iter().position(|v| *v != value as i64);
                assert_eq!(wrong, None, "{memory:?}, round {value}");
            };
            let mut ahead = VecDeque::new();
            for round in 0..ROUNDS {
                let queue = &queues[round % queues.len()];
                let rows = place.rows - round;
                ahead.push_back((round, filled(&kernel, queue, round as i64, rows)));
                if ahead.len() > AHEAD {
                    let (round, column) = ahead.pop_front().unwrap();
                    check(round, column);
                }
            }
            ahead
                .into_iter()
                .for_each(|(round, column)| check(round, column));
            drop((queues, kernel, context));
            device.assert_done();
        }
    });
}

/// What a kernel makes of a sliced column is null where that is, in every kind of memory: read back, copied,
/// out through the C structs and in again.
#[test]
fn a_kernels_result_has_the_nulls_of_its_sliced_input() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let kernel = fill_kernel(&device);
            let queue = device.new_queue().unwrap();
            let input: Int64Array = (0..200).map(|i| (i % 7 != 3).then_some(i)).collect();
            let up = device.upload_array(&input).unwrap();
            for offset in [0, 3, 8, 13, 17] {
                let context = format!("{memory:?}, rows from {offset}");
                let rows = 200 - offset;
                let out = filled(&kernel, &queue, 42, rows).buffer(1).unwrap();
                let part = up.slice(offset, rows).unwrap();
                let out = part.with_values(DataType::Int64, out).unwrap();
                let nulls = input.slice(offset, rows).nulls().cloned();
                let expected = Int64Array::new(vec![42; rows].into(), nulls);
                for (skip, rest) in [(0, rows), (5, 70)] {
                    let (part, expected) =
                        (out.slice(skip, rest).unwrap(), expected.slice(skip, rest));
                    let compact = part.compact().unwrap();
                    let field = Arc::new(Field::new("v", DataType::Int64, true));
                    let options = ExportOptions::new(SyncPolicy::Event);
                    let exported = part.export_array(&options).unwrap();
                    // SAFETY: the struct comes from an export of this crate, whose values are
                    // valid, and the type is the exported one.
                    let again = unsafe { DeviceArray::import_as(exported, field, &device.options) };
                    let again = again.unwrap();
                    assert_eq!(again.null_count(), Some(expected.null_count()), "{context}");
                    for array in [part, compact, again] {
                        assert_same(&expected, &array.to_host().unwrap(), &context);
                    }
                }
            }
            drop((up, queue, kernel));
            device.assert_done();
        }
    });
}

/// Prices and quantities of one round.
fn inputs(round: usize, rows: usize) -> [ArrayRef; 2] {
    let column = |nulls: usize, factor: f64| -> ArrayRef {
        let value = |i: usize| {
            let value = (i + round) as f64 * factor - round as f64;
            ((i + round) % nulls != 0).then_some(value)
        };
        Arc::new((0..rows).map(value).collect::<Float64Array>())
    };
    [column(7, 0.37), column(5, 1.25)]
}

fn batch(columns: [(&str, ArrayRef); 3]) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

/// On columns of every shape.
#[test]
fn the_other_kernels_of_the_example() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            example::double_and_filter(&device).unwrap_or_else(|e| panic!("{memory:?}: {e}"));
            with_kernels(&device, |kernels| kernel_suite::check(&device, kernels));
            device.assert_done();
        }
    });
}

/// Works with the example's kernels on a device.
pub(crate) fn with_kernels(device: &Device, work: impl FnOnce(&Kernels<'_>)) {
    let load = |name| example::load(device, name).unwrap();
    let (double, product) = (load("double_f64"), load("product_f64"));
    let above = example::load_above(device).unwrap();
    let queue = device.new_queue().unwrap();
    work(&Kernels {
        double: &|column| example::double(&double, column, &queue).unwrap(),
        product: &|a, b| example::product(&product, a, b, &queue).unwrap(),
        above: &|column, limit| example::above(&above, column, limit, &queue).unwrap(),
    });
}

/// Upload, kernel and download on three queues, with memory that is freed and used again meanwhile.
#[test]
fn upload_kernel_download_again_and_again() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let kernel = example::load(&device, "product_f64").unwrap();
            let (up, work) = (device.new_queue().unwrap(), device.new_queue().unwrap());
            let check = |round: usize, rows: usize, total: DeviceArray| {
                let [a, b] = inputs(round, rows);
                let back = total.to_host().unwrap();
                let sent = batch([("id", a.clone()), ("price", a.clone()), ("quantity", b)]);
                let back = batch([("id", a.clone()), ("total", back), ("", a)]);
                let same = example::check(&sent, &back);
                same.unwrap_or_else(|e| panic!("{memory:?}, round {round}: {e}"));
            };
            let mut ahead = VecDeque::new();
            for round in 0..ROUNDS {
                let rows = place.rows - round;
                let [a, b] = inputs(round, rows);
                let [a, b] = [a, b].map(|array| device.upload_array_on(&array, &up).unwrap());
                let total = example::product(&kernel, &a, &b, &work).unwrap();
                // Freed while the kernel has yet to read them; the next round may get their memory.
                drop((a, b));
                ahead.push_back((round, rows, total));
                if ahead.len() > AHEAD {
                    let (round, rows, total) = ahead.pop_front().unwrap();
                    check(round, rows, total);
                }
            }
            for (round, rows, total) in ahead {
                check(round, rows, total);
            }
            drop((up, work, kernel));
            device.assert_done();
        }
    });
}

/// Loans are arguments: of a whole buffer, and of bits, which are their address.
#[test]
fn loans_as_arguments() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let (kernel, queue) = (fill_kernel(&device), device.default_queue());
        let input: Int64Array = (0..20).map(|i| (i % 7 != 3).then_some(i)).collect();
        let up = device.upload_array(&input).unwrap();
        let values = DeviceBufferMut::allocate(&queue, 80).unwrap();
        let values = values.freeze().unwrap();
        let address = {
            let out = values.on(&queue).unwrap();
            let bits = up.validity_on(&queue).unwrap().unwrap();
            let (stream, n) = (queue.cuda_stream().unwrap(), 10usize);
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&out).arg(&bits).arg(&n);
            // SAFETY: the arguments are the kernel's parameters, with memory for all of its rows; nobody
            // reads the buffer yet.
            unsafe { launch.launch(LaunchConfig::for_num_elems(10)) }.unwrap();
            bits.address().address() as i64
        };
        let filled = DeviceArray::from_values(DataType::Int64, 10, values, None).unwrap();
        let expected = Int64Array::from(vec![address; 10]);
        assert_same(&expected, &filled.to_host().unwrap(), "filled");
        drop((up, filled, queue, kernel));
        device.assert_done();
    });
}

/// The same kernel on threads of their own, each with its queue.
#[test]
fn kernels_on_many_threads() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let kernel = fill_kernel(&device);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (device, kernel) = (&device, &kernel);
                scope.spawn(move || {
                    let queue = device.new_queue().unwrap();
                    for round in 0..50 {
                        let value = thread * 1000 + round;
                        let back = filled(kernel, &queue, value, 5000).to_host().unwrap();
                        let back = back.as_primitive::<Int64Type>();
                        assert!(back.values().iter().all(|v| *v == value), "{value}");
                    }
                });
            }
        });
        drop(kernel);
        device.assert_done();
    });
}
