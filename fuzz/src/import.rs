//! Arrays of any type and nesting with hostile members, imported.

use std::sync::atomic::Ordering::SeqCst;

use arrow_device::{DeviceArray, DeviceRecordBatch, Result, Validation};
use arrow_schema::{DataType, Field, Schema};

use crate::foreign::{Foreign, Memory, assert_children_kept};
use crate::input::Input;
use crate::sketch::Node;
use crate::support::compare::same;
use crate::world::{Place, World};
use crate::{check, contract, exercise, kinds};

/// | bytes | what |
/// | --- | --- |
/// | 1 | place: CPU, one of two simulated devices, or the first two, whose answers must agree |
/// | 1 | memory: exact or shared; a batch or an array; how much is validated |
/// | ... | a type, and an array of it |
/// | 1 + ... | members to spoil |
/// | 1 + ... | operations on what was imported |
/// | rest | the arena |
pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let (place, flags) = (input.choice(4), input.u8());
    let memory = [Memory::Exact, Memory::Shared][usize::from(flags & 1)];
    let as_batch = flags & 2 != 0;
    let validation = [Validation::Full, Validation::Structure][usize::from(flags & 12 == 12)];
    let data_type = kinds::data_type(input);
    let node = Node::read(input, &data_type);
    let mut spoils = Input::new(input.text());
    let mut operations = Input::new(input.text());
    let arena = input.rest();
    let arena = &arena[..arena.len().min(1 << 15)];

    if place == 3 {
        let [cpu, sim] = [0, 1].map(|i| {
            let place = &world.places[i];
            let foreign = Foreign::new(&data_type, &node, arena, place, Memory::Exact, true);
            contract::holds(&foreign)
                .then(|| give(&world, foreign, place, as_batch, Validation::Full))
        });
        let (Some(cpu), Some(sim)) = (cpu, sim) else {
            return;
        };
        agree(&cpu, &sim);
        drop((cpu, sim));
    } else {
        let place = &world.places[place];
        let mut foreign = Foreign::new(&data_type, &node, arena, place, memory, false);
        while !spoils.is_empty() {
            foreign.spoil(&mut spoils, &world);
        }
        if !contract::holds(&foreign) {
            return;
        }
        let imported = give(&world, foreign, place, as_batch, validation);
        if let Ok(array) = &imported.array {
            match validation {
                Validation::Full => exercise::array(&world, array, &mut operations),
                _ => exercise::structure(array),
            }
        }
        drop(imported);
    }
    assert_children_kept();
    world.assert_clean();
}

/// What an import says; the array, if it has been released when the import is dropped.
struct Imported<'a> {
    world: &'a World,
    array: Result<DeviceArray>,
    released: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

fn give<'a>(
    world: &'a World,
    foreign: Foreign<'_>,
    place: &Place,
    as_batch: bool,
    validation: Validation,
) -> Imported<'a> {
    let data_type = foreign.data_type;
    let (array, released) = foreign.give();
    let options = place.options(validation);
    let array = match data_type {
        DataType::Struct(fields) if as_batch => {
            let schema = Schema::new(fields.clone());
            // SAFETY: the contract holds (`contract`); what it leaves open the import checks.
            let batch = unsafe { DeviceRecordBatch::import_as(array, schema.into(), &options) };
            batch.map(|batch| batch.as_struct().clone())
        }
        _ => {
            let field = Field::new("f", data_type.clone(), true);
            // SAFETY: the contract holds (`contract`); what it leaves open the import checks.
            unsafe { DeviceArray::import_as(array, field.into(), &options) }
        }
    };
    Imported {
        world,
        array,
        released,
    }
}

impl Drop for Imported<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.array = Err(arrow_device::Error::Released("the array of a test"));
        // On a device's thread, where work may still use it.
        self.world
            .eventually("the array is released", || self.released.load(SeqCst) > 0);
        assert_eq!(self.released.load(SeqCst), 1, "releases of the array");
    }
}

/// The same bytes are valid wherever they are.
fn agree(cpu: &Imported<'_>, sim: &Imported<'_>) {
    match (&cpu.array, &sim.array) {
        (Ok(cpu), Ok(sim)) => {
            let [cpu, sim] = [cpu, sim].map(|array| array.to_host().expect("validated"));
            check::read(&cpu);
            check::read(&sim);
            if check::comparable(&cpu) {
                same(&cpu, &sim).unwrap_or_else(|e| panic!("CPU and simulated device: {e}"));
            }
        }
        (Err(_), Err(_)) => {}
        (cpu, sim) => panic!("one is refused: CPU {cpu:?}, simulated device {sim:?}"),
    }
}
