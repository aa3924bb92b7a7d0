use super::dot::tile;
use super::*;
use crate::aligned::AlignedVec;
use crate::block_type::BlockType;
use crate::gemm::Gemm;
use crate::ggml::tests::random_blocks;
use crate::pool::ThreadPool;
use crate::simd::Isa;
use crate::tensor::{Numbers, Source, Tensor};

/// A pseudo-random generator (Knuth's constants).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    /// A number from -1 to 1.
    fn number(&mut self) -> f32 {
        self.bits() as f32 / (1_u32 << 30) as f32 - 1.0
    }
    fn row(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }
    /// A row of blocks with scales up to 0.01 and any integers.
    fn blocks(&mut self, kind: BlockType, ins: usize) -> Vec<u8> {
        random_blocks(kind, 1, ins, u64::from(self.bits()))
    }
}

/// The values of ggml's blocks.
fn dequantized(kind: BlockType, bytes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0; bytes.len() / kind.bytes() * kind.block()];
    kind.dequantize(bytes, &mut numbers);
    numbers
}

/// The numbers after rounding to their block's scale and integers.
fn quantized(numbers: &[f32]) -> Vec<f64> {
    let mut values = Vec::new();
    for block in numbers.chunks(BLOCK) {
        let largest = block.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        values.extend(block.iter().map(|x| f64::from(largest / 127.0) * f64::from((x * inverse).round_ties_even())));
    }
    values
}

/// The product of `weights`, which has `columns` columns, and `rows`, computed as one tile: [rows][columns].
fn product(isa: Isa, weights: &QuantWeights, columns: usize, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut packed = QuantRows::default();
    packed.reserve(isa, rows.len(), rows[0].len());
    let packed = packed.shared();
    for (m, row) in rows.iter().enumerate() {
        // SAFETY: only this thread uses the rows.
        unsafe { packed.pack(isa, 0..rows.len(), m, row) }
    }
    let width = isa.panel();
    let mut results = vec![Vec::new(); rows.len()];
    for panel in 0..columns.div_ceil(width) {
        let mut out = AlignedVec::zeros(rows.len() * width);
        // The previous contents must not matter.
        out.fill(f32::NAN);
        // SAFETY: as above.
        unsafe { tile(isa, weights, panel, packed, 0..rows.len(), &mut out) }
        for (result, out) in results.iter_mut().zip(out.chunks(width)) {
            result.extend(out);
        }
    }
    results
}

fn packed(isa: Isa, numbers: Numbers, rows: usize, ins: usize, bytes: &[u8]) -> QuantWeights {
    let tensor = Tensor { numbers, rows, ins, source: Source::Memory(bytes), interleaved: 0 };
    QuantWeights::pack(&mut ThreadPool::new(2).expect("threads"), isa, (&tensor).into()).expect("in memory")
}

fn packed_blocks(isa: Isa, kind: BlockType, ins: usize, rows: &[Vec<u8>]) -> QuantWeights {
    packed(isa, Numbers::Ggml(kind.number()), rows.len(), ins, &rows.concat())
}

fn packed_floats(isa: Isa, rows: &[Vec<f32>]) -> QuantWeights {
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
    packed(isa, Numbers::F32, rows.len(), rows[0].len(), &bytes)
}

fn bits_of(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Compares with sums of the same numbers in double precision. The padding of the last panel must be zero.
fn assert_products(isa: Isa, results: &[Vec<f32>], weights: &[Vec<f32>], rows: &[Vec<f32>]) {
    for (result, row) in results.iter().zip(rows) {
        let x = quantized(row);
        for (n, found) in result.iter().enumerate() {
            let products = weights.get(n).map_or(Vec::new(), |w| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).collect());
            let (sum, size): (f64, f64) = (products.iter().sum(), products.iter().map(|p| p.abs()).sum());
            assert!((f64::from(*found) - sum).abs() <= 2e-6 * size, "{}: {found}, not {sum}, in column {n}", isa.name());
        }
    }
}

