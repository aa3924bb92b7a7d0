"""`chairlift replay`: on journals that the real scheduler wrote, in made-up time."""

import argparse
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from journals import BLOCKS, PROMPT_TOKEN, ROWS, watched

from chairlift import _core
from chairlift.cli import main, replay_settings
from chairlift.errors import InvalidSetting
from chairlift.sim.calibrate import from_journal


def record(**settings) -> bytes:
    """The journal of such a day."""
    return watched(**settings).journal


@pytest.fixture(scope="module")
def journal() -> bytes:
    return record()


@pytest.fixture
def file(journal, tmp_path):
    path = tmp_path / "day.journal"
    path.write_bytes(journal)
    return path


@pytest.fixture
def replay(capsys):
    """Runs the command; gives its status, output and complaint."""

    def run(path, *arguments):
        status = main.main(["replay", str(path), *arguments])
        return (status, *capsys.readouterr())

    return run


def rows(output: str) -> dict[str, list[str]]:
    """The table's cells by label; a label of a percentile alone belongs to the one above."""
    found, over = {}, ""
    for line in output.splitlines():
        label, *cells = re.split(r"  +", line.strip())
        if line.startswith("  ") and label != "recorded":
            label = f"{over}, {label}"
        else:
            over = label.split(",")[0]
        found[label] = cells
    return found


def test_a_journal_proves_itself(replay, file):
    status, output, complaint = replay(file)
    assert (status, complaint) == (0, "")
    first, second, *_ = output.splitlines()
    steps = int(rows(output)["steps"][0])
    assert re.fullmatch(rf"{file}: 24 requests, {steps} steps in 0\.\d+ s", first)
    assert re.fullmatch(r"Every decision is the same: hash [0-9a-f]{16}\.", second)
    table = rows(output)
    ended = [int(table[name][0]) for name in ("finished", "missed their deadline")]
    assert sum(ended) == 24
    assert ended[1] > 0
    assert "refused" not in table, "the journal does not tell"
    assert table["TTFT, p99"][0].endswith("ms")
    assert table["prefix cache hit rate"][0].endswith("%")
    assert "failed" not in table
    assert all(len(cells) == 1 for label, cells in table.items() if label in ("requests", "steps", "output tokens a second"))


