mod digits;
mod rounded;

use super::*;
use crate::block_type::{BLOCK, BlockType};
use crate::ggml::tests::{dequantized, random_blocks};
use crate::pool::ThreadPool;
use crate::tensor::{MakeBytes, Numbers, Source, Tensor};
use crate::weights::{Bf16, DType, Element, PackError};

/// Numbers between -1 and 1 that are exact in bfloat16.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_bits() & 0xffff_0000)
    };
    (0..count).map(|_| next()).collect()
}

/// The bytes of the numbers in a checkpoint.
fn bytes_of(weights: &[f32]) -> Vec<u8> {
    weights.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn tensor(numbers: Numbers, rows: usize, ins: usize, bytes: &[u8]) -> Tensor<'_> {
    Tensor { numbers, rows, ins, source: Source::Memory(bytes), interleaved: 0 }
}

fn pack_on(pool: &mut ThreadPool, isa: Isa, tensors: &[Tensor<'_>], merge: Merge, dtype: DType) -> Result<Matrix, PackError> {
    Matrix::pack(pool, isa, &tensors.iter().map(std::slice::from_ref).collect::<Vec<_>>(), merge, dtype)
}

fn pack(isa: Isa, tensors: &[Tensor<'_>], merge: Merge, dtype: DType) -> Matrix {
    pack_on(&mut ThreadPool::new(2).expect("threads"), isa, tensors, merge, dtype).expect("it fits")
}

fn multiply(isa: Isa, threads: usize, layer: &Linear, x: &[f32], start: f32, epilogue: Epilogue) -> Vec<f32> {
    let (ins, outs) = (layer.matrix.ins, layer.matrix.outs);
    let count = x.len() / ins;
    let mut rows = Rows::default();
    rows.reserve(isa, count, count, [layer]);
    let mut out = vec![start; count * outs];
    let (packed, shared) = (rows.packed(isa, count, count), UnsafeSlice::new(&mut out));
    ThreadPool::new(threads).expect("threads").run(|worker| {
        let mut scratch = Scratch::default();
        packed.pack(worker, isa, layer, &mut scratch, |m, to| to.copy_from_slice(&x[m * ins..(m + 1) * ins]));
        packed.multiply(worker, isa, layer, shared, outs, epilogue, &mut scratch);
    });
    out
}

/// Rows, and the plain sums of their products with a layer's weights, of its bias and of 1.
struct Plain {
    x: Vec<f32>,
    /// Each sum, and the sum of the sizes of what was added.
    sums: Vec<(f64, f64)>,
}

impl Plain {
    fn new(weights: &[f32], bias: &[f32]) -> Self {
        let ins = weights.len() / bias.len();
        let x = numbers(3, 130 * ins);
        let sum = |x: &[f32], weights: &[f32], bias: f32| {
            let products = x.iter().zip(weights).map(|(&x, &weight)| f64::from(x) * f64::from(weight));
            let (product, size) = products.fold((0.0, 2.0), |(sum, size), product| (sum + product, size + product.abs()));
            (1.0 + f64::from(bias) + product, size)
        };
        let row = |x| weights.chunks_exact(ins).zip(bias).map(move |(weights, &bias)| sum(x, weights, bias));
        let sums = x.chunks_exact(ins).flat_map(row).collect();
        Self { x, sums }
    }

    /// Compares a layer with the sums. Checks that a result does not depend on the rows that are computed with it, or on the number of
    /// threads.
    fn check(&self, isa: Isa, layer: &Linear, tolerance: f64, what: &str) {
        let (outs, ins) = (layer.matrix.outs, layer.matrix.ins);
        let all = multiply(isa, 3, layer, &self.x, 1.0, Epilogue::Add(1.0));
        for (at, (&found, (expected, size))) in all.iter().zip(&self.sums).enumerate() {
            let close = (f64::from(found) - expected).abs() < tolerance * size;
            assert!(close, "{isa:?} {what} {outs}x{ins} {} {}: {found} {expected}", at / outs, at % outs);
        }
        // Portable code is slow, and its tiles have one height.
        let counts: &[usize] =
            if isa.is_portable() { &[1, 2, 5, 29] } else { &[1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 27, 28, 29, 43, 129] };
        for &count in counts {
            let threads = 1 + count % 2;
            let some = multiply(isa, threads, layer, &self.x[..count * ins], 1.0, Epilogue::Add(1.0));
            assert!(some == all[..count * outs], "{isa:?} {what} {outs}x{ins}: {count} rows on {threads} threads");
        }
    }
}

/// The instruction sets that multiply blocks in fp32 in vectors, the fastest first.
fn in_vectors() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| !isa.has_tiles() && !isa.has_digits())
}

