//! Compares products of bytes with plain integers, and their errors with those of fp32.

use super::*;
use crate::block_type::Unpacked;

/// The instruction sets with products of bytes, portable code, and plain code for tiles.
fn tested() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| isa.has_digits()).chain([
        Isa::PORTABLE_DIGITS,
        Isa::PORTABLE.with_oracle(),
        Isa::best().with_oracle(),
    ])
}

/// Rows with blocks of many sizes: their magnitudes differ by up to 2^40, and those of a block's numbers by up to 2^16.
fn uneven(count: usize) -> Vec<f32> {
    let scale = |i: usize| 2.0_f32.powi((i / BLOCK * 7 % 41) as i32 - 20) * 2.0_f32.powi(-((i * i % 17) as i32));
    numbers(3, count).iter().zip(numbers(4, count)).enumerate().map(|(i, (x, y))| (x * 1.000_001 + y * 1e-4) * scale(i)).collect()
}

/// The arithmetics, and their digits of a number.
const DIGITS: [(DType, usize); 2] = [(DType::Kept, 3), (DType::Int16, 2)];

/// The integers of a block of a row, and the power of two that they are multiplied by.
fn integers(digits: usize, block: &[f32]) -> (Vec<i64>, f64) {
    let largest = block.iter().fold(0.0_f64, |largest, &x| largest.max(f64::from(x).abs()));
    let most = f64::from(0x7f_7f7f_u32 >> (8 * (3 - digits)));
    let scale = (-100..=113).map(|e| 2.0_f64.powi(e)).find(|scale| (largest / scale).round_ties_even() <= most).expect("a scale");
    (block.iter().map(|&x| (f64::from(x) / scale).round_ties_even() as i64).collect(), scale)
}

/// The product of a row of weights and a row of numbers, whose blocks are `integers`, as the kernels compute it. `fused`: with fused
/// multiply-adds.
fn plain(fused: bool, digits: usize, kind: BlockType, weights: &[Unpacked], x: &[(Vec<i64>, f64)]) -> f32 {
    let fma = |a: f32, b: f32, c: f32| if fused { a.mul_add(b, c) } else { a * b + c };
    let group = kind.group();
    let offset = -kind.table().map_or(-kind.offset(), |values| values.into_iter().fold(0.0, f32::min));
    let mut total = 0.0;
    for (unit, x) in weights.iter().zip(x.chunks_exact(kind.block() / BLOCK)) {
        for at in (0..kind.block()).step_by(group) {
            let (all, row_scale) = &x[at / BLOCK];
            let numbers = &all[at % BLOCK..][..group];
            let (scale, shift) = unit.scale_and_shift(kind, at);
            let mut sums = vec![0; digits];
            for (i, n) in numbers.iter().enumerate() {
                let code = (kind.value(unit.codes[at + i]) + offset) as i64;
                let mut rest = *n;
                for sum in &mut sums {
                    let digit = i64::from(rest as i8);
                    *sum += code * digit;
                    rest = (rest - digit) >> 8;
                }
            }
            let product = sums.iter().zip([1.0, 256.0, 65536.0]).fold(0.0, |lower, (&sum, power)| fma(sum as f32, power, lower));
            total = fma(product, scale * *row_scale as f32, total);
            total = fma(*row_scale as f32 * numbers.iter().sum::<i64>() as f32, fma(scale, -offset, shift), total);
        }
    }
    total
}

