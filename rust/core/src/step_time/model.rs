//! Predicts step times from the steps observed so far.

use super::row_times::RowTimes;
use crate::request::Time;

/// The work of a step, as input of the step-time model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Prompt tokens, including recomputed tokens.
    pub prefill_tokens: u32,
    /// Drafted tokens of decoding sequences.
    pub drafted_tokens: u32,
    /// Decoding sequences. Each computes its last token; drafted tokens are counted separately.
    pub decode_seqs: u32,
    /// Context tokens read by all sequences of the step.
    pub context_tokens: u64,
    /// Pairs of a prompt token and an earlier token.
    pub prefill_pairs: u64,
}

impl Load {
    /// Tokens that the step computes.
    pub fn tokens(&self) -> u32 {
        self.prefill_tokens + self.decode_rows()
    }

    /// Adds `len` prompt tokens after the first `from`.
    pub fn add_piece(&mut self, from: u32, len: u32) {
        self.context_tokens += u64::from(from + len);
        // A prompt piece of one token costs as much as a decode.
        if len == 1 {
            self.decode_seqs += 1;
        } else {
            self.prefill_tokens += len;
            self.prefill_pairs += u64::from(len) * (u64::from(from) + u64::from(len) / 2);
        }
    }

    /// Tokens of decoding sequences: the last one of each, and drafted ones.
    pub fn decode_rows(&self) -> u32 {
        self.decode_seqs + self.drafted_tokens
    }
}

pub(crate) const COEFFICIENTS: usize = 6;
type Vector = [f64; COEFFICIENTS];

/// Scales the features of a typical step to values near one.
const SCALE: Vector = [1.0, 1.0 / 256.0, 1.0 / 64.0, 1.0 / 65_536.0, 1.0 / 1_048_576.0, 1.0 / 64.0];
/// Drift variance of a coefficient per step, relative to its square.
const DRIFT: f64 = 2e-4;
/// Maximum variance of a coefficient, in squared microseconds.
const UNKNOWN: f64 = 1e10;
/// Noise as a part of a step's time. The next constant is the noise of an empty step in microseconds.
const NOISE: f64 = 0.1;
const MIN_NOISE: f64 = 2.0;
/// The part of a step's time limit to aim at. A prompt's next piece always costs slightly more than the pieces that the model
/// has observed.
pub(crate) const AIM: f64 = 0.88;
/// Prompt tokens in a step with a time limit before their cost is known.
pub(crate) const FIRST_PREFILL: u32 = 64;
/// The part of the running means of step times that each step replaces.
const RECENT: f64 = 0.25;
/// Observed steps after which predictions are used.
const ENOUGH: u32 = 8;

/// The experts of a layer, of which each token uses some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCount {
    /// Experts of a layer. 0 for a model without experts.
    pub count: u32,
    /// Experts that a token uses.
    pub used: u32,
}

impl ExpertCount {
    /// Expected number of experts that `tokens` tokens use together, if each chooses at random.
    pub fn touched(self, tokens: u32) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let count = f64::from(self.count);
        count * (1.0 - larger(1.0 - f64::from(self.used) / count, 0.0).powi(tokens as i32))
    }
}

/// A linear model of a step's time in microseconds: a constant, and a coefficient each for prompt tokens, rows of decoding
/// sequences, context tokens, pairs of a prompt's tokens (which make the end of a long prompt expensive) and touched experts (whose
/// weights are read once a step).
///
/// The coefficients are estimated by a Kalman filter with drift (Kalman, 1960). A coefficient about which recent steps
/// carry no information stays unchanged. Coefficients are never negative.
#[derive(Clone, Debug)]
pub struct StepModel {
    experts: ExpertCount,
    weights: Vector,
    covariance: [Vector; COEFFICIENTS],
    seen: u32,
    /// Prompt tokens in the largest observed step.
    largest_prefill: u32,
    /// Running mean of step times.
    mean: f64,
    /// Running mean of the times of recent steps without prompt tokens, zero before the first, and a load with as many
    /// decoding sequences as the last one.
    decode_mean: f64,
    decode_load: Load,
    /// Running mean of the times of recent steps with prompt tokens, each divided by its prediction.
    prefill_pace: f64,
    /// Times of the steps without prompt tokens.
    row_times: RowTimes,
    /// Microseconds of a prompt token, if the caller measures them.
    measured_token: Option<f64>,
}

