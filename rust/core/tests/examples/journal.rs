//! A journal replays bit for bit, and reading an invalid journal names the error.

use chairlift_core::{
    Batching, Call, Config, Continues, DraftSource, ExpertCount, FinishReason, HeldId, JournalError, Outputs, POLICIES, ParsedJournal,
    Prefix, Recorder, Rejected, Request, Scheduler, SeqId, Tier, Token, VerifiedDraft,
};
use std::sync::Arc;

fn config() -> Config {
    Config {
        num_kv_blocks: 65,
        block_size: 4,
        max_num_batched_tokens: 32,
        max_num_seqs: 4,
        max_model_len: 128,
        watermark: 2,
        ..Config::default()
    }
}

fn request(tag: u64, prompt: u32, new: u32) -> Request {
    let prompt = (0..prompt).map(|at| if at < 8 { at } else { tag as Token * 100 + at }).collect();
    Request { tag, prompt, max_new_tokens: new, stop: vec![0], ..Request::default() }
}

/// A recorded scheduler whose journal is taken after each step, and the tokens it sampled last.
struct Day {
    core: Recorder,
    outputs: Outputs,
    now: u64,
    bytes: Vec<u8>,
    /// Byte offsets at which the journal may end.
    ends: Vec<usize>,
}

impl Day {
    fn new(config: Config) -> Self {
        let core = Recorder::on(Scheduler::new(config).unwrap());
        Self { core, outputs: Outputs::default(), now: 100, bytes: Vec::new(), ends: Vec::new() }
    }

    fn add(&mut self, request: Request) -> SeqId {
        self.core.add(request, self.now).expect("it fits")
    }

    /// Plans a step and commits these tokens for it.
    fn step(&mut self, sampled: &[i32]) -> bool {
        self.core.expire(self.now, &mut Vec::new());
        let plan = self.core.plan(self.now);
        self.now += 1000;
        let planned = plan.is_some();
        if let Some(plan) = plan {
            self.core.commit(plan, sampled, self.now, &mut self.outputs);
        }
        self.core.take_journal(&mut self.bytes);
        self.ends.push(self.bytes.len());
        planned
    }

    fn finish(&mut self) {
        while !self.core.is_idle() {
            self.step(&[7; 64]);
        }
    }
}

/// A recording that covers every kind of call.
fn day(config: Config) -> Day {
    let mut day = Day::new(config);
    let first = day.add(Request {
        tenant: "alice".into(),
        weight: 3,
        priority: -2,
        predicted_tokens: Some(9),
        session: Some("s".into()),
        ..request(1, 21, 30)
    });
    day.core.fork(first, 2, day.now).unwrap();
    day.add(Request { deadline: Some(20_000), tenant: "bob".into(), ..request(3, 40, 60) });
    let aborted = day.add(request(4, 9, 20));
    for _ in 0..5 {
        day.step(&[5; 64]);
    }
    assert!(day.core.end(aborted, FinishReason::Abort, day.now));
    day.step(&[0; 64]);
    let failed = day.add(request(5, 33, 9));
    day.step(&[7; 64]);
    assert!(day.core.end(failed, FinishReason::Error, day.now));
    day.add(request(6, 12, 5));
    day.step(&[-1; 64]);
    day.add(request(7, 12, 5));
    day.finish();
    day
}

#[test]
fn it_replays_under_every_policy_with_priorities_and_tenants() {
    for policy in POLICIES {
        let config = Config { scheduling_policy: policy, host_blocks: 8, swap_ns_per_block: 100, ..config() };
        let day = day(config);
        let journal = ParsedJournal::read(&day.bytes).unwrap();
        assert_eq!((journal.config, journal.truncated), (config, false));
        let Some((_, Call::Add(arrival))) = journal.calls.first() else { panic!("{:?}", journal.calls.first()) };
        let Request { tenant, weight, priority, predicted_tokens, session, .. } = &arrival.request;
        assert_eq!((&**tenant, *weight, *priority, *predicted_tokens, session.as_deref()), ("alice", 3, -2, Some(9), Some("s")));
        let replayed = journal.replay().unwrap();
        assert_eq!((replayed.differs_at, replayed.steps), (None, day.core.stats().counters.steps));
        assert_eq!(replayed.scheduler.stats().counters, day.core.stats().counters);
    }
}

