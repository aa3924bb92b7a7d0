//! A steady decode step does not allocate in planning, in filling the buffers or in committing, with any feature enabled.

mod step_arrays;

use chairlift_core::{Config, Outputs, POLICIES, Request, Scheduler};
use step_arrays::StepArrays;

const ROWS: u32 = 64;
const WAITING: u32 = 100_000;
const STEPS: u32 = 200;
const TENANTS: u32 = 8;
const FAR: u64 = 1 << 50;

struct World {
    scheduler: Scheduler,
    arrays: StepArrays,
    sampled: Vec<i32>,
    outputs: Outputs,
    now: u64,
}

impl World {
    fn new(config: Config) -> Self {
        Self {
            scheduler: Scheduler::new(config).expect("a sound config"),
            arrays: StepArrays::new(&config),
            sampled: vec![7; config.max_num_batched_tokens as usize],
            outputs: Outputs::default(),
            now: 0,
        }
    }

    fn add(&mut self, tag: u32, new: u32) {
        let request = Request {
            tag: tag.into(),
            // Lengths differ, so that some blocks become full in every step.
            prompt: (0..20 + tag % 16).map(|i| tag.wrapping_mul(0x9E37_79B1).wrapping_add(i) % 50_000).collect(),
            max_new_tokens: new,
            stop: vec![1, 2, 3],
            priority: (tag % 3) as i32,
            tenant: format!("tenant {}", tag % TENANTS).into(),
            weight: 1 + tag % 2,
            deadline: Some(FAR),
            ttft_deadline: Some(FAR),
            predicted_tokens: Some(new),
            ..Request::default()
        };
        self.scheduler.add(request, self.now).expect("there is room for any number");
    }

    /// Runs a step as the engine does. Returns false if there was nothing to run.
    fn step(&mut self) -> bool {
        self.now += 1000;
        let mut late = Vec::new();
        self.scheduler.expire(self.now, &mut late);
        let Some(plan) = self.scheduler.plan(self.now) else { return false };
        assert_eq!(self.arrays.fill(&self.scheduler, &plan).seqs, plan.chunks.len());
        self.scheduler.commit(plan, &self.sampled, self.now + 900, &mut self.outputs);
        true
    }
}

#[test]
fn a_steady_decode_step_does_not_allocate_under_any_policy() {
    // A model with recurrent layers also saves states while answers grow.
    let with_states = [(POLICIES[0], 3 * ROWS)];
    for (policy, state_slots) in POLICIES.map(|policy| (policy, 0)).into_iter().chain(with_states) {
        let name = format!("{} with {state_slots} state slots", policy.name());
        let mut world = World::new(Config {
            num_kv_blocks: ROWS * 64,
            max_num_batched_tokens: 2048,
            max_num_seqs: ROWS,
            max_model_len: 1024,
            watermark: 64,
            scheduling_policy: policy,
            queue_ageing: FAR,
            target_itl: 50_000,
            host_blocks: 256,
            swap_ns_per_block: 1000,
            state_slots,
            ..Config::default()
        });
        (0..ROWS).for_each(|tag| world.add(tag, 900));
        while world.outputs.tokens.len() < ROWS as usize {
            assert!(world.step());
        }
        // No waiting request is urgent or short enough to take a slot.
        (0..WAITING).for_each(|i| world.add(3 * ROWS + i * 3 + 2, 900));
        (0..32).for_each(|_| assert!(world.step()));
        let blocks = world.scheduler.stats().free_blocks;
        let counted = allocation_counter::measure(|| {
            for _ in 0..STEPS {
                assert!(world.step());
                assert_eq!(world.outputs.tokens.len(), ROWS as usize);
            }
        });
        // Reallocations count as allocations.
        assert_eq!(counted.count_total, 0, "under {name}");
        let stats = world.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (ROWS as usize, WAITING as usize));
        assert_eq!(stats.saved_states, 2 * state_slots as usize / 3);
        assert!(blocks - stats.free_blocks >= (ROWS * STEPS / 16 - ROWS) as usize, "blocks were taken on the way");
    }
}
