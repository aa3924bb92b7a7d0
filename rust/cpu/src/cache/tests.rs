//! Written keys and values are read back, also after copies and swaps.

#![allow(clippy::float_cmp)] // Values stored unchanged, and zeros, are read back exactly.

use super::*;
use crate::simd::{Isa, Kernel};

const SHAPE: KvShape = KvShape { layers: 2, blocks: 5, kv_heads: 3, block_size: 4, head_dim: 6, latent: None };

const DTYPES: [KvDType; 4] = [KvDType::F32, KvDType::F16, KvDType::Bf16, KvDType::Int8];

/// Keys and values that are unique to a token.
fn token(layer: usize, slot: usize) -> [Vec<f32>; 2] {
    let first = ((layer * 100 + slot) * 36) as f32;
    [0, 18].map(|start| (start..start + 18).map(|i| (first + i as f32) / 1000.0).collect())
}

fn write(cache: &mut KvCache, layer: usize, slot: usize) {
    let [keys, values] = token(layer, slot);
    // SAFETY: no other thread uses the cache.
    unsafe { cache.pages().write(layer, slot, &keys, &values) };
}

/// Reads a token's keys and values as the kernels do, with the portable registers.
struct Token<'a> {
    pages: Pages<'a>,
    layer: usize,
    slot: usize,
}

impl Token<'_> {
    fn read<C: Cell, S: Simd>(self, s: S) -> [Vec<f32>; 2] {
        let (block, offset) = (self.slot / SHAPE.block_size, self.slot % SHAPE.block_size);
        // A number in the upper half of a pair is the pair as fp32.
        let number = |p: *const C, row: usize, scale: f32| {
            let (mut cells, mut numbers) = ([C::store(0.0, 1.0); 32], [0.0; 16]);
            // SAFETY: `p` points to a cell, and the arrays are as long as the widest register.
            unsafe {
                cells[C::NUMBERS - 1] = *p.cast::<C::Number>().add(row % C::NUMBERS);
                s.store(numbers.as_mut_ptr(), C::load(s, cells.as_ptr().cast()));
            }
            numbers[0] * if C::SCALED { scale } else { 1.0 }
        };
        let mut token = [Vec::new(), Vec::new()];
        for head in 0..SHAPE.kv_heads {
            for d in 0..SHAPE.head_dim {
                // SAFETY: the pointers are within the page, and no thread writes it.
                unsafe {
                    let parts = self.pages.page::<C>(self.layer, block, head);
                    let scale = |index: usize| if C::SCALED { *parts.scales.add(index) } else { 1.0 };
                    token[0].push(number(parts.keys.add(d / C::NUMBERS * SHAPE.block_size + offset), d, scale(offset)));
                    let value = parts.values.add(offset / C::NUMBERS * self.pages.padded() + d);
                    token[1].push(number(value, offset, scale(SHAPE.block_size + offset)));
                }
            }
        }
        token
    }
}

impl Kernel for Token<'_> {
    type Output = [Vec<f32>; 2];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [Vec<f32>; 2] {
        match self.pages.dtype {
            KvDType::F32 => self.read::<f32, S>(s),
            KvDType::F16 => self.read::<u16, S>(s),
            KvDType::Bf16 => self.read::<Bf16Pair, S>(s),
            KvDType::Int8 => self.read::<i8, S>(s),
        }
    }
}

fn read(cache: &mut KvCache, layer: usize, slot: usize) -> [Vec<f32>; 2] {
    Isa::PORTABLE.run(Token { pages: cache.pages(), layer, slot })
}

#[test]
fn what_is_written_is_read() {
    for dtype in DTYPES {
        let mut cache = KvCache::new(SHAPE, dtype, 0).expect("memory");
        let slots = || (0..2).flat_map(|layer| (0..20).map(move |slot| (layer, slot)));
        slots().for_each(|(layer, slot)| write(&mut cache, layer, slot));
        for (layer, slot) in slots() {
            let found = read(&mut cache, layer, slot).concat();
            let expected = token(layer, slot).concat();
            for heads in 0..6 {
                let [found, expected] = [&found, &expected].map(|x| &x[heads * 6..(heads + 1) * 6]);
                let largest = expected.iter().copied().fold(0.0, f32::max);
                let error = match dtype {
                    KvDType::F32 => 0.0,
                    KvDType::F16 => largest / 2048.0,
                    KvDType::Bf16 => largest / 256.0,
                    KvDType::Int8 => largest / 253.9,
                };
                assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() <= error), "{dtype:?}: {found:?} is not {expected:?}");
            }
        }
    }
}

#[test]
fn integers_keep_zeros_and_what_is_not_a_number() {
    let mut cache = KvCache::new(SHAPE, KvDType::Int8, 0).expect("memory");
    let mut values = vec![0.0; 18];
    values[7] = -f32::NAN;
    // SAFETY: no other thread uses the cache.
    unsafe { cache.pages().write(0, 3, &[0.0; 18], &values) };
    let [keys, values] = read(&mut cache, 0, 3);
    assert_eq!(keys, [0.0; 18]);
    assert_eq!(values[..6], [0.0; 6]);
    assert!(values[6..12].iter().all(|x| x.is_nan()));
}

