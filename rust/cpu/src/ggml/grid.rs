//! Blocks whose codes are looked up in a grid: packed with their indexes, and looked up in registers.
//!
//! A unit has scales of 4 bits, \[words\]\[columns\], the bits of all indexes above the lowest 8, \[words\]\[columns\], and for each 32
//! weights the lowest 8 bits of their indexes and then their signs, \[words\]\[columns\].

use std::mem::MaybeUninit;

use super::decode::{Units, WIDTH, plane};
use super::panels::{CodeOrder, Unit, WordOrder};
use crate::block_type::BLOCK;
use crate::grids::{GridBlock, GridType, QUAD, SUPER};
use crate::simd::Int8;

/// Number of words for the scales of a block.
pub(super) fn scale_words(kind: GridType) -> usize {
    SUPER / kind.group() / 8
}

/// Number of words for the high bits of a block's indexes.
pub(super) fn high_words(kind: GridType) -> usize {
    SUPER / kind.weights() * (kind.index_bits() - 8) / 32
}

/// Number of words for the low bits of the indexes of 32 weights.
fn low_words(kind: GridType) -> usize {
    BLOCK / kind.weights() / 4
}

/// Number of words for the indexes and signs of 32 weights.
pub(super) fn code_words(kind: GridType) -> usize {
    low_words(kind) + usize::from(kind.has_signs())
}

/// Where the high bits of index `i` are: the word and the bit.
fn place_of_high(kind: GridType, i: usize) -> (usize, usize) {
    let bit = i * (kind.index_bits() - 8);
    (bit / 32, bit % 32)
}

/// Whether the second and the third of four weights are exchanged in the words of a grid.
fn is_crossed(order: CodeOrder) -> bool {
    order == CodeOrder::Words(WordOrder::Bytes)
}

/// The signs of 8 weights in the order of the words of a grid, or back.
fn crossed(signs: u8) -> u8 {
    signs & 0x99 | (signs & 0x22) << 1 | (signs & 0x44) >> 1
}

/// Writes a block to its column of a unit.
pub(super) fn write(block: &GridBlock, kind: GridType, order: CodeOrder, unit: Unit, to: &mut [u8], width: usize, column: usize) {
    let mut set = |part: usize, word: usize, bit: usize, bits: u32| {
        let to = to[part + 4 * (word * width + column)..].first_chunk_mut::<4>().expect("a unit has all parts");
        *to = (u32::from_le_bytes(*to) | bits << bit).to_le_bytes();
    };
    for group in 0..SUPER / kind.group() {
        set(unit.scales, group / 8, 4 * (group % 8), block.scales[group * kind.group() / 16].into());
    }
    let each = BLOCK / kind.weights();
    for (i, &index) in block.indexes[..SUPER / kind.weights()].iter().enumerate() {
        let at = unit.codes + i / each * unit.block;
        set(at, i % each / 4, 8 * (i % 4), u32::from(index & 255));
        let (word, bit) = place_of_high(kind, i);
        if kind.index_bits() > 8 {
            set(unit.high, word, bit, u32::from(index >> 8));
        }
    }
    if kind.has_signs() {
        for (i, &signs) in block.signs.iter().enumerate() {
            let signs = if is_crossed(order) { crossed(signs) } else { signs };
            set(unit.codes + i / 4 * unit.block, low_words(kind), 8 * (i % 4), signs.into());
        }
    }
    to[2 * column..][..2].copy_from_slice(&block.scale.to_le_bytes());
}