#[test]
fn products_are_those_of_the_numbers_that_the_blocks_stand_for() {
    for isa in Isa::without_digits() {
        for kind in [BlockType::Q4_0, BlockType::Q4_1, BlockType::Q8_0] {
            for (columns, ins) in [(1, 32), (isa.panel(), 64), (isa.panel() + 3, 160), (2 * isa.panel() - 1, 576)] {
                let mut random = Random(7);
                let blocks: Vec<_> = (0..columns).map(|_| random.blocks(kind, ins)).collect();
                let weights: Vec<_> = blocks.iter().map(|row| dequantized(kind, row)).collect();
                let packed = packed_blocks(isa, kind, ins, &blocks);
                let mut row = vec![0.0; ins];
                for (column, weights) in weights.iter().enumerate() {
                    packed.read_row(column, &mut row);
                    assert_eq!(&row, weights, "{kind:?}");
                }
                for count in 1..=isa.rows() {
                    let rows: Vec<_> = (0..count).map(|_| random.row(ins)).collect();
                    assert_products(isa, &product(isa, &packed, columns, &rows), &weights, &rows);
                }
            }
        }
    }
}

#[test]
fn floats_become_the_nearest_blocks_and_a_ragged_end_is_padded() {
    for isa in Isa::without_digits() {
        for ins in [1, 31, 33, 100, 576] {
            let mut random = Random(ins as u64);
            let columns = isa.panel() + 1;
            let floats: Vec<_> = (0..columns).map(|_| random.row(ins)).collect();
            let packed = packed_floats(isa, &floats);
            let mut weights = Vec::new();
            for (column, floats) in floats.iter().enumerate() {
                let mut row = vec![0.0; ins];
                packed.read_row(column, &mut row);
                for (read, block) in row.chunks(BLOCK).zip(floats.chunks(BLOCK)) {
                    let largest = block.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                    // Half a step, and the rounding of the scale.
                    let bound = largest / 127.0 * 0.5 + largest / 2048.0;
                    assert!(read.iter().zip(block).all(|(a, b)| (a - b).abs() <= bound), "{read:?} of {block:?}");
                }
                weights.push(row);
            }
            let rows: Vec<_> = (0..isa.rows()).map(|_| random.row(ins)).collect();
            assert_products(isa, &product(isa, &packed, columns, &rows), &weights, &rows);
        }
    }
}

#[test]
fn blocks_of_other_types_become_the_nearest_of_eight_bits() {
    for isa in Isa::without_digits() {
        for kind in [BlockType::Q5_0, BlockType::Q5_K, BlockType::Q6_K, BlockType::IQ4_NL] {
            let blocks = [Random(3).blocks(kind, 256)];
            let packed = packed_blocks(isa, kind, 256, &blocks);
            let mut row = vec![0.0; 256];
            packed.read_row(0, &mut row);
            for (found, weights) in row.chunks(BLOCK).zip(dequantized(kind, &blocks[0]).chunks(BLOCK)) {
                let largest = weights.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                // Half a step, and the rounding of the scale.
                let bound = largest / 127.0 * 0.5 + largest / 2048.0 + f32::EPSILON;
                assert!(found.iter().zip(weights).all(|(a, b)| (a - b).abs() <= bound), "{kind:?}");
            }
        }
    }
}

#[test]
fn blocks_of_four_bits_with_scales_of_their_own_keep_their_integers() {
    for isa in Isa::without_digits() {
        let (columns, ins) = (isa.panel() + 3, 512);
        let mut random = Random(11);
        let blocks: Vec<_> = (0..columns).map(|_| random.blocks(BlockType::Q4_K, ins)).collect();
        let packed = packed_blocks(isa, BlockType::Q4_K, ins, &blocks);
        assert_eq!(packed.bits(), Bits::Four);
        let mut read = Vec::new();
        for (column, blocks) in blocks.iter().enumerate() {
            let mut row = vec![0.0; ins];
            packed.read_row(column, &mut row);
            for (found, weights) in row.chunks(BLOCK).zip(dequantized(BlockType::Q4_K, blocks).chunks(BLOCK)) {
                // The scale and the shift are rounded to 11 bits. With integers of 8 bits the bound would be twice as large.
                let (least, most) = weights.iter().fold((f32::MAX, f32::MIN), |(least, most), &x| (least.min(x), most.max(x)));
                let largest = (most - least).max(least.abs()).max(most.abs());
                let bound = 2.0 * largest / 1024.0 + 1e-6;
                assert!(found.iter().zip(weights).all(|(a, b)| (a - b).abs() <= bound), "{found:?} of {weights:?}");
            }
            read.push(row);
        }
        let rows: Vec<_> = (0..isa.rows()).map(|_| random.row(ins)).collect();
        assert_products(isa, &product(isa, &packed, columns, &rows), &read, &rows);
    }
}