def test_the_recorded_figures_are_what_the_one_that_recorded_saw_to_the_digit(replay, tmp_path):
    seen, path = watched(), tmp_path / "seen.journal"
    path.write_bytes(seen.journal)
    [recorded] = json.loads(replay(path, "--json")[1])["runs"]

    def percentile(values, percent):
        return sorted(values)[-(-len(values) * percent // 100) - 1] / 1e6

    done = [timeline for timeline in seen.timelines if timeline["finish"] in ("stop", "length")]
    first = [timeline["first_token"] - timeline["arrived"] for timeline in seen.timelines if timeline["first_token"] is not None]
    whole = [timeline["ended"] - timeline["arrived"] for timeline in done]
    gaps = [after - before for times in seen.tokens.values() for before, after in pairwise(times)]
    busy, cache = sum(took for took, _, _ in seen.steps), BLOCKS - 1
    figures = recorded["figures"]
    for percent in (50, 90, 99):
        assert figures[f"ttft_p{percent}_s"] == percentile(first, percent)
        assert figures[f"end_to_end_p{percent}_s"] == percentile(whole, percent)
        assert figures[f"itl_p{percent}_s"] == pytest.approx(percentile(gaps, percent), rel=0.004)
    assert (figures["finished"], figures["missed_deadline"], figures["steps"]) == (len(done), 24 - len(done), len(seen.steps))
    assert figures["batch_mean"] == sum(took * batch for took, batch, _ in seen.steps) / busy
    assert figures["kv_used_mean"] == sum(took * blocks for took, _, blocks in seen.steps) / (busy * cache)
    assert figures["batch_max"] == max(batch for _, batch, _ in seen.steps) == ROWS
    assert figures["kv_used_max"] == max(blocks for _, _, blocks in seen.steps) / cache
    assert figures["tokens_per_s"] == sum(map(len, seen.tokens.values())) / figures["span_s"]
    assert recorded["timeline"]["time"][0] == 0


def test_a_journal_has_no_tokens(journal):
    assert PROMPT_TOKEN.to_bytes(3, "little") not in journal


def test_a_change_stands_beside_the_simulation_without_it(replay, file):
    status, output, _ = replay(file, "--set", "max_num_seqs=2", "--policy", "fair")
    assert status == 0
    assert "Changed: max_num_seqs 4 → 2; scheduling_policy fcfs → fair\n" in output
    table = rows(output)
    assert table["recorded"] == ["as recorded", "changed", "change"]
    assert table["requests"] == ["24", "24", "24", "="]
    slower = table["queue time, p99"]
    assert len(slower) == 4
    assert slower[3].startswith("+")
    assert "'recorded' is the recorded run" in " ".join(output.split())
    assert "Compare changed runs with 'as recorded'. Requests come at their recorded times" in " ".join(output.split())


def test_several_values_are_several_runs(replay, file):
    status, output, _ = replay(file, "--set", "max-num-seqs=1, 2,4", "--set", "watermark=0.1")
    assert status == 0
    assert rows(output)["recorded"] == ["as recorded", *(x for n in (1, 2, 4) for x in (f"max_num_seqs={n}", "change"))]
    _, output, _ = replay(file, "--set", "max_num_seqs=2", "--json")
    *_, as_recorded, changed = (run["figures"] for run in json.loads(output)["runs"])
    assert (as_recorded["batch_max"], changed["batch_max"]) == (4, 2)
    assert as_recorded["batch_mean"] > changed["batch_mean"] > 1
    assert as_recorded["tokens_per_s"] > changed["tokens_per_s"]
    _, output, _ = replay(file, "--set", "target_itl_ms=1000000,1000001", "--json")
    assert [run["name"] for run in json.loads(output)["runs"]][2:] == ["target_itl_ms=1000000", "target_itl_ms=1000001"]
    _, output, _ = replay(file, "--policy", "fair,shortest", "--set", "max_num_seqs=1,2", "--json")
    assert [run["name"] for run in json.loads(output)["runs"]][2:] == [
        "max_num_seqs=1, scheduling_policy=fair",
        "max_num_seqs=1, scheduling_policy=shortest",
        "max_num_seqs=2, scheduling_policy=fair",
        "max_num_seqs=2, scheduling_policy=shortest",
    ]


def test_json_has_all_numbers(replay, file):
    status, output, _ = replay(file, "--set", "num_kv_blocks=60", "--json")
    document = json.loads(output)
    assert status == 0
    assert (document["same"], document["differs_at"], document["truncated"]) == (True, None, False)
    assert document["file"] == str(file)
    assert len(document["step_model_us"]) == 5
    recorded, as_recorded, changed = document["runs"]
    assert [recorded["figures"]["refused"], as_recorded["figures"]["refused"]] == [None, 0]
    assert recorded["config"] == as_recorded["config"] == changed["config"] | {"num_kv_blocks": BLOCKS, "watermark": 2}
    assert (changed["config"]["num_kv_blocks"], changed["config"]["watermark"]) == (60, 2)
    for run in document["runs"]:
        figures = run["figures"]
        assert figures["steps"] == run["stats"]["steps"]
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p90_s"] <= figures["ttft_p99_s"] <= figures["end_to_end_p99_s"] < 10
        assert 0 < figures["time_per_output_token_p50_s"] < figures["end_to_end_p50_s"]
        assert figures["queue_p99_s"] <= figures["ttft_p99_s"]
        assert sum(run["states_mean_s"].values()) > 0
    # The machine that was recorded is as simple as the model that is fitted to it.
    assert as_recorded["figures"]["end_to_end_p50_s"] == pytest.approx(recorded["figures"]["end_to_end_p50_s"], rel=0.1)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("max_num_seqs=2", "max_num_seqs", 2),
        ("max-num-batched-tokens=64", "max_num_batched_tokens", 64),
        ("max_model_len=0.125k", "max_model_len", 128),
        ("num-kv-blocks=1K", "num_kv_blocks", 1024),
        ("enable_prefix_caching=off", "enable_prefix_caching", False),
        ("watermark=0.5", "watermark", 20),
        ("kv_reservation=max-tokens", "kv_reservation", "max-tokens"),
        ("scheduling_policy=deadline", "scheduling_policy", "deadline"),
        ("batching=static", "batching", "static"),
        ("max_num_queued_reqs=2", "max_num_queued_reqs", 2),
        ("max_num_queued_tokens=100", "max_num_queued_tokens", 100),
        ("queue_ageing_ms=1.5", "queue_ageing", 1500),
        ("target_itl_ms=20", "target_itl", 20_000),
        ("gather_ms=auto", "gather", 10_000_000_000_000),
        ("session_turns=all", "session_turns", "all"),
        ("max_session_wait_ms=2.5", "max_session_wait", 2500),
        ("target_itl_ms=none", "target_itl", None),
        ("background_slowdown=1.25", "background_slowdown", 125),
        ("host_blocks=8", "host_blocks", 8),
        ("swap_ns_per_block=500", "swap_ns_per_block", 500),
        ("state_slots=500", "state_slots", 500),
        ("state_tokens=500", "state_tokens", 500),
        ("experts=8", "experts", 8),
        ("experts_used=2", "experts_used", 2),
    ],
)
def test_every_setting_reaches_the_scheduler_in_its_units(replay, file, setting, name, value):
    status, output, _ = replay(file, "--set", setting, "--json")
    *_, as_recorded, changed = json.loads(output)["runs"]
    assert status == 0
    assert changed["config"][name] == value
    # Nothing else changed, but for what follows from it.
    follows = {"watermark", "static_batch_size"} if name in ("num_kv_blocks", "batching") else set()
    assert {key for key in changed["config"] if changed["config"][key] != as_recorded["config"][key]} <= {name} | follows