#[test]
fn halves_are_finite_where_numbers_are() {
    let mut cache = KvCache::new(SHAPE, KvDType::F16, 0).expect("memory");
    let mut keys = vec![1e5; 18];
    keys[1] = -1e30;
    keys[7] = f32::INFINITY;
    keys[8] = f32::NAN;
    // SAFETY: no other thread uses the cache.
    unsafe { cache.pages().write(0, 3, &keys, &[0.0; 18]) };
    let [keys, _] = read(&mut cache, 0, 3);
    assert_eq!(keys[..3], [65504.0, -65504.0, 65504.0]);
    assert_eq!(keys[7], f32::INFINITY);
    assert!(keys[8].is_nan());
}

#[test]
fn blocks_are_copied_and_swapped_in_all_layers() {
    for dtype in DTYPES {
        let mut cache = KvCache::new(SHAPE, dtype, 2).expect("memory");
        (0..2).for_each(|layer| (0..20).for_each(|slot| write(&mut cache, layer, slot)));
        let before: Vec<_> = (0..2).map(|layer| (0..20).map(|slot| read(&mut cache, layer, slot)).collect::<Vec<_>>()).collect();
        // `blocks[i]` is the block that originally held the contents of block i.
        let check = |cache: &mut KvCache, blocks: [usize; 5]| {
            for (layer, before) in before.iter().enumerate() {
                for slot in 0..20 {
                    let held = blocks[slot / 4] * 4 + slot % 4;
                    assert_eq!(read(cache, layer, slot), before[held], "{dtype:?}, layer {layer}, slot {slot}");
                }
            }
        };
        cache.copy(&[(0, 1), (1, 3)]);
        check(&mut cache, [0, 0, 2, 0, 4]);
        // A block is swapped out, and another one is swapped in to its place.
        cache.swap(&[(2, 0), (4, 1)], &[]);
        cache.swap(&[(0, 0)], &[(0, 2), (1, 3)]);
        check(&mut cache, [0, 0, 0, 4, 4]);
    }
}

#[test]
fn memory_is_refused_with_an_error_and_taken_only_when_written() {
    let shape = KvShape { blocks: usize::MAX / 1_000_000, ..SHAPE };
    let each = KvCache::bytes_per_block(SHAPE, KvDType::F32);
    assert_eq!(each, 2 * 3 * 384, "4 tokens of 16 values, 6 dimensions of 4 keys, in whole cache lines");
    let error = KvCache::new(shape, KvDType::F32, 0).err().expect("nobody has so much");
    assert_eq!(error.bytes, shape.blocks * each);
    let error = KvCache::new(SHAPE, KvDType::F32, usize::MAX / 2).err().expect("more than there are addresses");
    assert_eq!(error.bytes, usize::MAX);
    // The cache has 1 GiB, of which the test uses a few pages. Other tests use far less than the rest meanwhile.
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
        pages.split(' ').nth(1)?.parse::<usize>().ok()
    };
    let before = resident();
    let shape = KvShape { blocks: (1 << 30) / each, ..SHAPE };
    let mut cache = KvCache::new(shape, KvDType::F32, 0).expect("memory");
    write(&mut cache, 1, 7);
    assert_eq!(read(&mut cache, 1, 7), token(1, 7));
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after < before + (1 << 29) / 4096, "{before} pages, then {after}");
    }
}

#[test]
fn discarded_blocks_lose_their_memory_and_others_keep_their_content() {
    // A block has 3 heads in 12,672 bytes of a layer, so that memory pages are shared by neighbours.
    let shape = KvShape { layers: 2, blocks: 40, kv_heads: 3, block_size: 16, head_dim: 32, latent: None };
    let mut cache = KvCache::new(shape, KvDType::F32, 0).expect("little memory");
    let content = |block: u32| vec![block as u8 + 1; KvCache::bytes_per_block(shape, KvDType::F32)];
    let bytes = |cache: &KvCache, block| {
        let mut bytes = vec![0; cache.block_bytes()];
        cache.read(block, &mut bytes);
        bytes
    };
    (0..40).for_each(|block| cache.write(block, &content(block)));
    cache.discard(&[30, 7, 5, 6, 9, 8]);
    for block in (0..40).filter(|block| ![5, 6, 7, 8, 9, 30].contains(block)) {
        assert_eq!(bytes(&cache, block), content(block), "block {block}");
    }
    let rest = |cache: &KvCache, block| bytes(cache, block).into_iter().filter(|&byte| byte != 0).count();
    if cfg!(target_os = "linux") {
        assert_eq!(rest(&cache, 7), 0, "within a run");
        assert!(rest(&cache, 30) <= content(30).len() - 2 * 4096, "alone");
    }
    cache.discard(&[]);
    cache.write(7, &content(7));
    assert_eq!(bytes(&cache, 7), content(7));
}

#[test]
fn sizes_that_no_memory_has_are_refused() {
    let most = usize::MAX;
    for (layers, blocks, host_blocks, head_dim) in [(1 << 20, 1 << 20, 0, 1 << 30), (1, 1, 1 << 60, 6), (1, most, 0, 6), (1, 1, 0, most)] {
        let shape = KvShape { layers, blocks, head_dim, ..SHAPE };
        let error = KvCache::new(shape, KvDType::F32, host_blocks).err().expect("too much memory");
        assert_eq!(error.bytes, most, "{shape:?}");
    }
}
