//! Compares every block type with ggml's definitions, and every kernel with the portable decoding.

#![allow(clippy::float_cmp)] // The tests compare exact bits.

use super::*;
use crate::block_type::{BLOCK, BlockType, CodeBits, ScaleKind};
use crate::grids::{GridType, provide_grid};
use crate::half;
use crate::pool::ThreadPool;
use crate::simd::Isa;
use crate::tensor::{Numbers, Source, Tensor};

/// Sets random grids, as large as ggml's.
fn provide_grids() {
    for kind in GridType::ALL {
        let entries = 1 << (kind.index_bits() - usize::from(!kind.has_signs()));
        let number = |i: usize| ((i * 2_654_435_761) >> 7) % 1009;
        let value = |i: usize| if kind.has_signs() { number(i) % usize::from(kind.offset()) + 1 } else { number(i) % 3 };
        let values: Vec<i8> = (0..entries * kind.weights()).map(|i| value(i) as i8 - i8::from(!kind.has_signs())).collect();
        provide_grid(kind.number(), &values).expect("a grid");
    }
}

/// Blocks of `rows` rows of `ins` weights, with any codes and factors. Scales are below 0.01, so that nothing overflows.
pub(crate) fn random_blocks(kind: BlockType, rows: usize, ins: usize, seed: u64) -> Vec<u8> {
    provide_grids();
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut bytes: Vec<u8> = (0..rows * kind.row_bytes(ins).expect("whole blocks")).map(|_| next() as u8).collect();
    let halves: &[usize] = match (kind, kind.scale_kind()) {
        (BlockType::Q6_K, _) => &[208],
        (BlockType::Q2_K, _) => &[80, 82],
        (BlockType::Q3_K, _) => &[108],
        (_, ScaleKind::HalfShift | ScaleKind::ScaleMin) => &[0, 2],
        (_, ScaleKind::Bf16) | (BlockType::Grid(GridType::IQ1_M), _) => &[],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(kind.bytes()) {
        for &at in halves {
            let number = (next() as f32 / (1_u32 << 30) as f32 - 1.0) * 0.01;
            block[at..at + 2].copy_from_slice(&half::from_f32(number).to_le_bytes());
        }
        if kind == BlockType::MXFP4 {
            block[0] = 110 + (next() % 16) as u8;
        }
        if kind == BlockType::Grid(GridType::IQ1_M) {
            // The scale's four digits are in the highest bits of four words.
            let digits = half::from_f32((next() as f32 / (1_u32 << 30) as f32 - 1.0) * 0.01);
            (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | ((digits >> (4 * i) & 15) as u8) << 4);
        }
    }
    bytes
}

/// The weights of these blocks.
pub(crate) fn dequantized(kind: BlockType, bytes: &[u8], ins: usize) -> Vec<f32> {
    let row_bytes = kind.row_bytes(ins).expect("whole blocks");
    let mut weights = vec![0.0; bytes.len() / row_bytes * ins];
    for (row, to) in bytes.chunks_exact(row_bytes).zip(weights.chunks_exact_mut(ins)) {
        kind.dequantize(row, to);
    }
    weights
}

fn packed(isa: Isa, kind: BlockType, bytes: &[u8], ins: usize) -> BlockPanels {
    let rows = bytes.len() / kind.row_bytes(ins).expect("whole blocks");
    let tensor = Tensor { numbers: Numbers::Ggml(kind.number()), rows, ins, source: Source::Memory(bytes), interleaved: 0 };
    let order = if isa.has_digits() { WordOrder::Bytes } else { WordOrder::Bits };
    BlockPanels::pack(&mut ThreadPool::new(2).expect("threads"), isa, (&tensor).into(), kind, CodeOrder::Words(order)).expect("in memory")
}

fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| w.to_bits()).collect()
}

/// Bits without the signs of zeros. The kernels lose the sign of a zero code times a negative scale, which no sum depends on.
fn bits_of_sums(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| (w + 0.0).to_bits()).collect()
}