#[test]
fn the_scheduler_does_the_same_work_with_a_journal_as_without() {
    let core = || Scheduler::new(Config { scheduling_policy: &Prefix, ..config() }).unwrap();
    let mut recorders = [Recorder::on(core()), Recorder::off(core())];
    for now in 0..20 {
        let lookups = recorders.each_mut().map(|recorder| {
            if now == 0 {
                recorder.add(request(1, 10, 20), now).unwrap();
            }
            let plan = recorder.plan(now).unwrap();
            recorder.commit(plan, &[50], now, &mut Outputs::default());
            recorder.block_lookups()
        });
        // The journal needs the names of blocks before the scheduler does.
        assert_eq!(lookups[0], lookups[1], "after step {now}");
    }
}

/// A call that is refused is not recorded, so it must not advance the clocks: a request may come later that arrived before it.
#[test]
fn refused_calls_change_nothing_that_a_replay_has() {
    let refused: [fn(&mut Recorder, HeldId, HeldId, u64); 5] = [
        |core, _, _, now| assert!(matches!(core.add(request(2, 9, 500), now), Err(Rejected::TooLong { .. }))),
        |core, _, _, now| assert!(matches!(core.add(request(2, 90, 9), now), Err(Rejected::QueueFull { .. }))),
        |core, busy, _, now| {
            let continues = Some(Continues { held: busy, tokens: 0 });
            assert_eq!(core.add(Request { continues, ..request(2, 9, 9) }, now), Err(Rejected::HeldBusy));
        },
        |core, _, dropped, now| assert_eq!(core.fork_held(dropped, now), None),
        |core, _, dropped, now| assert!(!core.drop_held(dropped, now)),
    ];
    for (at, refuse) in refused.into_iter().enumerate() {
        let mut day = Day::new(Config { max_num_queued_tokens: 50, ..config() });
        let [busy, dropped] = [(); 2].map(|()| day.core.open(&"".into(), &Arc::default(), day.now));
        assert!(day.core.drop_held(dropped, day.now));
        day.add(Request { continues: Some(Continues { held: busy, tokens: 0 }), ..request(1, 9, 4) });
        refuse(&mut day.core, busy, dropped, day.now + 500);
        day.add(request(3, 9, 4));
        day.finish();
        let replayed = ParsedJournal::read(&day.bytes).unwrap().replay().unwrap();
        let recorded: Vec<_> = replayed.ended.iter().map(|timeline| day.core.explain(timeline.tag).unwrap()).collect();
        assert_eq!((replayed.differs_at, replayed.ended.len()), (None, 2));
        assert_eq!(replayed.ended, recorded, "refused call {at}");
    }
}

#[test]
fn it_has_every_setting() {
    let batching = Batching::Dynamic { size: 3, timeout: 77 };
    let config = Config {
        batching,
        max_num_queued_reqs: 9,
        max_num_queued_tokens: 900,
        queue_ageing: 5,
        target_itl: 6,
        gather: 8,
        enable_prefix_caching: false,
        ..config()
    };
    let mut bytes = Vec::new();
    Recorder::on(Scheduler::new(config).unwrap()).take_journal(&mut bytes);
    assert_eq!(ParsedJournal::read(&bytes).unwrap().config, config);
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.starts_with("chairlift-journal-4\n") && text.contains("max_model_len") && text.contains("dynamic"), "{text}");
}

#[test]
fn drafts_are_replayed_by_how_many_were_accepted() {
    let mut day = Day::new(config());
    let id = day.add(request(1, 10, 40));
    day.step(&[50]);
    // Of three drafted tokens two are accepted, then none, then all. The last accepted one is a stop token.
    assert!(day.core.draft(id, &[51, 52, 99], DraftSource::Text(7)));
    day.step(&[51, 52, 53, 54]);
    assert_eq!(day.core.tokens(id).unwrap().0[10..], [50, 51, 52, 53]);
    assert!(day.core.draft(id, &[98], DraftSource::Corpus(3)));
    day.step(&[54, 55]);
    // A request that finds the same blocks, filled by accepted tokens.
    let tokens = day.core.tokens(id).unwrap().0.to_vec();
    day.add(Request { prompt: tokens.clone(), ..request(2, 1, 1) });
    assert!(day.core.draft(id, &[60, 0, 61], DraftSource::Grammar));
    day.step(&[60, 0, 61, 62, 7]);
    day.finish();
    let timeline = day.core.explain(1).unwrap();
    assert_eq!((timeline.finish, timeline.output_tokens), (Some(FinishReason::Stop), 7));
    assert_eq!((timeline.draft_tokens, timeline.accepted_draft_tokens), (7, 3));
    assert_eq!(day.core.explain(2).unwrap().cached_tokens, 12);
    let journal = ParsedJournal::read(&day.bytes).unwrap();
    let drafts = journal.calls.iter().filter_map(|(_, call)| match call {
        &Call::Draft { tokens, accepted, .. } => Some((tokens, accepted)),
        _ => None,
    });
    assert_eq!(drafts.collect::<Vec<_>>(), [(3, 2), (1, 0), (3, 1)]);
    let replayed = journal.replay().unwrap();
    assert_eq!(replayed.differs_at, None);
    let verified = |source, position, tokens, accepted| (0, VerifiedDraft { source, position, tokens, accepted });
    let expected =
        [verified(DraftSource::Text(7), 11, 3, 2), verified(DraftSource::Corpus(3), 14, 1, 0), verified(DraftSource::Grammar, 15, 3, 1)];
    assert_eq!(replayed.drafts, expected);
    let ended: Vec<_> =
        replayed.ended.iter().map(|timeline| (timeline.tag, timeline.finish, timeline.output_tokens, timeline.cached_tokens)).collect();
    assert!(ended.contains(&(1, Some(FinishReason::Stop), 7, 0)) && ended.contains(&(2, Some(FinishReason::Length), 1, 12)), "{ended:?}");
}

