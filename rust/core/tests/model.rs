//! Any interleaving of calls keeps every invariant, and every request ends with exactly the tokens that a model without
//! cache, batching, chunks or overlap gives it. This holds under every policy, even one that answers at random.

mod world;

use chairlift_core::{
    BACKGROUND, Batching, CacheUse, Candidate, Charges, Config, ExpertCount, Grouping, POLICIES, Policy, Preemption, PreemptionReason,
    Preparation, Reservation, Rules, SessionTurns, Tier, Time, Token,
};
use proptest::prelude::*;
use std::num::NonZeroU8;
use std::sync::atomic::{AtomicU64, Ordering};
use world::{GROUP, Op, VOCABULARY, World};

fn op() -> impl Strategy<Value = Op> {
    let prompt = (0..2u32, 0..30usize, prop::collection::vec(0..VOCABULARY, 0..8)).prop_filter_map("empty", |(stem, len, tail)| {
        let prompt: Vec<_> = (0..len as u32).map(|i| (i * i + stem * (i / 5)) % VOCABULARY).chain(tail).collect();
        (!prompt.is_empty()).then_some(prompt)
    });
    let stored = (0..2u32, 0..30u32, any::<bool>()).prop_map(|(stem, len, grouped)| {
        let tokens = (0..len).map(|i| (i * i + stem * (i / 5)) % VOCABULARY).collect();
        Op::Restore { grouped, tokens }
    });
    let priority = prop_oneof![4 => -1..2i32, 1 => Just(BACKGROUND)];
    let tier = prop::sample::select(vec![Tier::Priority, Tier::Default, Tier::Default, Tier::Flex]);
    let (patience, predicted) = (prop::option::weighted(0.3, 0..60u64), prop::option::weighted(0.5, 1..12u32));
    let preparation = || prop::option::weighted(0.2, prop::sample::select(Preparation::NAMES.map(|(preparation, _)| preparation).to_vec()));
    let session = prop::option::weighted(0.6, (0..6u8, prop::option::weighted(0.3, 0..3u8)));
    let whose = (
        (priority, tier, preparation(), session),
        0..3u8,
        patience,
        predicted,
        prop_oneof![Just(0), 0..9u64],
        prop::option::weighted(0.2, 0..12u32),
    );
    let what = (prompt, 1..12u32, any::<bool>(), 0..=GROUP, prop_oneof![3 => Just(0), 1 => 1..3usize]);
    prop_oneof![
        4 => (what, whose).prop_map(|((prompt, new, stop, salt, forks), ((priority, tier, preparation, session), tenant, patience, predicted, ago, resumed))| {
            Op::Add { prompt, new, stop, salt, forks, priority, tier, tenant, patience, predicted, ago, resumed, preparation, session }
        }),
        2 => (0..30usize, preparation()).prop_map(|(which, next)| Op::Prepare { which, next }),
        1 => (0..30usize).prop_map(Op::Fork),
        1 => (0..=GROUP, 0..3u8).prop_map(|(salt, tenant)| Op::Open { salt, tenant }),
        1 => (0..30usize).prop_map(Op::ForkHeld),
        1 => (0..30usize).prop_map(Op::DropHeld),
        4 => (0..30usize, 0..3usize, prop::collection::vec(0..VOCABULARY, 0..8), 1..8u32, any::<bool>())
            .prop_map(|(which, less, more, new, stop)| Op::Continue { which, less, more, new, stop }),
        1 => (0..30usize, -1..2i32).prop_map(|(which, priority)| Op::SetPriority(which, priority)),
        1 => stored,
        1 => (0..4u8, prop_oneof![0..50u64, Just(u64::MAX)]).prop_map(|(tenant, us)| Op::ShareService { tenant, us }),
        1 => (0..4u8, (0..6u8, prop::option::weighted(0.3, 0..3u8)), any::<bool>())
            .prop_map(|(tenant, session, ended)| Op::NoteSession { tenant, session, ended }),
        1 => (0..40u32).prop_map(Op::SetBlockLimit),
        1 => any::<bool>().prop_map(Op::CloseQueue),
        1 => Just(Op::EvictCached),
        1 => (0..1_000_000_000u64).prop_map(Op::SetUpstreamTokenTime),
        1 => prop_oneof![3 => 0..40u64, 1 => 50_000_000..700_000_000u64].prop_map(Op::Wait),
        1 => (0..30usize).prop_map(Op::Abort),
        1 => (0..30usize).prop_map(Op::Stop),
        2 => (0..30usize, 0..4usize, 0..3usize).prop_map(|(which, right, wrong)| Op::Draft { which, right, wrong }),
        10 => (0..4usize).prop_map(|lag| Op::Step { lag: lag.saturating_sub(1), poison: None, lost: None }),
        1 => (0..3usize, 0..30usize).prop_map(|(lag, which)| Op::Step { lag, poison: Some(which), lost: None }),
        1 => (0..3usize, 0..30usize).prop_map(|(lag, which)| Op::Step { lag, poison: None, lost: Some(which) }),
    ]
}

