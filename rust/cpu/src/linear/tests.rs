use super::*;
use crate::pool::ThreadPool;
use crate::weights::{Form, Merge, Numbers};

/// Numbers between -1 and 1 that bf16 can hold.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_bits() & 0xffff_0000)
    };
    (0..count).map(|_| next()).collect()
}

/// Blocks of type `Q8_0`, and what they stand for.
fn blocks(weights: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let mut meant = Vec::new();
    for block in weights.chunks_exact(BLOCK) {
        bytes.extend(crate::half::from_f32(0.01).to_le_bytes());
        bytes.extend(block.iter().map(|x| (x * 100.0) as i8 as u8));
        meant.extend(block.iter().map(|x| crate::half::to_f32(crate::half::from_f32(0.01)) * f32::from((x * 100.0) as i8)));
    }
    (bytes, meant)
}

fn multiply(isa: Isa, threads: usize, layer: &Linear, x: &[f32], start: f32, epilogue: Epilogue) -> Vec<f32> {
    let (ins, outs) = (layer.matrix.ins, layer.matrix.outs);
    let count = x.len() / ins;
    let mut rows = Rows::default();
    rows.reserve(isa, count, ins);
    let mut out = vec![start; count * outs];
    let (packed, shared) = (rows.packed(isa, count), UnsafeSlice::new(&mut out));
    ThreadPool::new(threads).expect("threads").run(|worker| {
        let mut scratch = Scratch::default();
        packed.pack(worker, isa, layer, &mut scratch, |m, to| to.copy_from_slice(&x[m * ins..(m + 1) * ins]));
        packed.multiply(worker, isa, layer, shared, outs, epilogue, &mut scratch);
    });
    out
}

#[test]
fn products_are_right_and_rows_do_not_depend_on_each_other() {
    // Inputs that are summed at once and in two turns; outputs that fill panels and that do not; rows for one tile, some, and groups of tiles.
    for (outs, ins) in [(5, 3), (70, 64), (33, 1184)] {
        let (weights, bias) = (numbers(1, outs * ins), numbers(2, outs));
        let x = numbers(3, 150 * ins);
        let (bytes, meant) = blocks(&weights);
        for isa in Isa::available() {
            for form in [Form::F32, Form::F16, Form::Bf16, Form::Blocks] {
                if form == Form::Blocks && ins % BLOCK != 0 {
                    continue;
                }
                let (source, weights) =
                    if form == Form::Blocks { (Numbers::Blocks(8, &bytes), &meant) } else { (Numbers::F32(&weights), &weights) };
                let matrix = Matrix::pack(&mut ThreadPool::new(2).expect("threads"), isa, &[(outs, source)], ins, Merge::Stacked, form)
                    .expect("it fits");
                let layer = Linear::new(matrix, isa, Some(&bias));
                let all = multiply(isa, 3, &layer, &x, 1.0, Epilogue::Add);
                for (m, row) in all.chunks_exact(outs).enumerate() {
                    for (n, &found) in row.iter().enumerate() {
                        let product: f64 = (0..ins).map(|k| f64::from(x[m * ins + k]) * f64::from(weights[n * ins + k])).sum();
                        let expected = 1.0 + f64::from(bias[n]) + product;
                        // Half precision has 11 bits for weights of up to 8.
                        let tolerance = if form == Form::F16 { 2e-3 } else { 2e-6 } * (ins as f64).sqrt();
                        assert!(
                            (f64::from(found) - expected).abs() < tolerance,
                            "{isa:?} {form:?} {outs}x{ins} {m} {n}: {found} {expected}"
                        );
                    }
                }
                for count in (1..=16).chain([27, 28, 29, 43, 100, 129]) {
                    for threads in [1, 2] {
                        let some = multiply(isa, threads, &layer, &x[..count * ins], 1.0, Epilogue::Add);
                        assert!(some == all[..count * outs], "{isa:?} {form:?} {outs}x{ins}: {count} rows on {threads} threads");
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_kept_as_they_are_give_what_their_numbers_give_to_the_last_bit() {
    let (outs, ins) = (70, 1184);
    let (bytes, meant) = blocks(&numbers(1, outs * ins));
    let x = numbers(3, 40 * ins);
    for isa in Isa::available() {
        let [kept, plain] = [(Numbers::Blocks(8, &bytes), Form::Blocks), (Numbers::F32(&meant), Form::F32)].map(|(source, form)| {
            let matrix = Matrix::pack(&mut ThreadPool::new(1).expect("threads"), isa, &[(outs, source)], ins, Merge::Stacked, form)
                .expect("it fits");
            multiply(isa, 1, &Linear::new(matrix, isa, None), &x, 0.0, Epilogue::Store)
        });
        assert!(kept == plain, "{isa:?}");
    }
}

#[test]
fn half_precision_is_refused_where_a_weight_is_too_large_for_it() {
    let weights = [1.0, 2.0, 70_000.0, 3.0];
    let packed =
        Matrix::pack(&mut ThreadPool::new(1).expect("threads"), Isa::best(), &[(2, Numbers::F32(&weights))], 2, Merge::Stacked, Form::F16);
    assert_eq!(packed.err(), Some(crate::weights::PackError::Overflow(70_000.0)));
}

#[test]
fn sources_that_do_not_fit_are_refused() {
    let mut pool = ThreadPool::new(1).expect("threads");
    let mut pack = |parts: &[(usize, Numbers<'_>)], ins: usize, form: Form| {
        Matrix::pack(&mut pool, Isa::best(), parts, ins, Merge::Stacked, form).err()
    };
    let (numbers, four, eight) = ([0.0; 64], [0; 2 * 20], [0; 2 * 34]);
    assert!(pack(&[(2, Numbers::F32(&numbers))], 33, Form::F32).is_some());
    assert!(pack(&[(2, Numbers::Blocks(3, &four))], 32, Form::F32).is_some());
    assert!(pack(&[(2, Numbers::Blocks(99, &four))], 32, Form::Blocks).is_some());
    assert!(pack(&[(3, Numbers::Blocks(3, &four))], 32, Form::Blocks).is_some());
    assert!(pack(&[(2, Numbers::F32(&numbers))], 32, Form::Blocks).is_some());
    assert!(pack(&[(2, Numbers::Blocks(3, &four)), (2, Numbers::Blocks(8, &eight))], 32, Form::Blocks).is_some());
    assert!(pack(&[(2, Numbers::Blocks(3, &four)), (2, Numbers::Blocks(8, &eight))], 32, Form::Int8).is_none());
    assert!(pack(&[(2, Numbers::Blocks(3, &four)), (2, Numbers::Blocks(2, &four[..36]))], 32, Form::Blocks).is_none());
}
