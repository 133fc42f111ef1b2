use std::sync::Arc; use std::time::Instant;
use arrow_array::*;
fn main() {
    let device = arrow_device_wgpu::open().unwrap();
    let rows = 1 << 17;
    let batch = RecordBatch::try_from_iter([("a", Arc::new(Int64Array::from_iter_values(0..rows)) as ArrayRef)]).unwrap();
    let what = std::env::args().nth(1).unwrap_or("up".into());
    let there = device.upload(&batch).unwrap();
    let q = device.default_queue();
    let mut all: Vec<[f64; 3]> = Vec::new();
    for _ in 0..3000 {
        let t = Instant::now();
        match &*what {
            "up" => { let s = device.upload(&batch).unwrap(); let a = t.elapsed(); s.wait().unwrap(); let b = t.elapsed(); drop(s); all.push([a.as_secs_f64(), b.as_secs_f64(), t.elapsed().as_secs_f64()]); }
            "record" => { let e = q.record().unwrap().unwrap(); let a = t.elapsed(); e.wait().unwrap(); let b = t.elapsed(); drop(e); all.push([a.as_secs_f64(), b.as_secs_f64(), t.elapsed().as_secs_f64()]); }
            _ => { let d = there.start_to_host().unwrap(); let a = t.elapsed(); let h = d.wait().unwrap(); let b = t.elapsed(); drop(h); all.push([a.as_secs_f64(), b.as_secs_f64(), t.elapsed().as_secs_f64()]); }
        }
    }
    for i in 0..3 { let mut v: Vec<f64> = all.iter().map(|a| a[i] * 1e6).collect(); v.sort_by(f64::total_cmp); println!("{what} {i}: median {:.1} us, best {:.1}", v[v.len()/2], v[0]); }
}