#[test]
fn products_are_right_and_rows_do_not_depend_on_each_other() {
    // Covers inputs in one and in two slices, full and partial panels, and rows for one tile, some tiles, and groups of tiles.
    for (outs, ins) in [(5, 3), (70, 64), (33, 1184)] {
        let (weights, bias) = (numbers(1, outs * ins), numbers(2, outs));
        let (bytes, plain) = (bytes_of(&weights), Plain::new(&weights, &bias));
        for dtype in [DType::F32, DType::F16, DType::Bf16, DType::Rounded, DType::Kept] {
            // Tiles multiply bfloat16 numbers only, and nothing here is an integer code.
            let for_tiles = matches!(dtype, DType::Bf16 | DType::Rounded);
            for isa in Isa::tested().into_iter().filter(|isa| !isa.has_digits() || for_tiles && isa.has_tiles()) {
                let matrix = pack(isa, &[tensor(Numbers::F32, outs, ins, &bytes)], Merge::Stacked, dtype);
                // Half precision has 11 bits, for weights of up to 8.
                let tolerance = if dtype == DType::F16 { 5e-4 } else { 1e-6 };
                plain.check(isa, &Linear::new(matrix, Some(&bias)), tolerance, &format!("{dtype:?}"));
            }
        }
    }
}

#[test]
fn products_of_blocks_are_right_and_rows_do_not_depend_on_each_other() {
    for kind in BlockType::all() {
        let (outs, ins) = if kind.block() == BLOCK { (70, 1184) } else { (70, 1280) };
        let bias = numbers(2, outs);
        let bytes = random_blocks(kind, outs, ins, 1);
        let plain = Plain::new(&dequantized(kind, &bytes, ins), &bias);
        for isa in Isa::tested() {
            let matrix = pack(isa, &[tensor(Numbers::Ggml(kind.number()), outs, ins, &bytes)], Merge::Stacked, DType::Kept);
            plain.check(isa, &Linear::new(matrix, Some(&bias)), 1e-6, &format!("{kind:?}"));
        }
    }
}

#[test]
fn blocks_kept_as_they_are_give_what_their_numbers_give_to_the_last_bit() {
    for kind in BlockType::all() {
        let (outs, ins) = if kind.block() == BLOCK { (70, 1184) } else { (70, 1280) };
        let blocks = random_blocks(kind, outs, ins, 1);
        let floats = bytes_of(&dequantized(kind, &blocks, ins));
        let x = numbers(3, 40 * ins);
        for isa in in_vectors() {
            for count in [1, 4, 5, 40] {
                let sources = [tensor(Numbers::Ggml(kind.number()), outs, ins, &blocks), tensor(Numbers::F32, outs, ins, &floats)];
                let [kept, plain] = sources.map(|source| {
                    let matrix = pack(isa, &[source], Merge::Stacked, DType::Kept);
                    multiply(isa, 1, &Linear::new(matrix, None), &x[..count * ins], 0.0, Epilogue::Store)
                });
                assert!(kept == plain, "{isa:?} {kind:?} {count} rows");
            }
        }
    }
}

#[test]
fn tensors_of_one_matrix_may_differ_in_type() {
    let ins = 256;
    let kinds = [BlockType::Q4_K, BlockType::Q5_0, BlockType::Q6_K];
    let blocks = kinds.map(|kind| random_blocks(kind, 40, ins, 9));
    let floats: Vec<Vec<f32>> = kinds.iter().zip(&blocks).map(|(&kind, bytes)| dequantized(kind, bytes, ins)).collect();
    let plain = bytes_of(&floats.concat());
    let bias = numbers(2, 120);
    let x = numbers(3, 20 * ins);
    for isa in in_vectors() {
        let mixed: Vec<_> = kinds.iter().zip(&blocks).map(|(kind, bytes)| tensor(Numbers::Ggml(kind.number()), 40, ins, bytes)).collect();
        let (mixed, whole) = (pack(isa, &mixed, Merge::Stacked, DType::Kept), tensor(Numbers::F32, 120, ins, &plain));
        let mut row = vec![0.0; ins];
        mixed.read_row(100, &mut row);
        assert_eq!(row, floats[2][20 * ins..21 * ins]);
        let layers = [mixed, pack(isa, &[whole], Merge::Stacked, DType::F32)].map(|matrix| Linear::new(matrix, Some(&bias)));
        for count in [1, 3, 20] {
            let [mixed, whole] = layers.each_ref().map(|layer| multiply(isa, 2, layer, &x[..count * ins], 1.0, Epilogue::Add(1.0)));
            assert!(mixed == whole, "{isa:?} {count} rows");
        }
    }
}

