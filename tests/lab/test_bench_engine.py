"""The engine's benchmark on a CPU, with a tiny random model: rows, parity that can fail, the throughput run."""

import pytest
import torch

from microllm.errors import ConfigError
from microllm.inference import Engine
from microllm.lab.bench_engine import EngineBenchConfig, measure_engine

TINY = {"model": "tiny", "dtype": "fp32", "device": "cpu", "batch": (2,), "tokens": (8,), "new_tokens": 3, "rounds": 2}


def test_rows_of_decode_prefill_and_throughput_with_a_peer_and_a_limit(tmp_path):
    said, out = [], tmp_path / "rows.jsonl"
    config = EngineBenchConfig(**TINY, peer=True, sequences=2, lengths=(3, 6), out=out)
    decode, prefill, throughput = measure_engine(config, said.append)
    assert [row.parity for row in (decode, prefill, throughput)] == ["pass"] * 3
    assert decode.workload == "tiny B2 T8 N3 mode A"
    assert decode.ours > 0 < decode.peer
    assert decode.limit > decode.ours
    assert (prefill.unit, throughput.target) == ("ms", "S1")
    assert len(out.read_text().splitlines()) == 3
    assert said[0] == "parity: pass"


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_quantised_weights_read_less_and_are_held_to_their_own_eager_form(weights):
    plain = next(measure_engine(EngineBenchConfig(**TINY)))
    row = next(measure_engine(EngineBenchConfig(**TINY, weights=weights)))
    assert (row.dtype, row.parity, row.peer_name) == (weights, "pass", "microllm fp32")
    assert row.target == ("D5" if weights == "int8" else "decode")
    assert row.workload == f"tiny B2 T8 N3 mode A {weights} weights"
    assert row.peer > 0
    assert row.limit > (2 if weights == "int4" else 1.5) * plain.limit
    with pytest.raises(ConfigError, match="and a peer; need one of them"):
        EngineBenchConfig(**TINY, weights=weights, peer=True)


def test_a_row_whose_tokens_are_not_transformers_has_no_speed(monkeypatch):
    init = Engine.__init__

    def spoiled(engine, llm, *args, **kwargs):
        with torch.no_grad():
            llm.transformer.norm.weight.mul_(1.5)
        init(engine, llm, *args, **kwargs)

    monkeypatch.setattr(Engine, "__init__", spoiled)
    rows = list(measure_engine(EngineBenchConfig(**TINY)))
    assert [(row.ours, row.status) for row in rows] == [(None, "precision_mismatch")] * 2
    assert "log-probabilities off by" in rows[0].parity


@pytest.mark.parametrize("wrong", [{"batch": (0,)}, {"rounds": 3}, {"dtype": "int8"}])
def test_refuses_what_cannot_be_measured(wrong):
    with pytest.raises(ConfigError, match="need at least 1"):
        EngineBenchConfig(**TINY | wrong)
