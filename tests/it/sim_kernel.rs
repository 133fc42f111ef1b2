//! The example `sim_kernel`, its own code: every shape of column, costs, and the text of the guide.

#[allow(dead_code)] // its `main`
#[path = "../../examples/sim_kernel.rs"]
mod example;

use crate::kernel_suite::Kernels;
use crate::simkit::{MODES, Sim, launch};
use arrow_array::BooleanArray;
use arrow_device::device::sim::SimMemory;
use arrow_device::{DeviceArray, DeviceBufferMut, Devices, Error};
use arrow_schema::DataType;

#[test]
fn the_kernels_of_the_example() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        let kernels = Kernels {
            double: &|column| example::double(column, &queue).unwrap(),
            product: &|a, b| example::product(a, b, &queue).unwrap(),
            above: &|column, limit| example::above(column, limit, &queue).unwrap(),
        };
        crate::kernel_suite::check(&sim, &kernels);
        crate::kernel_suite::check_costs(&sim, &kernels);
        drop(queue);
        sim.assert_done();
    }
}

#[test]
fn the_guide_shows_the_example() {
    let functions = [
        ("fn double(column: ", 15),
        ("fn product(a: ", 20),
        ("fn above(column: ", 30),
    ];
    crate::kernel_suite::check_guide(include_str!("../../examples/sim_kernel.rs"), &functions);
}

#[test]
fn only_a_simulated_devices_queue_is_one() {
    let e = Devices::cpu()
        .default_queue()
        .as_sim()
        .map(drop)
        .unwrap_err();
    assert!(matches!(e, Error::NotSupported { .. }), "{e:?}");
    let e = e.to_string();
    assert!(
        e.contains("cpu") && e.contains("Devices::simulated()"),
        "{e}"
    );
}

/// Bits are read from any bit on, and written from the first; none stands for all set.
#[test]
fn a_kernel_reads_and_writes_bitmaps() {
    let sim = Sim::new(MODES[1]);
    let queue = sim.new_queue().unwrap();
    let host: BooleanArray = (0..100).map(|i| Some(i % 3 == 0 || i % 7 == 2)).collect();
    let column = sim.upload_array(&host).unwrap();
    for (skip, rows) in [(0, 100), (1, 99), (8, 16), (13, 50), (99, 1), (50, 0)] {
        let column = column.slice(skip, rows).unwrap();
        let bits = column.booleans_on(&queue).unwrap();
        let start = (bits.address(), bits.bit_offset());
        let copied = DeviceBufferMut::allocate(&queue, rows.div_ceil(8)).unwrap();
        let to = copied.address();
        let copy = move |memory: &mut SimMemory<'_>| {
            assert_eq!(memory.bits(None, rows)?.count_set_bits(), rows);
            let bits = memory.bits(Some(start), rows)?.sliced();
            memory.write(to, &bits[..rows.div_ceil(8)])
        };
        launch(&queue, copy).unwrap();
        drop(bits);
        let copied = copied.freeze().unwrap();
        let copied = DeviceArray::from_values(DataType::Boolean, rows, copied, None).unwrap();
        let copied = copied.to_host().unwrap();
        assert_eq!(*copied, host.slice(skip, rows), "{rows} rows from {skip}");
    }
    let beyond = column.booleans_on(&queue).unwrap().address();
    let read = move |memory: &mut SimMemory<'_>| memory.bits(Some((beyond, 99)), 4000).map(drop);
    launch(&queue, read).unwrap();
    let e = sim.synchronize().unwrap_err().to_string();
    assert!(e.contains("kernel"), "{e}");
}