/// Handwritten blocks, each with its first, middle and last weights as ggml's C code computes them. The Python tests compare whole random
/// blocks with the `gguf` package.
#[test]
fn blocks_stand_for_what_ggml_says() {
    let one = [0x00, 0x3c];
    let block = |head: &[u8], fill: u8, kind: BlockType| {
        let mut bytes = head.to_vec();
        bytes.resize(kind.bytes(), fill);
        bytes
    };
    let first_and_last = |kind: BlockType, bytes: &[u8]| {
        let weights = dequantized(kind, bytes, kind.block());
        (weights[0], weights[kind.block() / 2], weights[kind.block() - 1])
    };
    assert_eq!(first_and_last(BlockType::Q4_0, &block(&one, 0xf1, BlockType::Q4_0)), (-7.0, 7.0, 7.0));
    assert_eq!(first_and_last(BlockType::Q4_1, &block(&[0, 0x3c, 0, 0x40], 0xf1, BlockType::Q4_1)), (3.0, 17.0, 17.0));
    // Only weight 0 has its fifth bit set.
    assert_eq!(first_and_last(BlockType::Q5_0, &block(&[0, 0x3c, 1, 0, 0, 0], 0xf1, BlockType::Q5_0)), (1.0, -1.0, -1.0));
    assert_eq!(first_and_last(BlockType::Q5_1, &block(&[0, 0x3c, 0, 0x40, 1, 0, 0, 0], 0xf1, BlockType::Q5_1)), (19.0, 17.0, 17.0));
    assert_eq!(first_and_last(BlockType::Q8_0, &block(&one, 0x80, BlockType::Q8_0)), (-128.0, -128.0, -128.0));
    assert_eq!(first_and_last(BlockType::IQ4_NL, &block(&one, 0xf1, BlockType::IQ4_NL)), (-104.0, 113.0, 113.0));
    // The scale is 2^(128 - 128), half of the power that the byte encodes.
    assert_eq!(first_and_last(BlockType::MXFP4, &block(&[128], 0xf1, BlockType::MXFP4)), (1.0, -12.0, -12.0));
    // The scales are 1 to 8 (the last four have high bits too). Only the last minimum is not 0.
    let scales = [1, 2, 3, 4 | 1 << 6, 0, 0, 0, 3 << 6, 5, 6, 7, 8 | 1 << 4];
    let head = [&[0, 0x3c, 0, 0x3c], scales.as_slice()].concat();
    assert_eq!(first_and_last(BlockType::Q4_K, &block(&head, 0xf1, BlockType::Q4_K)), (1.0, 5.0, 15.0 * 24.0 - 49.0));
    // The fifth bits are set in the first sub-block only.
    let head = [head.as_slice(), &[1; 32]].concat();
    assert_eq!(first_and_last(BlockType::Q5_K, &block(&head, 0xf1, BlockType::Q5_K)), (17.0, 5.0, 15.0 * 24.0 - 49.0));
    let mut six = [vec![0xf1; 128], vec![0; 64], vec![1; 16], one.to_vec()].concat();
    (six[128], six[192 + 15]) = (3, 0xff);
    assert_eq!(first_and_last(BlockType::Q6_K, &six), (17.0, -31.0, 17.0));
    let head = [0, 0x3c, 0x01, 0x80, 0x0f, 0, 0, 0x10];
    assert_eq!(first_and_last(BlockType::IQ4_XS, &block(&head, 0xf1, BlockType::IQ4_XS)), (-104.0 * -1.0, -104.0 * -32.0, 113.0));
}

