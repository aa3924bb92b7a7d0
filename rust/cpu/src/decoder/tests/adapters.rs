//! Compares adapters with merged weights.

use super::*;
use crate::lora::{Adapter, LowRank, Update};

/// The update of one tensor: the bytes of A [rank, ins] and B [outs, rank].
struct Delta {
    a: Vec<u8>,
    b: Vec<u8>,
    ins: usize,
    rank: usize,
}

const SCALE: f32 = 0.05;

/// The updates of each block's two layers, tensor by tensor.
type Deltas = Vec<[Vec<Option<Delta>>; 2]>;

/// Random updates. `targets` says which of q, k and v together, o, gate, up and down have one.
fn deltas(seed: u32, rank: usize, targets: [bool; 6]) -> Deltas {
    let delta = |index: u32, outs: usize, ins: usize| {
        let (a, b) = (numbers(seed + 2 * index, rank * ins), numbers(seed + 2 * index + 1, outs * rank));
        targets[index as usize % 6].then_some(Delta { a: bytes_of(&a), b: bytes_of(&b), ins, rank })
    };
    let attention = |i: u32| [vec![delta(i, QUERIES, HIDDEN), delta(i + 1, WIDE - QUERIES, HIDDEN)], vec![delta(i + 2, HIDDEN, QUERIES)]];
    let mlp = |i: u32| [vec![delta(i + 3, INNER, HIDDEN), delta(i + 4, INNER, HIDDEN)], vec![delta(i + 5, HIDDEN, INNER)]];
    (0..LAYERS as u32).flat_map(|layer| [attention(6 * layer), mlp(6 * layer)]).collect()
}

fn adapter(isa: Isa, deltas: &Deltas) -> Adapter {
    let mut pool = ThreadPool::new(1).expect("threads");
    let mut pack = |layer: &[Option<Delta>]| {
        let updates = layer.iter().map(|one| {
            let Delta { a, b, ins, rank } = one.as_ref()?;
            Some(Update { a: tensor(a, *ins), b: tensor(b, *rank), scale: SCALE })
        });
        let updates: Vec<_> = updates.collect();
        LowRank::pack(&mut pool, isa, &updates).expect("it fits")
    };
    Adapter::new(deltas.iter().map(|[first, second]| [pack(first), pack(second)]).collect())
}

/// Adds the updates to the weights.
fn merged(weights: &Weights, deltas: &Deltas) -> Weights {
    let mut merged = weights.clone();
    for (index, layers) in deltas.iter().enumerate() {
        let (layer, attention) = (index / 2, index % 2 == 0);
        let stacked: [&mut [f32]; 2] = if attention {
            [&mut merged.qkv[layer], &mut merged.output[layer]]
        } else {
            [&mut merged.gate_up[layer], &mut merged.down[layer]]
        };
        for (tensors, mut target) in layers.iter().zip(stacked) {
            let rows = if attention { [QUERIES, WIDE - QUERIES] } else { [INNER, INNER] };
            for (one, rows) in tensors.iter().zip(rows) {
                let size = if tensors.len() == 1 { target.len() } else { rows * HIDDEN };
                let (own, others) = target.split_at_mut(size);
                target = others;
                let Some(Delta { a, b, ins, rank }) = one else { continue };
                let number = |bytes: &[u8], at: usize| f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four bytes"));
                for (at, weight) in own.iter_mut().enumerate() {
                    let (row, column) = (at / ins, at % ins);
                    *weight += SCALE * (0..*rank).map(|j| number(b, row * rank + j) * number(a, j * ins + column)).sum::<f32>();
                }
            }
        }
    }
    merged
}

const ALL: [bool; 6] = [true; 6];

#[test]
fn an_adapter_gives_the_logits_of_merged_weights() {
    let weights = Weights::new();
    let sequence = tokens(5, 37);
    for (rank, targets) in
        [(1, ALL), (16, ALL), (19, ALL), (8, [true, false, false, false, true, false]), (8, [false, true, true, false, false, true])]
    {
        let deltas = deltas(200, rank, targets);
        let expected = merged(&weights, &deltas).reference(&sequence, None);
        let base = weights.reference(&sequence, None);
        let scale = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let off = |found: &[f32]| found.iter().zip(&expected).fold(0.0, |most: f64, (&x, y)| most.max((f64::from(x) - y).abs())) / scale;
        assert!(off(&base.iter().map(|&x| x as f32).collect::<Vec<_>>()) > 1e-2, "the update must change the logits");
        for isa in Isa::without_digits() {
            for (dtype, tolerance) in [(DType::F32, 5e-6), (DType::Bf16, 3e-2), (DType::Int8, 0.12)] {
                let mut decoder = weights.decoder(isa, dtype, 2, None);
                let number = decoder.add_adapter(adapter(isa, &deltas)).expect("it fits");
                let found = run_adapted(&mut decoder, KvDType::F32, &[&sequence], &[11], &[number as i32]).remove(0);
                assert!(off(&found) < tolerance, "{isa:?} {dtype:?} rank {rank} {targets:?}: {:e}", off(&found));
            }
        }
    }
}