/// A policy that answers at random, within its type.
#[derive(Debug)]
struct AtRandom {
    rules: Rules,
    rolls: AtomicU64,
}

impl AtRandom {
    /// The next random number (`SplitMix64`: Steele et al., 2014).
    fn roll(&self) -> u64 {
        let state = self.rolls.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

impl Policy for AtRandom {
    fn name(&self) -> &'static str {
        "at random"
    }

    fn help(&self) -> &'static str {
        "any"
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn rank(&self, _: &Candidate) -> u64 {
        self.roll()
    }

    fn drop_at(&self, _: &Candidate) -> Option<Time> {
        Some(self.roll() % 400).filter(|at| *at < 100)
    }

    fn may_preempt(&self, _: &Candidate, _: &Candidate) -> bool {
        self.roll().is_multiple_of(2)
    }

    fn victim_rank(&self, _: &Candidate) -> i64 {
        self.roll() as i64
    }
}

fn at_random() -> impl Strategy<Value = &'static dyn Policy> {
    let charge = || (1..=u8::MAX).prop_map(|charge| NonZeroU8::new(charge).expect("at least 1"));
    let turns = (charge(), charge()).prop_map(|(prompt_token, output_token)| Grouping::Tenants(Charges { prompt_token, output_token }));
    let grouping = prop_oneof![Just(Grouping::Single), Just(Grouping::Classes), turns];
    let cache = prop::sample::select(vec![CacheUse::Unused, CacheUse::WhenQueued, CacheUse::Followed]);
    let reason = PreemptionReason::Priority;
    let preemption = prop::sample::select(vec![Preemption::Never, Preemption::Free(reason), Preemption::WithinBudget(reason)]);
    (grouping, any::<bool>(), any::<bool>(), cache, preemption, any::<u64>()).prop_map(
        |(grouping, ranked, orders_prompts, cache, preemption, seed)| {
            let rules = Rules { grouping, ranked, orders_prompts, cache, preemption };
            &*Box::leak(Box::new(AtRandom { rules, rolls: AtomicU64::new(seed) })) as &dyn Policy
        },
    )
}

fn policy() -> impl Strategy<Value = &'static dyn Policy> {
    prop_oneof![3 => prop::sample::select(POLICIES.to_vec()), 1 => at_random()]
}

/// Whether a journal of the policy can be replayed.
fn replays(policy: &dyn Policy) -> bool {
    <dyn Policy>::named(policy.name()).is_some()
}

fn batching() -> impl Strategy<Value = Batching> {
    prop_oneof![
        4 => Just(Batching::Continuous),
        1 => (1..6u32).prop_map(|size| Batching::Static { size }),
        1 => (1..6u32, 0..30u64).prop_map(|(size, timeout)| Batching::Dynamic { size, timeout }),
    ]
}

