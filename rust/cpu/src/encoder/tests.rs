//! Checks that a text's embedding has the same bits whatever else is computed with it, and that unsound texts are refused. The Python
//! tests compare embeddings with those of transformers.

use crate::decoder::tests::numbers;
use crate::{
    Activation, DType, Dense, DenseActivation, Embeddings, Encoder, EncoderBlock, EncoderBlockKind, EncoderConfig, EncoderMlp, Head, Isa,
    Linear, Matrix, Merge, Norm, Numbers, PartialText, Pooling, Rope, Source, Tensor, TextAttention, TextError, ThreadPool,
};

const HIDDEN: usize = 36;
const INNER: usize = 50;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 6;
const VOCABULARY: usize = 40;
const POSITIONS: usize = 24;
const LABELS: usize = 3;

fn norm(seed: u32, size: usize) -> Norm {
    Norm { weight: numbers(seed, size).iter().map(|x| 1.0 + 0.2 * x).collect(), bias: Some(numbers(seed + 1, size)) }
}

fn matrix(isa: Isa, seed: u32, shapes: &[usize], ins: usize, merge: Merge) -> Matrix {
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .enumerate()
        .map(|(i, outs)| numbers(seed + 100 * i as u32, outs * ins).iter().flat_map(|x| (0.3 * x).to_le_bytes()).collect())
        .collect();
    let tensor = |(bytes, &rows)| Tensor { numbers: Numbers::F32, rows, ins, source: Source::Memory(bytes), interleaved: 0 };
    let tensors: Vec<_> = bytes.iter().map(Vec::as_slice).zip(shapes).map(tensor).collect();
    let sources: Vec<_> = tensors.iter().map(std::slice::from_ref).collect();
    let mut pool = ThreadPool::new(1).expect("threads");
    Matrix::pack(&mut pool, isa, &sources, merge, DType::F32).expect("it fits")
}

fn linear(isa: Isa, seed: u32, outs: usize, ins: usize) -> Linear {
    Linear::new(matrix(isa, seed, &[outs], ins, Merge::Stacked), Some(&numbers(seed + 1, outs)))
}

/// An encoder with the features of BERT in its first layer and those of Gemma in its second.
fn encoder(isa: Isa, threads: usize, pooling: Pooling, classifies: bool) -> Encoder {
    encoder_of(isa, threads, pooling, classifies, false)
}

