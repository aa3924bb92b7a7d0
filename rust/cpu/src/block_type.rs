//! ggml's block types, and how to unpack their bytes.

use crate::grids::{GridBlock, GridType, SUPER};
use crate::half;

/// Number of weights in the smallest block.
pub(crate) const BLOCK: usize = 32;

/// Values of the codes of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of the codes of `MXFP4`, which are 4-bit floats.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Defines the types, each with ggml's number and the bytes of a block in the file.
macro_rules! block_types {
    ($($kind:ident = $number:literal, $bytes:literal;)+) => {
        /// A ggml block type that [`BlockPanels`](crate::ggml::BlockPanels) stores without conversion.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types)]
        pub(crate) enum BlockType {
            $($kind,)+
            /// Types whose codes are looked up in a table.
            Grid(GridType),
        }

        impl BlockType {
            pub(crate) fn all() -> impl Iterator<Item = Self> {
                [$(Self::$kind),+].into_iter().chain(GridType::ALL.map(Self::Grid))
            }

            /// ggml's type number.
            pub(crate) fn number(self) -> u32 {
                match self {
                    $(Self::$kind => $number,)+
                    Self::Grid(kind) => kind.number(),
                }
            }

            /// Bytes of a block in the file.
            pub(crate) fn bytes(self) -> usize {
                match self {
                    $(Self::$kind => $bytes,)+
                    Self::Grid(kind) => kind.bytes(),
                }
            }
        }
    };
}

block_types! {
    Q4_0 = 2, 18;
    Q4_1 = 3, 20;
    Q5_0 = 6, 22;
    Q5_1 = 7, 24;
    Q8_0 = 8, 34;
    Q2_K = 10, 84;
    Q3_K = 11, 110;
    Q4_K = 12, 144;
    Q5_K = 13, 176;
    Q6_K = 14, 210;
    IQ4_NL = 20, 18;
    IQ4_XS = 23, 136;
    MXFP4 = 39, 17;
}

/// Number of bits in a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeBits {
    Two,
    Three,
    Four,
    Five,
    Six,
    Eight,
}

/// Storage format of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleKind {
    /// A scale in half precision for each 32 weights.
    Half,
    /// A scale and a shift in half precision for each 32 weights.
    HalfShift,
    /// A scale in bfloat16 for each 32 weights.
    Bf16,
    /// A scale and a minimum in half precision for 256 weights. Each is multiplied by an unsigned byte for each 32 weights.
    ScaleMin,
    /// A scale and a minimum in half precision for 256 weights. Each is multiplied by an unsigned factor of 4 bits for each 16 weights.
    Nibbles,
    /// A scale in half precision for 256 weights, multiplied by a signed byte for each group ([`BlockType::group`]).
    Signed,
    /// A scale in half precision for 256 weights, multiplied by an odd number for each group ([`BlockType::group`]): twice a number of 4 bits
    /// plus 1.
    Odd(GridType),
}

/// An unpacked block. Unused parts are zero.
pub(crate) struct Unpacked {
    /// A code for each weight. Codes of 8 bits are the value plus 128.
    pub(crate) codes: [u8; SUPER],
    /// In half precision or bfloat16, according to the [`ScaleKind`].
    pub(crate) scale: u16,
    /// The shift or the minimum, in half precision.
    pub(crate) second: u16,
    /// Factors of the scale, signed or unsigned.
    pub(crate) scales: [u8; 16],
    /// Factors of the minimum.
    pub(crate) mins: [u8; 16],
}

impl BlockType {
    /// The type with this ggml number. `None` if the type is not supported without conversion, or if its grid is not known.
    pub(crate) fn from_ggml(number: u32) -> Option<Self> {
        Self::all().find(|kind| kind.number() == number).filter(|kind| kind.is_known())
    }

    /// Whether the type's blocks can be unpacked: not without its grid, if it has one.
    pub(crate) fn is_known(self) -> bool {
        if let Self::Grid(kind) = self { kind.grid().is_some() } else { true }
    }

    /// Number of weights in a block.
    pub(crate) fn block(self) -> usize {
        match self.scale_kind() {
            ScaleKind::Half | ScaleKind::HalfShift | ScaleKind::Bf16 => BLOCK,
            ScaleKind::ScaleMin | ScaleKind::Nibbles | ScaleKind::Signed | ScaleKind::Odd(_) => SUPER,
        }
    }

    /// Whether a weight takes less than 4 bits.
    pub(crate) fn is_small(self) -> bool {
        matches!(self, Self::Q2_K | Self::Q3_K | Self::Grid(_))
    }

