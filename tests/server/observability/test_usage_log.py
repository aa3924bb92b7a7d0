"""The usage log, with an engine that is a fake: what a record says, and what happens if the disk fails."""

import asyncio
import errno
import json
import os
import time

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, timeline, wait_until

from chairlift.cli.main import main
from chairlift.errors import InvalidSetting
from chairlift.server.observability import usage_log
from chairlift.server.observability.usage_log import UsageLabels, UsageLog

LABELS = UsageLabels("cmpl-1", "mine", MODEL, "alice", "flex", 3, 5)


def records(directory):
    return [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]


def write(directory, *batches, engine=None):
    """Writes a record for each batch of timelines, and returns all that are in the directory."""

    async def run():
        log = UsageLog(str(directory))
        for timelines in batches:
            await log.write_ended(engine or ScriptedEngine(), LABELS, timelines)
        await log.close()

    asyncio.run(run())
    return records(directory)


def test_a_record_sums_the_answers_of_a_prompt(tmp_path):
    second = timeline(finish="stop", ended=103.0, preemptions=2, states={"wait_blocks": 1.0, "decode": 1.0})
    [record] = write(tmp_path, [timeline(cached_tokens=5, own_cached_tokens=4), second])
    assert record.pop("time").startswith(time.strftime("%Y-"))
    assert record == {
        "id": "cmpl-1",
        "request_id": "mine",
        "model": MODEL,
        "tenant": "alice",
        "tier": "flex",
        "priority": 3,
        "session": None,
        "finish": ["length", "stop"],
        "prompt_tokens": 5,
        "cached_tokens": 4,
        "output_tokens": 6,
        "computed_tokens": 14,
        "recomputed_tokens": 0,
        "block_seconds": 1.0,
        "compute_seconds": 0.5,
        "preemptions": 2,
        "swaps": 0,
        "seconds": 3.0,
        "states": {"wait_blocks": 2.5, "prefill": 0.25, "decode": 1.25},
        "preempted_by": [],
    }


