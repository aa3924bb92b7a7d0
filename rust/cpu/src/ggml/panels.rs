//! Blocks packed for the kernels, with the columns of a panel side by side.

use std::ops::Range;

use super::grid;
use crate::aligned::AlignedVec;
use crate::block_type::{BLOCK, BlockType, CodeBits, ScaleKind, Unpacked};
use crate::pool::ThreadPool;
use crate::simd::Isa;
use crate::tensor::{ReadError, RowReader, Stack};

/// The weights of one tensor, as panels of blocks.
///
/// A panel is a sequence of units. A unit holds, for each column of the panel, one block of the file. Its parts are: scales in half
/// precision, \[columns\]; shifts or minimums, \[columns\]; factors of the scales, then factors of the minimums, \[groups\]\[columns\], or
/// both in the halves of a byte; and codes. The codes of 32 weights are planes of 32-bit words, \[words\]\[columns\]. The low four bits take 4 words: weight i is in word
/// i / 8 at bit 4 (i % 8). A fifth bit takes 1 word: weight i is at bit i + 4. A fifth and a sixth bit take 2 words: weight i is in word
/// i / 16 at bit 2 (i % 16) + 4. These high bits are rotated: bits beyond 31 wrap around to the lowest bits. Codes of 8 bits take 8 words:
/// weight i is byte i % 4 of word i / 4. Two bits take 2 words: weight i is in word i / 16 at bit 2 (i % 16). A third bit takes 1 word: weight
/// i is at bit i.
///
/// Panels for products of bytes and of matrix tiles ([`WordOrder::Bytes`]) have the weights in another order, in which those of a pair (p and
/// p + 8, in each half of the 32) are in the low and in the high half of a word, and the high bits in the bytes of [`BYTE_ORDER`], which is
/// the order of the low four bits when a word is read as its low and then its high halves of bytes. A fifth bit of code i of that order is at bit i / 4 of
/// byte i % 4. A fifth and a sixth bit are at bit 2 (i / 4 % 4) of byte i % 4 of word i / 16. Codes of 8 bits are in this order. Two
/// bits are at bit 2 (i / 4 % 4) of byte i % 4 of word i / 16, a third one at bit i / 4 of byte i % 4.
///
/// Panels for products in bfloat16 have the weights of a column next to each other, see [`CodeOrder::Columns`].
#[derive(Debug)]
pub(crate) struct BlockPanels {
    pub(super) bytes: AlignedVec<u8>,
    pub(super) kind: BlockType,
    pub(super) width: usize,
    pub(super) ins: usize,
    pub(super) order: CodeOrder,
    /// The values of codes as products of bytes have them, without their scales and shifts, in bfloat16.
    pub(super) halves: [u16; 64],
}

/// Order of the codes of 32 weights in all columns of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeOrder {
    /// Words, for products in fp32 or in digits.
    Words(WordOrder),
    /// Weights of a column, for products in bfloat16. Four columns share 32 halves of words, which hold the low four bits of their codes,
    /// those of column c at bit 4 (c % 4). Then 16 columns share 32 halves with a fifth bit at bit c % 16, or 8 columns share 32 halves with
    /// a fifth and a sixth bit at bit 2 (c % 8). The halves are those of weights in ascending order for codes of 4 bits; otherwise the low
    /// halves of words have the first 16 weights, and the high halves the others. Codes of 8 bits are signed bytes, in ascending order.
    Columns,
}

/// Order of the codes in a column's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WordOrder {
    /// For products in fp32.
    Bits,
    /// For products of bytes, and of matrix tiles with the same results.
    Bytes,
}

/// The weights whose codes are the bytes of a column, four to a word.
pub(super) const BYTE_ORDER: [usize; BLOCK] = {
    let mut order = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        let (word, byte, _) = place_in_bytes(i);
        order[4 * word + byte] = i;
        i += 1;
    }
    order
};

