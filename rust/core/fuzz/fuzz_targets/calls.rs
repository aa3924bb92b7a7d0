//! The same world as the property test's, under calls that bytes stand for.
#![no_main]

use arbitrary::{Result, Unstructured};
use chairlift_core::{Batching, Config, ExpertCount, POLICIES, Preparation, Reservation, SessionTurns, Tier};
use libfuzzer_sys::fuzz_target;
use world::{GROUP, Op, VOCABULARY, World};

#[path = "../../tests/world/mod.rs"]
mod world;

fuzz_target!(|bytes: &[u8]| {
    // Bytes that end in the middle of a call stand for the calls before it.
    let mut bytes = Unstructured::new(bytes);
    let Ok((config, journal)) = config(&mut bytes) else { return };
    let mut world = World::new(config, journal).drafting(config.block_size as usize - 1, 100);
    while !bytes.is_empty() {
        let Ok(op) = op(&mut bytes) else { break };
        world.apply(op);
    }
    world.drain();
    if journal {
        world.replay();
    }
});

fn config(bytes: &mut Unstructured) -> Result<(Config, bool)> {
    let max_tokens = bytes.int_in_range(1..=24)?;
    let max_num_seqs = bytes.int_in_range(1..=max_tokens.min(6))?;
    let config = Config {
        num_kv_blocks: bytes.int_in_range(6..=40)?,
        block_size: bytes.int_in_range(1..=6)?,
        max_num_batched_tokens: max_tokens,
        max_num_seqs,
        max_model_len: 44,
        enable_prefix_caching: bytes.ratio(9, 10)?,
        watermark: bytes.int_in_range(0..=4)?,
        kv_reservation: bytes.choose(&Reservation::NAMES)?.0,
        scheduling_policy: *bytes.choose(&POLICIES)?,
        batching: match bytes.int_in_range(0..=5)? {
            4 => Batching::Static { size: bytes.int_in_range(1..=6)? },
            5 => Batching::Dynamic { size: bytes.int_in_range(1..=6)?, timeout: bytes.int_in_range(0..=30)? },
            _ => Batching::Continuous,
        },
        max_num_queued_reqs: *bytes.choose(&[u32::MAX, u32::MAX, u32::MAX, 5])?,
        max_num_queued_tokens: *bytes.choose(&[u64::MAX, u64::MAX, u64::MAX, 60])?,
        queue_ageing: bytes.int_in_range(0..=60)?,
        background_slowdown: *bytes.choose(&[0, 100, 300])?,
        target_itl: *bytes.choose(&[0, 0, 1, 4])?,
        gather: *bytes.choose(&[0, 0, 20])?,
        session_turns: bytes.choose(&SessionTurns::NAMES)?.0,
        max_session_wait: *bytes.choose(&[0, 30, 1 << 40])?,
        host_blocks: *bytes.choose(&[0, 3, 10, 40])?,
        swap_ns_per_block: *bytes.choose(&[0, 500, 1_000_000])?,
        state_slots: *bytes.choose(&[0, 0, max_num_seqs, max_num_seqs + 4])?,
        state_tokens: *bytes.choose(&[0, 4, 12])?,
        experts: ExpertCount { count: *bytes.choose(&[0, 8])?, used: 2 },
    };
    Ok((config, bytes.arbitrary()?))
}

