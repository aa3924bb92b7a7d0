//! Checks that a text's embedding has the same bits whatever else is computed with it, and that unsound texts are refused. The Python
//! tests compare embeddings with those of transformers.

mod support;

use chairlift_cpu::{
    DType, Embeddings, Encoder, EncoderLayer, Isa, Linear, Matrix, Merge, Norm, Numbers, Pooling, Source, Tensor, TextError, ThreadPool,
};
use support::numbers;

const HIDDEN: usize = 36;
const INNER: usize = 50;
const HEADS: usize = 3;
const VOCABULARY: usize = 40;
const POSITIONS: usize = 24;

fn norm(seed: u32) -> Norm {
    Norm { weight: numbers(seed, HIDDEN).iter().map(|x| 1.0 + 0.2 * x).collect(), bias: numbers(seed + 1, HIDDEN) }
}

fn linear(isa: Isa, seed: u32, outs: usize, ins: usize) -> Linear {
    let bytes: Vec<u8> = numbers(seed, outs * ins).iter().flat_map(|x| (0.3 * x).to_le_bytes()).collect();
    let tensor = Tensor { numbers: Numbers::F32, rows: outs, ins, source: Source::Memory(&bytes), interleaved: 0 };
    let mut pool = ThreadPool::new(1).expect("threads");
    let matrix = Matrix::pack(&mut pool, isa, &[&[tensor]], Merge::Stacked, DType::F32).expect("it fits");
    Linear::new(matrix, Some(&numbers(seed + 1, outs)))
}

fn encoder(isa: Isa, threads: usize, pooling: Pooling) -> Encoder {
    let layer = |seed: u32| EncoderLayer {
        qkv_proj: linear(isa, seed, 3 * HIDDEN, HIDDEN),
        o_proj: linear(isa, seed + 2, HIDDEN, HIDDEN),
        attention_norm: norm(seed + 4),
        up_proj: linear(isa, seed + 6, INNER, HIDDEN),
        down_proj: linear(isa, seed + 8, HIDDEN, INNER),
        norm: norm(seed + 10),
    };
    let embeddings = Embeddings { tokens: numbers(1, VOCABULARY * HIDDEN), positions: numbers(2, POSITIONS * HIDDEN), norm: norm(3) };
    let pool = ThreadPool::new(threads).expect("threads");
    Encoder::new(pool, HEADS, 1e-12, embeddings, vec![layer(20), layer(40)], pooling).expect("all fits")
}

fn embed(encoder: &mut Encoder, texts: &[&[i32]]) -> Vec<Vec<u32>> {
    let ids = texts.concat();
    let starts: Vec<i32> = (0..=texts.len()).map(|i| texts[..i].iter().map(|text| text.len() as i32).sum()).collect();
    let mut out = vec![0.0; texts.len() * HIDDEN];
    encoder.embed(&ids, &starts, &mut out).expect("sound texts");
    out.chunks(HIDDEN).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn an_embedding_has_the_same_bits_alone_and_in_a_batch() {
    let long: Vec<i32> = (0..POSITIONS as i32).map(|i| i * 7 % VOCABULARY as i32).collect();
    let texts: [&[i32]; 4] = [&[1, 2, 3], &long, &[39], &[3, 2, 1, 0, 5, 6, 7, 8, 9]];
    for isa in Isa::available() {
        for pooling in [Pooling::First, Pooling::Last, Pooling::Mean] {
            let together = embed(&mut encoder(isa, 3, pooling), &texts);
            let mut alone = encoder(isa, 1, pooling);
            for (text, together) in texts.iter().zip(&together) {
                assert_eq!(&embed(&mut alone, &[text])[0], together, "{isa:?} {pooling:?}");
            }
            let squares: f32 = together[1].iter().map(|&x| f32::from_bits(x).powi(2)).sum();
            assert!((squares - 1.0).abs() < 1e-5, "{isa:?} {pooling:?}: {squares}");
        }
    }
}

#[test]
fn unsound_texts_are_refused() {
    let mut encoder = encoder(Isa::best(), 1, Pooling::Mean);
    let mut out = vec![0.0; 4 * HIDDEN];
    let long = [0; POSITIONS + 1];
    let starts = |tokens| Err(TextError::Starts { tokens, most: POSITIONS });
    assert_eq!(encoder.embed(&[1, 2], &[0, 1], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[0, 0, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[1, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[1, 2], &[0, -1, 2], &mut out), starts(2));
    assert_eq!(encoder.embed(&[], &[], &mut out), starts(0));
    assert_eq!(encoder.embed(&long, &[0, long.len() as i32], &mut out), starts(long.len()));
    assert_eq!(encoder.embed(&[1, 40], &[0, 2], &mut out), Err(TextError::Token(40)));
    assert_eq!(encoder.embed(&[-1, 2], &[0, 2], &mut out), Err(TextError::Token(-1)));
    assert_eq!(encoder.embed(&[], &[0], &mut out), Ok(()));
}