/// The word and the byte of weight `i` in [`BYTE_ORDER`], and the place of its low four bits among those of all weights. The pairs of
/// tiles (p and p + 8) are four apart in a word of eight codes.
const fn place_in_bytes(i: usize) -> (usize, usize, usize) {
    let (pair, second) = (i / 16 * 8 + i % 8, i / 8 % 2);
    let nibble = pair / 4 * 8 + pair % 4 + second * 4;
    (nibble / 8 * 2 + nibble % 2, nibble % 8 / 2, nibble)
}

/// Byte offsets in a unit, and sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    /// Offset of the shifts or minimums.
    pub(super) second: usize,
    pub(super) scales: usize,
    pub(super) mins: usize,
    /// Offset of the high bits of indexes of a grid.
    pub(super) high: usize,
    pub(super) codes: usize,
    /// Bytes of the codes of 32 weights, in all columns.
    pub(super) block: usize,
    pub(super) bytes: usize,
}

impl Unit {
    pub(super) fn new(kind: BlockType, width: usize) -> Self {
        let groups = kind.block() / kind.group();
        let (seconds, scales, mins) = match kind.scale_kind() {
            ScaleKind::Half | ScaleKind::Bf16 | ScaleKind::Odd(_) => (0, 0, 0),
            ScaleKind::HalfShift => (1, 0, 0),
            ScaleKind::ScaleMin => (1, groups, groups),
            ScaleKind::Nibbles => (1, groups, 0),
            ScaleKind::Signed => (0, groups, 0),
        };
        let second = 2 * width;
        let scales_at = second + 2 * width * seconds;
        let mins_at = scales_at + width * scales;
        let end = mins_at + width * mins;
        let (in_scales, in_high, in_codes) = match kind {
            BlockType::Grid(kind) => (grid::scale_words(kind), grid::high_words(kind), grid::code_words(kind)),
            _ => (0, 0, words(kind.code_bits())),
        };
        let word = width * size_of::<u32>();
        let high = end + in_scales * word;
        let (codes, block) = (high + in_high * word, in_codes * word);
        Self { second, scales: scales_at, mins: mins_at, high, codes, block, bytes: codes + kind.block() / BLOCK * block }
    }
}

/// Number of words that hold a column's 32 codes.
const fn words(bits: CodeBits) -> usize {
    match bits {
        CodeBits::Two => 2,
        CodeBits::Three => 3,
        CodeBits::Four => 4,
        CodeBits::Five => 5,
        CodeBits::Six => 6,
        CodeBits::Eight => 8,
    }
}

