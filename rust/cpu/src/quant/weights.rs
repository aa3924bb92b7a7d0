//! Weights in blocks of integers, packed in panels.

use crate::aligned::AlignedVec;
use crate::block_type::{BLOCK, BlockType, Unpacked};
use crate::half;
use crate::pool::ThreadPool;
use crate::simd::{Isa, Layout};
use crate::tensor::{ReadError, Stack};

/// 1.5 * 2^23. Adding it to a small number rounds that to the nearest integer, which is then in the last bits of the sum.
const ROUNDER: f32 = 12_582_912.0;

/// Number of bits of an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    /// -128 to 127, times a scale.
    Eight,
    /// 0 to 15, times a scale, plus a shift.
    Four,
}

/// A block of one column.
#[derive(Clone, Copy)]
struct Block {
    /// In half precision.
    scale: u16,
    /// In half precision. Only 4-bit blocks have a shift.
    shift: u16,
    /// Signed for 8 bits, 0 to 15 for 4 bits.
    codes: [i8; BLOCK],
}

/// Weights [columns, ins], as panels of blocks.
///
/// A panel's block has the scales of all columns, the shifts for 4-bit weights, and then the integers. 8-bit integers are [8][column][4]
/// bytes, or another layout that the instruction set needs. Two 4-bit integers share a byte, as in ggml: [4][column][4], with the block's
/// second half in the upper bits.
#[derive(Debug)]
pub(crate) struct QuantWeights {
    bytes: AlignedVec<u8>,
    bits: Bits,
    isa: Isa,
    ins: usize,
}

impl QuantWeights {
    /// Reads and packs tensors. Blocks of types `Q4_0`, `Q4_1` and `Q8_0` are kept exactly. Those of `Q4_K` keep their integers; their scales
    /// are rounded to half precision, which changes a weight less than 8 bits would. Other numbers are rounded to 8-bit integers.
    pub(crate) fn pack(pool: &mut ThreadPool, isa: Isa, stack: Stack<'_>) -> Result<Self, ReadError> {
        let (width, ins) = (isa.panel(), stack.ins());
        let bits_of = |kind| match kind {
            BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q4_K => Some(Bits::Four),
            BlockType::Q8_0 => Some(Bits::Eight),
            _ => None,
        };
        let kept = stack.numbers().blocks().filter(|&kind| bits_of(kind).is_some());
        let bits = kept.and_then(bits_of).unwrap_or(Bits::Eight);
        let each = block_bytes(width, bits);
        let blocks = ins.div_ceil(BLOCK);
        let size = blocks * each;
        let mut bytes = AlignedVec::zeros(stack.panels(width) * size);
        let shared = bytes.shared();
        let layout = isa.layout();
        stack.for_each_panel(pool, width, |panel, rows| {
            // SAFETY: each panel is written by one call.
            let out = unsafe { shared.write(panel * size, size) };
            let mut row = vec![0.0; blocks * BLOCK];
            for column in 0..rows.count() {
                let Some(kind) = kept else {
                    stack.numbers().decode(rows.row(column), &mut row[..ins]);
                    for (to, numbers) in out.chunks_exact_mut(each).zip(row.as_chunks().0) {
                        Block::nearest(numbers).write(to, width, column, bits, layout);
                    }
                    continue;
                };
                let units = rows.row(column).chunks_exact(kind.bytes());
                for (to, unit) in out.chunks_exact_mut(kind.block() / BLOCK * each).zip(units) {
                    let unit = kind.unpack(unit);
                    for (part, to) in to.chunks_exact_mut(each).enumerate() {
                        Block::of_ggml(kind, &unit, part).write(to, width, column, bits, layout);
                    }
                }
            }
        })?;
        Ok(Self { bytes, bits, isa, ins })
    }

    /// Reads the weights of a column, as an embedding.
    pub(crate) fn read_row(&self, column: usize, out: &mut [f32]) {
        let width = self.isa.panel();
        for (out, bytes) in out.chunks_mut(BLOCK).zip(self.panel(column / width).chunks_exact(block_bytes(width, self.bits))) {
            let block = Block::read(bytes, width, column % width, self.bits, self.isa.layout());
            out.copy_from_slice(&block.numbers()[..out.len()]);
        }
    }

    /// The blocks of a panel.
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let size = self.blocks() * block_bytes(self.isa.panel(), self.bits);
        &self.bytes[panel * size..(panel + 1) * size]
    }

    /// Number of blocks in a column.
    pub(super) fn blocks(&self) -> usize {
        self.ins.div_ceil(BLOCK)
    }

    pub(super) fn bits(&self) -> Bits {
        self.bits
    }

    pub(super) fn isa(&self) -> Isa {
        self.isa
    }
}

