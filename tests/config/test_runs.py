"""Table of runs: rows override settings of the config; messages name the line of a mistake."""

from pathlib import Path

import pytest

from tokamake.config.architecture import Architecture
from tokamake.config.model import check_export_format, parse_export_format
from tokamake.config.runs import read_runs
from tokamake.data.corpus.corpora import merge_tables, read_corpora
from tokamake.errors import UserError

BASE = {"run": "alone", "seed": 5, "train": {"train_steps": 9, "optimizer": {"name": "lion"}}}


def table(folder: Path, text: str) -> dict[str, object]:
    (folder / "runs.tsv").write_text(text)
    return {**BASE, "runs": str(folder / "runs.tsv")}


def test_without_a_table_the_config_is_one_run() -> None:
    ((name, run),) = read_runs({**BASE, "runs": None}, "my.yaml").items()
    assert (name, run.config.seed, run.where) == ("alone", 5, "my.yaml")


def test_mistakes_in_the_config_are_reported_for_the_config(tmp_path: Path) -> None:
    values = table(tmp_path, "run\ttrain.optimizer.beta1\na\ttwo\n") | {"sed": 3}
    with pytest.raises(UserError) as caught:
        read_runs(values, "my.yaml")
    first, second = sorted(str(caught.value).splitlines())
    assert first.startswith(f"{tmp_path}/runs.tsv:2: train.optimizer.beta1: ")
    assert second.startswith("my.yaml: sed: unknown key; did you mean seed")


def test_cells_override_settings_and_empty_cells_keep_them(tmp_path: Path) -> None:
    values = table(
        tmp_path,
        "# a sweep\n"
        "run\tseed\ttrain.optimizer.learning_rate\ttrain.parallel.tensor_parallel_size\tconvert\n"
        "b\t7\t1e-3\t2\t[mds, hf-bf16]\n"
        "1e5\t\t\t\t\n",
    )
    runs = read_runs(values, "my.yaml")
    assert list(runs) == ["b", "1e5"]
    first, second = (runs[name].config for name in runs)
    assert (first.seed, second.seed) == (7, 5)
    assert first.train.optimizer.learning_rate == 1e-3 != second.train.optimizer.learning_rate
    assert first.train.optimizer.name == second.train.optimizer.name == "lion"
    assert first.train.parallel.tensor_parallel_size == 2
    assert (first.convert, second.convert) == (("mds", "hf-bf16"), ())
    assert runs["1e5"].where.endswith("runs.tsv:4")
    assert values["seed"] == 5