impl BlockPanels {
    /// Reads and packs tensors of blocks. All threads pack panels.
    pub(crate) fn pack(pool: &mut ThreadPool, isa: Isa, stack: Stack<'_>, kind: BlockType, order: CodeOrder) -> Result<Self, ReadError> {
        let (width, ins) = (isa.panel(), stack.ins());
        let unit = Unit::new(kind, width);
        let size = ins / kind.block() * unit.bytes;
        let mut bytes = AlignedVec::zeros(stack.panels(width) * size);
        let shared = bytes.shared();
        stack.for_each_panel(pool, width, |panel, rows: &RowReader<'_>| {
            // SAFETY: each panel is written by one call.
            let out = unsafe { shared.write(panel * size, size) };
            // Unit by unit: one stays in the first-level cache until its columns are written.
            for (index, to) in out.chunks_exact_mut(unit.bytes).enumerate() {
                for column in 0..rows.count() {
                    let block = &rows.row(column)[index * kind.bytes()..][..kind.bytes()];
                    match kind {
                        BlockType::Grid(kind) => grid::write(&kind.read(block), kind, order, unit, to, width, column),
                        _ => write(&kind.unpack(block), kind, order, unit, to, width, column),
                    }
                }
            }
        })?;
        // Codes of 4 bits are looked up together with bits of the next code.
        let count = if kind.code_bits() == CodeBits::Four { 16 } else { 64 };
        let half = |code: usize| ((kind.value((code % count) as u8) + kind.byte_offset()).to_bits() >> 16) as u16;
        Ok(Self { bytes, kind, width, ins, order, halves: std::array::from_fn(half) })
    }

    /// The units of a panel.
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let size = self.ins / self.kind.block() * Unit::new(self.kind, self.width).bytes;
        &self.bytes[panel * size..(panel + 1) * size]
    }

    /// Where the units are that are read after those of `inputs` in `panel`, as many as these: in the next of `panels`, then in the first
    /// one after these inputs, and at last behind all of them. The addresses need not be valid.
    pub(crate) fn after(&self, panels: &Range<usize>, panel: usize, inputs: &Range<usize>) -> Range<*const u8> {
        let size = Unit::new(self.kind, self.width).bytes;
        let units = |inputs: usize| inputs / self.kind.block();
        let (panel, input) = match () {
            () if panel + 1 < panels.end => (panel + 1, inputs.start),
            () if inputs.end < self.ins => (panels.start, inputs.end),
            () => (panel, self.ins),
        };
        let start = self.panel(panel).as_ptr().wrapping_add(units(input) * size);
        start..start.wrapping_add(units(inputs.len()) * size)
    }

    /// Inputs per unit. Parts of a panel must start and end at multiples of it.
    pub(crate) fn unit_inputs(&self) -> usize {
        self.kind.block()
    }

    /// Number of inputs.
    pub(crate) fn ins(&self) -> usize {
        self.ins
    }

    /// Number of inputs that share a scale.
    pub(crate) fn group(&self) -> usize {
        self.kind.group()
    }

    /// Reads the weights of a column, as an embedding.
    pub(crate) fn read_column(&self, column: usize, out: &mut [f32]) {
        let unit = Unit::new(self.kind, self.width);
        let panel = self.panel(column / self.width);
        for (from, out) in panel.chunks_exact(unit.bytes).zip(out.chunks_exact_mut(self.kind.block())) {
            let (order, width, column) = (self.order, self.width, column % self.width);
            let block = match self.kind {
                BlockType::Grid(kind) => Unpacked::of_grid(kind, &grid::read(kind, order, unit, from, width, column)),
                kind => read(kind, order, unit, from, width, column),
            };
            for (i, out) in out.iter_mut().enumerate() {
                let (scale, shift) = block.scale_and_shift(self.kind, i);
                *out = self.kind.value(block.codes[i]) * scale + shift;
            }
        }
    }
}

/// The location of weight `i` of 32 in a column's words. Each entry has the word, the bit in that word, the lowest bit of the code that is
/// there, and the mask.
fn places(bits: CodeBits, order: WordOrder, i: usize) -> [Option<(usize, u32, u32, u32)>; 2] {
    let (word, byte, nibble) = place_in_bytes(i);
    let byte = 8 * byte as u32;
    let at = if order == WordOrder::Bytes { nibble } else { i };
    let low = Some((at / 8, 4 * (at % 8) as u32, 0, 15));
    let pair = match order {
        WordOrder::Bits => Some((i / 16, 2 * (i % 16) as u32, 0, 3)),
        WordOrder::Bytes => Some((word / 4, byte + 2 * (word % 4) as u32, 0, 3)),
    };
    match (bits, order) {
        (CodeBits::Two, _) => [pair, None],
        (CodeBits::Three, WordOrder::Bits) => [pair, Some((2, i as u32, 2, 1))],
        (CodeBits::Three, WordOrder::Bytes) => [pair, Some((2, byte + word as u32, 2, 1))],
        (CodeBits::Four, _) => [low, None],
        (CodeBits::Five, WordOrder::Bits) => [low, Some((4, i as u32 + 4, 4, 1))],
        (CodeBits::Five, WordOrder::Bytes) => [low, Some((4, byte + word as u32, 4, 1))],
        (CodeBits::Six, WordOrder::Bits) => [low, Some((4 + i / 16, 2 * (i % 16) as u32 + 4, 4, 3))],
        (CodeBits::Six, WordOrder::Bytes) => [low, Some((4 + word / 4, byte + 2 * (word % 4) as u32, 4, 3))],
        (CodeBits::Eight, WordOrder::Bits) => [Some((i / 4, 8 * (i % 4) as u32, 0, 255)), None],
        (CodeBits::Eight, WordOrder::Bytes) => [Some((word, byte, 0, 255)), None],
    }
}

