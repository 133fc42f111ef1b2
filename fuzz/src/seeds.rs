//! First inputs.

use std::path::Path;

use arrow_array::{Array, ArrayRef, RecordBatch, StructArray};
use arrow_ipc::reader::StreamReader;
use arrow_schema::DataType;

use crate::put;
use crate::support::r#gen::{Nulls, array};
use crate::support::types::all_types;

/// An input, and its target.
type Seed = (&'static str, Vec<u8>);

/// Rows of an array in an input.
const ROWS: usize = 12;

/// Inputs of all targets: from the files below `data` and from all types.
pub fn all(data: &Path) -> Vec<Seed> {
    let mut seeds = vec![];
    let mut arrays = vec![];
    for version in ["1.0.0-littleendian", "0.17.1"] {
        let folder = data.join("arrow-ipc-stream/integration").join(version);
        let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut files: Vec<_> = files.map(|file| file.path()).collect();
        files.sort();
        for file in files
            .iter()
            .filter(|file| file.extension().is_some_and(|e| e == "stream"))
        {
            from_file(file, &mut arrays);
        }
    }
    println!("{} arrays of files", arrays.len());
    for (i, (_, data_type)) in all_types().into_iter().enumerate() {
        arrays.push(array(
            &data_type,
            ROWS,
            [Nulls::Some, Nulls::None][i % 2],
            i as u64,
        ));
        generated(&data_type, i as u8, &mut seeds);
    }
    let mut left_out = 0;
    for (i, array) in arrays.iter().enumerate() {
        left_out += usize::from(from_array(array, i as u8, &mut seeds).is_none());
    }
    println!("{left_out} do not fit");
    scripts(&mut seeds);
    seeds
}

fn from_file(file: &Path, arrays: &mut Vec<ArrayRef>) {
    let reader = std::fs::File::open(file).map(std::io::BufReader::new);
    let Ok(reader) = StreamReader::try_new(reader.expect("the file can be read"), None) else {
        println!("not read: {}", file.display());
        return;
    };
    for batch in reader.flatten().take(2) {
        let rows = batch.num_rows();
        let part = batch.slice(rows / 3, ROWS.min(rows - rows / 3));
        arrays.extend(part.columns().iter().cloned());
        // A few columns as a batch.
        for start in (0..part.num_columns()).step_by(5) {
            let columns: Vec<_> = (start..part.num_columns().min(start + 5)).collect();
            let some: RecordBatch = part.project(&columns).expect("they are there");
            arrays.push(std::sync::Arc::new(StructArray::from(some)));
        }
    }
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.push(text.len() as u8);
    out.extend_from_slice(text);
}

fn from_array(array: &ArrayRef, i: u8, seeds: &mut Vec<Seed>) -> Option<()> {
    let data = array.to_data();
    let (mut body, mut arena) = (vec![], vec![]);
    put::array(&mut body, &mut arena, &data)?;
    let import = |place: u8, body: &[u8]| {
        let mut input = vec![place, i / 4 % 4];
        input.extend(body);
        text(&mut input, &[]);
        text(&mut input, &[i, i.wrapping_mul(7), 5, 3, i / 3, 9, 1, 2]);
        input.extend(&arena);
        ("import", input)
    };
    seeds.push(import(i % 4, &body));
    let mut data_type = vec![];
    put::data_type(&mut data_type, data.data_type())?;
    if data.len() > 4 && data.offset() == 0 {
        // The rows in the middle, by the root's members: what is below stays whole.
        let mut part = body.clone();
        part[data_type.len()..][..3].copy_from_slice(&[data.len() as u8 - 3, 2, 0]);
        seeds.push(import(1 + i % 3, &part));
    }

    let mut input = vec![4 + i % 3];
    let steps: Vec<u8> = (0..6)
        .flat_map(|k| [k, i.wrapping_add(k * 5), 3, 4])
        .collect();
    text(&mut input, &steps);
    input.extend(&body);
    input.extend(&arena);
    seeds.push(("operations", input));

    let mut input = vec![i % 2];
    if put::schema(&mut input, data.data_type()).is_some() {
        seeds.push(("schemas", input));
    }
    Some(())
}

fn generated(data_type: &DataType, i: u8, seeds: &mut Vec<Seed>) {
    for k in 0..3u8 {
        let mut input = vec![k];
        let steps: Vec<u8> = (0..8)
            .flat_map(|n| [n, i.wrapping_add(n * 3 + k), 7, 2])
            .collect();
        text(&mut input, &steps);
        if put::data_type(&mut input, data_type).is_none() {
            return;
        }
        input.extend([40, i, 0, k, 3, 5]);
        seeds.push(("operations", input));
        // A slice, and both together, as arrays and as batches.
        let mut input = vec![k];
        text(
            &mut input,
            &[
                0,
                0,
                3 + i % 9,
                11,
                0,
                13,
                2,
                9,
                k % 2,
                1,
                1,
                13,
                5,
                20,
                1 - k % 2,
                0,
            ],
        );
        if put::data_type(&mut input, data_type).is_none() {
            return;
        }
        input.extend([40, i, 0, k, 3, 5]);
        seeds.push(("operations", input));
        let mut input = vec![2 + k % 2 + 4 * k];
        let _ = put::data_type(&mut input, data_type);
        input.extend([40, i, 0, 1, 3, 5, 4 + i % 8, 2, 2, 32, 1, 0, 1, 1, 1]);
        seeds.push(("dlpack", input));
    }
}

/// Calls in an order that gets somewhere.
fn scripts(seeds: &mut Vec<Seed>) {
    for i in 0..24u8 {
        let mut input = vec![i % 3 + 16 * (i % 2) + 128 * (i / 12)];
        text(&mut input, &[]);
        let steps: Vec<u8> = (0..6)
            .flat_map(|k| [8 + (i + k) % 12 * u8::from(k > 2), 0])
            .collect();
        text(&mut input, &steps);
        text(&mut input, &[4, b'w', b'h', b'y', b'?']);
        input.extend([2, 1, i % 4, 3, i, 4, 5, 3, 0, 4, 1, 1]);
        seeds.push(("streams", input));

        let mut input = vec![2 * (i % 3)];
        input.push(i % 4);
        for op in [3, 0, 6, 7, 0, 0, 6 + i % 9, 0, 13, 0, 17] {
            input.extend([op, i]);
        }
        seeds.push(("async_streams", input));
        let mut input = vec![1 + 2 * (i % 3)];
        text(&mut input, &[7, 6, 2, 7, i % 8, 7, 0]);
        input.extend([17, 9 + i % 8, 0, 1]);
        for op in [0, 0, 6, 4, 0, 6, 5 + i % 4, 0, 0, 7, 0, 0, 0] {
            input.extend([op, 2]);
        }
        seeds.push(("async_streams", input));

        for form in 0..2 {
            // Codes, bits, shape, offset, device, id, strides, dimensions.
            let mut input = vec![form + 4 * (i % 3)];
            input.extend([i % 4, 0, i % 5, 0, 0, 0, 2, 3, 4, 1, 0, 0, 2, 0, 0, 0, 0]);
            text(&mut input, &[i, 3, 5, i]);
            input.extend((0..200u8).map(|n| n ^ i));
            seeds.push(("dlpack", input));
        }
    }
}