impl Default for StepModel {
    fn default() -> Self {
        let mut covariance = [[0.0; COEFFICIENTS]; COEFFICIENTS];
        (0..COEFFICIENTS).for_each(|i| covariance[i][i] = UNKNOWN);
        Self {
            experts: ExpertCount::default(),
            weights: [0.0; COEFFICIENTS],
            covariance,
            seen: 0,
            largest_prefill: 0,
            mean: 0.0,
            decode_mean: 0.0,
            decode_load: Load::default(),
            prefill_pace: 1.0,
            row_times: RowTimes::default(),
            measured_token: None,
        }
    }
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The smaller number.
fn smaller(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// The larger number. `f64::max` takes more instructions, because it looks for NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

impl StepModel {
    /// Creates a known model: microseconds per empty step, prompt token, decoding sequence or drafted token, context token and
    /// pair of a prompt's tokens.
    pub fn new(fixed: f64, prefill_token: f64, decode_row: f64, context_token: f64, prefill_pair: f64) -> Self {
        Self::known(ExpertCount::default(), [fixed, prefill_token, decode_row, context_token, prefill_pair, 0.0])
    }

    /// Creates a known model from the coefficients of [`new`](Self::new), and the microseconds of a touched expert.
    pub(crate) fn known(experts: ExpertCount, raw: [f64; COEFFICIENTS]) -> Self {
        Self {
            experts,
            weights: std::array::from_fn(|i| raw[i] / SCALE[i]),
            seen: ENOUGH,
            largest_prefill: u32::MAX,
            mean: raw[0],
            ..Self::default()
        }
    }

    /// Creates an unknown model of steps with these experts.
    pub fn of_experts(experts: ExpertCount) -> Self {
        Self { experts, ..Self::default() }
    }

    /// The coefficients in microseconds, in the order of [`new`](Self::new), without the time of experts.
    pub fn coefficients(&self) -> [f64; 5] {
        let [known @ .., _] = self.raw();
        known
    }

    /// The coefficients in microseconds, as [`known`](Self::known) takes them.
    pub(crate) fn raw(&self) -> [f64; COEFFICIENTS] {
        std::array::from_fn(|i| self.weights[i] * SCALE[i])
    }

    /// Like [`coefficients`](Self::coefficients), with the time of experts divided evenly among the tokens of `load`.
    pub fn coefficients_of(&self, load: &Load) -> [f64; 5] {
        let mut parts = self.coefficients();
        let each = self.expert_time(load.tokens()) / f64::from(load.tokens().max(1));
        parts[1] += each;
        parts[2] += each;
        parts
    }

    /// Predicted microseconds of the experts that `tokens` tokens touch.
    pub fn expert_time(&self, tokens: u32) -> f64 {
        self.weights[5] * SCALE[5] * self.experts.touched(tokens)
    }

    /// Predicted microseconds of one more row of a decoding sequence beside `load`, without its context.
    pub(crate) fn row(&self, load: &Load) -> f64 {
        self.weights[2] * SCALE[2] + self.expert_time(load.tokens() + 1) - self.expert_time(load.tokens())
    }

    fn features(&self, load: &Load) -> Vector {
        // A signed number becomes an f64 in one instruction, an unsigned one in seven.
        let context = (load.context_tokens as i64 as f64, load.prefill_pairs as i64 as f64);
        let touched = self.experts.touched(load.tokens());
        let raw = [1.0, f64::from(load.prefill_tokens), f64::from(load.decode_rows()), context.0, context.1, touched];
        std::array::from_fn(|i| raw[i] * SCALE[i])
    }

    /// Updates the model with a step of `load` that took `took` microseconds. Returns the time that was predicted.
    pub fn observe(&mut self, load: &Load, took: Time) -> f64 {
        let (x, took) = (self.features(load), took as f64);
        for i in 0..COEFFICIENTS {
            let drift = DRIFT * larger(self.weights[i], 1.0).powi(2);
            self.covariance[i][i] = (self.covariance[i][i] + drift).min(UNKNOWN);
        }
        // The covariance is symmetric, and most features of most steps are zero.
        let mut px = [0.0; COEFFICIENTS];
        for (row, &x) in self.covariance.iter().zip(&x).filter(|(_, x)| **x > 0.0) {
            (0..COEFFICIENTS).for_each(|i| px[i] += row[i] * x);
        }
        let noise = (NOISE * took).max(MIN_NOISE).powi(2);
        let spread = dot(&x, &px) + noise;
        let deviation = spread.sqrt();
        // A step that took much longer than predicted was delayed by another cause.
        let predicted = dot(&self.weights, &x);
        let surprise = ((took - predicted) / deviation).clamp(-3.0, 3.0);
        let gain = px.map(|px| px / deviation);
        for i in 0..COEFFICIENTS {
            self.weights[i] = larger(self.weights[i] + gain[i] * surprise, 0.0);
            for j in 0..COEFFICIENTS {
                self.covariance[i][j] -= gain[i] * gain[j];
            }
        }
        // A single very long step says little about the next steps.
        let usual = if self.knows() { took.min(4.0 * self.mean) } else { took };
        self.mean += (usual - self.mean) / f64::from(self.seen.min(31) + 1);
        self.seen = self.seen.saturating_add(1);
        self.largest_prefill = self.largest_prefill.max(load.prefill_tokens);
        if load.prefill_tokens == 0 {
            self.row_times.observe(load.decode_rows(), took);
            if load.decode_seqs != self.decode_load.decode_seqs {
                self.decode_mean = self.decode_step(load);
                self.decode_load = *load;
            }
            let mean = if self.decode_mean > 0.0 { self.decode_mean } else { took };
            self.decode_mean = mean + RECENT * (smaller(took, 2.0 * mean) - mean);
        } else if self.knows() && predicted > 0.0 {
            self.prefill_pace += RECENT * (smaller(took / predicted, 2.0 * self.prefill_pace) - self.prefill_pace);
        }
        predicted
    }

    /// Whether enough steps were observed to predict.
    pub fn knows(&self) -> bool {
        self.seen >= ENOUGH
    }

    /// Predicted microseconds for a step of `load`.
    pub fn step(&self, load: &Load) -> f64 {
        dot(&self.weights, &self.features(load))
    }

    /// Predicted microseconds for a step of `load`, which has no prompt tokens, from the times of the latest such steps.
    ///
    /// While a long prompt is computed, there is no such step. The prediction of [`step`](Self::step) is then unreliable,
    /// because the filter cannot tell the cost of the decodes from that of the prompt. Contexts count as if they had the
    /// length of those when the number of decoding sequences last changed.
    pub fn decode_step(&self, load: &Load) -> f64 {
        let latest = &self.decode_load;
        let context_tokens = latest.context_tokens * u64::from(load.decode_seqs) / u64::from(latest.decode_seqs.max(1));
        let predicted = self.step(latest);
        if self.decode_mean > 0.0 && predicted > 0.0 {
            self.decode_mean * self.step(&Load { context_tokens, ..*load }) / predicted
        } else {
            self.step(load)
        }
    }

    /// How much of a step of `whole` predicted microseconds counts as used capacity if it was full to `fullness` (0 to 1):
    /// the cost of its tokens, and that part of the fixed cost.
    pub fn share(&self, whole: f64, fullness: f64) -> f64 {
        let fixed = self.weights[0] * SCALE[0];
        if whole > 0.0 { (whole - fixed * (1.0 - fullness)) / whole } else { fullness }
    }

    /// Mean microseconds of recent steps with `rows` rows of decoding sequences, and no prompt tokens. `None` if there were too few
    /// lately.
    pub(crate) fn decode_rows(&self, rows: u32) -> Option<f64> {
        self.row_times.step(rows)
    }

    /// Mean microseconds of recent steps.
    pub fn mean_step(&self) -> f64 {
        self.mean
    }

    /// Sets the nanoseconds of a prompt token, whatever steps with prompts take.
    pub(crate) fn set_token_time(&mut self, ns: u64) {
        self.measured_token = Some(ns as f64 / 1000.0);
    }

    /// Predicted microseconds that `tokens` prompt tokens, after the first `from`, add to their steps.
    pub fn prefill(&self, from: f64, tokens: f64) -> f64 {
        self.prefill_token(from + tokens / 2.0) * tokens
    }

    /// Predicted microseconds of a prompt token with `context` tokens before it.
    fn prefill_token(&self, context: f64) -> f64 {
        self.measured_token.unwrap_or(self.weights[1] * SCALE[1] + self.weights[4] * SCALE[4] * context)
    }

    /// Prompt tokens that fit beside `load` into a step of `target` microseconds, with `context` tokens before them. At
    /// least as many as `least` microseconds allow, and at most twice as many as in any observed step, because the
    /// model may not be linear beyond that.
    pub fn prefill_room(&self, load: &Load, target: f64, least: f64, context: u32) -> u32 {
        // The filter follows a machine that becomes slower too late for a target.
        let pace = larger(self.prefill_pace, 1.0);
        let beside = Load { context_tokens: load.context_tokens + u64::from(context), ..*load };
        // A prompt's piece touches nearly all experts.
        let experts = self.expert_time(u32::MAX >> 1) - self.expert_time(load.tokens());
        self.prefill_fits((target / pace - self.step(&beside) - experts).max(least / pace), context)
    }

    /// Prompt tokens that take `room` microseconds, with `context` tokens before them. At most twice as many as in any observed step.
    pub(crate) fn prefill_fits(&self, room: f64, context: u32) -> u32 {
        let each = self.prefill_token(context.into());
        let fits = if each > 0.0 { (room / each) as u32 } else { u32::MAX };
        fits.min(self.largest_prefill.max(FIRST_PREFILL / 2).saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise of up to 10 %, the same in every run.
    fn noisy(value: f64, state: &mut u64) -> Time {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (value * (0.9 + 0.2 * (*state >> 11) as f64 / (1_u64 << 53) as f64)) as Time
    }

    fn load(i: u32) -> Load {
        let decode_seqs = i * 7 % 60;
        let prefill_tokens = if i.is_multiple_of(3) { i * 31 % 256 } else { 0 };
        let prefill_pairs = u64::from(prefill_tokens) * u64::from(i * 97 % 4000);
        let context_tokens = u64::from(decode_seqs * (200 + i % 900)) + u64::from(prefill_tokens);
        Load { prefill_tokens, decode_seqs, context_tokens, prefill_pairs, drafted_tokens: i * 13 % 17 }
    }

    #[test]
    fn it_learns_what_a_machine_takes_and_follows_when_that_changes() {
        let mut model = StepModel::default();
        let mut state = 1;
        for truth in [StepModel::new(9000.0, 300.0, 900.0, 0.5, 0.1), StepModel::new(4000.0, 900.0, 400.0, 2.0, 0.02)] {
            for i in 0..3000 {
                model.observe(&load(i), noisy(truth.step(&load(i)), &mut state));
            }
            for i in 5000..5100 {
                let (said, is) = (model.step(&load(i)), truth.step(&load(i)));
                assert!((said - is).abs() < 0.1 * is, "{said} for {is}");
            }
        }
    }

    /// A machine whose steps read up to 128 experts, of which a token uses 8, in 45 µs each.
    #[test]
    fn experts_touched_explain_the_times_of_small_steps() {
        let experts = ExpertCount { count: 128, used: 8 };
        let mut truth = StepModel::of_experts(experts);
        truth.weights = [2000.0, 12.0 * 256.0, 60.0 * 64.0, 0.02 * 65_536.0, 0.0, 45.0 * 64.0];
        let learned = |mut model: StepModel| {
            let mut state = 1;
            for i in 0..3000 {
                model.observe(&load(i), noisy(truth.step(&load(i)), &mut state));
            }
            let decodes = [1, 2, 4, 8, 16, 32].map(|decode_seqs| Load { decode_seqs, context_tokens: 500, ..Load::default() });
            let errors = decodes.map(|load| (model.step(&load) / truth.step(&load) - 1.0).abs());
            errors.iter().sum::<f64>() / errors.len() as f64
        };
        let (plain, with_experts) = (learned(StepModel::default()), learned(StepModel::of_experts(experts)));
        assert!(with_experts < 0.05 && plain > 4.0 * with_experts, "mean error {plain} without experts, {with_experts} with them");
    }

    #[test]
    fn the_parts_of_a_step_s_tokens_are_the_whole_step() {
        let mut model = StepModel::of_experts(ExpertCount { count: 32, used: 4 });
        model.weights = [1000.0, 256.0, 640.0, 0.0, 0.0, 6400.0];
        let load = Load { prefill_tokens: 3, decode_seqs: 2, ..Load::default() };
        let [fixed, token, row, ..] = model.coefficients_of(&load);
        assert!((fixed + 3.0 * token + 2.0 * row - model.step(&load)).abs() < 1e-6);
        let more = Load { decode_seqs: 3, ..load };
        assert!((model.row(&load) - (model.step(&more) - model.step(&load))).abs() < 1e-6);
    }

    #[test]
    fn what_steps_of_late_say_nothing_about_stays_known() {
        let (mut model, mut state) = (StepModel::default(), 1);
        let truth = StepModel::new(9000.0, 300.0, 900.0, 0.5, 0.1);
        for i in 0..500 {
            model.observe(&load(i), noisy(truth.step(&load(i)), &mut state));
        }
        let before = model.prefill(0.0, 100.0);
        let decode = Load { decode_seqs: 30, context_tokens: 9000, ..Load::default() };
        for _ in 0..20_000 {
            model.observe(&decode, noisy(truth.step(&decode), &mut state));
        }
        let after = model.prefill(0.0, 100.0);
        assert!((after - before).abs() < 0.1 * before, "{before} became {after}");
    }

    #[test]
    fn a_hiccup_does_not_make_every_step_look_long() {
        let (mut model, mut state) = (StepModel::default(), 1);
        let truth = StepModel::new(9000.0, 300.0, 900.0, 0.5, 0.1);
        for i in 0..500 {
            model.observe(&load(i), noisy(truth.step(&load(i)), &mut state));
        }
        let before = model.step(&load(7));
        model.observe(&load(7), 10_000_000);
        assert!(model.step(&load(7)) < 1.5 * before);
    }

    #[test]
    fn the_time_of_decodes_is_known_after_a_few_steps_and_stays_so_while_a_long_prompt_is_computed() {
        let (mut model, mut state) = (StepModel::default(), 1);
        let slow = StepModel::new(9000.0, 900.0, 900.0, 0.5, 0.1);
        for i in 0..500 {
            model.observe(&load(i), noisy(slow.step(&load(i)), &mut state));
        }
        // The machine is three times as fast from now on, which twelve steps tell of decodes only.
        let fast = StepModel::new(3000.0, 300.0, 300.0, 0.2, 0.03);
        let decode = Load { decode_seqs: 4, context_tokens: 400, ..Load::default() };
        for _ in 0..12 {
            model.observe(&decode, noisy(fast.step(&decode), &mut state));
        }
        let off = |model: &StepModel, load: &Load| model.decode_step(load) / fast.step(load) - 1.0;
        assert!(off(&model, &decode).abs() < 0.15, "{} at first", off(&model, &decode));
        for i in 0..200_u64 {
            let context_tokens = 400 + 4 * i + 16 * i;
            let mixed = Load { prefill_tokens: 16, prefill_pairs: 16 * 16 * i, context_tokens, ..decode };
            model.observe(&mixed, noisy(fast.step(&mixed), &mut state));
            let decode = Load { context_tokens: 400 + 4 * i, ..decode };
            assert!(off(&model, &decode).abs() < 0.2, "{} after {i} steps of the prompt", off(&model, &decode));
        }
    }

    #[test]
    fn steps_meet_a_target_again_soon_after_the_machine_became_slower() {
        let (mut model, mut state) = (StepModel::default(), 1);
        let decode = Load { decode_seqs: 4, context_tokens: 400, ..Load::default() };
        let mut longest = 0.0;
        for (i, pace) in (0..300).map(|i| (i, if i < 200 { 1.0 } else { 2.5 })) {
            let prefill_tokens = if model.knows() { model.prefill_room(&decode, 100_000.0, 0.0, 500) } else { 64 };
            let mixed = Load { prefill_tokens, prefill_pairs: u64::from(prefill_tokens) * 500, ..decode };
            let took = noisy(pace * StepModel::new(3000.0, 300.0, 300.0, 0.2, 0.03).step(&mixed), &mut state);
            model.observe(&mixed, took);
            if i >= 210 {
                longest = larger(longest, took as f64);
            }
        }
        assert!(longest < 130_000.0, "{longest} µs");
    }

    #[test]
    fn an_empty_slot_saves_its_part_of_a_step_s_fixed_cost() {
        let model = StepModel::new(1000.0, 10.0, 100.0, 0.0, 0.0);
        let load = Load { decode_seqs: 10, ..Load::default() };
        assert!((model.share(model.step(&load), 0.5) - 0.75).abs() < 1e-9);
        assert!((model.share(model.step(&load), 1.0) - 1.0).abs() < 1e-9);
        assert!((StepModel::default().share(0.0, 0.25) - 0.25).abs() < 1e-9, "nothing is known yet");
    }

    #[test]
    fn room_is_what_the_target_leaves() {
        let model = StepModel::new(1000.0, 10.0, 100.0, 0.0, 0.01);
        let load = Load { decode_seqs: 10, ..Load::default() };
        assert_eq!(model.prefill_room(&load, 5000.0, 0.0, 0), 300);
        assert_eq!(model.prefill_room(&load, 5000.0, 0.0, 1000), 150);
        assert_eq!(model.prefill_room(&load, 100.0, 0.0, 0), 0);
        assert_eq!(model.prefill_room(&load, 100.0, 500.0, 0), 50);
    }
}