/// The bit that makes a code of 8 bits, the value plus 128, a signed byte.
fn sign_in_columns(bits: CodeBits) -> u8 {
    if bits == CodeBits::Eight { 0x80 } else { 0 }
}

/// The location of weight `i` of 32 in [`CodeOrder::Columns`]. Each entry has the byte, the lowest bit of the code that is there, the bit in
/// the byte, and the mask.
fn places_in_columns(bits: CodeBits, width: usize, column: usize, i: usize) -> [Option<(usize, u8, u8, u8)>; 2] {
    let half = if bits == CodeBits::Four { i } else { 2 * (i % 16) + i / 16 };
    // `columns` share the halves, each with 16 / `columns` bits.
    let place = |start: usize, columns: usize, from: u8, mask: u8| {
        let bit = column % columns * (16 / columns);
        Some((start + column / columns * 2 * BLOCK + 2 * half + bit / 8, from, (bit % 8) as u8, mask))
    };
    let (low, high) = (place(0, 4, 0, 15), width * BLOCK / 2);
    match bits {
        CodeBits::Two | CodeBits::Three => unreachable!("tiles multiply these codes as words"),
        CodeBits::Four => [low, None],
        CodeBits::Five => [low, place(high, 16, 4, 1)],
        CodeBits::Six => [low, place(high, 8, 4, 3)],
        CodeBits::Eight => [Some((column * BLOCK + i, 0, 0, 255)), None],
    }
}

/// The place of a group's scale among the scales of a unit, and whether its minimum is in the upper half of the byte. Those are bytes of words,
/// \[words\]\[columns\], which kernels read as they read codes.
fn place_of_scale(kind: BlockType, width: usize, column: usize, group: usize) -> (usize, bool) {
    match kind.scale_kind() {
        ScaleKind::Nibbles => (4 * (group / 4 * width + column) + group % 4, true),
        _ => (group * width + column, false),
    }
}

/// Writes a block to its column of a unit.
fn write(block: &Unpacked, kind: BlockType, order: CodeOrder, unit: Unit, to: &mut [u8], width: usize, column: usize) {
    to[2 * column..][..2].copy_from_slice(&block.scale.to_le_bytes());
    if unit.scales > unit.second {
        to[unit.second + 2 * column..][..2].copy_from_slice(&block.second.to_le_bytes());
    }
    for group in 0..(unit.mins - unit.scales) / width {
        let (at, mins) = place_of_scale(kind, width, column, group);
        to[unit.scales + at] = block.scales[group] | if mins { block.mins[group] << 4 } else { 0 };
    }
    for (group, at) in (unit.mins..unit.codes).step_by(width).enumerate() {
        to[at + column] = block.mins[group];
    }
    let codes = block.codes[..kind.block()].as_chunks::<BLOCK>().0;
    let each = to[unit.codes..].chunks_exact_mut(unit.block).zip(codes);
    if let CodeOrder::Words(order) = order {
        return write_words(kind.code_bits(), order, each, width, column);
    }
    let sign = sign_in_columns(kind.code_bits());
    for (to, codes) in each {
        for (i, code) in codes.iter().enumerate() {
            for (at, from, bit, mask) in places_in_columns(kind.code_bits(), width, column, i).into_iter().flatten() {
                to[at] |= ((code ^ sign) >> from & mask) << bit;
            }
        }
    }
}

