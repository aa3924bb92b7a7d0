use super::*;
use crate::journal::format::Writer;
use crate::request::Preparation;
use crate::step::DraftSource;

/// Pseudorandom numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Writes a random record whose numbers may be invalid.
fn put_record(journal: &mut Writer, now: Time, dice: &mut Dice, known: &mut u64, held: &mut u64) {
    let names = |dice: &mut Dice, count| (0..count).map(|_| dice.roll(3)).collect();
    let call = match dice.roll(16) {
        0..3 => {
            let (prompt, max_new_tokens) = (1 + dice.roll(30), 1 + dice.roll(12));
            *known += 1;
            let preparation = [None, None, Some(Preparation::ReadCache)][dice.roll(3) as usize];
            let deadline = [None, Some(now + dice.roll(90))][dice.roll(2) as usize];
            let fields = Request { tag: dice.roll(30), max_new_tokens: max_new_tokens as u32, preparation, deadline, ..Request::default() };
            let wrong = u64::from(dice.roll(200) == 0);
            let added = Added {
                prompt_tokens: prompt as u32,
                answered: None,
                continues: (*held > 0 && dice.roll(4) == 0).then(|| (dice.roll(*held), dice.roll(30) as u32)),
                request: fields.to_bytes(),
                names: names(dice, prompt / 4 + wrong),
            };
            return journal.record(now, &Record::Add(added));
        }
        3 if *known > 0 => {
            let parent = dice.roll(*known);
            *known += 1;
            Call::Fork { parent, tag: dice.roll(30) }
        }
        4 if *known > 0 => {
            let arrival_number = dice.roll(*known);
            match dice.roll(6) {
                0..3 => Call::End {
                    arrival_number,
                    reason: [FinishReason::Abort, FinishReason::Stop, FinishReason::Error][dice.roll(3) as usize],
                },
                _ => Call::Prepare { arrival_number, next: [None, Some(Preparation::Grammar)][dice.roll(2) as usize] },
            }
        }
        3..6 => Call::Expire,
        6..9 => return journal.plan(now, None),
        9 | 10 => Call::Commit(Sampled {
            ended: (0..dice.roll(3)).map(|_| (dice.roll(30), dice.roll(2) == 1)).collect(),
            drafted: (0..dice.roll(3)).map(|_| (dice.roll(9), dice.roll(5) as u32)).collect(),
        }),
        11 => {
            *held += 1;
            if dice.roll(3) == 0 { Call::ForkHeld(0) } else { Call::Open("".into()) }
        }
        12 if *held > 0 => match dice.roll(2) {
            0 => Call::DropHeld(dice.roll(*held)),
            _ if *known > 0 => Call::SetPriority { arrival_number: dice.roll(*known), priority: dice.roll(5) as i32 - 2 },
            _ => Call::Expire,
        },
        13 => {
            let count = dice.roll(9);
            Call::Restore(names(dice, count))
        }
        14 => {
            let most = 1 << dice.roll(63);
            Call::ChargeExternal { tenant: ["", "a", "b"][dice.roll(3) as usize].into(), us: dice.roll(most) }
        }
        15 if dice.roll(2) == 0 => Call::SetBlockLimit(dice.roll(30) as u32),
        15 if dice.roll(2) == 0 => Call::CloseQueue(dice.roll(2) == 1),
        15 if dice.roll(2) == 0 => Call::EvictCached,
        15 if dice.roll(2) == 0 => Call::SetUpstreamTokenTime(dice.roll(1 << 40)),
        _ if *known > 0 => {
            let source = DraftSource::of(dice.roll(9) as u32);
            Call::Draft { arrival_number: dice.roll(*known), tokens: dice.roll(6) as u32, accepted: 0, source }
        }
        _ => return,
    };
    // Sometimes no valid record.
    let call = if dice.roll(400) == 0 { Call::End { arrival_number: dice.roll(1 << 30), reason: FinishReason::Length } } else { call };
    journal.record(now, &Record::Call(call));
}

#[test]
fn calls_that_make_no_sense_are_refused_or_replayed_and_never_a_panic() {
    let (mut refused, mut steps) = (0, 0);
    for seed in 0..2000 {
        let mut dice = Dice(seed);
        let config = Config {
            num_kv_blocks: 20,
            block_size: 4,
            max_num_batched_tokens: 16,
            max_num_seqs: 3,
            max_model_len: 44,
            ..Config::default()
        };
        let (mut journal, mut bytes, mut now, mut known, mut held) = (Writer::new(&config), Vec::new(), 50, 0, 0);
        for _ in 0..dice.roll(100) {
            now += dice.roll(40);
            put_record(&mut journal, now - dice.roll(10), &mut dice, &mut known, &mut held);
        }
        journal.take(&mut bytes);
        match ParsedJournal::read(&bytes) {
            Ok(journal) => steps += journal.replay().expect("a sound config").steps,
            Err(error) => {
                assert!(matches!(error, JournalError::Damaged(_)), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 100 && steps > 1000, "{refused} refused, {steps} steps");
}
