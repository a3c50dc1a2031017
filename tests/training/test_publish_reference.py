"""A run of a few steps, stopped and resumed, published as the reference run is; and what few bits do to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import transformers

import publish_reference as publish
from microllm.errors import DataError
from microllm.training import train


@pytest.fixture(scope="module")
def published(packed, tmp_path_factory):
    from microllm.training import TrainConfig

    home = tmp_path_factory.mktemp("published")
    config = TrainConfig(
        data=packed, output=home / "run", model="tiny", num_steps=6, row_tokens=32, batch_rows=4, device="cpu",
        validate_every=2,
    )  # fmt: skip
    train(replace(config, stop_at=4))
    train(config)
    source = {"title": "A | text", "requirement": "text==1 --no-binary=text", "manager": "pip", "licence": "none"}
    split = {"num_tokens": 3000, "num_documents": 120}
    record = {
        "sources": [source | split], "splits": {"train": split, "validation": split}, "vocab_size": 300
    }  # fmt: skip
    (home / "sources.json").write_text(json.dumps(record))
    (home / "page.md").write_text("# Page\n<!-- reference run -->\nold\n<!-- /reference run -->\nend\n")
    publish.write_weights(home / "run", home / "sources.json", home / "tiny", "a shared machine")
    publish.write_card(home / "tiny", home / "page.md")
    return home


def test_figures_are_those_of_the_run(published):
    found = publish.figures(published / "tiny")
    assert (found["steps"], found["stops"], found["first_validation"]["step"]) == (6, [4], 2)
    card = (published / "tiny" / "README.md").read_text()
    assert f"| validation loss | {found['validation']['loss']:.4f} at step 6 " in card
    assert "| stopped and resumed | after 4, in a new process |" in card
    assert "| note | a shared machine |" in card
    assert "rows of 32 tokens" in card
    assert "text==1 (pip)" in card
    assert "Not measured yet." in card


def test_weights_are_in_bf16_and_load_in_transformers(published):
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "tiny")
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    assert not list((published / "tiny").glob("optimizer*"))
    assert str(published) not in "".join(p.read_text() for p in (published / "tiny").glob("*.json*"))


def test_samples_can_be_drawn_again_and_a_page_is_filled(published):
    samples = (published / "tiny" / "samples.md").read_bytes().decode()  # a line may end in the middle
    assert publish.samples_text(published / "tiny") == samples
    page = (published / "page.md").read_text()
    assert "old" not in page
    assert page.endswith("<!-- /reference run -->\nend\n")
    assert publish.filled(page, published / "tiny") == page
    with pytest.raises(DataError, match="without <!-- reference run -->"):
        publish.filled("# Page\n", published / "tiny")


def test_a_run_without_a_checkpoint_is_not_published(tmp_path):
    with pytest.raises(DataError, match="without a whole checkpoint"):
        publish.write_weights(tmp_path, tmp_path / "sources.json", tmp_path / "out")


@pytest.mark.slow
def test_what_few_bits_do_is_measured_on_held_out_text(published, packed, monkeypatch):
    import reference_gates

    monkeypatch.setattr(reference_gates, "WINDOW", 17)
    monkeypatch.setattr(reference_gates, "NUM_CALIBRATION", 4)
    directory = published / "tiny"
    record = reference_gates.measure(str(directory), packed, 4, published / "receipts")
    assert [row["scheme"] for row in record["schemes"]] == ["w8a16_decode", "w4a16_decode", "w4a16_gptq"]
    assert record["num_tokens"] == 4 * 16
    assert all(row["clean"] and row["agreement"] > 0.5 for row in record["schemes"])
    receipts = (published / "receipts" / "receipts.jsonl").read_text().splitlines()
    assert len(receipts) == 3
    (directory / "structures.json").write_text(json.dumps(record))
    assert "| w4a16_gptq |" in publish.gates_table(directory)
    (directory / "structures.json").unlink()