#[test]
fn experts_multiply_their_rows_as_matrices_of_their_own_would() {
    // Rows that do not fill the last panel, an expert without rows, and one with more rows than a group has.
    let (outs, ins, counts) = (41, 256, [2, 0, 131, 1]);
    let blocks: Vec<_> = (0..4).map(|expert| random_blocks(BlockType::Q4_K, outs, ins, 1 + expert)).collect();
    let bias = numbers(2, 4 * outs);
    let x = numbers(3, counts.iter().sum::<usize>() * ins);
    let mut groups = Vec::new();
    let mut start = 0;
    for (expert, count) in counts.into_iter().enumerate() {
        groups.extend(RowGroup::split(expert, start..start + count));
        start += count;
    }
    for isa in Isa::tested() {
        for dtype in [DType::F32, DType::Bf16, DType::Kept, DType::Int16, DType::Rounded, DType::Int8] {
            let tensors: Vec<_> = blocks.iter().map(|bytes| tensor(Numbers::Ggml(12), outs, ins, bytes)).collect();
            let matrix = Matrix::pack(&mut ThreadPool::new(2).expect("threads"), isa, &[&tensors], Merge::Stacked, dtype).expect("it fits");
            let experts = Linear::new(matrix, Some(&bias));
            let mut rows = Rows::default();
            rows.reserve(isa, start, start / 4, [&experts]);
            let mut found = vec![1.0; start * outs];
            let (packed, shared) = (rows.packed(isa, start, start / 4).grouped(&groups), UnsafeSlice::new(&mut found));
            ThreadPool::new(3).expect("threads").run(|worker| {
                let mut scratch = Scratch::default();
                packed.pack(worker, isa, &experts, &mut scratch, |m, to| to.copy_from_slice(&x[m * ins..(m + 1) * ins]));
                packed.multiply(worker, isa, &experts, shared, outs, Epilogue::Store, &mut scratch);
            });
            let mut start = 0;
            for (expert, count) in counts.into_iter().enumerate().filter(|&(_, count)| count > 0) {
                let alone = Linear::new(pack(isa, &tensors[expert..=expert], Merge::Stacked, dtype), Some(&bias[expert * outs..][..outs]));
                let expected = multiply(isa, 1, &alone, &x[start * ins..(start + count) * ins], 0.0, Epilogue::Store);
                assert!(found[start * outs..(start + count) * outs] == expected, "{isa:?} {dtype:?} {expert}");
                start += count;
            }
        }
    }
}

#[test]
fn a_clamped_gate_follows_its_formula() {
    let (outs, ins) = (37, 64);
    let (gates, ups) = (numbers(1, outs * ins), numbers(2, outs * ins));
    let (bytes, x) = ([bytes_of(&gates), bytes_of(&ups)], numbers(3, 5 * ins));
    let [gate, up] = bytes.each_ref().map(|bytes| tensor(Numbers::F32, outs, ins, bytes));
    let sum = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(x * w)).sum::<f64>();
    for isa in Isa::available() {
        let layer = Linear::new(pack(isa, &[gate, up], Merge::Gated, DType::F32), None);
        let found = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Gate(Activation::Clamped { slope: 1.7, limit: 2.0 }));
        for (i, &found) in found.iter().enumerate() {
            let (row, out) = (&x[i / outs * ins..][..ins], i % outs * ins);
            let (gate, up) = (sum(row, &gates[out..][..ins]).min(2.0), sum(row, &ups[out..][..ins]).clamp(-2.0, 2.0));
            let expected = (up + 1.0) * gate / (1.0 + (-1.7 * gate).exp());
            assert!((f64::from(found) - expected).abs() < 1e-5, "{isa:?} {i}: {found} {expected}");
        }
    }
}