fn encoder_of(isa: Isa, threads: usize, pooling: Pooling, classifies: bool, causal: bool) -> Encoder {
    let attention = |seed: u32, near: bool| {
        EncoderBlockKind::Attention(TextAttention {
            qkv_proj: linear(isa, seed, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            o_proj: linear(isa, seed + 2, HIDDEN, HEADS * HEAD_DIM),
            qk_norm: near.then(|| [numbers(seed + 3, HEAD_DIM), numbers(seed + 4, HEAD_DIM)]),
            rope: near.then_some(0),
            window: near.then_some(3),
        })
    };
    let mlp = |seed: u32, gate: Option<Activation>| {
        let gated = Linear::new(matrix(isa, seed, &[INNER, INNER], HIDDEN, Merge::Gated), None);
        let up_proj = if gate.is_some() { gated } else { linear(isa, seed, INNER, HIDDEN) };
        EncoderBlockKind::Mlp(EncoderMlp { up_proj, down_proj: linear(isa, seed + 2, HIDDEN, INNER), gate })
    };
    let after = |kind, seed| EncoderBlock { kind, input_norm: None, output_norm: None, sum_norm: Some(norm(seed, HIDDEN)) };
    let around = |kind, seed| EncoderBlock {
        kind,
        input_norm: Some(norm(seed, HIDDEN)),
        output_norm: Some(Norm { bias: None, ..norm(seed + 2, HIDDEN) }),
        sum_norm: None,
    };
    let blocks = vec![
        after(attention(20, false), 30),
        after(mlp(40, None), 50),
        around(attention(60, true), 70),
        around(mlp(80, Some(Activation::Gelu)), 90),
    ];
    let embeddings = Embeddings {
        tokens: matrix(isa, 1, &[VOCABULARY], HIDDEN, Merge::Stacked),
        positions: Some(numbers(2, POSITIONS * HIDDEN)),
        types: numbers(4, 2 * HIDDEN),
        norm: Some(norm(5, HIDDEN)),
    };
    let config = EncoderConfig {
        hidden_size: HIDDEN,
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        norm_eps: 1e-12,
        embedding_scale: 1.5,
        attention_scale: 0.4,
        causal,
        distances: causal.then(|| numbers(14, HEADS * (2 * POSITIONS - 1))),
        ropes: vec![Rope { frequencies: vec![1.0, 0.3, 0.1], scale: 1.0 }],
        longest: POSITIONS,
    };
    let wide = Dense { linear: linear(isa, 8, 64, HIDDEN), activation: DenseActivation::Tanh, norm: Some(norm(16, 64)) };
    let labels = Dense { linear: linear(isa, 10, LABELS, 64), activation: DenseActivation::Identity, norm: None };
    let dense = if classifies { vec![wide, labels] } else { vec![] };
    let head = Head { norm: Some(norm(12, HIDDEN)), pooling, dense, normalized: !classifies };
    Encoder::new(ThreadPool::new(threads).expect("threads"), config, embeddings, blocks, head).expect("all fits")
}

fn embed(encoder: &mut Encoder, texts: &[&[i32]]) -> Vec<Vec<u32>> {
    let ids = texts.concat();
    let starts: Vec<i32> = (0..=texts.len()).map(|i| texts[..i].iter().map(|text| text.len() as i32).sum()).collect();
    let (mut out, width) = (vec![0.0; texts.len() * encoder.width()], encoder.width());
    let types: Vec<i32> = ids.iter().map(|id| i32::from(id % 3 == 0)).collect();
    encoder.embed(&ids, &types, &starts, &mut out).expect("sound texts");
    out.chunks(width).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn an_embedding_has_the_same_bits_alone_and_in_a_batch() {
    let long: Vec<i32> = (0..POSITIONS as i32).map(|i| i * 7 % VOCABULARY as i32).collect();
    let texts: [&[i32]; 4] = [&[1, 2, 3], &long, &[39], &[3, 2, 1, 0, 5, 6, 7, 8, 9]];
    for isa in Isa::without_digits() {
        for (pooling, classifies) in [(Pooling::First, true), (Pooling::Last, false), (Pooling::Mean, false), (Pooling::Mean, true)] {
            let together = embed(&mut encoder(isa, 3, pooling, classifies), &texts);
            let mut alone = encoder(isa, 1, pooling, classifies);
            for (text, together) in texts.iter().zip(&together) {
                assert_eq!(&embed(&mut alone, &[text])[0], together, "{isa:?} {pooling:?}");
            }
            assert_eq!(together[0].len(), if classifies { LABELS } else { HIDDEN });
            let squares: f32 = together[1].iter().map(|&x| f32::from_bits(x).powi(2)).sum();
            assert!(classifies || (squares - 1.0).abs() < 1e-5, "{isa:?} {pooling:?}: {squares}");
        }
    }
}

#[test]
fn a_text_that_is_computed_in_parts_has_the_same_bits() {
    let [long, short]: [Vec<i32>; 2] = [7, 5].map(|step| (0..POSITIONS as i32).map(|i| i * step % VOCABULARY as i32).collect());
    let types = |ids: &[i32]| ids.iter().map(|id| i32::from(id % 3 == 0)).collect();
    for isa in Isa::without_digits() {
        for pooling in [Pooling::First, Pooling::Mean] {
            let mut encoder = encoder(isa, 2, pooling, true);
            let whole = embed(&mut encoder, &[&long, &short[..9]]);
            for parts in [&[][..], &[0, 1], &[1, 2, 3], &[2, 2], &[3, 9], &[3, 1]] {
                let mut texts = [&long[..], &short[..9]].map(|ids| PartialText::new(ids.to_vec(), types(ids)));
                for &blocks in parts {
                    // Another text is computed between the parts.
                    embed(&mut encoder, &[&[1, 2, 3]]);
                    for text in &mut texts {
                        encoder.advance(text, blocks).expect("a sound text");
                    }
                }
                for (text, whole) in texts.iter_mut().zip(&whole) {
                    let mut out = vec![0.0; encoder.width()];
                    encoder.finish(text, &mut out).expect("a sound text");
                    assert_eq!(&out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), whole, "{isa:?} {pooling:?} {parts:?}");
                }
            }
        }
    }
    let mut encoder = encoder(Isa::best(), 1, Pooling::Mean, false);
    let mut wrong = PartialText::new(vec![VOCABULARY as i32], vec![]);
    assert_eq!(encoder.advance(&mut wrong, 1), Err(TextError::Token(VOCABULARY as i32)));
    assert!(encoder.finish(&mut wrong, &mut [0.0; HIDDEN]).is_err());
}

#[test]
fn a_token_of_a_causal_model_does_not_see_later_ones() {
    let (short, long): (&[i32], &[i32]) = (&[1, 2, 3, 4], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    for isa in Isa::without_digits() {
        let [first, last] = [Pooling::First, Pooling::Last].map(|pooling| {
            [false, true].map(|causal| {
                let mut encoder = encoder_of(isa, 1, pooling, false, causal);
                [short, long].map(|text| embed(&mut encoder, &[text]).remove(0))
            })
        });
        assert_ne!(first[0][0], first[0][1], "{isa:?}");
        assert_eq!(first[1][0], first[1][1], "{isa:?}");
        assert_ne!(last[0][1], last[1][1], "{isa:?}");
        assert_ne!(last[1][0], last[1][1], "{isa:?}");
    }
}

#[test]
fn unsound_texts_are_refused() {
    let mut encoder = encoder(Isa::best(), 1, Pooling::Mean, false);
    let mut out = vec![0.0; 4 * HIDDEN];
    let long = [0; POSITIONS + 1];
    let starts = |tokens| Err(TextError::Starts { tokens, most: POSITIONS });
    assert_eq!(encoder.embed(&[1, 2], &[], &[0, 1], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[], &[0, 0, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[], &[1, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[], &[0, -1, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[], &[], &[], &mut out), starts(0));
    assert_eq!(encoder.embed(&long, &[], &[0, long.len() as i32], &mut out), starts(long.len()));
    assert_eq!(encoder.embed(&[1, 40], &[], &[0, 2], &mut out), Err(TextError::Token(40)));
    assert_eq!(encoder.embed(&[-1, 2], &[], &[0, 2], &mut out), Err(TextError::Token(-1)));
    assert_eq!(encoder.embed(&[1, 2], &[0, 2], &[0, 2], &mut out), Err(TextError::Types(1)));
    assert_eq!(encoder.embed(&[1, 2], &[0], &[0, 2], &mut out), Err(TextError::Types(1)));
    assert_eq!(encoder.embed(&[], &[], &[0], &mut out), Ok(()));
}