#[test]
fn a_sequence_with_an_adapter_is_computed_bit_for_bit_the_same_in_any_company() {
    let weights = Weights::new();
    let sequence = tokens(5, 9);
    let others: Vec<_> = (0..69).map(|i| tokens(100 + i, 2 + i as usize % 9)).collect();
    let all = [deltas(200, 16, ALL), deltas(300, 5, ALL), deltas(400, 40, [true, false, true, true, false, false])];
    for isa in Isa::without_digits() {
        for (dtype, kv) in [(DType::Bf16, KvDType::F32), (DType::Int8, KvDType::F16)] {
            let load = |threads: usize| {
                let mut decoder = weights.decoder(isa, dtype, threads, None);
                let numbers: Vec<_> = all.iter().map(|deltas| decoder.add_adapter(adapter(isa, deltas)).expect("it fits")).collect();
                assert_eq!(numbers, [1, 2, 3]);
                decoder
            };
            let plain = run(&mut weights.decoder(isa, dtype, 1, None), kv, &[&sequence], &[64]).remove(0);
            let mut alone = load(1);
            let alone = [0, 1, 2, 3].map(|own| run_adapted(&mut alone, kv, &[&sequence], &[64], &[own]).remove(0));
            assert!(alone[0] == plain && alone[1..].iter().all(|logits| *logits != plain));
            let mut decoder = load(3);
            for (count, kinds) in [(1, 0), (2, 1), (3, 3), (4, 3), (7, 1), (11, 3), (16, 0), (33, 1), (69, 3)] {
                let mut company: Vec<&[i32]> = others[..count].iter().map(Vec::as_slice).collect();
                let mut adapters: Vec<i32> = (0..count as i32).map(|i| if kinds == 0 { 0 } else { i % (kinds + 1) }).collect();
                company.insert(count / 2, &sequence);
                adapters.insert(count / 2, 0);
                for own in [0, 1 + count as i32 % 3] {
                    adapters[count / 2] = own;
                    let found = run_adapted(&mut decoder, kv, &company, &[1 + count % 4, 3], &adapters).remove(count / 2);
                    assert!(found == alone[own as usize], "{isa:?} {dtype:?}, adapter {own} among {count} with {kinds} adapters");
                }
            }
        }
    }
}

#[test]
fn adapters_that_do_not_fit_or_are_not_loaded_are_refused() {
    let weights = Weights::new();
    let sequence = tokens(5, 7);
    let isa = Isa::best();
    let mut decoder = weights.decoder(isa, DType::F32, 2, None);
    let mut wrong = deltas(200, 4, ALL);
    wrong[0][1] = vec![Some(Delta { a: vec![0; 4 * 4 * INNER], b: vec![0; 4 * 4 * HIDDEN], ins: INNER, rank: 4 })];
    assert!(decoder.add_adapter(adapter(isa, &wrong)).is_err());
    wrong.truncate(1);
    assert!(decoder.add_adapter(adapter(isa, &wrong)).is_err());
    for other in Isa::available().into_iter().skip(1) {
        assert!(decoder.add_adapter(adapter(other, &deltas(200, 4, ALL))).is_err(), "it is packed for {other:?}");
    }
    assert_eq!(decoder.add_adapter(adapter(isa, &deltas(200, 4, ALL))), Ok(1));
    assert_eq!(decoder.add_adapter(adapter(isa, &deltas(300, 4, ALL))), Ok(2));
    let second = run_adapted(&mut decoder, KvDType::F32, &[&sequence], &[64], &[2]);
    decoder.remove_adapter(1);
    assert!(run_adapted(&mut decoder, KvDType::F32, &[&sequence], &[64], &[2]) == second);
    let shape = KvShape { layers: LAYERS, blocks: 4, kv_heads: KV_HEADS, block_size: BLOCK, head_dim: HEAD, latent: None };
    let mut cache = KvCache::new(shape, KvDType::F32, 0).expect("there is memory");
    for number in [1, 3, -1] {
        let step = Step { adapters: &[number], ..ONE_TOKEN };
        assert_eq!(decoder.forward(&step, std::slice::from_mut(&mut cache), None), Err(StepError::Adapter { sequence: 0, number }));
    }
    assert_eq!(decoder.add_adapter(adapter(isa, &deltas(300, 4, ALL))), Ok(1));
    assert!(run_adapted(&mut decoder, KvDType::F32, &[&sequence], &[64], &[1]) == second);
}