    /// Number of weights that share a scale. Kernels read one for each 16 weights of types with a grid, of which some have one for 32.
    pub(crate) fn group(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K | Self::Grid(_) => BLOCK / 2,
            _ => BLOCK,
        }
    }

    /// Bytes of a row of `ins` weights in the file. `None` if `ins` is not a multiple of the block.
    pub(crate) fn row_bytes(self, ins: usize) -> Option<usize> {
        ins.is_multiple_of(self.block()).then(|| ins / self.block() * self.bytes())
    }

    pub(crate) fn code_bits(self) -> CodeBits {
        match self {
            Self::Q2_K => CodeBits::Two,
            Self::Q3_K => CodeBits::Three,
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K | Self::IQ4_NL | Self::IQ4_XS | Self::MXFP4 => CodeBits::Four,
            Self::Q5_0 | Self::Q5_1 | Self::Q5_K => CodeBits::Five,
            Self::Q6_K => CodeBits::Six,
            Self::Q8_0 | Self::Grid(_) => CodeBits::Eight,
        }
    }

    pub(crate) fn scale_kind(self) -> ScaleKind {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::IQ4_NL => ScaleKind::Half,
            Self::Q4_1 | Self::Q5_1 => ScaleKind::HalfShift,
            Self::Q4_K | Self::Q5_K => ScaleKind::ScaleMin,
            Self::Q2_K => ScaleKind::Nibbles,
            Self::Q3_K | Self::Q6_K | Self::IQ4_XS => ScaleKind::Signed,
            Self::MXFP4 => ScaleKind::Bf16,
            Self::Grid(kind) => ScaleKind::Odd(kind),
        }
    }

    /// The offset that is subtracted from a code. Non-linear codes of 4 bits have a table instead.
    pub(crate) fn offset(self) -> f32 {
        match self {
            Self::Q3_K => 4.0,
            Self::Q4_0 => 8.0,
            Self::Q5_0 => 16.0,
            Self::Q6_K => 32.0,
            Self::Q8_0 => 128.0,
            Self::Grid(kind) => kind.offset().into(),
            _ => 0.0,
        }
    }

    /// What must be added to the values of codes so that none is below 0.
    pub(crate) fn byte_offset(self) -> f32 {
        self.table().map_or(self.offset(), |values| -values.into_iter().fold(0.0, f32::min))
    }

    /// The value of each code of 4 bits, for types whose codes are not linear.
    pub(crate) fn table(self) -> Option<[f32; 16]> {
        match self {
            Self::IQ4_NL | Self::IQ4_XS => Some(IQ4.map(f32::from)),
            Self::MXFP4 => Some(E2M1.map(f32::from)),
            _ => None,
        }
    }

    /// The value of a code.
    pub(crate) fn value(self, code: u8) -> f32 {
        self.table().map_or(f32::from(code) - self.offset(), |table| table[usize::from(code)])
    }

    /// Unpacks a block of the file.
    pub(crate) fn unpack(self, bytes: &[u8]) -> Unpacked {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut block = Unpacked { codes: [0; SUPER], scale: half(0), second: half(2), scales: [0; 16], mins: [0; 16] };
        let codes = &mut block.codes;
        match self {
            Self::Q4_0 | Self::IQ4_NL => nibbles(&bytes[2..18], codes),
            Self::Q4_1 => nibbles(&bytes[4..20], codes),
            Self::MXFP4 => {
                nibbles(&bytes[1..17], codes);
                // The scale is 2^(e - 128), half of the power that the byte encodes, because the table's values are doubled.
                block.scale = if bytes[0] < 2 { 0x20 << bytes[0] } else { u16::from(bytes[0] - 1) << 7 };
            }
            Self::Q5_0 | Self::Q5_1 => {
                let at = if self == Self::Q5_0 { 2 } else { 4 };
                nibbles(&bytes[at + 4..at + 20], codes);
                for (i, code) in codes[..BLOCK].iter_mut().enumerate() {
                    *code |= (bytes[at + i / 8] >> (i % 8) & 1) << 4;
                }
            }
            Self::Q8_0 => codes.iter_mut().zip(&bytes[2..34]).for_each(|(code, &byte)| *code = byte ^ 0x80),
            Self::Q2_K => {
                pairs_of_bits(&bytes[16..80], codes);
                for (i, &byte) in bytes[..16].iter().enumerate() {
                    (block.scales[i], block.mins[i]) = (byte & 15, byte >> 4);
                }
                (block.scale, block.second) = (half(80), half(82));
            }
            Self::Q3_K => {
                pairs_of_bits(&bytes[32..96], codes);
                for (i, codes) in codes.chunks_exact_mut(BLOCK).enumerate() {
                    codes.iter_mut().zip(&bytes[..BLOCK]).for_each(|(code, &byte)| *code |= (byte >> i & 1) << 2);
                }
                let packed = &bytes[96..108];
                for (i, scale) in block.scales.iter_mut().enumerate() {
                    let low = packed[i % 8] >> (i / 8 * 4) & 15;
                    *scale = (low | (packed[8 + i % 4] >> (i / 4 * 2) & 3) << 4).wrapping_sub(32);
                }
                (block.scale, block.second) = (half(108), 0);
            }
            Self::Q4_K | Self::Q5_K => {
                let (high, low) = bytes[16..].split_at(if self == Self::Q5_K { BLOCK } else { 0 });
                for (codes, low) in codes.chunks_exact_mut(2 * BLOCK).zip(low.chunks_exact(BLOCK)) {
                    let (first, second) = codes.split_at_mut(BLOCK);
                    for ((first, second), byte) in first.iter_mut().zip(second).zip(low) {
                        (*first, *second) = (byte & 15, byte >> 4);
                    }
                }
                for (i, codes) in codes.chunks_exact_mut(BLOCK).enumerate() {
                    codes.iter_mut().zip(high).for_each(|(code, &byte)| *code |= (byte >> i & 1) << 4);
                }
                let packed = &bytes[4..16];
                for i in 0..4 {
                    block.scales[i] = packed[i] & 63;
                    block.mins[i] = packed[i + 4] & 63;
                    block.scales[i + 4] = packed[i + 8] & 15 | packed[i] >> 6 << 4;
                    block.mins[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
                }
            }
            Self::Q6_K => {
                for (i, codes) in codes.chunks_exact_mut(BLOCK).enumerate() {
                    let (half, quarter) = (i / 4, i % 4);
                    let (low, high) = (&bytes[64 * half + quarter % 2 * BLOCK..][..BLOCK], &bytes[128 + BLOCK * half..][..BLOCK]);
                    for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                        *code = (low >> (quarter / 2 * 4) & 15) | (high >> (quarter * 2) & 3) << 4;
                    }
                }
                block.scales.copy_from_slice(&bytes[192..208]);
                block.scale = half(208);
            }
            Self::IQ4_XS => {
                codes.chunks_exact_mut(BLOCK).zip(bytes[8..].chunks_exact(16)).for_each(|(codes, bytes)| nibbles(bytes, codes));
                let high = half(2);
                for i in 0..8 {
                    let scale = (bytes[4 + i / 2] >> (i % 2 * 4) & 15) | ((high >> (2 * i) & 3) as u8) << 4;
                    block.scales[i] = scale.wrapping_sub(32);
                }
            }
            Self::Grid(kind) => return Unpacked::of_grid(kind, &kind.read(bytes)),
        }
        block
    }

    /// Computes the weights of a row of the file.
    pub(crate) fn dequantize(self, row: &[u8], to: &mut [f32]) {
        for (bytes, to) in row.chunks_exact(self.bytes()).zip(to.chunks_exact_mut(self.block())) {
            let block = self.unpack(bytes);
            for (i, to) in to.iter_mut().enumerate() {
                let (scale, shift) = block.scale_and_shift(self, i);
                *to = self.value(block.codes[i]) * scale + shift;
            }
        }
    }
}