MISTAKES = {
    r"runs\.tsv: no run; add a header and one tab-separated row per run": "run\tseed\n",
    r"runs\.tsv:1: run  seed: spaces between columns; separate columns with one tab, not": (
        "run  seed\na  3\n"
    ),
    r"runs\.tsv:1: no column run; add one with the runs' names": "seed\n3\n",
    r"runs\.tsv:2: run: missing; give the run a name": "run\tseed\n\t3\n",
    r"runs\.tsv:3: run 'a' is already in line 2": "run\tseed\na\t1\na\t2\n",
    r"runs\.tsv:1: seed: duplicate column": "run\tseed\tseed\na\t1\t2\n",
    r"runs\.tsv:1: tokenize.append_eod: must be the same for all runs, which share their data": (
        "run\ttokenize.append_eod\na\tfalse\n"
    ),
    r"runs\.tsv:1: run  seed: spaces between columns; separate columns with one tab": (
        "run  seed\trun\na\ta\n"
    ),
    r"runs\.tsv:1: sed: no such setting; columns are run and settings of seed, corpora": (
        "sed\trun\na\ta\n"
    ),
    r"runs\.tsv:2: train.train_step: unknown key; did you mean train_steps": (
        "run\ttrain.train_step\na\t1\n"
    ),
    r"runs\.tsv:2: train.train_steps: -1: give an integer of 1 or more": (
        "run\ttrain.train_steps\na\t-1\n"
    ),
    r"runs\.tsv:2: seed: '\[': not valid YAML": "run\tseed\na\t[\n",
    r"runs\.tsv:2: run: 'import': results/import is reserved": "run\tseed\nimport\t1\n",
    r"runs\.tsv:2: convert: 'mds-pp2': format mds has no pipeline_parallel_size; leave it out": (
        "run\tconvert\na\t[mds-pp2]\n"
    ),
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_mistakes_in_the_table_of_runs(tmp_path: Path, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        read_runs(table(tmp_path, MISTAKES[expected]), "my.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.tsv: no such file; fix runs in the config"):
        read_runs({"runs": str(tmp_path / "none.tsv")}, "my.yaml")


def test_tables_of_corpora_may_differ_only_in_the_mixture(tmp_path: Path) -> None:
    def merged(second: str) -> dict[str, str]:
        tables = {"a.tsv": "corpus\tfiles\tweight\nx\tx/*\t1\ny\ty/*\t1\n", "b.tsv": second}
        for name, text in tables.items():
            (tmp_path / name).write_text(text)
        merged_corpora = merge_tables([read_corpora(tmp_path / name) for name in tables])
        return {name: corpus.files for name, corpus in merged_corpora.items()}

    files = merged("corpus\tfiles\tweight\nz\tz/*\t1\nx\tx/*\t9\n")
    assert files == {"x": "x/*", "y": "y/*", "z": "z/*"}
    with pytest.raises(UserError, match=r'b\.tsv: corpus "x": files is \'w\', but \'x/\*\' in .*a'):
        merged("corpus\tfiles\tweight\nx\tw\t1\n")
    with pytest.raises(UserError, match=r"b\.tsv: splits are train, valid, but none in .*a\.tsv"):
        merged("corpus\tfiles\tweight\tsets\nx\tx/*\t1\ttrain=0:0.9 valid=0.9:1\n")


def test_names_of_export_formats() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "virtual_pipeline_size": 3}
    assert parse_export_format("megatron-tp2-pp4-vpp3-bf16") == ("megatron", sizes, "bf16")
    assert parse_export_format("mds-pipeline-pp16") == (
        "mds-pipeline",
        {"pipeline_parallel_size": 16},
        None,
    )
    assert parse_export_format("hf") == ("hf", {}, None)
    assert parse_export_format("torch-dist-ep8") == (
        "torch-dist",
        {"expert_parallel_size": 8},
        None,
    )
    assert parse_export_format("megatron-zero1") == ("megatron", {"zero_stage": 1}, None)
    zero_2 = {"tensor_parallel_size": 2, "data_parallel_size": 6, "zero_stage": 2}
    assert parse_export_format("mds-tp2-dp6-zero2-bf16") == ("mds", zero_2, "bf16")
    zero_3 = {"data_parallel_size": 4, "zero_stage": 3}
    assert parse_export_format("mds-dp4-zero3-bf16") == ("mds", zero_3, "bf16")
    for wrong in (
        "mds-pp2",
        "hf-tp1",
        "mds-tp0",
        "mds-tp",
        "tp2",
        "hf-fp64",
        "hf_bf16",
        "",
        "megatron-vpp2",
        "mds-ep2",
        "mds-dp2",
        "mds-zero4",
        "mds-pipeline-pp2-zero2",
        "mds-pipeline-pp2-zero3",
        "megatron-zero2",
        "universal-zero1",
    ):
        message = "leave it out|give a format|give (pp|zero1), too|allows at most [13]; give [13]"
        with pytest.raises(ValueError, match=message):
            parse_export_format(wrong)


def test_zero_formats_need_adam() -> None:
    lion = {"optimizer": {"name": "lion"}}
    message = (
        r"convert: mds-dp2-zero1: zero formats hold optimizer states of adam and adamw, not of lion"
    )
    with pytest.raises(UserError, match=message):
        read_runs({**BASE, "convert": "mds-dp2-zero1", "train": lion}, "my.yaml")
    read_runs({**BASE, "convert": ["universal", "mds"], "train": lion}, "my.yaml")


def test_export_formats_that_do_not_divide_the_model_are_refused() -> None:
    model = Architecture(
        vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    for good in ("hf", "mds-tp2", "mds-pipeline-tp2-pp3", "megatron-pp2-vpp2", "universal-pp4"):
        check_export_format(parse_export_format(good), model)
    for wrong, message in {
        "mds-tp3": "tp3: does not divide num_attention_heads 8; give one of 1, 2, 4, 8",
        "mds-tp4": "tp4: does not divide num_key_value_heads 2; give one of 1, 2",
        "mds-pipeline-pp5": "5 stages: the model has 4 layers; give a number that is no larger",
        "megatron-ep2": "ep2: family llama has no experts; leave it out",
        "megatron-pp3": "3 stages: the model has 4 layers; give a number that divides them",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_export_format(parse_export_format(wrong), model)
    experts = model.model_copy(update={"family": "mixtral", "num_experts": 6})
    check_export_format(parse_export_format("megatron-tp2-ep3"), experts)
    with pytest.raises(ValueError, match="ep4: does not divide 6 experts; give one of 1, 2, 3, 6"):
        check_export_format(parse_export_format("torch-dist-ep4"), experts)
    two_stacks = model.model_copy(update={"family": "t5"})
    check_export_format(parse_export_format("mds-tp2"), two_stacks)
    for wrong in ("mds-pipeline", "megatron-pp2"):
        with pytest.raises(ValueError, match=f"{wrong[:8]}.*: stages of a model with an encoder"):
            check_export_format(parse_export_format(wrong), two_stacks)
    (run,) = read_runs({**BASE, "convert": "mds"}, "my.yaml").values()
    assert run.config.convert == ("mds",)


def test_sizes_of_the_section_model_replace_the_file_s() -> None:
    sizes = {"num_layers": 64, "hidden_size": 8192, "tie_word_embeddings": True}
    for section, file in (
        ({"architecture": "a.yaml"}, "a.yaml"),
        ({}, "config/models/tiny-llama.yaml"),
    ):
        run, _ = read_runs({**BASE, "model": {**section, **sizes}}, "my.yaml")["alone"]
        replaced = "num_hidden_layers=64:hidden_size=8192:tie_word_embeddings=True"
        assert str(run.model.architecture) == f"{file}:{replaced}"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_layres": 2}, "model: num_layres: unknown key; did you mean num_layers"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: .*: give one value, or write it into"),
        ({"checkpoint": "x", "hidden_size": 8}, "hidden_size: 8: the checkpoint decides the shape"),
    ],
)
def test_wrong_sizes_of_the_section_model(section: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_runs({**BASE, "model": section}, "my.yaml")