/// A matrix of every format that tiles multiply, and of one that they do not.
fn mixed(isa: Isa, dtype: DType, ins: usize) -> (Linear, Vec<f32>, Vec<f32>) {
    let (mut sources, mut weights) = (Vec::new(), Vec::new());
    for kind in BlockType::all() {
        let bytes = random_blocks(kind, 40, ins, 9);
        weights.extend(dequantized(kind, &bytes, ins));
        sources.push((Numbers::Ggml(kind.number()), bytes));
    }
    let plain = numbers(5, 40 * ins);
    for kind in [Numbers::F32, Numbers::Bf16] {
        weights.extend(&plain);
        let bytes = bytes_of(&plain);
        let halves = bytes.chunks_exact(4).flat_map(|x| [x[2], x[3]]).collect();
        sources.push((kind, if kind == Numbers::F32 { bytes } else { halves }));
    }
    let tensors: Vec<_> = sources.iter().map(|(kind, bytes)| tensor(*kind, 40, ins, bytes)).collect();
    let bias = numbers(2, 40 * tensors.len());
    let matrix = pack(isa, &tensors, Merge::Stacked, dtype);
    (Linear::new(matrix, Some(&bias)), weights, bias)
}

#[test]
fn one_matrix_may_have_parts_for_tiles_and_parts_for_vectors() {
    for isa in [Isa::best().with_oracle(), Isa::PORTABLE.with_oracle()] {
        let (layer, weights, bias) = mixed(isa, DType::Kept, 256);
        let (x, outs) = (numbers(3, 2 * 256), layer.matrix.outs);
        for (m, row) in multiply(isa, 2, &layer, &x, 0.0, Epilogue::Store).chunks_exact(outs).enumerate() {
            for (n, &found) in row.iter().enumerate() {
                let products = (0..256).map(|k| f64::from(x[m * 256 + k]) * f64::from(weights[n * 256 + k]));
                let (expected, size) = products.fold((f64::from(bias[n]), 2.0), |(sum, size), x| (sum + x, size + x.abs()));
                assert!((f64::from(found) - expected).abs() < 1e-6 * size, "{isa:?} {m} {n}: {found} {expected}");
            }
        }
    }
}

/// `digits::each_row_alone_gives_what_it_gives_among_others` checks the same matrices with other numbers of rows.
#[test]
fn tiles_compute_what_their_oracle_computes() {
    let ins = 512;
    let x: Vec<f32> = numbers(3, 130 * ins).iter().zip(numbers(4, 130 * ins)).map(|(x, y)| x * y * 1.000_001 + x).collect();
    for dtype in [DType::Kept, DType::Int16] {
        let mut last: Option<Vec<f32>> = None;
        for isa in Isa::available().into_iter().filter(|isa| isa.has_tiles()).chain([Isa::best().with_oracle()]) {
            let (layer, ..) = mixed(isa, dtype, ins);
            let all = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Store);
            assert!(last.is_none_or(|last| last == all), "{isa:?} {dtype:?} and its oracle");
            last = Some(all);
        }
    }
}

#[test]
fn two_pieces_are_a_number_rounded_to_16_bits() {
    let ins = 64;
    // The identity, so that each output is a number of the row.
    let weights: Vec<u8> = (0..ins * ins).flat_map(|at| Bf16::from_f32(f32::from(u8::from(at % (ins + 1) == 0))).0.to_le_bytes()).collect();
    let x: Vec<f32> = numbers(3, 20 * ins).iter().map(|x| (x * 1.3).powi(3)).collect();
    for isa in [Isa::best().with_oracle(), Isa::PORTABLE.with_oracle()] {
        let layer = Linear::new(pack(isa, &[tensor(Numbers::Bf16, ins, ins, &weights)], Merge::Stacked, DType::Int16), None);
        for (found, x) in multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store).into_iter().zip(&x) {
            let high = f32::from_bits(x.to_bits() & 0xffff_0000);
            let low = Bf16::from_f32(x - high).to_f32();
            assert_eq!(found.to_bits(), (high + low).to_bits(), "{isa:?} {x}");
            assert!((found - x).abs() <= x.abs() * 2.0_f32.powi(-16), "{isa:?} {x} {found}");
        }
    }
}