fn op(bytes: &mut Unstructured) -> Result<Op> {
    Ok(match bytes.int_in_range(0..=29)? {
        0..=3 => Op::Add {
            prompt: prompt(bytes)?,
            new: bytes.int_in_range(1..=12)?,
            stop: bytes.arbitrary()?,
            salt: bytes.int_in_range(0..=GROUP)?,
            forks: *bytes.choose(&[0, 0, 0, 1, 2])?,
            priority: bytes.int_in_range(-1..=1)?,
            tier: *bytes.choose(&[Tier::Priority, Tier::Default, Tier::Default, Tier::Flex])?,
            tenant: bytes.int_in_range(0..=2)?,
            patience: if bytes.ratio(3, 10)? { Some(bytes.int_in_range(0..=60)?) } else { None },
            predicted: if bytes.arbitrary()? { Some(bytes.int_in_range(1..=12)?) } else { None },
            ago: *bytes.choose(&[0, 0, 2, 8])?,
            resumed: if bytes.ratio(1, 5)? { Some(bytes.int_in_range(0..=12)?) } else { None },
            preparation: preparation(bytes)?,
            session: if bytes.arbitrary()? {
                Some((bytes.int_in_range(0..=5)?, *bytes.choose(&[None, None, Some(0), Some(1)])?))
            } else {
                None
            },
        },
        4 => Op::Fork(bytes.int_in_range(0..=30)?),
        5 => Op::Wait(bytes.int_in_range(0..=40)?),
        6 => Op::Abort(bytes.int_in_range(0..=30)?),
        7..=8 => Op::Draft { which: bytes.int_in_range(0..=30)?, right: bytes.int_in_range(0..=3)?, wrong: bytes.int_in_range(0..=2)? },
        9 => Op::Step { lag: bytes.int_in_range(0..=2)?, poison: Some(bytes.int_in_range(0..=30)?), lost: None },
        10 => Op::Step { lag: bytes.int_in_range(0..=2)?, poison: None, lost: Some(bytes.int_in_range(0..=30)?) },
        11 => Op::Open { salt: bytes.int_in_range(0..=GROUP)?, tenant: bytes.int_in_range(0..=2)? },
        12 => Op::ForkHeld(bytes.int_in_range(0..=30)?),
        13 => Op::DropHeld(bytes.int_in_range(0..=30)?),
        14 => Op::Continue {
            which: bytes.int_in_range(0..=30)?,
            less: bytes.int_in_range(0..=2)?,
            more: prompt(bytes)?,
            new: bytes.int_in_range(1..=8)?,
            stop: bytes.arbitrary()?,
        },
        15 => Op::SetPriority(bytes.int_in_range(0..=30)?, bytes.int_in_range(-1..=1)?),
        16 => Op::Restore { grouped: bytes.arbitrary()?, tokens: prompt(bytes)? },
        17 => Op::ShareService { tenant: bytes.int_in_range(0..=3)?, us: *bytes.choose(&[1, 20, 300, u64::MAX])? },
        18 => Op::SetBlockLimit(bytes.int_in_range(0..=40)?),
        22 => Op::CloseQueue(bytes.arbitrary()?),
        23 => Op::EvictCached,
        25 => Op::SetUpstreamTokenTime(bytes.int_in_range(0..=1_000_000_000)?),
        19..=20 => Op::Prepare { which: bytes.int_in_range(0..=30)?, next: preparation(bytes)? },
        21 => Op::NoteSession {
            tenant: bytes.int_in_range(0..=3)?,
            session: (bytes.int_in_range(0..=5)?, *bytes.choose(&[None, None, Some(0), Some(1)])?),
            ended: bytes.arbitrary()?,
        },
        24 => Op::Stop(bytes.int_in_range(0..=30)?),
        _ => Op::Step { lag: *bytes.choose(&[0, 0, 1, 2])?, poison: None, lost: None },
    })
}

fn preparation(bytes: &mut Unstructured) -> Result<Option<Preparation>> {
    Ok(if bytes.ratio(1, 5)? { Some(bytes.choose(&Preparation::NAMES)?.0) } else { None })
}

/// Tokens that begin as many others do, and end as they like.
fn prompt(bytes: &mut Unstructured) -> Result<Vec<u32>> {
    let (stem, len): (u32, u32) = (bytes.int_in_range(0..=1)?, bytes.int_in_range(1..=30)?);
    let mut prompt: Vec<u32> = (0..len).map(|i| (i * i + stem * (i / 5)) % VOCABULARY).collect();
    for _ in 0..bytes.int_in_range(0..=7)? {
        prompt.push(bytes.int_in_range(0..=VOCABULARY - 1)?);
    }
    Ok(prompt)
}
