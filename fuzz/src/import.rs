//! Arrays of any type and nesting with hostile members, imported.

use arrow_device::{DeviceArray, Result, Validation};
use arrow_schema::DataType;

use crate::foreign::{Foreign, Spoil};
use crate::input::Input;
use crate::sketch::Node;
use crate::support::compare::same;
use crate::world::{Place, World};
use crate::{check, exercise, kinds, operations};

/// | bytes | what |
/// | --- | --- |
/// | 1 | place: CPU, one of two simulated devices, or the first two, whose answers must agree |
/// | 1 | each buffer by itself or all in one allocation; a batch or an array; how much is validated |
/// | ... | a type, and an array of it |
/// | 1 + ... | members to spoil |
/// | 1 + ... | operations on what was imported |
/// | rest | the arena |
pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let (place, flags) = (input.choice(4), input.u8());
    let validation = [Validation::Full, Validation::Structure][usize::from(flags & 12 == 12)];
    let data_type = kinds::data_type(input);
    let as_batch = flags & 2 != 0 && matches!(data_type, DataType::Struct(_));
    let import = |foreign: &mut Foreign<'_>, place: &Place, validation| match as_batch {
        true => foreign.import_batch(&place.validating(validation)),
        false => foreign.import(&place.validating(validation)),
    };
    let mut node = Node::read(input, &data_type);
    let mut spoils = Input::new(input.text());
    let mut steps = Input::new(input.text());
    let arena = input.rest();
    let arena = &arena[..arena.len().min(1 << 15)];

    if place == 3 {
        let both = [0, 1].map(|i| {
            let place = &world.places[i];
            let mut foreign = Foreign::new(&data_type, &node, arena, place, false, true);
            (import(&mut foreign, place, Validation::Full), foreign)
        });
        agree(&both[0].0, &both[1].0);
        for (array, foreign) in both {
            drop(array);
            foreign.assert_released(&world);
        }
    } else {
        let place = &world.places[place];
        let spoils = Spoil::read_all(&mut spoils, node.count());
        // In host memory just what is claimed must be there.
        for spoil in spoils.iter().filter(|_| place.is_cpu()) {
            spoil.claim(&mut node);
        }
        let mut foreign = Foreign::new(&data_type, &node, arena, place, flags & 1 != 0, false);
        for spoil in &spoils {
            foreign.spoil(spoil, &world);
        }
        let imported = import(&mut foreign, place, validation);
        if let Ok(array) = &imported {
            match validation {
                Validation::Full => operations::imported(&world, array, &mut steps),
                _ => exercise::structure(array),
            }
        }
        drop(imported);
        foreign.assert_released(&world);
    }
    world.assert_clean();
}

/// The same bytes are valid wherever they are.
fn agree(cpu: &Result<DeviceArray>, sim: &Result<DeviceArray>) {
    match (cpu, sim) {
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
