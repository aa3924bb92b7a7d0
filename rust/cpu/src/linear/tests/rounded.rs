//! Compares products in bfloat16 with plain sums of rounded weights and rows.

use super::*;
use crate::block_type::CodeBits;
use crate::half;

/// The instruction sets with tiles, and plain code for them.
fn tested() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| isa.has_tiles()).chain([Isa::best().with_oracle(), Isa::PORTABLE.with_oracle()])
}

fn rounded(x: f32) -> f32 {
    f32::from_bits(u32::from(half::bf16_from_f32(x)) << 16)
}

/// The bfloat16 number that a weight becomes. Ties of codes of 4 bits are rounded away from zero.
fn rounded_weight(format: Numbers, x: f32) -> f32 {
    if format.blocks().is_some_and(|kind| kind.code_bits() == CodeBits::Four) {
        return f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000);
    }
    rounded(x)
}

/// Numbers with all 24 bits.
fn uneven(seed: u32, count: usize) -> Vec<f32> {
    numbers(seed, count).into_iter().zip(numbers(seed + 1, count)).map(|(x, y)| x + y * 1e-3).collect()
}

/// The sources of a layer: every block type that is rounded, and all formats of numbers.
fn sources(outs: usize, ins: usize) -> Vec<(Numbers, Vec<u8>, Vec<f32>)> {
    let mut all: Vec<_> = BlockType::all()
        .filter(|kind| !kind.is_small())
        .map(|kind| {
            let bytes = random_blocks(kind, outs, ins, 5);
            let weights = dequantized(kind, &bytes, ins);
            (Numbers::Ggml(kind.number()), bytes, weights)
        })
        .collect();
    let weights = uneven(8, outs * ins);
    let halves = |to: fn(f32) -> u16| weights.iter().flat_map(|&x| to(x).to_le_bytes()).collect::<Vec<u8>>();
    let formats =
        [(Numbers::F32, bytes_of(&weights)), (Numbers::F16, halves(half::from_f32)), (Numbers::Bf16, halves(half::bf16_from_f32))];
    for (numbers, bytes) in formats {
        let mut decoded = vec![0.0; outs * ins];
        numbers.decode(&bytes, &mut decoded);
        all.push((numbers, bytes, decoded));
    }
    all
}

#[test]
fn products_are_those_of_rounded_weights_and_rows() {
    let (outs, ins, count) = (70, 768, 37);
    let x = uneven(3, count * ins);
    for (format, bytes, weights) in sources(outs, ins) {
        let mut last: Option<Vec<f32>> = None;
        for isa in tested() {
            let layer = Linear::new(pack(isa, &[tensor(format, outs, ins, &bytes)], Merge::Stacked, DType::Rounded), None);
            let found = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Store);
            for (at, &found) in found.iter().enumerate() {
                let (x, w) = (&x[at / outs * ins..][..ins], &weights[at % outs * ins..][..ins]);
                let products = x.iter().zip(w).map(|(&x, &w)| f64::from(rounded(x)) * f64::from(rounded_weight(format, w)));
                let (expected, size) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
                let error = (f64::from(found) - expected).abs();
                assert!(error < 2e-6 * size, "{isa:?} {format:?} {at}: {found} {expected}");
            }
            if isa.is_portable() {
                continue;
            }
            assert!(last.is_none_or(|last| last == found), "{isa:?} and its oracle, {format:?}");
            last = Some(found);
        }
    }
}

#[test]
fn each_row_alone_gives_what_it_gives_among_others() {
    let (outs, ins) = (70, 1280);
    let x = uneven(3, 130 * ins);
    for (format, bytes, _) in sources(outs, ins) {
        for isa in tested() {
            let layer = Linear::new(pack(isa, &[tensor(format, outs, ins, &bytes)], Merge::Stacked, DType::Rounded), None);
            let all = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Store);
            for count in [1, 2, 15, 16, 17, 31, 32, 33, 49, 100, 129] {
                let some = multiply(isa, 1, &layer, &x[..count * ins], 0.0, Epilogue::Store);
                assert!(some == all[..count * outs], "{isa:?} {format:?} {count} rows");
            }
        }
    }
}

#[test]
fn the_weights_are_kept_as_they_are() {
    let (outs, ins) = (70, 768);
    for (format, bytes, weights) in sources(outs, ins) {
        for isa in tested() {
            let matrix = pack(isa, &[tensor(format, outs, ins, &bytes)], Merge::Stacked, DType::Rounded);
            let is_block = format.blocks().is_some();
            for (row, weights) in weights.chunks_exact(ins).enumerate() {
                let mut found = vec![f32::NAN; ins];
                matrix.read_row(row, &mut found);
                let expected = weights.iter().map(|&w| if is_block { w } else { rounded(w) }.to_bits());
                assert!(found.iter().map(|w| w.to_bits()).eq(expected), "{isa:?} {format:?} row {row}");
            }
        }
    }
}

#[test]
fn a_number_that_is_not_finite_spoils_its_own_row_only() {
    let (outs, ins) = (5, 64);
    let bytes = random_blocks(BlockType::Q4_0, outs, ins, 5);
    for isa in tested() {
        let layer = Linear::new(pack(isa, &[tensor(Numbers::Ggml(2), outs, ins, &bytes)], Merge::Stacked, DType::Rounded), None);
        for special in [f32::NAN, f32::INFINITY, f32::MAX] {
            let mut x = uneven(3, 3 * ins);
            let usual = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store);
            x[ins + 7] = special;
            let found = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store);
            assert!(found[outs..2 * outs].iter().all(|x| !x.is_finite()), "{isa:?} {special}: {found:?}");
            assert!(found[..outs] == usual[..outs] && found[2 * outs..] == usual[2 * outs..], "{isa:?} {special}: {found:?}");
        }
    }
}
