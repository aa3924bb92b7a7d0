//! Weights in blocks of integers, packed in panels.

use super::BLOCK;
use crate::aligned::AlignedVec;
use crate::half;
use crate::pool::ThreadPool;
use crate::simd::{Int8, Isa, Kernel};

/// 1.5 * 2^23: a small number added to it is rounded to the nearest integer, and that is in the sum's last bits.
const ROUNDER: f32 = 12_582_912.0;

/// How many bits an integer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    /// -128 to 127, times a scale.
    Eight,
    /// 0 to 15, times a scale, plus a shift.
    Four,
}

/// The types of ggml's blocks that are used as they are. All begin with a scale in half precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockType {
    /// 32 integers of 4 bits, of which 8 is subtracted: byte i holds numbers i and, above it, i + 16.
    Q4_0,
    /// The block's shift in half precision, then integers as in `Q4_0`.
    Q4_1,
    /// 32 signed bytes.
    Q8_0,
}

impl BlockType {
    /// The type that ggml numbers so; `None` for others than these.
    pub(crate) fn from_ggml(number: u32) -> Option<Self> {
        match number {
            2 => Some(Self::Q4_0),
            3 => Some(Self::Q4_1),
            8 => Some(Self::Q8_0),
            _ => None,
        }
    }

    /// Bytes of a row of so many numbers, a multiple of 32.
    pub(crate) fn row_bytes(self, ins: usize) -> usize {
        ins / BLOCK * self.bytes()
    }

    /// What holds the integers as they are.
    pub(crate) fn bits(self) -> Bits {
        match self {
            Self::Q4_0 | Self::Q4_1 => Bits::Four,
            Self::Q8_0 => Bits::Eight,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }
}

/// Where a column's weights are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// Nowhere: the column pads the panel, with zeros.
    Padding,
    /// In the buffer that was given.
    Floats,
    /// In blocks of ggml's.
    Blocks(BlockType, &'a [u8]),
}

/// A block of one column.
#[derive(Clone, Copy)]
struct Block {
    /// In half precision.
    scale: u16,
    /// In half precision; 4-bit blocks only.
    shift: u16,
    /// Signed, or from 0 to 15.
    codes: [i8; BLOCK],
}

/// Weights [columns, ins] as panels of blocks.
///
/// A panel's block is the columns' scales, of 4-bit weights their shifts, and then integers: [8][column][4] bytes, or what the
/// instruction set wants. Two 4-bit ones share a byte, as in ggml: [4][column][4], with the block's second half in the upper bits.
#[derive(Debug)]
pub(crate) struct QuantWeights {
    bytes: AlignedVec<u8>,
    bits: Bits,
    isa: Isa,
    ins: usize,
}

impl QuantWeights {
    /// Packs `columns` columns of `ins` weights.
    ///
    /// `source` is asked for each column, and gets a buffer for `ins` numbers. With 8 bits, 4-bit blocks of type `Q4_0` are kept
    /// exactly, and ones of type `Q4_1` rounded. With 4 bits all sources must be blocks of 4 bits.
    pub(crate) fn pack<'a>(
        pool: &mut ThreadPool,
        isa: Isa,
        bits: Bits,
        columns: usize,
        ins: usize,
        source: impl Fn(usize, &mut [f32]) -> Source<'a> + Sync,
    ) -> Self {
        let width = isa.panel();
        let blocks = ins.div_ceil(BLOCK);
        let size = blocks * block_bytes(width, bits);
        let panels = columns.div_ceil(width);
        let mut bytes = AlignedVec::zeros(panels * size);
        let shared = bytes.shared();
        let layout = Layout::of(isa);
        pool.run(|worker| {
            let mut row = vec![0.0; blocks * BLOCK];
            worker.parallel_for(panels, |panel| {
                // SAFETY: each panel is one piece's.
                let out = unsafe { shared.write(panel * size, size) };
                for column in panel * width..columns.min((panel + 1) * width) {
                    let found = source(column, &mut row[..ins]);
                    for (b, to) in out.chunks_exact_mut(block_bytes(width, bits)).enumerate() {
                        let block = match found {
                            Source::Padding => break,
                            Source::Floats => Block::nearest(row[b * BLOCK..][..BLOCK].try_into().expect("whole blocks")),
                            Source::Blocks(kind, bytes) => Block::of_ggml(kind, &bytes[b * kind.bytes()..][..kind.bytes()], bits),
                        };
                        block.write(to, width, column % width, bits, layout);
                    }
                }
            });
        });
        Self { bytes, bits, isa, ins }
    }