/// Reads a block from its column of a unit.
pub(super) fn read(kind: GridType, order: CodeOrder, unit: Unit, from: &[u8], width: usize, column: usize) -> GridBlock {
    let get = |part: usize, word: usize, bit: usize| {
        let bytes = from[part + 4 * (word * width + column)..].first_chunk::<4>().expect("a unit has all parts");
        u32::from_le_bytes(*bytes) >> bit
    };
    let scale = u16::from_le_bytes([from[2 * column], from[2 * column + 1]]);
    let mut block = GridBlock { scale, scales: [0; 16], indexes: [0; SUPER / 4], signs: [0; SUPER / 8] };
    for (i, scale) in block.scales.iter_mut().enumerate() {
        let group = i * 16 / kind.group();
        *scale = (get(unit.scales, group / 8, 4 * (group % 8)) & 15) as u8;
    }
    let each = BLOCK / kind.weights();
    for (i, index) in block.indexes[..SUPER / kind.weights()].iter_mut().enumerate() {
        let at = unit.codes + i / each * unit.block;
        *index = (get(at, i % each / 4, 8 * (i % 4)) & 255) as u16;
        if kind.index_bits() > 8 {
            let (word, bit) = place_of_high(kind, i);
            *index |= ((get(unit.high, word, bit) & ((1 << (kind.index_bits() - 8)) - 1)) << 8) as u16;
        }
    }
    if kind.has_signs() {
        for (i, signs) in block.signs.iter_mut().enumerate() {
            let stored = get(unit.codes + i / 4 * unit.block, low_words(kind), 8 * (i % 4)) as u8;
            *signs = if is_crossed(order) { crossed(stored) } else { stored };
        }
    }
    block
}

/// The codes of a unit, in the order of codes of 8 bits, \[blocks\]\[8 words\]\[columns\].
#[repr(align(64))]
pub(super) struct GridCodes(MaybeUninit<[u32; SUPER / 4 * WIDTH]>);

impl GridCodes {
    /// Bytes of the codes of 32 weights, in `width` columns.
    pub(super) const fn block(width: usize) -> usize {
        BLOCK * width
    }

    /// Room for the codes of a unit.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    /// Looks up the codes of a unit of `V` registers, and returns where they are.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // An iterator's closures would lack the kernel's target features.
    pub(super) unsafe fn fill<S: Int8, const V: usize>(&mut self, s: S, units: &Units<'_>, kind: GridType, from: &[u8]) -> *const u8 {
        let (unit, width) = (units.unit, V * S::LANES);
        let grid = kind.grid().expect("types without a grid are refused");
        assert!(from.len() >= unit.bytes && width <= WIDTH);
        let (per_index, high_bits, low) = (kind.weights() / QUAD, kind.index_bits() - 8, low_words(kind));
        let (is_crossed, offset) = (is_crossed(units.order), s.splat_i32(i32::from_ne_bytes([kind.offset(); 4])));
        let (from, to) = (from.as_ptr(), self.0.as_mut_ptr().cast::<u32>());
        // SAFETY: as asserted. A unit has all parts of its layout, and an index has `index_bits`, for each of which the grid has a word.
        unsafe {
            for b in 0..SUPER / BLOCK {
                let p = from.add(unit.codes + b * unit.block);
                let signs = if kind.has_signs() { plane::<S, V>(s, p, low) } else { [s.splat_i32(0); V] };
                let mut quads = [[s.splat_i32(0); V]; 8];
                for quad in 0..8 {
                    let i = quad / per_index;
                    let indexes = plane::<S, V>(s, p, i / 4);
                    let (at, bit) = place_of_high(kind, b * 8 / per_index + i);
                    let high = if high_bits > 0 { plane::<S, V>(s, from.add(unit.high), at) } else { [s.splat_i32(0); V] };
                    let words = grid.words(quad % per_index, is_crossed).as_ptr();
                    for v in 0..V {
                        let high = s.field(high[v], bit as i32 - 8, ((1 << high_bits) - 1) << 8);
                        let index = s.or(s.field(indexes[v], 8 * (i % 4) as i32, 255), high);
                        quads[quad][v] = s.gather(words, index);
                        if kind.has_signs() {
                            quads[quad][v] = s.sign_bytes(quads[quad][v], signs[v], (QUAD * quad) as i32, offset);
                        }
                    }
                }
                for word in 0..8 {
                    let (first, odd) = (word / 4 * 4 + word % 4 / 2, word as i32 % 2);
                    for v in 0..V {
                        let codes = if is_crossed {
                            let high = s.field(quads[first + 2][v], 16 * odd - 16, -0x1_0000);
                            s.or(s.field(quads[first][v], 16 * odd, 0xffff), high)
                        } else {
                            quads[word][v]
                        };
                        s.store_words(to.add((b * 8 + word) * width + v * S::LANES), codes);
                    }
                }
            }
        }
        to.cast()
    }
}