/// Writes codes, 32 at a time, to a column's words.
fn write_words<'a>(
    bits: CodeBits,
    order: WordOrder,
    each: impl Iterator<Item = (&'a mut [u8], &'a [u8; BLOCK])>,
    width: usize,
    column: usize,
) {
    // A loop for each number of bits, so that the choice is outside.
    fn write<'a, const WORDS: usize>(
        each: impl Iterator<Item = (&'a mut [u8], &'a [u8; BLOCK])>,
        width: usize,
        column: usize,
        words_of: impl Fn([u64; 4]) -> [u32; 8],
    ) {
        for (to, codes) in each {
            let words = words_of(std::array::from_fn(|i| u64::from_le_bytes(codes.as_chunks::<8>().0[i])));
            let to = &mut to[4 * column..][..4 * (width * (WORDS - 1) + 1)];
            for (index, word) in words[..WORDS].iter().enumerate() {
                to[4 * width * index..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
    use CodeBits::{Eight, Five, Four, Six, Three, Two};
    match bits {
        Two => write::<{ words(Two) }>(each, width, column, |codes| words_of(Two, order, codes)),
        Three => write::<{ words(Three) }>(each, width, column, |codes| words_of(Three, order, codes)),
        Four => write::<{ words(Four) }>(each, width, column, |codes| words_of(Four, order, codes)),
        Five => write::<{ words(Five) }>(each, width, column, |codes| words_of(Five, order, codes)),
        Six => write::<{ words(Six) }>(each, width, column, |codes| words_of(Six, order, codes)),
        Eight => write::<{ words(Eight) }>(each, width, column, |codes| words_of(Eight, order, codes)),
    }
}

/// Packs 32 codes into a column's words. [`places`] gives the location of the bits.
#[inline(always)]
fn words_of(bits: CodeBits, order: WordOrder, eights: [u64; 4]) -> [u32; 8] {
    match order {
        WordOrder::Bits => words_of_bits(bits, eights),
        WordOrder::Bytes => words_of_bytes(bits, eights),
    }
}

/// The words of 32 codes in [`WordOrder::Bits`].
#[inline(always)]
fn words_of_bits(bits: CodeBits, eights: [u64; 4]) -> [u32; 8] {
    let [a, b, c, d] = eights;
    let pairs = |from: u32| [[a, b], [c, d]].map(|[low, high]| adjacent(low, from, 2) | adjacent(high, from, 2) << 16);
    let ones = |from: u32| (0..).zip(eights).fold(0, |word, (i, codes)| word | adjacent(codes, from, 1) << (8 * i));
    let mut words = [0; 8];
    match bits {
        CodeBits::Two | CodeBits::Three => words[..2].copy_from_slice(&pairs(0)),
        CodeBits::Eight => words = std::array::from_fn(|i| (eights[i / 2] >> (i % 2 * 32)) as u32),
        CodeBits::Four | CodeBits::Five | CodeBits::Six => words[..4].copy_from_slice(&eights.map(|codes| adjacent(codes, 0, 4))),
    }
    match bits {
        CodeBits::Three => words[2] = ones(2),
        CodeBits::Five => words[4] = ones(4).rotate_left(4),
        CodeBits::Six => words[4..6].copy_from_slice(&pairs(4).map(|word| word.rotate_left(4))),
        CodeBits::Two | CodeBits::Four | CodeBits::Eight => {}
    }
    words
}

/// The words of 32 codes in [`WordOrder::Bytes`].
#[inline(always)]
fn words_of_bytes(bits: CodeBits, eights: [u64; 4]) -> [u32; 8] {
    let codes = in_byte_order(eights);
    // Some bits of four codes at a time, side by side in each byte.
    let beside = |codes: &[u32], from: u32, each: u32| {
        let mask = 0x0101_0101 * ((1 << each) - 1);
        (0..).zip(codes).fold(0, |word, (i, four)| word | (four >> from & mask) << (each * i))
    };
    let mut words = [0; 8];
    match bits {
        CodeBits::Two | CodeBits::Three => (words[0], words[1]) = (beside(&codes[..4], 0, 2), beside(&codes[4..], 0, 2)),
        CodeBits::Eight => words = codes,
        CodeBits::Four | CodeBits::Five | CodeBits::Six => words[..4].copy_from_slice(&in_pairs(eights.map(|codes| adjacent(codes, 0, 4)))),
    }
    match bits {
        CodeBits::Three => words[2] = beside(&codes, 2, 1),
        CodeBits::Five => words[4] = beside(&codes, 4, 1),
        CodeBits::Six => (words[4], words[5]) = (beside(&codes[..4], 4, 2), beside(&codes[4..], 4, 2)),
        CodeBits::Two | CodeBits::Four | CodeBits::Eight => {}
    }
    words
}

/// Words of eight codes each, with the pairs of tiles (p and p + 8) in the low and the high half of a word.
fn in_pairs([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let halves = |low: u32, high: u32| [low & 0xffff | high << 16, low >> 16 | high & 0xffff_0000];
    let ([a, b], [c, d]) = (halves(a, b), halves(c, d));
    [a, b, c, d]
}

/// Bits `from..from + each` of eight bytes, next to each other. `each` is 1, 2 or 4.
fn adjacent(bytes: u64, from: u32, each: u32) -> u32 {
    let mut fields = bytes >> from & (0x0101_0101_0101_0101 * ((1 << each) - 1));
    fields = (fields | fields >> (8 - each)) & (0x0001_0001_0001_0001 * ((1 << (2 * each)) - 1));
    fields = (fields | fields >> (2 * (8 - each))) & (0x0000_0001_0000_0001 * ((1 << (4 * each)) - 1));
    (fields | fields >> (4 * (8 - each))) as u32 & (((1_u64 << (8 * each)) - 1) as u32)
}

/// Codes in [`BYTE_ORDER`], four to a word.
fn in_byte_order(eights: [u64; 4]) -> [u32; 8] {
    let mut words = [0; 8];
    for (words, [first, second]) in words.as_chunks_mut::<4>().0.iter_mut().zip(eights.as_chunks::<2>().0) {
        for odd in 0..2 {
            // Two codes are in the low 16 bits of each 32.
            let twos = |codes: u64| {
                let apart = codes >> (8 * odd) & 0x00ff_00ff_00ff_00ff;
                apart | apart >> 8
            };
            let (low, high) = (twos(*first), twos(*second));
            words[odd] = (low & 0xffff) as u32 | (high as u32) << 16;
            words[2 + odd] = (low >> 32 & 0xffff) as u32 | ((high >> 32) as u32) << 16;
        }
    }
    words
}

/// Reads a block from its column of a unit.
fn read(kind: BlockType, order: CodeOrder, unit: Unit, from: &[u8], width: usize, column: usize) -> Unpacked {
    let number = |at: usize| u16::from_le_bytes([from[at], from[at + 1]]);
    let mut block = Unpacked { codes: [0; 256], scale: number(2 * column), second: 0, scales: [0; 16], mins: [0; 16] };
    if unit.scales > unit.second {
        block.second = number(unit.second + 2 * column);
    }
    for group in 0..(unit.mins - unit.scales) / width {
        let (at, mins) = place_of_scale(kind, width, column, group);
        let byte = from[unit.scales + at];
        (block.scales[group], block.mins[group]) = if mins { (byte & 15, byte >> 4) } else { (byte, 0) };
    }
    for (group, at) in (unit.mins..unit.codes).step_by(width).enumerate() {
        block.mins[group] = from[at + column];
    }
    let sign = sign_in_columns(kind.code_bits());
    for (from, codes) in from[unit.codes..].chunks_exact(unit.block).zip(block.codes.chunks_exact_mut(BLOCK)) {
        let CodeOrder::Words(order) = order else {
            for (i, code) in codes.iter_mut().enumerate() {
                for (at, to, bit, mask) in places_in_columns(kind.code_bits(), width, column, i).into_iter().flatten() {
                    *code |= (from[at] >> bit & mask) << to;
                }
                *code ^= sign;
            }
            continue;
        };
        let mut words = [0_u32; 8];
        for (word, from) in words.iter_mut().zip(from[4 * column..].chunks(4 * width)) {
            *word = u32::from_le_bytes([from[0], from[1], from[2], from[3]]);
        }
        for (i, code) in codes.iter_mut().enumerate() {
            for (word, at, to, mask) in places(kind.code_bits(), order, i).into_iter().flatten() {
                *code |= ((words[word].rotate_right(at) & mask) << to) as u8;
            }
        }
    }
    block
}
