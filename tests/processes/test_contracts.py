"""What every form and every feature keeps: a line in its registry makes it run here, by the example of its class."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from contract_ranks import FIRST, Net, config_of, on_four, on_two, with_features
from ranks import run_torchrun

from onebit import zero
from onebit.comm.launch import Launch
from onebit.zero.config.sections import Onebit
from onebit.zero.feature import Asked, Feature
from onebit.zero.features import FEATURES, features_of
from onebit.zero.features.compression import Compression
from onebit.zero.form import Form
from onebit.zero.forms import FORMS, choose, shard_ranks
from onebit.zero.forms.dense import Dense
from onebit.zero.grid import GridShape

ZERO = Path(zero.__file__).parent


def names(kinds: tuple[type, ...]) -> list[str]:
    return [kind.__name__ for kind in kinds]


# ---------------------------------------------------------------- without ranks


@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_example_takes_its_form_and_all_of_it_acts(form: type[Form], ranks: int) -> None:
    read = zero.read_config(config_of(form.example, "/files", min(ranks, 2)), world_size=ranks)
    shards = shard_ranks(read, Launch("torchrun", 0, ranks, 0, ranks))
    assert choose(read, GridShape((1, ranks // shards, shards, 1))) is form
    assert form.without_effect(read, GridShape((1, 1, 1, 1))) == []
    assert zero.read_config(read.to_dict(), world_size=ranks) == read


@pytest.mark.parametrize("feature", FEATURES, ids=names(FEATURES))
def test_a_feature_is_off_until_a_block_of_its_own_asks_for_it(feature: type[Feature]) -> None:
    plain = zero.read_config(config_of(Dense.example, "/files", 1), world_size=1)
    assert feature.of(Asked(plain, Net(), 0)) is None and features_of(Asked(plain, Net(), 0)) == ()
    assert set(feature.example) <= set(feature.blocks) <= {field.name for field in fields(zero.Config)}
    config = config_of(Dense.example, "/files", 2, **feature.example)
    read = zero.read_config(config, world_size=2)
    assert zero.read_config(read.to_dict(), world_size=2) == read != plain
    model = zero.init_compression(Net(), config) if "compression_training" in config else Net()
    assert [type(each) for each in features_of(Asked(read, model, 0))] == [feature]


def test_a_plain_configuration_asks_no_feature_and_a_mark_asks_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is off is not asked: neither features, nor forms whose block is absent."""
    asked: list[type] = []
    for feature in FEATURES:
        monkeypatch.setattr(feature, "of", classmethod(lambda cls, given: asked.append(cls)))
    plain = zero.read_config(config_of(Dense.example, "/files", 1), world_size=1)
    assert features_of(Asked(plain, Net(), 0)) == () and asked == []
    compressed = zero.init_compression(Net(), config_of(Dense.example, "/files", 1, **Compression.example))
    features_of(Asked(plain, compressed, 0))
    assert asked == [Compression]
    for form in FORMS:
        if form.block:
            monkeypatch.setattr(form, "fits", classmethod(lambda cls, *given: asked.append(cls)))
    assert choose(plain, GridShape((1, 1, 1, 1))) is Dense and asked == [Compression]


@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_no_form_warns_of_what_a_feature_acts_on(form: type[Form]) -> None:
    values = {"sequence": {"codec": "int8"}, "activation_folder": "/files"}
    keys = {key for feature in FEATURES for key in feature.keys}
    assert keys == set(values) <= {field.name for field in fields(Onebit)}
    ours = {"onebit": {**form.example.get("onebit", {}), **values}}
    read = zero.read_config(config_of({**form.example, **ours}, "/files", 1), world_size=1)
    assert form.without_effect(read, GridShape((1, 1, 1, 1))) == []


def test_names_in_checkpoints_and_blocks_are_unique() -> None:
    """Offloaded is "dense" there: its state loads into the other, and the other's into it."""
    own = [form.name for form in FORMS if "name" in vars(form)]
    assert len(own) == len(set(own)) and {form.name for form in FORMS} == set(own)
    blocks = [block for feature in FEATURES for block in feature.blocks]
    assert len(blocks) == len(set(blocks))


@pytest.mark.parametrize("file", ["engine.py", "initializing.py"])
def test_the_spine_names_no_form_and_no_feature(file: str) -> None:
    kinds = (*FORMS, *FEATURES)
    known = {kind.__name__ for kind in kinds} | {kind.__module__.rpartition(".")[2] for kind in kinds}
    known |= {form.name for form in FORMS} | {block for feature in FEATURES for block in feature.blocks}
    tree, said = ast.parse((ZERO / file).read_text()), set()
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docs = {id(node.body[0].value) for node in holders if isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            said.add(node.id)
        elif isinstance(node, ast.Attribute):
            said.add(node.attr)
        elif isinstance(node, ast.alias):
            said |= set(node.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            said |= set((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            said.add(node.value)
    assert not said & known


# ---------------------------------------------------------------- on four ranks, and on two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("contracts"))


@pytest.fixture(scope="module")
def four(folder: str) -> list[dict]:
    return list(run_torchrun(4, on_four, folder, timeout_s=150).check().results)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two(folder: str, four: list[dict]) -> list[dict]:
    return list(run_torchrun(2, on_two, folder, timeout_s=110).check().results)  # type: ignore[arg-type]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_it_trains_and_resumes_to_the_bit(four: list[dict], form: type[Form]) -> None:
    for facts in (rank[form.__name__] for rank in four):
        assert facts["class"] == form.__name__
        assert facts["losses"][-1] < 0.95 * facts["losses"][0], facts["losses"]
        assert facts["resumed"] and facts["same everywhere"] and facts["norm"], facts


@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_a_bad_batch_on_one_rank_is_skipped_and_training_goes_on(four: list[dict], form: type[Form]) -> None:
    skipped = [rank[form.__name__]["skipped"] for rank in four]
    for facts in (rank[form.__name__] for rank in four):
        assert facts["same after it"] and max(facts["after a bad batch"]) < 2 * facts["losses"][0], facts
        assert form.steps_apart or not facts["left a trace"]
    assert skipped == ([1, 1, 0, 0] if form.steps_apart else [1] * 4)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_other_worlds_and_layouts_go_on_from_its_checkpoint(
    four: list[dict], two: list[dict], form: type[Form]
) -> None:
    for facts in (rank[form.__name__] for rank in two):
        assert facts["steps"] == FIRST and facts["same weights"] and facts["state counts"], facts
        assert facts["losses"][-1] < 1.1 * four[0][form.__name__]["losses"][2 * FIRST], facts
    for facts in (rank[form.__name__] for rank in four):
        if isinstance(facts["wider"], str):
            assert form.fixed_cut and form.fixed_cut in facts["wider"]
        else:
            steps, *losses = facts["wider"]
            assert steps == FIRST and losses[-1] < 1.1 * facts["losses"][2 * FIRST], facts


@pytest.fixture(scope="module")
def featured(folder: str) -> list[dict]:
    return list(run_torchrun(2, with_features, folder, timeout_s=110).check().results)  # type: ignore[arg-type]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("feature", FEATURES, ids=names(FEATURES))
def test_a_feature_acts_and_resumes_to_the_bit(featured: list[dict], feature: type[Feature]) -> None:
    for rank in featured:
        facts = rank[feature.__name__]
        assert facts == {"features": [feature.__name__], "acts": not feature.only_watches, "resumed": True}
        assert rank["none"] == {"features": []}