/// Bytes of one block of a panel with `width` columns.
pub(super) const fn block_bytes(width: usize, bits: Bits) -> usize {
    match bits {
        Bits::Eight => width * (2 + BLOCK),
        Bits::Four => width * (4 + BLOCK / 2),
    }
}

impl Block {
    /// Rounds numbers to an 8-bit block. The largest magnitude becomes 127 or -127. If a number is NaN, the whole block is NaN.
    fn nearest(numbers: &[f32; BLOCK]) -> Self {
        // Magnitudes have the same order as their bits, and NaN is the largest.
        let largest = numbers.map(|x| x.to_bits() & 0x7fff_ffff).into_iter().max().map_or(0.0, f32::from_bits);
        // Rounds the scale to half precision first, because the integers must fit the scale that is stored.
        let scale = half::from_f32(largest / 127.0);
        let inverse = if half::to_f32(scale) > 0.0 { 1.0 / half::to_f32(scale) } else { 0.0 };
        let code = |x: f32| ((x * inverse).clamp(-127.0, 127.0) + ROUNDER).to_bits() as i8;
        Self { scale, shift: 0, codes: numbers.map(code) }
    }

    /// Converts 32 weights of a ggml block, those of index `part`, without changing their integers.
    fn of_ggml(kind: BlockType, unit: &Unpacked, part: usize) -> Self {
        let &Unpacked { scale, second, .. } = unit;
        let codes: [u8; BLOCK] = std::array::from_fn(|i| unit.codes[part * BLOCK + i]);
        match kind {
            // The unpacked codes of `Q8_0` are the value plus 128.
            BlockType::Q8_0 => Self { scale, shift: 0, codes: codes.map(|code| (code ^ 0x80) as i8) },
            // The product of the scale and a power of two is exact.
            BlockType::Q4_0 => Self { scale, shift: half::from_f32(-8.0 * half::to_f32(scale)), codes: codes.map(|code| code as i8) },
            BlockType::Q4_K => {
                let (scale, shift) = unit.scale_and_shift(kind, part * BLOCK);
                Self { scale: half::from_f32(scale), shift: half::from_f32(shift), codes: codes.map(|code| code as i8) }
            }
            _ => Self { scale, shift: second, codes: codes.map(|code| code as i8) },
        }
    }

    /// The values of the block.
    fn numbers(&self) -> [f32; BLOCK] {
        let (scale, shift) = (half::to_f32(self.scale), half::to_f32(self.shift));
        self.codes.map(|code| scale * f32::from(code) + shift)
    }

    /// Writes the block to its column of a panel's block.
    fn write(&self, to: &mut [u8], width: usize, column: usize, bits: Bits, layout: Layout) {
        to[2 * column..][..2].copy_from_slice(&self.scale.to_le_bytes());
        match bits {
            Bits::Eight => {
                let Layout { group, offset, .. } = layout;
                for (i, codes) in self.codes.chunks_exact(group).enumerate() {
                    let to = &mut to[2 * width + group * (i * width + column)..][..group];
                    to.iter_mut().zip(codes).for_each(|(to, &code)| *to = (code as u8).wrapping_add(offset));
                }
            }
            Bits::Four => {
                to[2 * (width + column)..][..2].copy_from_slice(&self.shift.to_le_bytes());
                for i in 0..BLOCK / 2 {
                    to[4 * (width + i / 4 * width + column) + i % 4] = self.codes[i] as u8 | (self.codes[i + BLOCK / 2] as u8) << 4;
                }
            }
        }
    }

    /// Reads the block from its column of a panel's block.
    fn read(from: &[u8], width: usize, column: usize, bits: Bits, layout: Layout) -> Self {
        let half = |at: usize| u16::from_le_bytes([from[at], from[at + 1]]);
        let scale = half(2 * column);
        match bits {
            Bits::Eight => {
                let Layout { group, offset, .. } = layout;
                let code = |i: usize| from[2 * width + group * (i / group * width + column) + i % group].wrapping_sub(offset) as i8;
                Self { scale, shift: 0, codes: std::array::from_fn(code) }
            }
            Bits::Four => {
                let byte = |i: usize| from[4 * (width + i / 4 * width + column) + i % 4];
                let code = |i: usize| if i < BLOCK / 2 { byte(i) & 15 } else { byte(i - BLOCK / 2) >> 4 };
                Self { scale, shift: half(2 * (width + column)), codes: std::array::from_fn(|i| code(i) as i8) }
            }
        }
    }
}