#[test]
fn the_largest_integers_overflow_nothing() {
    for isa in Isa::without_digits() {
        for (kind, codes) in [(BlockType::Q8_0, [0x80, 0x7f]), (BlockType::Q4_0, [0xff, 0x00]), (BlockType::Q4_1, [0xff, 0x00])] {
            // Scales and shifts are 1.
            let mut bytes = vec![0x00, 0x3c, 0x00, 0x3c];
            bytes.truncate(if kind == BlockType::Q4_1 { 4 } else { 2 });
            let blocks = codes.map(|code| [bytes.clone(), vec![code; kind.bytes() - bytes.len()]].concat());
            let weights = blocks.each_ref().map(|block| dequantized(kind, block));
            let packed = packed_blocks(isa, kind, BLOCK, &blocks);
            for x in [1.0, -1.0] {
                let rows = vec![vec![x; BLOCK]; isa.rows()];
                assert_products(isa, &product(isa, &packed, 2, &rows), &weights, &rows);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_those_beside_it() {
    for isa in Isa::without_digits() {
        for kind in [BlockType::Q4_1, BlockType::Q8_0] {
            let mut random = Random(11);
            let blocks: Vec<_> = (0..isa.panel()).map(|_| random.blocks(kind, 576)).collect();
            let packed = packed_blocks(isa, kind, 576, &blocks);
            let rows: Vec<_> = (0..isa.rows()).map(|_| random.row(576)).collect();
            let alone: Vec<_> = rows.iter().flat_map(|row| product(isa, &packed, blocks.len(), std::slice::from_ref(row))).collect();
            for count in 2..=rows.len() {
                let together = product(isa, &packed, blocks.len(), &rows[..count]);
                assert_eq!(bits_of(&together), bits_of(&alone[..count]), "{} rows, {}", count, isa.name());
            }
        }
    }
}

#[test]
fn a_row_that_is_not_all_numbers_spoils_itself_alone() {
    for isa in Isa::without_digits() {
        for kind in [BlockType::Q4_0, BlockType::Q8_0] {
            let mut random = Random(13);
            let blocks: Vec<_> = (0..isa.panel()).map(|_| random.blocks(kind, 128)).collect();
            let packed = packed_blocks(isa, kind, 128, &blocks);
            let mut rows: Vec<_> = (0..3).map(|_| random.row(128)).collect();
            let before = product(isa, &packed, blocks.len(), &rows);
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 37, 127] {
                    let number = std::mem::replace(&mut rows[1][at], odd);
                    let after = product(isa, &packed, blocks.len(), &rows);
                    assert!(after[1].iter().all(|x| x.is_nan()), "{odd} at {at}: {:?}", after[1]);
                    assert_eq!(bits_of(&[after[0].clone(), after[2].clone()]), bits_of(&[before[0].clone(), before[2].clone()]));
                    rows[1][at] = number;
                }
            }
        }
    }
}

#[test]
fn tiny_and_huge_numbers_are_numbers() {
    for isa in Isa::without_digits() {
        let kind = BlockType::Q8_0;
        let blocks = [Random(17).blocks(kind, 64)];
        let packed = packed_blocks(isa, kind, 64, &blocks);
        let weights = [dequantized(kind, &blocks[0])];
        let huge = vec![Random(19).row(64).iter().map(|x| x * 1e37).collect::<Vec<_>>()];
        assert_products(isa, &product(isa, &packed, 1, &huge), &weights, &huge);
        for x in [0.0, -0.0, 1e-45, -1e-38] {
            let result = product(isa, &packed, 1, &[vec![x; 64]])[0][0];
            assert!(result.to_bits() << 1 == 0, "{result} of {x:e}");
        }
    }
}

#[test]
fn a_weight_that_is_no_number_spoils_its_column_alone() {
    for isa in Isa::without_digits() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut weights = vec![Random(29).row(70), Random(31).row(70)];
            weights[1][69] = odd;
            let result = &product(isa, &packed_floats(isa, &weights), 2, &[Random(37).row(70)])[0];
            assert!(result[0].is_finite() && !result[1].is_finite(), "{odd}: {result:?}");
        }
    }
}