    /// The weights of a column, as an embedding's row.
    pub(crate) fn read_row(&self, column: usize, out: &mut [f32]) {
        let width = self.isa.panel();
        for (out, bytes) in out.chunks_mut(BLOCK).zip(self.panel(column / width).chunks_exact(block_bytes(width, self.bits))) {
            let block = Block::read(bytes, width, column % width, self.bits, Layout::of(self.isa));
            out.copy_from_slice(&block.numbers()[..out.len()]);
        }
    }

    /// A panel's blocks.
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let size = self.blocks() * block_bytes(self.isa.panel(), self.bits);
        &self.bytes[panel * size..(panel + 1) * size]
    }

    /// Blocks in a column.
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

/// Bytes of a block of a panel of so many columns.
pub(super) const fn block_bytes(width: usize, bits: Bits) -> usize {
    match bits {
        Bits::Eight => width * (2 + BLOCK),
        Bits::Four => width * (4 + BLOCK / 2),
    }
}

/// How an instruction set wants 8-bit weights.
#[derive(Clone, Copy)]
struct Layout {
    /// How many of a column lie side by side.
    group: usize,
    /// What they are stored larger by.
    offset: u8,
}

impl Layout {
    fn of(isa: Isa) -> Self {
        struct Of;
        impl Kernel for Of {
            type Output = Layout;
            #[inline(always)]
            fn run<S: Int8>(self, _: S) -> Layout {
                Layout { group: S::GROUP, offset: S::OFFSET as u8 }
            }
        }
        isa.run(Of)
    }
}

impl Block {
    /// The nearest 8-bit block to some numbers: the largest becomes 127 or -127. It is none if one of them is none.
    fn nearest(numbers: &[f32; BLOCK]) -> Self {
        // Magnitudes are ordered as their bits are, and what is no number comes last.
        let largest = numbers.map(|x| x.to_bits() & 0x7fff_ffff).into_iter().max().map_or(0.0, f32::from_bits);
        // The integers are made for the scale as it will be used, and so rounded first.
        let scale = half::from_f32(largest / 127.0);
        let inverse = if half::to_f32(scale) > 0.0 { 1.0 / half::to_f32(scale) } else { 0.0 };
        let code = |x: f32| ((x * inverse).clamp(-127.0, 127.0) + ROUNDER).to_bits() as i8;
        Self { scale, shift: 0, codes: numbers.map(code) }
    }

    /// A block as ggml has it, its integers as they are if `bits` can hold them.
    fn of_ggml(kind: BlockType, bytes: &[u8], bits: Bits) -> Self {
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let scale = number(0);
        let nibbles: [i8; BLOCK] = std::array::from_fn(|i| {
            let byte = bytes[bytes.len() - 16 + i % 16];
            if i < 16 { byte as i8 & 15 } else { (byte >> 4) as i8 }
        });
        match (kind, bits) {
            (BlockType::Q8_0, Bits::Eight) => Self { scale, shift: 0, codes: std::array::from_fn(|i| bytes[2 + i] as i8) },
            (BlockType::Q4_0, Bits::Eight) => Self { scale, shift: 0, codes: nibbles.map(|code| code - 8) },
            // A power of two times the scale is exact.
            (BlockType::Q4_0, Bits::Four) => Self { scale, shift: half::from_f32(-8.0 * half::to_f32(scale)), codes: nibbles },
            (BlockType::Q4_1, Bits::Four) => Self { scale, shift: number(2), codes: nibbles },
            (BlockType::Q4_1, Bits::Eight) => Self::nearest(&Self { scale, shift: number(2), codes: nibbles }.numbers()),
            (BlockType::Q8_0, Bits::Four) => unreachable!("8 bits do not fit 4"),
        }
    }

    /// What it stands for.
    fn numbers(&self) -> [f32; BLOCK] {
        let (scale, shift) = (half::to_f32(self.scale), half::to_f32(self.shift));
        self.codes.map(|code| scale * f32::from(code) + shift)
    }

    /// Puts it into a panel's block.
    fn write(&self, to: &mut [u8], width: usize, column: usize, bits: Bits, layout: Layout) {
        to[2 * column..][..2].copy_from_slice(&self.scale.to_le_bytes());
        match bits {
            Bits::Eight => {
                let Layout { group, offset } = layout;
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

    /// Takes it out of a panel's block.
    fn read(from: &[u8], width: usize, column: usize, bits: Bits, layout: Layout) -> Self {
        let half = |at: usize| u16::from_le_bytes([from[at], from[at + 1]]);
        let scale = half(2 * column);
        match bits {
            Bits::Eight => {
                let Layout { group, offset } = layout;
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
