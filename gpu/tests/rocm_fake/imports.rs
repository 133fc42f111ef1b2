//! Which addresses an import takes beside those of `gpu_suite::foreign`: HIP numbers its types of memory otherwise
//! in other versions.

use std::ffi::c_void;

use arrow_array::{Array, Int32Array};
use arrow_device::abi::ArrowDeviceType;
use arrow_device::{
    DeviceArray, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy,
};

use crate::block::Block;
use crate::fake::{Group, MODES};
use crate::rig::{Rig, soon};
use crate::support::assert_same;
use crate::support_c::Foreign;
use crate::vendor::{DEVICE, HOST, open_device};

fn ints() -> Int32Array {
    (0..100).map(|i| (i % 3 != 0).then_some(i)).collect()
}

/// The array with its values at an address: taken and read, or refused with a text, and released once.
#[track_caller]
fn import(rig: &Rig, values: *const c_void, refusal: Option<&str>) {
    let mut foreign = Foreign::new(&ints().to_data(), &rig.device);
    foreign.set_buffer(&[], 1, values);
    match (foreign.import(&rig.options), refusal) {
        (Ok(imported), None) => {
            assert_same(&ints(), &imported.to_host().unwrap(), "imported");
            drop(imported);
            rig.synchronize().unwrap();
            assert!(soon(|| foreign.releases() == (1, 1)));
        }
        (Err(e), Some(text)) => {
            for part in ["array.buffers[1]", text, &rig.device.to_string()] {
                assert!(e.to_string().contains(part), "{e} lacks {part}");
            }
            foreign.assert_released(text);
        }
        (other, _) => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn addresses() {
    for mode in MODES {
        for memory in [DEVICE, HOST] {
            let group = Group::open(2, mode);
            let rig = Rig::of(group, open_device(memory, group.ordinal()));
            let (first, values) = (group.first, ints().values().to_vec());
            let managed = Block::managed(first, 400).with(&values);
            let pinned = Block::pinned(first, 400).with(&values);
            import(&rig, managed.ptr, None);
            import(&rig, pinned.ptr, None);
            let short = Block::device(first, 128);
            // Nothing is behind it, so that the last byte of the column is in no other allocation.
            drop(Block::device(first, 1 << 10));
            let freed = short.ptr;
            import(&rig, freed, Some(""));
            drop(short);
            import(&rig, freed, Some(""));
            if memory == DEVICE {
                let other = Block::device(first + 1, 400);
                let text = format!("it is memory of ROCm device {}", first + 1);
                import(&rig, other.ptr, Some(&text));
            }
            drop((managed, pinned));
            rig.end();
        }
    }
}

/// hipDF's label, out and in: of an array, and of a stream.
#[test]
fn memory_that_is_called_cudas() {
    for mode in MODES {
        let group = Group::open(1, mode);
        let rig = Rig::of(group, open_device(DEVICE, group.ordinal()));
        let export = ExportOptions {
            rocm_as_cuda: true,
            ..ExportOptions::new(SyncPolicy::Event)
        };
        let import = ImportOptions {
            cuda_is_rocm: true,
            ..rig.options.clone()
        };
        let up = rig.upload_array(&ints()).unwrap();
        let schema = up.export(SyncPolicy::Event).unwrap().1;
        let labelled = || up.export_array(&export).unwrap();
        assert_eq!(labelled().device_type(), ArrowDeviceType::CUDA);
        // SAFETY: the arrays and their type were exported here.
        let (taken, refused) = unsafe {
            (
                DeviceArray::import(labelled(), &schema, &import).unwrap(),
                DeviceArray::import(labelled(), &schema, &rig.options).unwrap_err(),
            )
        };
        assert_eq!(taken.device(), &rig.device);
        assert_same(&ints(), &taken.to_host().unwrap(), "labelled");
        assert!(refused.to_string().contains("cuda:"), "{refused}");
        // Other memory is not HIP's, whatever the program says.
        let mut foreign = Foreign::new(&ints().to_data(), &rig.device);
        foreign.device_array.device_type = ArrowDeviceType::CUDA.value();
        let freed = Block::device(rig.group.first, 400).ptr;
        foreign.set_buffer(&[], 1, freed);
        let e = foreign.import(&import).unwrap_err().to_string();
        assert!(e.contains("array.buffers[1]") && e.contains("rocm:"), "{e}");

        let batch = arrow_array::record_batch!(("a", Int32, [1, 2, 3])).unwrap();
        let batches = [rig.upload(&batch)];
        let reader = DeviceRecordBatches::new(batches, batch.schema(), ArrowDeviceType::ROCM);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, export).unwrap();
        // SAFETY: the stream was exported here.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, import) }.unwrap();
        assert_eq!(reader.device_type(), ArrowDeviceType::CUDA);
        let read: Vec<_> = reader.map(|b| b.unwrap().to_host().unwrap()).collect();
        assert_eq!(read, [batch]);
        drop((up, taken, read));
        rig.end();
    }
}
