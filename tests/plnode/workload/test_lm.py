"""The language model as a job: built from a manifest, refused when the data are not the manifest's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plnode.manifest import Manifest
from plnode.manifest_text import default_values, render, shipped_values
from plnode.workload import JobError, LanguageModel

SMALL = {
    "model.dim": 32, "model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "model.ffn_dim": 48, "model.seq_len": 32,
    "batch.microbatches": 3, "batch.sequences": 2, "stages.count": 3, "steps": 30, "evaluation.microbatches": 2,
}  # fmt: skip


def job(**changes: Any) -> LanguageModel:
    paths = {key.replace("__", "."): value for key, value in changes.items()}
    text = render(default_values({**shipped_values(), **SMALL, **paths}))
    return LanguageModel(Manifest.parse(text.encode()))


def test_stages_together_are_the_whole_model() -> None:
    built = job()
    whole = built.build_whole().state_dict()
    stages = [built.build_stage(i).state_dict() for i in range(3)]
    assert [name for stage in stages for name in stage if name in whole] == [name for stage in stages for name in stage]
    assert {name for stage in stages for name in stage} == set(whole)
    assert all(np.array_equal(value, whole[name]) for stage in stages for name, value in stage.items())


def test_an_explicit_split_is_followed() -> None:
    assert [s.layers for s in job(stages__split=[1, 1, 2]).spans] == [1, 1, 2]


def test_boundary_has_the_sizes_of_a_microbatch() -> None:
    boundary = job().boundary()
    assert boundary.shape == (2, 32, 32)
    assert boundary.forward_bytes == 2 * 32 * 32 * 4 + 2 * 33 * 2


def test_ids_are_those_of_the_sampler_and_decode_to_the_text() -> None:
    built = job()
    ids = built.train_ids(4, 2)
    assert ids.shape == (2, 33)
    assert np.array_equal(ids, job().train_ids(4, 2))
    assert not np.array_equal(ids, job(seed=2).train_ids(4, 2))
    assert built.heldout_ids(1).shape == (2, 33)
    assert " " in built.tokenizer.decode(ids[0].tolist())
    assert built.tokens_per_step == 3 * 2 * 32
    assert 5.8 < built.unigram_loss < 6.1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"data__sha256": "0" * 64}, "data.sha256"),
        ({"model__tokenizer": "0" * 64}, "model.tokenizer"),
        ({"model__vocab": 2049}, "model.vocab"),
        ({"evaluation__microbatches": 900}, "evaluation.microbatches"),
    ],
)
def test_a_manifest_of_other_data_is_refused_with_the_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError, match=key) as refused:
        job(**change)
    assert refused.value.key == key
