//! The end of a process whose threads wait for work that does not end.

use std::mem::forget;

use crate::exit::ends_well;
use crate::rigs::{Gate, hold};

#[test]
fn at_the_end() {
    ends_well("waits::at_the_end", |device| {
        let queue = device.new_queue().unwrap();
        forget(hold(&queue));
        let event = queue.record().unwrap().unwrap();
        std::thread::spawn(move || event.wait().unwrap());
        let gate = Gate::new(&device);
        let other = device.new_queue().unwrap();
        // SAFETY: the event lives until the process ends.
        unsafe { other.raw().wait(gate.pointer()) }.unwrap();
        let event = other.record().unwrap().unwrap();
        let waits = std::thread::spawn(move || event.wait().unwrap());
        forget((gate, device));
        std::thread::sleep(std::time::Duration::from_millis(5));
        drop(waits);
    });
}