/// Number of cases. `make property` runs a million.
fn cases() -> u32 {
    std::env::var("PROPERTY_CASES").map_or(5_000, |cases| cases.parse().expect("PROPERTY_CASES must be a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_interleaving(
        ops in prop::collection::vec(op(), 1..150),
        sizes in (6..40u32, 1..6u32, 1..24u32, 1..6u32),
        journal in any::<bool>(), watermark in 0..4u32, prefix_caching in prop::bool::weighted(0.9),
        reservation in prop::sample::select(Reservation::NAMES.map(|(reservation, _)| reservation).to_vec()),
        policy in policy(), batching in batching(),
        ageing in 0..60u64, target_itl in prop_oneof![2 => Just(0u64), 1 => 1..5u64], gather in prop_oneof![2 => Just(0u64), 1 => 1..60u64],
        background_slowdown in prop::sample::select(vec![0, 100, 120, 300]),
        host in prop_oneof![1 => Just((0, 0)), 2 => (1..40u32, prop::sample::select(vec![0, 500, 1_000_000u32]))],
        sessions in (prop::sample::select(SessionTurns::NAMES.map(|(turns, _)| turns).to_vec()), prop_oneof![0..100u64, Just(1u64 << 40)]),
        max_queued_reqs in prop_oneof![3 => Just(u32::MAX), 1 => 0..10u32],
        drafts in prop_oneof![1 => Just((0, 0)), 1 => (1..8usize, prop::sample::select(vec![0, 50, 5000usize]))],
        spare_slots in prop::option::weighted(0.5, 0..12u32), state_tokens in 0..20u32, experts in prop::sample::select(vec![0, 8u32]),
    ) {
        let (num_blocks, block_size, max_tokens, max_seqs) = sizes;
        let max_seqs = max_seqs.min(max_tokens);
        let (host_blocks, swap_ns_per_block) = host;
        let config = Config {
            num_kv_blocks: num_blocks, block_size, max_num_batched_tokens: max_tokens, max_num_seqs: max_seqs, max_model_len: 44, enable_prefix_caching: prefix_caching, watermark, kv_reservation: reservation, scheduling_policy: policy, batching,
            max_num_queued_reqs: max_queued_reqs, max_num_queued_tokens: u64::MAX, queue_ageing: ageing, target_itl, background_slowdown, gather, host_blocks, swap_ns_per_block,
            state_slots: spare_slots.map_or(0, |spare| max_seqs + spare), state_tokens, experts: ExpertCount { count: experts, used: 2 },
            session_turns: sessions.0, max_session_wait: sessions.1,
        };
        let journal = journal && replays(policy);
        let mut world = World::new(config, journal).drafting(drafts.0, drafts.1);
        for op in ops {
            world.apply(op);
        }
        world.drain();
        if journal {
            world.replay();
        }
    }

    /// Long outputs in a small cache, so that requests are preempted as often as possible. `drain` fails if they never end.
    #[test]
    fn requests_that_need_most_of_the_cache_all_end(
        requests in prop::collection::vec((1..6usize, 12..36u32, -1..2i32, 0..3usize), 4..16),
        block_size in 1..3u32, spare in 0..12u32, max_seqs in 3..8u32, policy in policy(), lag in 0..3usize, ageing in 0..60u64,
        host_blocks in prop_oneof![2 => Just(0u32), 1 => 1..40u32], limits in 0..60u32,
        spare_slots in prop::option::weighted(0.5, 0..12u32),
    ) {
        let config = Config {
            num_kv_blocks: 40u32.div_ceil(block_size) + spare, block_size, max_num_batched_tokens: 24, max_num_seqs: max_seqs, max_model_len: 44, scheduling_policy: policy, queue_ageing: ageing, host_blocks,
            state_slots: spare_slots.map_or(0, |spare| max_seqs + spare), state_tokens: limits % 9,
            ..Config::default()
        };
        let mut world = World::new(config, replays(policy)).drafting(ageing as usize % 5, 1000);
        for (at, (prompt, new, priority, tier)) in requests.into_iter().enumerate() {
            let prompt = (0..prompt as u32).map(|i| (i + at as u32) % VOCABULARY).collect();
            world.apply(Op::Add { prompt, new, stop: false, salt: at as u8, forks: 0, priority, tier: Tier::NAMES[tier].0, tenant: at as u8 % 3, patience: None, predicted: None, ago: 0, resumed: None, preparation: None, session: (at % 2 == 0).then_some((at as u8 % 5, None)) });
            world.apply(Op::Step { lag, poison: None, lost: None });
            if at as u32 % 3 == spare % 3 {
                world.apply(Op::SetBlockLimit(limits));
            }
        }
        world.drain();
        if replays(policy) {
            world.replay();
        }
    }
}

/// A fork copies a block that only a held sequence still has. The sequence that is admitted after the fork in the same plan evicts the held
/// one, and reads its own KV back from host memory. A step makes such reads before it copies blocks.
#[test]
fn a_block_that_a_step_copies_is_not_overwritten_from_host_memory() {
    let config = Config {
        num_kv_blocks: 8,
        block_size: 5,
        max_num_batched_tokens: 10,
        max_num_seqs: 2,
        max_model_len: 44,
        watermark: 0,
        kv_reservation: Reservation::Peak,
        queue_ageing: 20,
        host_blocks: 6,
        swap_ns_per_block: 0,
        ..Config::default()
    };
    let add = |prompt: &[Token], new, tier| Op::Add {
        prompt: prompt.to_vec(),
        new,
        stop: false,
        salt: 0,
        forks: 0,
        priority: 0,
        tier,
        tenant: 0,
        patience: None,
        predicted: None,
        ago: 0,
        resumed: None,
        preparation: None,
        session: None,
    };
    let step = |lag| Op::Step { lag, poison: None, lost: None };
    let mut world = World::new(config, true);
    for op in [
        Op::Open { salt: 1, tenant: 0 },
        add(&[0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0], 9, Tier::Flex),
        step(0),
        add(&[0], 7, Tier::Priority),
        step(0),
        step(0),
        Op::Continue { which: 0, less: 0, more: vec![0, 1, 1, 2, 2], new: 2, stop: true },
        Op::Fork(2),
        step(1),
        step(1),
    ] {
        world.apply(op);
    }
    world.drain();
    world.replay();
}
