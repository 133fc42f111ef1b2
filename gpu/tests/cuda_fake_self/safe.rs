//! cudarc's safe API runs on it.

use cudarc::driver::{CudaContext, DevicePtr, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

use crate::fake::{Group, LAZY, NO_POOLS};

fn open(flags: u32) -> (Group, std::sync::Arc<CudaContext>) {
    let group = Group::open(1, flags);
    let context = CudaContext::new(group.ordinal()).unwrap();
    (group, context)
}

#[test]
fn there_are_many_devices() {
    crate::fake::library();
    assert_eq!(CudaContext::device_count().unwrap(), 900);
    let (group, context) = open(0);
    assert_eq!(context.compute_capability().unwrap(), (9, 0));
    assert_eq!(
        context.name().unwrap(),
        format!("Simulated CUDA device {}", group.first)
    );
    assert_eq!(context.uuid().unwrap().bytes[15], group.first as i8);
    assert_eq!(context.total_mem().unwrap(), 1 << 30);
    assert_eq!(context.mem_get_info().unwrap(), (1 << 30, 1 << 30));
    drop(context);
    group.assert_clean();
}

#[test]
fn values_go_up_and_come_down() {
    for flags in [0, LAZY, NO_POOLS] {
        let (group, context) = open(flags);
        for stream in [
            context.default_stream(),
            context.per_thread_stream(),
            context.new_stream().unwrap(),
        ] {
            let values: Vec<i32> = (0..1000).collect();
            let on_device = stream.clone_htod(&values).unwrap();
            let copy = on_device.try_clone().unwrap();
            let zeros = stream.alloc_zeros::<i32>(10).unwrap();
            let back = stream.clone_dtoh(&copy).unwrap();
            let nothing = stream.clone_dtoh(&zeros).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(back, values);
            assert_eq!(nothing, [0; 10]);
        }
        assert_eq!(group.drain(), 0);
        context.check_err().unwrap();
        drop(context);
        group.assert_clean();
    }
}

#[test]
fn without_a_wait_nothing_is_there() {
    let (group, context) = open(LAZY);
    let stream = context.default_stream();
    let on_device = stream.clone_htod(&[7i32; 4]).unwrap();
    let mut back = [0i32; 4];
    stream.memcpy_dtoh(&on_device, &mut back).unwrap();
    let event = stream.record_event(None).unwrap();
    assert!(!event.is_complete());
    assert_eq!(back, [0; 4]);
    event.synchronize().unwrap();
    assert!(event.is_complete());
    assert_eq!(back, [7; 4]);
    drop((on_device, event));
    assert_eq!(group.live("pending"), 1); // the free
    assert_eq!(group.drain(), 0);
    drop((stream, context));
    group.assert_clean();
}

#[test]
fn streams_wait_for_events_of_other_ordinals() {
    let group = Group::open(2, LAZY);
    let one = CudaContext::new(group.ordinal()).unwrap();
    let two = CudaContext::new(group.ordinal() + 1).unwrap();
    let (here, there) = (one.new_stream().unwrap(), two.new_stream().unwrap());
    let on_one = here.clone_htod(&[1u8, 2, 3]).unwrap();
    // Waits for an event of the first one's stream, then copies across.
    let on_two = there.clone_dtod(&on_one).unwrap();
    let back = there.clone_dtoh(&on_two).unwrap();
    there.synchronize().unwrap();
    assert_eq!(back, [1, 2, 3]);
    drop((on_one, on_two));
    assert_eq!(group.drain(), 0);
    drop((here, there, one, two));
    group.assert_clean();
}

#[test]
fn leaked_memory_can_be_taken_over() {
    let (group, context) = open(0);
    let stream = context.new_stream().unwrap();
    let on_device = stream.clone_htod(&[1u64, 2]).unwrap();
    let leaked = on_device.leak();
    assert_eq!(group.live("device"), 1);
    // SAFETY: the address was leaked above by a slice of two values, and nothing else owns the
    // memory.
    let again = unsafe { stream.upgrade_device_ptr::<u64>(leaked, 2) };
    let back = stream.clone_dtoh(&again).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(back, [1, 2]);
    drop(again);
    drop((stream, context));
    assert_eq!(group.drain(), 0);
    group.assert_clean();
}

#[test]
fn pinned_and_managed_memory() {
    for flags in [0, LAZY] {
        let (group, context) = open(flags);
        let stream = context.default_stream();
        // SAFETY: any bits are a value, and the memory is written before it is read.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u32>(4, 0) }.unwrap();
        pinned
            .as_mut_slice()
            .unwrap()
            .copy_from_slice(&[1, 2, 3, 4]);
        // SAFETY: any bits are a value, and the memory is written before it is read.
        let mut managed = unsafe { context.alloc_unified::<u32>(4, true) }.unwrap();
        stream.memcpy_htod(&pinned, &mut managed).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(managed.as_slice().unwrap(), [1, 2, 3, 4]);
        managed.as_mut_slice().unwrap()[0] = 9;
        managed.prefetch().unwrap();
        stream.memcpy_dtoh(&managed, &mut pinned).unwrap();
        // cudarc records the event of `pinned` only once there is a second stream.
        stream.synchronize().unwrap();
        assert_eq!(pinned.as_slice().unwrap(), [9, 2, 3, 4]);
        assert_eq!((group.live("pinned"), group.live("managed")), (1, 1));
        drop((pinned, managed));
        assert_eq!(group.drain(), 0);
        drop((stream, context));
        group.assert_clean();
    }
}

const PTX: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry product_f64(.param .u64 a) { ret; }
.visible .entry fill_i64(.param .u64 out) { ret; }
.visible .entry unknown_here(.param .u64 out) { ret; }
.visible .entry fail() { trap; }
";

#[test]
fn kernels_run_through_the_launch_builder() {
    for flags in [0, LAZY] {
        let (group, context) = open(flags);
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let product = module.load_function("product_f64").unwrap();
        let not_found = sys::CUresult::CUDA_ERROR_NOT_FOUND;
        for name in ["unknown_here", "elsewhere"] {
            assert_eq!(module.load_function(name).unwrap_err().0, not_found);
        }

        let rows = 11u64;
        let a: Vec<f64> = (0..rows).map(|i| i as f64).collect();
        let a = stream.clone_htod(&a).unwrap();
        let halves = vec![0.5f64; rows as usize]; // read when the stream gets there
        let b = stream.clone_htod(&halves).unwrap();
        // Bits 3..14 are those of the rows: row 1 and row 10 are null.
        let mask = stream.clone_htod(&[0b1110_1111u8, 0b1101_1111]).unwrap();
        let (no_mask, a_bit, b_bit) = (0u64, 3u64, 0u64);
        let mut out = stream.alloc_zeros::<f64>(rows as usize).unwrap();
        let mut out_mask = stream.alloc_zeros::<u8>(2).unwrap();
        let mut launch = stream.launch_builder(&product);
        launch
            .arg(&a)
            .arg(&mask)
            .arg(&a_bit)
            .arg(&b)
            .arg(&no_mask)
            .arg(&b_bit);
        launch.arg(&mut out).arg(&mut out_mask).arg(&rows);
        // SAFETY: the arguments are the kernel's parameters, with memory for all of its rows.
        unsafe { launch.launch(LaunchConfig::for_num_elems(rows as u32)) }.unwrap();
        let values = stream.clone_dtoh(&out).unwrap();
        let bits = stream.clone_dtoh(&out_mask).unwrap();
        stream.synchronize().unwrap();
        let products = [0.0, 0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 0.0];
        assert_eq!(values, products);
        assert_eq!(bits, [0b1111_1101, 0b011]);

        let fill = module.load_function("fill_i64").unwrap();
        let mut filled = stream.alloc_zeros::<i64>(3).unwrap();
        let mut launch = stream.launch_builder(&fill);
        launch.arg(&mut filled).arg(&-5i64).arg(&3u64);
        // SAFETY: the arguments are the kernel's parameters, with memory for all of its rows.
        unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.unwrap();
        let values = stream.clone_dtoh(&filled).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(values, [-5; 3]);

        drop((a, b, mask, out, out_mask, filled, product, fill, module));
        assert_eq!(group.drain(), 0);
        context.check_err().unwrap();
        drop((stream, context));
        group.assert_clean();
    }
}

#[test]
fn a_kernel_that_fails_ends_the_engine() {
    let (group, context) = open(0);
    let stream = context.default_stream();
    let module = context.load_module(Ptx::from_src(PTX)).unwrap();
    let fail = module.load_function("fail").unwrap();
    let mut launch = stream.launch_builder(&fail);
    // SAFETY: the kernel has no parameters and uses no memory.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    let failed = sys::CUresult::CUDA_ERROR_LAUNCH_FAILED;
    assert_eq!(stream.synchronize().unwrap_err().0, failed);
    assert_eq!(stream.clone_htod(&[1]).unwrap_err().0, failed);
    drop((fail, module, stream, context));
    group.assert_clean(); // that it failed is nobody's mistake
}

#[test]
fn a_wrong_kernel_address_is_illegal() {
    let (group, context) = open(LAZY);
    let stream = context.default_stream();
    let module = context.load_module(Ptx::from_src(PTX)).unwrap();
    let fill = module.load_function("fill_i64").unwrap();
    let out = stream.alloc_zeros::<i64>(3).unwrap();
    let (address, sync) = out.device_ptr(&stream);
    drop(sync);
    let mut launch = stream.launch_builder(&fill);
    launch.arg(&address).arg(&1i64).arg(&4u64); // one too many
    // SAFETY: the arguments have the types of the kernel's parameters; the address is wrong on
    // purpose, and the stand-in refuses it.
    unsafe { launch.launch(LaunchConfig::for_num_elems(4)) }.unwrap();
    let illegal = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(stream.synchronize().unwrap_err().0, illegal);
    drop((out, fill, module, stream, context));
    group.assert_report(&["8 bytes past the end of an allocation of 24"]);
}
