"""The load generator, and the benchmark that puts a server beside its engine alone."""

import json

import pytest

from microllm.cli import main
from microllm.errors import ConfigError
from microllm.evidence.rows import read_rows
from microllm.inference import Engine, EngineConfig, load
from microllm.lab.bench_serve import ServeBenchConfig
from microllm.lab.load import Answer, LoadShape, _parse, make_load, run_in_engine, run_over_http


def test_a_load_is_its_seeds():
    shape = LoadShape(suite="short-heavy", num_requests=200, rate=10.0, seed=4)
    calls = make_load(shape, range(500), longest=1000)
    assert calls == make_load(shape, range(500), longest=1000)
    assert 150 < sum(len(call.prompt) <= 64 for call in calls) < 175
    assert calls == sorted(calls, key=lambda call: call.arrival_s)
    assert 15 < calls[-1].arrival_s < 25  # 200 at 10 a second
    begun = [tuple(call.prompt[:8]) for call in calls]
    assert 25 < max(begun.count(each) for each in begun) < 75
    alone = make_load(LoadShape(suite="one-long", num_requests=20), range(500), longest=1000)
    assert [len(call.prompt) > 64 for call in alone] == [True] + [False] * 19
    assert max(len(c.prompt) + c.max_tokens for c in make_load(shape, range(9), longest=40)) <= 40


def test_over_http_and_straight_give_the_same(server, tiny, settled):
    calls = make_load(LoadShape(suite="uniform", num_requests=8, scale=0.3), range(70, 200), longest=512)
    host, port = server.url.removeprefix("http://").split(":")
    for concurrency in (2, None):
        served = run_over_http(host, int(port), "tiny", calls, concurrency)
        direct = run_in_engine(
            Engine(load(tiny, device="cpu", precision="fp32"), EngineConfig(max_rows=4)), calls, concurrency
        )
        for call, a, b in zip(calls, served, direct, strict=True):
            assert (a.error, b.error) == ("", "")
            assert (a.text, a.num_tokens) == (b.text, b.num_tokens) == (a.text, call.max_tokens)
            for answer in (a, b):
                assert answer.sent_s <= answer.piece_s[0] <= answer.piece_s[-1] <= answer.end_s
                assert len(answer.gaps_s) == len(answer.piece_s) - 1
    (refused,) = run_over_http(host, int(port), "other", calls[:1], 1)
    assert "404" in refused.error
    (gone,) = run_over_http("127.0.0.1", 1, "tiny", calls[:1], 1)
    assert "refused" in gone.error.lower()


@pytest.mark.slow
def test_the_benchmark_prints_a_table_and_keeps_rows_and_times(tiny, tmp_path, capsys):
    command = ["bench", "serve", "--model", tiny, "--suite", "one-long", "--concurrency", "1", "4"]
    command += ["--num-requests", "6", "--scale", "0.2", "--out", str(tmp_path / "rows.jsonl")]
    assert main([*command, "--raw", str(tmp_path / "raw.json")]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    assert len(table) == 2 + 2
    assert all(line.count("|") == table[0].count("|") for line in table)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 4
    assert {row.peer_name for row in rows} == {"the engine alone", "3 x the median"}
    assert all(row.parity == "pass" for row in rows)
    runs = json.loads((tmp_path / "raw.json").read_text())["runs"]
    assert [len(run["served"]) for run in runs] == [6, 16]
    assert all(answer["piece_s"] for run in runs for answer in run["served"] + run["direct"])


def test_what_cannot_be_measured_is_refused():
    for change in ({"suite": ()}, {"concurrency": (0,)}, {"scale": 0.0}, {"rate": -1.0}, {"num_requests": 0}):
        with pytest.raises(ConfigError, match="need"):
            ServeBenchConfig(**change)


def test_events_that_one_read_brought_are_one_piece():
    def event(content):
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    def token(text):
        return event({"choices": [{"text": text}]})

    reads = [(0.1, b"HTTP/1.1 200 OK\r\n\r\n" + token("a") + token("b")), (0.3, token("c") + token("d")[:9])]
    reads.append((0.6, token("d")[9:] + event({"choices": [], "usage": {"completion_tokens": 4}})))
    answer = Answer()
    _parse(answer, reads)
    assert (answer.text, answer.num_tokens, answer.piece_s) == ("abcd", 4, [0.1, 0.3, 0.6])
    assert answer.gaps_s == pytest.approx([0.2, 0.3])
