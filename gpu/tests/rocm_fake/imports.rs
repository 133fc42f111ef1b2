//! Which addresses an import takes beside those of `gpu_suite::foreign`: HIP numbers its types of memory otherwise
//! in other versions.

use std::ffi::c_void;

use arrow_array::{Array, Int32Array};

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
