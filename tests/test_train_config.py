"""Settings: merging, types, and one clear line for each mistake, before torch is loaded."""

import dataclasses
import subprocess
import sys

import pytest

from tests.runs import ROOT, TINY
from train.command import load_config, to_yaml
from train.config import TrainConfig
from train.errors import ConfigError
from train.parsing import apply_overrides, build


def test_defaults_then_file_then_overrides(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "model: {name_or_path: gpt2}\ndata: {standard_library: true}\noptim: {max_steps: 5, warmup_steps: 1}\n"
    )
    config = load_config(tmp_path / "mine.yaml", ["optim.max_steps=7"])
    assert config.optim.max_steps == 7  # command line
    assert config.optim.warmup_steps == 1  # file
    assert config.optim.betas == (0.9, 0.95)  # default
    assert (config.run.name, config.run.output_dir) == ("mine", "runs/mine")


@pytest.mark.parametrize("text", ["5e-4", "5.0e-4", "0.0005", "'5e-4'", "+5E-4"])
def test_a_float_may_be_written_in_any_way(text):
    assert load_config(TINY, [f"optim.learning_rate={text}"]).optim.learning_rate == 5e-4


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("12", 12), ("'12'", 12)])
def test_a_whole_number_may_be_written_in_any_way(text, value):
    assert load_config(TINY, [f"optim.max_steps={text}"]).optim.max_steps == value


def test_numbers_in_an_architecture_are_numbers_too():
    config = load_config(TINY, ["model.architecture.rms_norm_eps=1e-5", "model.architecture.hidden_size=32"])
    assert config.model.architecture["rms_norm_eps"] == 1e-5
    assert config.model.architecture["hidden_size"] == 32
    assert config.model.architecture["model_type"] == "llama"  # the rest of the mapping stays


def test_lists_become_tuples_and_a_lone_value_a_list_of_one():
    config = load_config(TINY, ["recipe.exits=[2, 1]", "data.standard_library=false", "data.path=a.txt"])
    assert config.recipe.exits == (1, 2)
    assert config.data.path == ("a.txt",)


def test_recipe_gets_seed_and_length_from_the_run_unless_given():
    config = load_config(TINY, ["run.seed=3"])
    assert (config.recipe.seed, config.recipe.total_steps) == (3, config.optim.max_steps)
    config = load_config(TINY, ["run.seed=3", "recipe.seed=4", "recipe.total_steps=9"])
    assert (config.recipe.seed, config.recipe.total_steps) == (4, 9)