def test_no_name_is_left_out_above():
    tried = {re.split("=", mark)[0].replace("-", "_") for mark, *_ in _settings()}
    assert tried | {"static_batch_size", "batch_timeout_ms"} == set(replay_settings.NAMES)


def test_a_setting_may_be_none_where_the_core_allows_it():
    table = {setting["name"]: setting for setting in _core.settings()}
    for text, name, _ in [*_settings(), ("static_batch_size=2", "static_batch_size", 2)]:
        flag = re.split("=", text)[0].replace("-", "_")
        if table[name].get("optional"):
            assert replay_settings.parse(f"{flag}=none") == (flag, [None])
        else:
            with pytest.raises(argparse.ArgumentTypeError):
                replay_settings.parse(f"{flag}=none")


def _settings():
    [mark] = test_every_setting_reaches_the_scheduler_in_its_units.pytestmark
    return mark.args[1]


def test_sizes_of_batches_follow_what_they_follow_by_default(replay, tmp_path):
    path = tmp_path / "batches.journal"
    path.write_bytes(record(batching="dynamic", batch_timeout=3001))

    def config(*arguments):
        status, output, _ = replay(path, *arguments, "--json")
        assert status == 0
        return {key: json.loads(output)["runs"][-1]["config"][key] for key in ("batching", "static_batch_size", "batch_timeout")}

    assert config() == {"batching": "dynamic", "static_batch_size": 4, "batch_timeout": 3001}
    assert config("--set", "max_num_seqs=2") == {"batching": "dynamic", "static_batch_size": 2, "batch_timeout": 3001}
    assert config("--set", "static_batch_size=3", "--set", "batch_timeout_ms=5")["static_batch_size"] == 3
    assert config("--set", "batch_timeout_ms=none")["batch_timeout"] == 0
    assert config("--set", "batching=static") == {"batching": "static", "static_batch_size": 4, "batch_timeout": 0}
    assert config("--set", "batching=continuous") == {"batching": "continuous", "static_batch_size": None, "batch_timeout": 0}


def test_a_setting_taken_as_it_was_changes_nothing(replay, tmp_path):
    path = tmp_path / "some.journal"
    path.write_bytes(record(watermark=3, max_num_queued_reqs=9, queue_ageing=12_345, target_itl=6_001, scheduling_policy="shortest"))
    _, output, _ = replay(path, "--set", "max_num_seqs=4", "--json")
    *_, as_recorded, changed = json.loads(output)["runs"]
    assert as_recorded["figures"]["refused"] == 0  # those were not recorded
    del as_recorded["name"], changed["name"]
    assert changed == as_recorded


def test_refusals_of_a_shorter_queue_are_counted(replay, file):
    _, output, _ = replay(file, "--set", "max_num_queued_reqs=1")
    recorded, as_recorded, changed, _ = rows(output)["refused"]
    assert (recorded, as_recorded) == ("-", "0")
    assert int(changed) > 0
    assert rows(output)["requests"][2] == "24"