#[test]
fn packed_blocks_hold_the_weights_to_the_bit() {
    for isa in Isa::available().into_iter().chain([Isa::PORTABLE_DIGITS]) {
        let width = isa.panel();
        for kind in BlockType::all() {
            let ins = if kind.block() == BLOCK { 160 } else { 768 };
            for rows in [1, width, width + 3] {
                let bytes = random_blocks(kind, rows, ins, 7);
                let weights = dequantized(kind, &bytes, ins);
                let panels = packed(isa, kind, &bytes, ins);
                for (row, weights) in weights.chunks_exact(ins).enumerate() {
                    let mut found = vec![f32::NAN; ins];
                    panels.read_column(row, &mut found);
                    assert_eq!(bits(&found), bits(weights), "{isa:?} {kind:?} row {row}");
                }
                if isa.has_digits() {
                    continue;
                }
                let (unit, panel) = (panels.unit_inputs(), (rows - 1) / width);
                for inputs in [0..ins, unit..2 * unit, ins - unit..ins] {
                    let mut expanded = vec![f32::NAN; inputs.len() * width];
                    expand(isa, &panels, panel, inputs.clone(), &mut expanded);
                    for row in panel * width..rows {
                        let found: Vec<f32> = expanded[row % width..].iter().step_by(width).copied().collect();
                        let expected = &weights[row * ins..][inputs.clone()];
                        assert_eq!(bits_of_sums(&found), bits_of_sums(expected), "{isa:?} {kind:?} row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn products_are_those_of_expanded_weights_to_the_bit() {
    for isa in Isa::available().into_iter().filter(|isa| !isa.has_digits()) {
        let width = isa.panel();
        for kind in BlockType::all() {
            let ins = 768;
            let panels = packed(isa, kind, &random_blocks(kind, width, ins, 11), ins);
            let mut expanded = vec![0.0; ins * width];
            expand(isa, &panels, 0, 0..ins, &mut expanded);
            for rows in (1..=isa.rows()).filter(|&rows| fused_rows(isa, rows)) {
                let a: Vec<f32> = (0..rows * ins).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
                let mut sums = vec![f32::NAN; rows * width];
                multiply(isa, &panels, 0, rows, &a, &mut sums);
                for (r, column) in (0..rows).flat_map(|r| (0..width).map(move |column| (r, column))) {
                    let add = |sum: f32, k: usize| {
                        let (x, w) = (a[k * rows + r], expanded[k * width + column]);
                        if isa.is_portable() { x * w + sum } else { x.mul_add(w, sum) }
                    };
                    let expected = (0..ins).fold(0.0, add);
                    assert_eq!(sums[r * width + column].to_bits(), expected.to_bits(), "{isa:?} {kind:?} {rows} rows");
                }
            }
        }
    }
}

#[test]
fn packed_blocks_take_little_more_memory_than_the_file() {
    for kind in BlockType::all() {
        let bytes = random_blocks(kind, 64, 1024, 1);
        // A scale of MXFP4 has 8 bits in the file and 16 here, and 8 signs of a type with a grid 7 and 8. The file has a delta of `IQ1_S` for
        // each 32 weights, and each 8 have one here.
        let limit = match kind {
            BlockType::MXFP4 => 1.06,
            BlockType::Grid(_) => 1.09,
            _ => 1.04,
        };
        for isa in Isa::available() {
            let ratio = packed(isa, kind, &bytes, 1024).bytes.len() as f64 / bytes.len() as f64;
            assert!((1.0..limit).contains(&ratio), "{isa:?} {kind:?}: {ratio}");
        }
    }
}

#[test]
fn every_code_of_every_width_is_read() {
    for kind in BlockType::all().filter(|kind| !matches!(kind, BlockType::Grid(_))) {
        let codes = match kind.code_bits() {
            CodeBits::Two => 4,
            CodeBits::Three => 8,
            CodeBits::Four => 16,
            CodeBits::Five => 32,
            CodeBits::Six => 64,
            CodeBits::Eight => 256,
        };
        let bytes = random_blocks(kind, 64, 1024, 5);
        let mut seen = vec![false; codes];
        for block in bytes.chunks_exact(kind.bytes()) {
            kind.unpack(block).codes[..kind.block()].iter().for_each(|&code| seen[usize::from(code)] = true);
        }
        assert!(seen.iter().all(|&seen| seen), "{kind:?}");
    }
}
