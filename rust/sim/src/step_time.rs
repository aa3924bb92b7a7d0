//! Step durations of a simulated device.

use chairlift_core::{Load, StepModel};

/// The duration of a step in microseconds, computed from its load.
///
/// The curve gives the fixed cost of a step and the cost of its tokens in layers that process each token separately. It
/// is linear between its points and extends its last segment. Such layers are bound by weight reads when there are few
/// tokens and by compute when there are many (the roofline, Williams et al., 2009), so a single line does not fit.
/// Attention and sampling are linear.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    curve: Vec<(f64, f64)>,
    decode_seq: f64,
    context_token: f64,
    prefill_pair: f64,
}

impl StepTime {
    /// Takes points (tokens, microseconds), and microseconds per decoding sequence, context token and pair of a
    /// prompt's tokens. A drafted token takes as long as a decoding sequence. Returns `None` unless there are at least two
    /// points with increasing tokens and all numbers are finite.
    pub fn new(curve: Vec<(f64, f64)>, decode_seq: f64, context_token: f64, prefill_pair: f64) -> Option<Self> {
        let rises = curve.len() >= 2 && curve.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let numbers = curve.iter().flat_map(|&(tokens, time)| [tokens, time]).chain([decode_seq, context_token, prefill_pair]);
        let finite = numbers.into_iter().all(f64::is_finite);
        (rises && finite).then_some(Self { curve, decode_seq, context_token, prefill_pair })
    }

    /// The times that a scheduler has learned: a line, or a curve if the model has experts.
    pub fn learned(model: &StepModel) -> Self {
        let mut time = Self::linear(model.coefficients());
        if model.expert_time(1) > 0.0 {
            let ((_, fixed), (_, one)) = (time.curve[0], time.curve[1]);
            let point = |tokens: u32| (f64::from(tokens), fixed + f64::from(tokens) * (one - fixed) + model.expert_time(tokens));
            time.curve = std::iter::once(0).chain((0..12).map(|power| 1 << power)).map(point).collect();
        }
        time
    }

    /// The line of these coefficients, in the order of [`StepModel::new`].
    pub fn linear([fixed, prefill_token, decode_seq, context_token, prefill_pair]: [f64; 5]) -> Self {
        let curve = vec![(0.0, fixed), (1.0, fixed + prefill_token)];
        Self { curve, decode_seq: decode_seq - prefill_token, context_token, prefill_pair }
    }

    /// Microseconds of a step of `load`, at least one.
    pub fn step(&self, load: &Load) -> u64 {
        let tokens = f64::from(load.tokens());
        let after = self.curve.partition_point(|&(at, _)| at <= tokens).clamp(1, self.curve.len() - 1);
        let ((from, low), (to, high)) = (self.curve[after - 1], self.curve[after]);
        let alone = low + (high - low) * (tokens - from) / (to - from);
        let attention = self.context_token * load.context_tokens as f64 + self.prefill_pair * load.prefill_pairs as f64;
        (alone + attention + self.decode_seq * f64::from(load.decode_rows())).max(1.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_is_linear_between_its_points_and_beyond_them() {
        let time = StepTime::new(vec![(1.0, 100.0), (3.0, 100.0), (5.0, 200.0)], 0.0, 0.0, 0.0).unwrap();
        let of = |tokens| time.step(&Load { prefill_tokens: tokens, ..Load::default() });
        assert_eq!([0, 1, 2, 3, 4, 5, 7].map(of), [100, 100, 100, 100, 150, 200, 300]);
    }

    #[test]
    fn a_line_says_the_same_as_its_model() {
        let model = StepModel::new(900.0, 30.0, 90.0, 0.5, 0.125);
        let time = StepTime::learned(&model);
        for (prefill_tokens, decode_seqs, drafted_tokens) in [(0, 1, 0), (64, 0, 0), (100, 7, 0), (0, 3, 20)] {
            let load = Load { prefill_tokens, decode_seqs, context_tokens: 1000, prefill_pairs: 4096, drafted_tokens };
            assert_eq!(time.step(&load), model.step(&load) as u64);
        }
    }

    #[test]
    fn what_is_no_curve_is_refused() {
        for curve in [vec![], vec![(1.0, 1.0)], vec![(2.0, 1.0), (1.0, 2.0)], vec![(1.0, 1.0), (2.0, f64::NAN)]] {
            assert_eq!(StepTime::new(curve, 0.0, 0.0, 0.0), None);
        }
    }
}