def test_a_record_has_the_energy_where_there_is_a_meter(tmp_path, capsys):
    [record] = write(tmp_path, [timeline(energy_joules=1.5), timeline(energy_joules=0.25)])
    assert record["energy_joules"] == 1.75
    assert main(["usage", str(tmp_path), "--by", "tenant", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["energy_joules"] == 1.75


def test_a_record_names_the_tenants_that_its_request_was_preempted_for(tmp_path):
    engine = ScriptedEngine()
    engine.others = [timeline(tag=7, tenant="bob"), timeline(tag=8, tenant="carol"), timeline(tag=9, tenant="dave")]
    [record] = write(tmp_path, [timeline(preemptions=2, preempted_by=(7, 8))], engine=engine)
    assert record["preempted_by"] == ["bob", "carol"]


def test_the_directory_and_its_files_are_for_this_user_alone(tmp_path):
    write(tmp_path / "a" / "b", [timeline()])
    [file] = (tmp_path / "a" / "b").iterdir()
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSetting, match=r"^--usage-log .*file/logs: Not a directory$"):
        UsageLog(str(tmp_path / "file" / "logs"))


def test_an_incomplete_line_of_an_earlier_run_spoils_no_other(tmp_path):
    write(tmp_path, [timeline()])
    [file] = tmp_path.iterdir()
    with file.open("a") as torn:
        torn.write('{"time":"2026-')
    write_more = asyncio.run(_append(tmp_path))
    lines = file.read_text().splitlines()
    assert write_more == 1
    assert len(lines) == 3
    assert json.loads(lines[2])["id"] == "cmpl-1"


async def _append(directory):
    log = UsageLog(str(directory))
    await log.write_ended(ScriptedEngine(), LABELS, [timeline()])
    await log.close()
    return 1


def test_a_new_day_begins_a_new_file(tmp_path, monkeypatch):
    days = iter([0.0, 0.0, 86_400.0, 86_400.0])
    monkeypatch.setattr(usage_log.time, "time", lambda: next(days))
    write(tmp_path, [timeline()], [timeline()], [timeline()])
    assert {file.name: len(file.read_text().splitlines()) for file in tmp_path.iterdir()} == {"1970-01-01.jsonl": 1, "1970-01-02.jsonl": 2}


def test_records_after_a_deleted_file_begin_a_new_one(tmp_path):
    async def run():
        log = UsageLog(str(tmp_path))
        await log.write_ended(ScriptedEngine(), LABELS, [timeline()])
        [file] = tmp_path.iterdir()
        file.unlink()
        await log.write_ended(ScriptedEngine(), LABELS, [timeline()])
        await log.close()

    asyncio.run(run())
    assert len(records(tmp_path)) == 1


def test_a_full_disk_is_logged_and_the_next_record_is_whole_again(tmp_path, monkeypatch, caplog):
    real, sizes = os.write, iter([20, None])

    def refuse(file, data):
        size = next(sizes, None)
        return real(file, data if size is None else data[:size])

    monkeypatch.setattr(usage_log.os, "write", refuse)
    asyncio.run(_two(tmp_path))
    assert "the usage record of cmpl-1 could not be written: the disk is full" in caplog.text
    [file] = tmp_path.iterdir()
    torn, whole = file.read_text().splitlines()
    assert len(torn) == 20
    assert json.loads(whole)["id"] == "cmpl-1"


def test_a_disk_that_cannot_be_synchronised_is_logged_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def refuse(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    days = iter([0.0, 0.0])
    monkeypatch.setattr(usage_log.time, "time", lambda: next(days, 86_400.0))
    monkeypatch.setattr(usage_log.os, "fsync", refuse)
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(_two(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(list(tmp_path.iterdir())) == 2
    assert caplog.messages == ["usage records may not be on the disk: Disk quota exceeded"] * 2


async def _two(directory):
    log = UsageLog(str(directory))
    for _ in range(2):
        await log.write_ended(ScriptedEngine(), LABELS, [timeline()])
    await log.close()


def test_a_request_that_the_client_leaves_has_a_record_and_a_refused_one_has_none(tmp_path):
    with serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base) as http:
        service.usage_log = UsageLog(str(tmp_path))
        with http.stream("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 1000, "stream": True}) as reply:
            next(reply.iter_lines())
        wait_until(lambda: len(records(tmp_path)) == 1)
        assert http.post("/v1/completions", json={"prompt": "full"}).status_code == 503
        assert http.post("/v1/completions", json={"prompt": "ok", "max_tokens": 2, "service_tier": "flex", "session_id": "s"}).is_success
        assert [(record["tier"], record["session"]) for record in records(tmp_path)] == [("default", None), ("flex", "s")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_its_own_fields_end_after_some_tokens_has_a_record(tmp_path, stream):
    with serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base) as http:
        service.usage_log = UsageLog(str(tmp_path))
        reply = http.post("/v1/completions", json={"prompt": "stuck", "max_tokens": 9, "stream": stream})
        assert "nothing can follow" in reply.text
        assert reply.status_code == (200 if stream else 400)
        wait_until(lambda: records(tmp_path))
        assert [(record["finish"], record["prompt_tokens"], record["output_tokens"]) for record in records(tmp_path)] == [(["error"], 5, 2)]


def test_a_generation_has_a_record_although_its_sequence_was_dropped_meanwhile(tmp_path):
    with serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base) as http:
        service.usage_log = UsageLog(str(tmp_path))
        url = f"/v1/sequences/{http.post('/v1/sequences', json={'prompt': 'slow'}).json()['id']}"
        assert len(records(tmp_path)) == 1  # the prompt was computed
        with http.stream("POST", f"{url}/generate", json={"max_tokens": 1000, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert http.delete(url).status_code == 200
            assert '"sequence_dropped"' in list(lines)[-2]
        wait_until(lambda: len([one for one in records(tmp_path) if "held_token_seconds" not in one]) == 2)


def test_the_command_sums_by_day_tenant_and_tier(tmp_path, capsys):
    write(tmp_path, [timeline()], [timeline(output_tokens=4)])
    with next(tmp_path.iterdir()).open("a") as torn:
        torn.write('{"time":"2026-\n[]\n')
    assert main(["usage", str(tmp_path), "--json"]) == 0
    reported = capsys.readouterr()
    assert reported.err == "2 incomplete lines were skipped\n"
    [row] = json.loads(reported.out)
    assert row.pop("day") == time.strftime("%Y-%m-%d", time.gmtime())
    assert row == {
        "tenant": "alice",
        "tier": "flex",
        "requests": 2,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 7,
        "computed_tokens": 14,
        "block_seconds": 1.0,
        "compute_seconds": 0.5,
        "energy_joules": 0,
        "held_token_seconds": 0,
        "seconds": 4.0,
        "preemptions": 0,
    }
    assert main(["usage", str(tmp_path), "--by", "tenant", "--until", "2001-01-01"]) == 0
    assert capsys.readouterr().out == "no records\n"


def test_the_command_sums_by_session_also_older_records_without_one(tmp_path, capsys):
    write(tmp_path, [timeline()])
    file = next(tmp_path.iterdir())
    line = json.loads(file.read_text())
    older = {name: value for name, value in line.items() if name != "session"}
    file.write_text("".join(json.dumps(one) + "\n" for one in (older, line, line | {"session": "s"})))
    assert main(["usage", str(tmp_path), "--by", "session", "--json"]) == 0
    assert [(row["session"], row["requests"]) for row in json.loads(capsys.readouterr().out)] == [("", 2), ("s", 1)]


@pytest.mark.parametrize("columns", [60, 400])
@pytest.mark.parametrize(
    ("name", "shown"), [("\x1b[2Jrow\n", "?[2Jrow?"), ("[/]", "[/]"), ("[link=http://x]y[/link]", "[link=http://x]y[/link]")]
)
def test_a_session_is_shown_as_its_client_named_it_and_controls_no_terminal(tmp_path, capsys, monkeypatch, columns, name, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    write(tmp_path, [timeline()])
    file = next(tmp_path.iterdir())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"session": name}) + "\n")
    assert main(["usage", str(tmp_path), "--by", "session"]) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("columns", [20, 60, 80, 120, 200])
def test_numbers_are_never_cut(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    write(tmp_path, [timeline(computed_tokens=987_654_321)])
    assert main(["usage", str(tmp_path)]) == 0
    words = capsys.readouterr().out.split()
    assert "987,654,321" in words
    assert not any("…" in word for word in words)


def test_the_lifetime_of_a_live_sequence_is_not_the_time_of_a_request(tmp_path, capsys):
    write(tmp_path, [timeline()])
    file = next(tmp_path.iterdir())
    line = json.loads(file.read_text())
    file.write_text("".join(json.dumps(one) + "\n" for one in (line, line | {"seconds": 600.0, "held_token_seconds": 7200.0})))
    assert main(["usage", str(tmp_path), "--by", "tenant"]) == 0
    shown = dict(part.rsplit("  ", 1) for part in capsys.readouterr().out.splitlines()[1:])
    assert {name.strip(): value for name, value in shown.items() if name.strip() in ("requests", "seconds", "held token-seconds")} == {
        "requests": "1",
        "seconds": f"{line['seconds']:.1f}",
        "held token-seconds": "7,200.0",
    }


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "x.jsonl").mkdir()
    assert main(["usage", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no records\n"
    assert main(["usage", str(tmp_path / "none")]) == 2
    assert "is not a directory: name the one that was given to --usage-log" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["usage", str(tmp_path), "--since", "2026-11"])
    assert "--since: expected a day like 2026-11-01, got '2026-11'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["usage", str(tmp_path), "--by", "tenant,colour"])
    assert "cannot group by 'colour': expected day, tenant, tier, model" in capsys.readouterr().err