def test_copies_that_cost_nothing_are_pointed_out(replay, file):
    def pointed_out(*arguments):
        return "Swapping is simulated at no cost" in " ".join(replay(file, *arguments)[1].split())

    assert pointed_out("--set", "host_blocks=8")
    assert not pointed_out("--set", "host_blocks=8", "--set", "swap_ns_per_block=9")
    assert not pointed_out()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "max_num_seqs"], "expected NAME=VALUE, like max_num_seqs=64, got 'max_num_seqs'"),
        (["--set", "speed=2"], "'speed' cannot be changed in a replay; expected one of max_num_seqs, max_num_batched_tokens, "),
        (["--set", "block_size=32"], "'block_size' cannot be changed in a replay"),
        (["--set", "max_num_seqs=many"], "max_num_seqs: not a size: 'many'"),
        (["--set", "max_num_seqs=none"], "max_num_seqs: not a size: 'none'"),
        (["--set", "watermark=x"], "watermark: expected a number, got 'x'"),
        (["--set", "enable_prefix_caching=maybe"], "enable_prefix_caching: expected true or false"),
        (["--set", "host_blocks=-1"], "host_blocks: must be at least 0, got -1"),
        (
            ["--policy", "lottery"],
            "scheduling_policy: expected one of fcfs, priority, fair, deadline, shortest, prefix, vtc, got 'lottery'",
        ),
        ([], "required: FILE"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, says, capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["replay", *(["file"] if arguments else []), *arguments])
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["max_num_seqs=64"], "--max-num-batched-tokens (32) must be at least --max-num-seqs (64)"),
        (["watermark=1"], "--watermark must be at least 0 and below 1"),
        (["static_batch_size=2"], "--static-batch-size needs --batching static or --batching dynamic"),
        (["max_num_seqs=0"], "--max-num-seqs must be at least 1"),
        (["num_kv_blocks=1"], "num_kv_blocks must be a whole number from 2 to 4294967295, got 1"),
        (["num_kv_blocks=1T"], "num_kv_blocks must be a whole number from 2 to 4294967295, got 1099511627776"),
        (["max_num_seqs=2,64"], "--max-num-batched-tokens (32) must be at least --max-num-seqs (64)"),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_status_2(replay, file, settings, says):
    status, output, complaint = replay(file, *(word for setting in settings for word in ("--set", setting)))
    assert (status, output) == (2, "")
    [line] = complaint.splitlines()
    assert says in line