#[test]
fn tiles_are_more_accurate_than_chains_of_multiply_adds() {
    let (outs, ins) = (64, 1536);
    let weights = numbers(5, outs * ins);
    let bytes: Vec<u8> = weights.iter().flat_map(|x| Bf16::from_f32(*x).0.to_le_bytes()).collect();
    // Numbers of different sizes, with all 24 bits.
    let x: Vec<f32> = numbers(3, 8 * ins).iter().map(|x| (x * 1.3).powi(3)).collect();
    let exact = |m: usize, n: usize| (0..ins).map(|k| f64::from(x[m * ins + k]) * f64::from(weights[n * ins + k])).sum::<f64>();
    let error = |isa: Isa| {
        let matrix = pack(isa, &[tensor(Numbers::Bf16, outs, ins, &bytes)], Merge::Stacked, DType::Kept);
        let found = multiply(isa, 1, &Linear::new(matrix, None), &x, 0.0, Epilogue::Store);
        let squares = found.iter().enumerate().map(|(i, &y)| (f64::from(y) - exact(i / outs, i % outs)).powi(2));
        (squares.sum::<f64>() / (0..8 * outs).map(|i| exact(i / outs, i % outs).powi(2)).sum::<f64>()).sqrt()
    };
    let vectors = in_vectors().next().expect("portable code at least");
    let (tiles, vectors) = (error(Isa::best().with_oracle()), error(vectors));
    assert!(tiles < 0.6 * vectors && vectors < 1e-5, "{tiles:e} {vectors:e}");
}

#[test]
fn a_gate_and_what_it_gates_may_differ_in_type() {
    let (ins, outs) = (256, 70);
    let kinds = [BlockType::Q4_K, BlockType::Q6_K];
    let blocks = kinds.map(|kind| random_blocks(kind, outs, ins, 13));
    let floats: Vec<Vec<f32>> = kinds.iter().zip(&blocks).map(|(&kind, bytes)| dequantized(kind, bytes, ins)).collect();
    let bias = numbers(2, 2 * outs);
    let x = numbers(3, 130 * ins);
    for isa in Isa::tested() {
        let tensors: Vec<_> =
            kinds.iter().zip(&blocks).map(|(kind, bytes)| tensor(Numbers::Ggml(kind.number()), outs, ins, bytes)).collect();
        let layer = Linear::new(pack(isa, &tensors, Merge::Gated, DType::Kept), Some(&bias));
        let all = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Gate(Activation::Silu));
        let gelu = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Gate(Activation::GeluTanh));
        for (m, n) in [(0, 0), (7, 31), (64, 32), (129, 69)] {
            let sum = |part: usize| {
                let row = &floats[part][n * ins..(n + 1) * ins];
                let products = row.iter().zip(&x[m * ins..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let bias = f64::from(bias[part * outs + n]);
                products.fold((bias, 1.0), |(sum, size), product| (sum + product, size + product.abs()))
            };
            let ((gate, gate_size), (up, up_size)) = (sum(0), sum(1));
            let tanh = ((2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3))).tanh();
            for (expected, found) in [(gate / (1.0 + (-gate).exp()) * up, &all), (0.5 * gate * (1.0 + tanh) * up, &gelu)] {
                let found = f64::from(found[m * outs + n]);
                assert!((found - expected).abs() < 1e-6 * gate_size * up_size, "{isa:?} {m} {n}: {found} {expected}");
            }
        }
        for count in [1, 2, 5, 14, 100] {
            assert!(
                multiply(isa, 1, &layer, &x[..count * ins], 0.0, Epilogue::Gate(Activation::Silu)) == all[..count * outs],
                "{isa:?} {count} rows"
            );
        }
    }
}

