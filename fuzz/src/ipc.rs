//! Arrow IPC files and streams of any bytes, read to each device.
//!
//! What arrow-ipc reads too must be the same. It is asked only for what was accepted: it bounds nothing.

use std::io::Cursor;

use arrow_array::RecordBatch;
use arrow_device::ipc::{IpcFileReader, IpcOptions, IpcStreamReader};
use arrow_device::{Device, Result};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::ArrowError;

use crate::check;
use crate::input::Input;
use crate::panics::caught;
use crate::support::compare::same;
use crate::world::World;

/// The limit of a message, in bytes.
const MOST: usize = 1 << 20;

/// Which bytes, and what is read of them.
#[derive(Clone)]
struct Ipc<'a> {
    bytes: &'a [u8],
    is_file: bool,
    projection: Option<Vec<usize>>,
}

impl Ipc<'_> {
    /// The batches on a device, up to an error, and whether there was one.
    fn read(self, device: &Device) -> (Vec<RecordBatch>, bool) {
        let mut options = IpcOptions::default().with_max_message_bytes(MOST);
        if let Some(projection) = self.projection {
            options = options.with_projection(projection);
        }
        let queue = device.default_queue();
        let (mut read, mut failed) = (vec![], false);
        let mut take = |batch: Result<_>| match batch {
            Ok(batch) => read.push(batch),
            Err(_) => failed = true,
        };
        if self.is_file {
            match IpcFileReader::try_new_on(Cursor::new(self.bytes), queue, options) {
                Ok(reader) => reader.for_each(&mut take),
                Err(e) => take(Err(e)),
            }
        } else {
            match IpcStreamReader::try_new_on(self.bytes, queue, options) {
                Ok(reader) => reader.for_each(&mut take),
                Err(e) => take(Err(e)),
            }
        }
        read.iter().for_each(check::read_batch);
        let host = read.iter().map(|batch| batch.to_host().expect("valid"));
        (host.collect(), failed)
    }

    /// The same as arrow-ipc reads it.
    fn theirs(self) -> std::result::Result<Vec<RecordBatch>, ArrowError> {
        match self.is_file {
            true => FileReader::try_new(Cursor::new(self.bytes), self.projection)?.collect(),
            false => StreamReader::try_new(self.bytes, self.projection)?.collect(),
        }
    }
}

pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let choice = input.u8();
    let ipc = Ipc {
        is_file: choice & 1 == 1,
        projection: (choice & 2 == 2).then(|| vec![input.choice(4), input.choice(4)]),
        bytes: input.rest(),
    };
    let [cpu, sims @ ..] = &world.places;
    let (expected, failed) = ipc.clone().read(&cpu.device);
    for sim in sims {
        let (read, failed_too) = ipc.clone().read(&sim.device);
        assert_eq!(failed, failed_too, "on {}", sim.device);
        assert_same(&expected, &read);
    }
    if !failed {
        if let Some(Ok(theirs)) = caught(|| ipc.theirs()) {
            assert_same(&theirs, &expected);
        }
    }
    world.assert_clean();
}

fn assert_same(expected: &[RecordBatch], read: &[RecordBatch]) {
    assert_eq!(expected.len(), read.len());
    for (expected, read) in expected.iter().zip(read) {
        assert_eq!(expected.schema(), read.schema());
        assert_eq!(expected.num_rows(), read.num_rows());
        for (expected, read) in expected.columns().iter().zip(read.columns()) {
            if check::comparable(expected) {
                same(expected, read).expect("the same values");
            }
        }
    }
}