def test_a_journal_that_a_crash_cut_off_is_replayed_to_there(replay, journal, tmp_path):
    path = tmp_path / "cut.journal"
    path.write_bytes(journal[: len(journal) * 2 // 3 - 1])
    status, output, complaint = replay(path, "--set", "max_num_seqs=2")
    assert (status, complaint) == (0, "")
    assert "The file is cut off, as after a crash" in output
    assert "Every decision is the same" in output
    assert int(rows(output)["unfinished"][0]) > 0


def test_an_empty_day_is_a_journal_too(replay, tmp_path):
    path = tmp_path / "empty.journal"
    path.write_bytes(record(requests=0))
    status, output, _ = replay(path, "--policy", "fair")
    assert status == 0
    assert rows(output)["TTFT, p50"] == ["-"] * 4


def test_decisions_that_differ_are_told(replay, file, monkeypatch):
    real = _core.replay
    monkeypatch.setattr(_core, "replay", lambda journal: real(journal) | {"differs_at": 6})
    status, output, complaint = replay(file)
    assert (status, complaint) == (1, "")
    assert "The decisions differ from plan 7 on: another version of chairlift" in output


def test_a_journal_with_a_changed_byte_is_refused(replay, file, journal):
    for at in (30, len(journal) // 2, len(journal) - 1):
        file.write_bytes(journal[:at] + bytes([journal[at] ^ 1]) + journal[at + 1 :])
        status, output, complaint = replay(file)
        assert (status, output) == (2, "")
        assert re.search(rf"{file} cannot be replayed: the journal is damaged at byte \d+", complaint)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"chairlift-journal-0\n12345", b"chairlift-journal-1\n\x00\x00"])
def test_what_is_no_journal_is_one_line_and_status_2(replay, tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    status, output, complaint = replay(path)
    assert (status, output) == (2, "")
    [line] = complaint.splitlines()
    assert line.startswith(f"chairlift: {path} cannot be replayed: ")


def test_a_frame_that_no_recorder_wrote_is_one_line_and_status_2(replay, tmp_path):
    path = tmp_path / "damaged.journal"
    frame_without_its_checksums = bytes([3, 0, 0, 0, 0, 0, 0, 2, 9, 0, 0, 0, 0])
    path.write_bytes(record(requests=0) + frame_without_its_checksums)
    status, output, complaint = replay(path)
    assert (status, output) == (2, "")
    [line] = complaint.splitlines()
    assert line.startswith(f"chairlift: {path}")
    assert "the journal is damaged" in line
    with pytest.raises(InvalidSetting, match="the journal is damaged"):
        from_journal(path)


def test_a_panic_of_the_core_is_one_line_too(replay, file, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 names what a panic becomes."""

    def panic(journal):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(_core, "step_times", panic)
    with pytest.raises(InvalidSetting, match="the journal is damaged, its calls contradict each other: index out of bounds"):
        from_journal(file)
    monkeypatch.setattr(_core, "replay", panic)
    status, output, complaint = replay(file)
    assert (status, output) == (2, "")
    assert "its calls contradict each other: index out of bounds" in complaint


def test_a_setting_that_is_named_twice_is_refused(replay, file):
    for twice in (["--set", "max_num_seqs=1", "--set", "max_num_seqs=2"], ["--set", "scheduling_policy=fair", "--policy", "fcfs"]):
        status, output, complaint = replay(file, *twice)
        assert (status, output) == (2, "")
        assert "is set twice: separate its values with commas" in complaint


def test_a_file_that_is_not_there_is_one_line_and_status_2(replay, tmp_path):
    status, _, complaint = replay(tmp_path / "none")
    assert status == 2
    assert complaint == f"chairlift: {tmp_path / 'none'}: cannot be read (No such file or directory); name a file that --journal wrote\n"


class _Page(HTMLParser):
    """What a page loads from elsewhere, its words, and the curves that each of its plots draws."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.words, self.plots, self._tag, self._in = [], "", {}, None, None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag == "svg":
            self.plot = self.plots.setdefault(dict(attrs)["aria-label"], [])
        if tag == "path" and self._in is not None:
            self.plot.append(self._in)
        self._tag = tag

    def handle_endtag(self, tag):
        self._in = None if tag == "g" else self._in
        self._tag = None

    def handle_data(self, data):
        self.words += data + "\n"
        if self._tag == "title" and self.plots:
            self._in = data


def test_the_page_shows_what_was_and_what_would_have_been_in_each_plot(replay, file, tmp_path):
    path = tmp_path / "day.html"
    assert replay(file, "--set", "max_num_seqs=1,2", "--report", str(path))[0] == 0
    page = _Page(path)
    assert page.loads == []
    assert list(page.plots) == ["TTFT", "ITL", "TPOT", "E2EL", "Batch", "Waiting", "KV cache", "Tokens in a step"]
    assert all(curves == ["recorded", "as recorded", "max_num_seqs=1", "max_num_seqs=2"] for curves in page.plots.values()), page.plots
    for words in (
        "Every decision is the same",
        "Changed: max_num_seqs 4",
        "is the recorded run",
        "KV cache used, mean",
        "wait_slots",
    ):
        assert words in page.words


def test_the_page_of_the_recorded_run_alone_beside_json(replay, file, tmp_path):
    path = tmp_path / "day.html"
    status, output, _ = replay(file, "--json", "--report", str(path))
    assert status == 0
    assert len(json.loads(output)["runs"]) == 1
    assert set(map(tuple, _Page(path).plots.values())) == {("recorded",)}


def test_a_page_that_cannot_be_written_is_refused_before_the_work(file, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["replay", str(file), "--report", str(tmp_path / "no" / "day.html")])
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "there is no directory" in line


def test_help_teaches_by_example_and_names_every_setting(capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["replay", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "chairlift replay" in text.split("examples:")[1]
    assert all(name in text for name in replay_settings.NAMES)


def test_a_table_needs_no_torch(file):
    requested = f"import sys; from chairlift.cli.main import main; main(['replay', {str(file)!r}]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", requested], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stderr.split()} & {"torch", "transformers"}