def test_merged_config_is_read_back_equal(tmp_path):
    config = load_config(TINY, ["run.seed=3", "recipe.exits=[1]", "optim.betas=[0.8, 0.9]"])
    (tmp_path / "merged.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "merged.yaml") == config


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(TINY).optim.max_steps = 3  # type: ignore[misc]


def test_overrides_do_not_change_the_mapping_they_are_applied_to():
    values = {"model": {"architecture": {"hidden_size": 1}}}
    apply_overrides(values, ["model.architecture.hidden_size=2"])
    assert values == {"model": {"architecture": {"hidden_size": 1}}}


MISTAKES = {
    "optim.learning_rat=1": "unknown key optim.learning_rat; did you mean optim.learning_rate?",
    "optm.learning_rate=1": "unknown key optm; did you mean optim?",
    "recipe.max_droput=0.2": "unknown key recipe.max_droput; did you mean recipe.max_dropout?",
    "optim.zzz=1": "unknown key optim.zzz; known here: max_steps, ",
    "optim.max_steps=many": "optim.max_steps is 'many'; it must be a whole number (int)",
    "optim.max_steps=2.5": "optim.max_steps is 2.5; it must be a whole number (int)",
    "optim.max_steps=true": "optim.max_steps is True; it must be a whole number (int)",
    "optim.max_steps=0": "optim.max_steps is 0; it must be at least 1",
    "optim.learning_rate=fast": "optim.learning_rate is 'fast'; it must be a number (float)",
    "optim.learning_rate=null": "optim.learning_rate is None; it must be a number (float)",
    "optim.learning_rate=0": "optim.learning_rate is 0.0; it must be above 0 and finite",
    "optim.learning_rate=.inf": "optim.learning_rate is inf; it must be above 0 and finite",
    "optim.weight_decay=.inf": "optim.weight_decay is inf; it must be finite",
    "optim.max_steps=1e30": "optim.max_steps is 10000000000000000",
    "optim.global_batch_size=1e15": "optim.global_batch_size is 1000000000000000; it must be at most 1000000",
    "run.seed=1e30": "run.seed is 10000000000000000",
    "run.cpu_threads=1e9": "run.cpu_threads is 1000000000; it must be at most 4096",
    "tokenizer.train_vocab_size=1e12": "tokenizer.train_vocab_size is 1000000000000; it must be at most 1000000",
    "tracking.sample_tokens=1e9": "tracking.sample_tokens is 1000000000; it must be at most 65536",
    "model.lora_alpha=0": "model.lora_alpha is 0; it must be at least 1",
    "model.lora_alpha=8": "model.lora_alpha is 8, which says nothing without model.lora_rank: give that, or leave",
    "model.lora_targets=[q_proj]": "model.lora_targets is ('q_proj',), which says nothing without model.lora_rank",
    "data.weight=.inf": "data.weight is inf; it must be above 0 and finite",
    "optim.betas=[0.9]": "optim.betas has 1 values; it must have 2",
    "optim.betas=[0.9, 1.0]": "optim.betas are (0.9, 1.0); each must be in [0, 1)",
    "optim.schedule=cosin": "optim.schedule is 'cosin'; it must be one of cosine, linear, constant",
    "optim.warmup_steps=6": "optim.warmup_steps is 6; it must be below optim.max_steps (6)",
    "optim.micro_batch_size=3": "optim.global_batch_size (4) must be a multiple of optim.micro_batch_size",
    "model.gradient_checkpointing=1": "model.gradient_checkpointing is 1; it must be true or false (bool)",
    "model.name_or_path=gpt2": "model.name_or_path, model.architecture: give one; both given",
    "model.architecture={}": "model.name_or_path, model.architecture: give one; neither given",
    "model.architecture={hidden_size: 3}": "model.architecture has no model_type",
    "tokenizer.name_or_path=gpt2": "tokenizer.name_or_path and tokenizer.train_vocab_size exclude each other",
    "tokenizer.train_vocab_size=null": "a model from scratch has no tokenizer of its own",
    "data.dataset=x": "data: give exactly one of standard_library, path and dataset; 2 are given",
    "data.held_out=0.5": "data.held_out is 0.5; it must be above 0 and at most 0.4",
    "data.sequence_length=4": "data.sequence_length is 4; it must be at least 32",
    "recipe.max_dropout=1.5": "recipe: max_dropout=1.5 is out of range",
    "recipe.exit_loss_scale=.inf": "recipe: exit_loss_scale=inf is out of range: 0 to 1000",
    "recipe.distillation_temperature=0": "recipe: distillation_temperature=0.0 is out of range: 0.01 to 100",
    "recipe.curriculum=spiral": "recipe: curriculum='spiral' is unknown",
    "run.resume=maybe": "run.resume is 'maybe'; it must be one of auto, never",
    "run.name=7": "run.name is 7; it must be text (str)",
    "hub.repo=model": "hub.repo: 'model' names no repository: write owner/name",
    "optim=3": "cannot read the override 'optim=3'; write section.key=value",
    "optim.max_steps": "cannot read the override 'optim.max_steps'; write section.key=value",
    "optim.betas=[0.9": "the override 'optim.betas=[0.9' is not YAML",
    "run.name=\x00": "the override 'run.name=\\x00' is not YAML: ",
    "run={[1]: 2}": "cannot read the override",
    "model.architecture={[1]: 2}": "the override 'model.architecture={[1]: 2}': line 1: a key must be a word",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_limit(override):
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, [override])
    message = str(caught.value)
    assert message.startswith(MISTAKES[override])
    assert "\n" not in message


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*absent.yaml"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds list; it must be sections"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("run: {seed: 1}\nrun: {seed: 2}\n")
    with pytest.raises(ConfigError, match="line 2: run is given twice"):
        load_config(tmp_path / "twice.yaml")
    (tmp_path / "latin.yaml").write_bytes("run: {name: café}\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot read the config file .*latin.yaml: .*; it must be text in UTF-8"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "section.yaml").write_text("optim: fast\n")
    with pytest.raises(ConfigError, match="optim is 'fast'; it must be a section of key: value"):
        load_config(tmp_path / "section.yaml")


def test_an_empty_section_is_all_defaults():
    config = build(TrainConfig, {**_sections(), "every": None})
    assert config.every.log == 10


def _sections() -> dict:
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {"model": {"name_or_path": "x"}, "data": {"standard_library": True}}
    return {name: given.get(name, {}) for name in names}


def _run_without_torch(*arguments: str) -> subprocess.CompletedProcess:
    """The program in a fresh interpreter that tells at its end whether torch was loaded."""
    code = (
        "import atexit, sys; from train.command import main;"
        "atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules));"
        f"sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_lists_every_setting_without_loading_torch():
    result = _run_without_torch("--help")
    assert result.returncode == 0
    assert result.stdout.endswith("False False\n")
    for section in dataclasses.fields(TrainConfig):
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            assert f"\n  {field.name}=" in result.stdout
    for written in ("overwrite=false ", "trackers=[] ", "betas=[0.9, 0.95] ", "learning_rate=0.0001 ", "split=train "):
        assert f"\n  {written}" in result.stdout  # as it is written in YAML


def test_a_wrong_setting_is_told_without_loading_torch():
    result = _run_without_torch(str(TINY), "optim.learning_rat=5e-4")
    assert (result.returncode, result.stdout) == (2, "False False\n")
    assert result.stderr == "error: unknown key optim.learning_rat; did you mean optim.learning_rate?\n"


def test_print_config_prints_the_merged_settings():
    result = _run_without_torch(str(TINY), "--print-config", "optim.max_steps=9")
    assert result.returncode == 0
    assert "\n  max_steps: 9\n" in result.stdout
    assert result.stdout.endswith("False False\n")