#[test]
fn sums_are_scaled_before_they_are_added_and_capped_or_squared_after_their_bias() {
    let (ins, outs) = (64, 70);
    let (weights, bias, x) = (numbers(1, outs * ins), numbers(2, outs), numbers(3, 5 * ins));
    let bytes = bytes_of(&weights);
    for isa in Isa::available() {
        let layer = Linear::new(pack(isa, &[tensor(Numbers::F32, outs, ins, &bytes)], Merge::Stacked, DType::F32), Some(&bias));
        let sums = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store);
        let added = multiply(isa, 1, &layer, &x, 2.0, Epilogue::Add(0.25));
        let capped = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Softcap(3.0));
        let squared = multiply(isa, 1, &layer, &x, 0.0, Epilogue::ReluSquared);
        let positive = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Relu);
        let gelu = multiply(isa, 1, &layer, &x, 0.0, Epilogue::GeluTanh);
        for (&sum, gelu) in sums.iter().zip(gelu) {
            let tanh = ((2.0 / std::f32::consts::PI).sqrt() * (sum + 0.044_715 * sum.powi(3))).tanh();
            assert!((gelu - 0.5 * sum * (1.0 + tanh)).abs() < 1e-5, "{isa:?}: {gelu} of {sum}");
        }
        assert!(positive.iter().zip(&sums).all(|(positive, sum)| positive.to_bits() == sum.max(0.0).to_bits()), "{isa:?}");
        assert!(squared.iter().zip(&sums).all(|(squared, sum)| squared.to_bits() == (sum.max(0.0) * sum.max(0.0)).to_bits()), "{isa:?}");
        for ((sum, added), capped) in sums.iter().zip(added).zip(capped) {
            assert!((added - 2.0 - sum * 0.25).abs() < 1e-6, "{isa:?}: {added} of {sum}");
            assert!((capped - 3.0 * (sum / 3.0).tanh()).abs() < 2e-6, "{isa:?}: {capped} of {sum}");
        }
    }
}

#[test]
fn interleaved_rows_of_heads_are_put_in_order() {
    let (heads, head_dim, ins) = (3, 4, 32);
    let bytes = random_blocks(BlockType::Q8_0, heads * head_dim, ins, 21);
    let weights = dequantized(BlockType::Q8_0, &bytes, ins);
    let source = tensor(Numbers::Ggml(8), heads * head_dim, ins, &bytes);
    for dtype in [DType::Kept, DType::F32, DType::Int8] {
        let matrix = pack(Isa::best(), &[Tensor { interleaved: head_dim, ..source }], Merge::Stacked, dtype);
        for (row, from) in [(0, 0), (1, 2), (2, 1), (3, 3), (4, 4), (5, 6), (11, 11)] {
            let mut found = vec![0.0; ins];
            matrix.read_row(row, &mut found);
            assert_eq!(found, weights[from * ins..(from + 1) * ins], "{dtype:?} row {row}");
        }
    }
}

#[test]
fn tensors_in_files_are_read_and_a_file_that_ends_too_early_is_refused() {
    let (rows, ins) = (70, 256);
    let bytes = random_blocks(BlockType::Q4_K, rows, ins, 17);
    let path = std::env::temp_dir().join(format!("chairlift-tensor-{}", std::process::id()));
    std::fs::write(&path, [&[7; 11], bytes.as_slice()].concat()).expect("a temporary file");
    let file = std::fs::File::open(&path).expect("the file just written");
    let in_file = Tensor { source: Source::File(&file, 11), ..tensor(Numbers::Ggml(12), rows, ins, &[]) };
    let mut pool = ThreadPool::new(2).expect("threads");
    for interleaved in [0, 10] {
        let both = [in_file, tensor(Numbers::Ggml(12), rows, ins, &bytes)].map(|source| {
            let matrix = pack(Isa::best(), &[Tensor { interleaved, ..source }], Merge::Stacked, DType::Kept);
            multiply(Isa::best(), 1, &Linear::new(matrix, None), &numbers(3, ins), 0.0, Epilogue::Store)
        });
        assert_eq!(both[0], both[1]);
    }
    // Truncates the open file. This can happen while weights are being read.
    std::fs::OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(5000)).expect("a shorter file");
    for dtype in [DType::Kept, DType::F32, DType::Int8] {
        let error = pack_on(&mut pool, Isa::best(), &[in_file], Merge::Stacked, dtype).expect_err("the file is too short");
        assert!(error.to_string().contains("became shorter while it was read"), "{error}");
    }
    std::fs::remove_file(&path).expect("the file just written");
}

/// Makes a tensor's bytes.
#[derive(Debug)]
struct Copied<'a>(Result<&'a [u8], &'static str>);

impl MakeBytes for Copied<'_> {
    fn make(&self) -> Result<Vec<u8>, String> {
        self.0.map(<[u8]>::to_vec).map_err(str::to_owned)
    }
}

