use super::*;
use crate::journal::format::Writer;
use crate::{BlockHasher, CacheScope};

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
    match dice.roll(16) {
        0..3 => {
            let (prompt, max_new_tokens) = (1 + dice.roll(30), 1 + dice.roll(12));
            *known += 1;
            if dice.roll(2) == 0 {
                let preparation = [None, None, Some(Preparation::ReadCache)][dice.roll(3) as usize];
                let fields = Request { tag: dice.roll(30), max_new_tokens: max_new_tokens as u32, preparation, ..Request::default() };
                journal.call(Kind::Request, now).number(prompt).bytes(&fields.to_bytes());
            } else {
                journal.call(Kind::Add, now).number(dice.roll(30)).number(prompt).number(max_new_tokens);
                journal.number(dice.roll(5)).number(dice.roll(3)).number(dice.roll(90)).number(dice.roll(90)).number(dice.roll(9));
                journal.text(["", "a"][dice.roll(2) as usize]);
            }
            for _ in 0..prompt / 4 {
                journal.name(BlockHasher::new(0).root(&CacheScope::salted(&[dice.roll(3) as u8])));
            }
        }
        3 if *known > 0 => {
            journal.call(Kind::Fork, now).number(dice.roll(*known)).number(dice.roll(30));
            *known += 1;
        }
        4 if *known > 0 => {
            let kind = [Kind::End, Kind::Prepare][dice.roll(2) as usize];
            journal.call(kind, now).number(dice.roll(*known)).number(dice.roll(3));
        }
        3..6 => {
            journal.call(Kind::Expire, now);
        }
        6..9 => journal.plan(now, None),
        9 | 10 => {
            let (ended, drafted) = (dice.roll(3), dice.roll(3));
            journal.call(Kind::Commit, now).number(ended);
            for _ in 0..ended {
                journal.number(dice.roll(30)).number(dice.roll(2));
            }
            journal.number(drafted);
            for _ in 0..drafted {
                journal.number(dice.roll(9)).number(dice.roll(5));
            }
        }
        11 => {
            journal.call([Kind::Open, Kind::Open, Kind::ForkAt][dice.roll(3) as usize], now).number(0);
            *held += 1;
        }
        12 if *held > 0 => match dice.roll(4) {
            0 => {
                journal.call(Kind::Drop, now).number(dice.roll(*held));
            }
            1 if *known > 0 => {
                journal.call(Kind::SetPriority, now).number(dice.roll(*known)).number(dice.roll(5));
            }
            _ => {
                journal.note(Kind::Append).number(dice.roll(*held)).number(dice.roll(30));
            }
        },
        13 => {
            let count = dice.roll(9);
            journal.call(Kind::Restore, now).number(count);
            for _ in 0..count {
                journal.name(BlockHasher::new(0).root(&CacheScope::salted(&[dice.roll(3) as u8])));
            }
        }
        14 => {
            let most = 1 << dice.roll(63);
            journal.note(Kind::ExternalService).text(["", "a", "b"][dice.roll(3) as usize]).number(dice.roll(most));
        }
        15 if dice.roll(2) == 0 => {
            journal.call(Kind::BlockLimit, now).number(dice.roll(30));
        }
        15 if dice.roll(2) == 0 => {
            journal.call(Kind::CloseQueue, now).number(dice.roll(2));
        }
        _ if *known > 0 => {
            journal.note(Kind::Draft).number(dice.roll(*known)).number(dice.roll(6)).number(dice.roll(9));
        }
        _ => {}
    }
    if dice.roll(400) == 0 {
        journal.number(dice.roll(1 << 30)); // sometimes no valid record
    }
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