impl Unpacked {
    /// A block whose codes are looked up in the grid of its type.
    pub(crate) fn of_grid(kind: GridType, block: &GridBlock) -> Self {
        Self { codes: kind.codes(block), scale: block.scale, second: 0, scales: block.scales, mins: [0; 16] }
    }

    /// The scale and the shift of weight `i`. A shift of -0.0 leaves every product unchanged.
    pub(crate) fn scale_and_shift(&self, kind: BlockType, i: usize) -> (f32, f32) {
        let scale = half::to_f32(self.scale);
        match kind.scale_kind() {
            ScaleKind::Half => (scale, -0.0),
            ScaleKind::HalfShift => (scale, half::to_f32(self.second)),
            ScaleKind::Bf16 => (f32::from_bits(u32::from(self.scale) << 16), -0.0),
            ScaleKind::ScaleMin => {
                (scale * f32::from(self.scales[i / BLOCK]), -(half::to_f32(self.second) * f32::from(self.mins[i / BLOCK])))
            }
            ScaleKind::Nibbles => {
                let group = i / kind.group();
                (scale * f32::from(self.scales[group]), -(half::to_f32(self.second) * f32::from(self.mins[group])))
            }
            ScaleKind::Signed => (scale * f32::from(self.scales[i / kind.group()] as i8), -0.0),
            ScaleKind::Odd(grid) => (scale * grid.unit() * f32::from(2 * self.scales[i / kind.group()] + 1), -0.0),
        }
    }
}

/// Unpacks 256 codes from 64 bytes: each half has the lowest bits of 32 bytes first.
fn pairs_of_bits(bytes: &[u8], codes: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact_mut(4 * BLOCK).zip(bytes.chunks_exact(BLOCK)) {
        for (i, codes) in codes.chunks_exact_mut(BLOCK).enumerate() {
            codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (2 * i) & 3);
        }
    }
}

/// Unpacks 32 codes from 16 bytes: the low halves first, then the high halves.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}