#[test]
fn products_are_those_of_plain_integers_to_the_bit() {
    // Few rows are multiplied as bytes, and more in tiles.
    let (outs, ins, count) = (40, 768, 17);
    let numbers = uneven(count * ins);
    let blocks = DIGITS.map(|(_, digits)| numbers.chunks_exact(BLOCK).map(|block| integers(digits, block)).collect::<Vec<_>>());
    for kind in BlockType::all() {
        let bytes = random_blocks(kind, outs, ins, 5);
        let weights: Vec<_> = bytes.chunks_exact(kind.bytes()).map(|unit| kind.unpack(unit)).collect();
        for ((dtype, digits), x) in DIGITS.into_iter().zip(&blocks) {
            let expected = [false, true].map(|fused| {
                let row = |x| weights.chunks_exact(ins / kind.block()).map(move |weights| plain(fused, digits, kind, weights, x));
                x.chunks_exact(ins / BLOCK).flat_map(row).collect::<Vec<_>>()
            });
            for isa in tested() {
                let matrix = pack(isa, &[tensor(Numbers::Ggml(kind.number()), outs, ins, &bytes)], Merge::Stacked, dtype);
                let found = multiply(isa, 1, &Linear::new(matrix, None), &numbers, 0.0, Epilogue::Store);
                for (at, (found, expected)) in found.iter().zip(&expected[usize::from(!isa.is_portable())]).enumerate() {
                    let (m, n) = (at / outs, at % outs);
                    assert_eq!(found.to_bits(), expected.to_bits(), "{isa:?} {dtype:?} {kind:?} {m} {n}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn each_row_alone_gives_what_it_gives_among_others() {
    let ins = 256;
    let x = uneven(66 * ins);
    for (isa, (dtype, _)) in tested().flat_map(|isa| DIGITS.map(|digits| (isa, digits))) {
        let (layer, ..) = mixed(isa, dtype, ins);
        let outs = layer.matrix.outs;
        let all = multiply(isa, 2, &layer, &x, 0.0, Epilogue::Store);
        for (m, row) in all.chunks_exact(outs).enumerate() {
            let alone = multiply(isa, 1, &layer, &x[m * ins..(m + 1) * ins], 0.0, Epilogue::Store);
            assert!(alone == row, "{isa:?} {dtype:?} row {m}");
            // Some heights of tiles for each number of tiles.
            if m > 32 && m % 8 > 0 {
                continue;
            }
            let first = multiply(isa, 1, &layer, &x[..(m + 1) * ins], 0.0, Epilogue::Store);
            assert!(first == all[..(m + 1) * outs], "{isa:?} {dtype:?} {} rows", m + 1);
        }
    }
}

#[test]
fn a_number_that_is_not_finite_makes_its_own_row_nan_and_tiny_and_huge_numbers_are_kept() {
    let (ins, kind) = (256, BlockType::Q4_K);
    let bytes = random_blocks(kind, 1, ins, 5);
    let weights = dequantized(kind, &bytes, ins);
    for (isa, (dtype, digits)) in tested().flat_map(|isa| DIGITS.map(|digits| (isa, digits))) {
        let matrix = pack(isa, &[tensor(Numbers::Ggml(kind.number()), 1, ins, &bytes)], Merge::Stacked, dtype);
        let layer = Linear::new(matrix, None);
        for (special, finite) in [
            (f32::NAN, false),
            (f32::INFINITY, false),
            (f32::NEG_INFINITY, false),
            (1e33, true),
            (-1e33, true),
            (1e34, false),
            (1e-40, true),
        ] {
            let mut x = numbers(3, 2 * ins);
            x[7] = special;
            let found = multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store);
            assert_eq!(found[0].is_finite(), finite, "{isa:?} {special}: {found:?}");
            assert_eq!(found[0].is_nan(), !finite, "{isa:?} {special}: {found:?}");
            let alone = multiply(isa, 1, &layer, &x[ins..], 0.0, Epilogue::Store);
            assert_eq!(found[1].to_bits(), alone[0].to_bits(), "{isa:?} {special}");
        }
        let tolerance = if digits == 3 { 1e-6 } else { 1e-4 };
        for (size, tolerance) in [(1e30_f32, tolerance), (1e-22, tolerance), (1e-40, 1.0)] {
            let x: Vec<f32> = numbers(3, ins).iter().map(|x| x * size).collect();
            let found = f64::from(multiply(isa, 1, &layer, &x, 0.0, Epilogue::Store)[0]);
            let products = x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (expected, total) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
            assert!((found - expected).abs() <= tolerance * total, "{isa:?} {size}: {found} {expected}");
        }
        assert!(multiply(isa, 1, &layer, &vec![0.0; ins], 0.0, Epilogue::Store) == [0.0]);
    }
}

/// The root of the mean square error of products, relative to the root of the sum of the products' squares.
fn error(isa: Isa, dtype: DType, kind: BlockType, x: &[f32], outs: usize, ins: usize) -> f64 {
    let bytes = random_blocks(kind, outs, ins, 5);
    let weights = dequantized(kind, &bytes, ins);
    let matrix = pack(isa, &[tensor(Numbers::Ggml(kind.number()), outs, ins, &bytes)], Merge::Stacked, dtype);
    let found = multiply(isa, 1, &Linear::new(matrix, None), x, 0.0, Epilogue::Store);
    let (mut errors, mut sizes) = (0.0, 0.0);
    for (at, found) in found.iter().enumerate() {
        let (x, w) = (&x[at / outs * ins..][..ins], &weights[at % outs * ins..][..ins]);
        let products = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (exact, size) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product * product));
        errors += (f64::from(*found) - exact).powi(2);
        sizes += size;
    }
    (errors / sizes).sqrt()
}

#[test]
fn errors_are_smaller_than_those_of_fp32() {
    let (outs, ins, count) = (32, 2048, 8);
    let even = numbers(3, count * ins).iter().zip(numbers(4, count * ins)).map(|(x, y)| x + y * 1e-3).collect();
    // One number of a block in eight is a hundred times as large.
    let outliers = numbers(3, count * ins).iter().enumerate().map(|(i, x)| x * if i % 256 == 5 { 100.0 } else { 1.0 }).collect();
    let positive = numbers(3, count * ins).iter().map(|x| x.abs() * 1.001).collect();
    for (what, x) in [("even", even), ("outliers", outliers), ("positive", positive)] as [(&str, Vec<f32>); 3] {
        // Errors are those of the rows: other types differ little.
        for kind in [BlockType::Q4_1, BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0] {
            let [bytes, plain] = [Isa::PORTABLE_DIGITS, Isa::PORTABLE].map(|isa| error(isa, DType::Kept, kind, &x, outs, ins));
            let two = error(Isa::PORTABLE_DIGITS, DType::Int16, kind, &x, outs, ins);
            println!("{what} {kind:?}: three digits {bytes:.2e}, two {two:.2e}, fp32 {plain:.2e}");
            assert!(bytes < plain, "{what} {kind:?}: {bytes:e} {plain:e}");
            // A number has 8 bits less.
            assert!(two < 256.0 * plain, "{what} {kind:?}: {two:e} {plain:e}");
        }
    }
}