#[test]
fn what_is_cut_off_replays_up_to_there() {
    let day = day(config());
    for len in 0..day.bytes.len() {
        match ParsedJournal::read(&day.bytes[..len]) {
            Ok(journal) => {
                let whole = day.ends.contains(&len) || journal.calls.is_empty() && !journal.truncated;
                assert_eq!(journal.truncated, !whole, "{len}");
                assert_eq!(journal.replay().unwrap().differs_at, None);
            }
            Err(error) => {
                assert!(matches!(error, JournalError::NotAJournal | JournalError::NoSettings | JournalError::Version { .. }), "{error}");
            }
        }
    }
}

#[test]
fn any_byte_that_was_changed_is_found() {
    let day = day(config());
    for at in 0..day.bytes.len() {
        for bit in 0..8 {
            let mut bytes = day.bytes.clone();
            bytes[at] ^= 1 << bit;
            let read = ParsedJournal::read(&bytes);
            assert!(read.as_ref().is_err() || read.as_ref().is_ok_and(|journal| journal.truncated), "byte {at} bit {bit}");
        }
    }
}

#[test]
fn other_versions_and_other_files_are_refused_in_words() {
    let error = |bytes: &[u8]| ParsedJournal::read(bytes).unwrap_err().to_string();
    assert_eq!(error(b"something else"), "this is no journal");
    assert_eq!(error(b""), "this is no journal");
    let old = "this is a journal of version 1, and only version 4 can be read here: replay it with the chairlift that recorded it";
    assert_eq!(error(b"chairlift-journal-1\n\x65\x10\x80\x02"), old);
    assert_eq!(error(b"chairlift-journal-4\n\x65"), "the journal is cut off within its settings: nothing can be replayed");
}

#[test]
fn the_first_decision_that_differs_is_named() {
    let day = day(config());
    let mut journal = ParsedJournal::read(&day.bytes).unwrap();
    let plans: Vec<usize> = (0..journal.calls.len()).filter(|&at| matches!(journal.calls[at].1, Call::Plan(_))).collect();
    journal.calls[plans[7]].1 = Call::Plan(1);
    assert_eq!(journal.replay().unwrap().differs_at, Some(7));
}

/// An earlier scheduler made its decisions, with tiers, deadlines, forks, drafts, resumed and held requests.
#[test]
fn a_recorded_journal_replays() {
    let journal = ParsedJournal::read(include_bytes!("../data/recorded.journal")).expect("a sound journal");
    let replayed = journal.replay().expect("a sound config");
    assert_eq!((replayed.differs_at, replayed.steps), (None, 132));
    let requests =
        || journal.calls.iter().filter_map(|(_, call)| if let Call::Add(arrival) = call { Some(&arrival.request) } else { None });
    assert!(requests().any(|request| request.tier == Tier::Flex));
    assert!(requests().any(|request| request.deadline.is_some() && request.predicted_tokens.is_some()));
    assert!(requests().any(|request| request.resumed.is_some_and(|resumed| resumed.answered > 0)));
}

#[test]
fn the_step_time_model_is_read_as_it_was_recorded() {
    let mut day = Day::new(Config { experts: ExpertCount { count: 8, used: 2 }, ..config() });
    day.add(request(1, 9, 40));
    for _ in 0..8 {
        assert!(day.step(&[7]));
    }
    let parsed = ParsedJournal::read(&day.bytes).unwrap();
    let (found, expected) = (parsed.step_model.expect("eight steps are recorded"), day.core.model());
    assert!(expected.expert_time(1) > 0.0, "steps of one token touch experts");
    assert_eq!((found.coefficients(), found.expert_time(3)), (expected.coefficients(), expected.expert_time(3)));
}