#[test]
fn tensors_that_are_made_are_packed_as_those_in_memory_and_one_that_cannot_be_made_is_refused() {
    let (rows, ins) = (37, 256);
    let experts: Vec<_> = (0..3).map(|seed| random_blocks(BlockType::Q4_K, rows, ins, seed)).collect();
    let in_memory: Vec<_> = experts.iter().map(|bytes| tensor(Numbers::Ggml(12), rows, ins, bytes)).collect();
    let makers: Vec<_> = experts.iter().map(|bytes| Copied(Ok(bytes))).collect();
    let made: Vec<_> = makers.iter().zip(&in_memory).map(|(maker, &stored)| Tensor { source: Source::Made(maker), ..stored }).collect();
    let mut pool = ThreadPool::new(2).expect("threads");
    for dtype in [DType::Kept, DType::F32, DType::Int8] {
        for mixed in [[made[0], made[1], made[2]], [in_memory[0], made[1], in_memory[2]], [in_memory[0], in_memory[1], made[2]]] {
            let mut pack = |tensors| Matrix::pack(&mut pool, Isa::best(), &[tensors], Merge::Stacked, dtype).expect("tensors of one shape");
            let [found, expected] = [pack(&mixed), pack(&in_memory)];
            let mut row = [vec![0.0; ins], vec![0.0; ins]];
            for at in 0..found.parts[0].panels(Isa::best()) * Isa::best().panel() * 2 + rows {
                found.parts[0].read_row(at, &mut row[0]);
                expected.parts[0].read_row(at, &mut row[1]);
                assert_eq!(row[0], row[1], "{dtype:?} row {at}");
            }
        }
    }
    for (made, reason) in [(Ok(&experts[0][1..]), "5327 bytes were made of 5328"), (Err("no scale"), "no scale")] {
        let maker = Copied(made);
        let tensors = [in_memory[0], Tensor { source: Source::Made(&maker), ..in_memory[1] }];
        let error = Matrix::pack(&mut pool, Isa::best(), &[&tensors], Merge::Stacked, DType::Kept).expect_err("it cannot be made");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn half_precision_is_refused_where_a_weight_is_too_large_for_it() {
    let bytes = bytes_of(&[1.0, 2.0, 70_000.0, 3.0]);
    let source = tensor(Numbers::F32, 2, 2, &bytes);
    let packed = pack_on(&mut ThreadPool::new(1).expect("threads"), Isa::best(), &[source], Merge::Stacked, DType::F16);
    assert_eq!(packed.err(), Some(PackError::Overflow(70_000.0)));
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut pool = ThreadPool::new(1).expect("threads");
    let mut refused = |tensors: &[Tensor<'_>], merge: Merge| pack_on(&mut pool, Isa::best(), tensors, merge, DType::Kept).err();
    let bytes = vec![0; 4 * 64 * 2];
    let floats = |rows: usize, ins: usize| tensor(Numbers::F32, rows, ins, &bytes[..rows.min(2) * ins.min(64) * 4]);
    assert!(matches!(refused(&[floats(3, 64)], Merge::Stacked), Some(PackError::Shape { expected: 768, found: 512, .. })));
    assert_eq!(refused(&[tensor(Numbers::Ggml(99), 1, 32, &bytes)], Merge::Stacked), Some(PackError::Blocks(99)));
    assert_eq!(refused(&[tensor(Numbers::Ggml(12), 1, 128, &bytes[..72])], Merge::Stacked), Some(PackError::Blocks(12)));
    assert_eq!(refused(&[floats(2, 64), floats(2, 32)], Merge::Stacked), Some(PackError::Mismatch));
    assert_eq!(refused(&[floats(2, 64), floats(1, 64)], Merge::Gated), Some(PackError::Mismatch));
    assert_eq!(refused(&[floats(2, 64)], Merge::Gated), Some(PackError::Mismatch));
    assert_eq!(refused(&[], Merge::Stacked), Some(PackError::Mismatch));
    assert_eq!(refused(&[Tensor { interleaved: 4, ..floats(2, 64) }], Merge::Stacked), Some(PackError::Mismatch));
    assert_eq!(refused(&[floats(2, 64), floats(2, 64)], Merge::Gated), None);
}
