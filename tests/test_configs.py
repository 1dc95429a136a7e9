"""Every YAML in configs/ is read by the program that is meant to read it."""

from pathlib import Path

import pytest

from train.command import load_config
from train.parsing import read_yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))
LAUNCHES = sorted((CONFIGS / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_config_is_read_and_names_its_command(path):
    config = load_config(path)
    assert config.run.name == path.stem
    assert f"train configs/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_recipe_fits_its_model(path):
    config = load_config(path)
    known = {"llama3.2-1b": 16, "llama2-7b": 32, "smollm2-domain": 30, "assistant": 30}
    layers = known.get(path.stem) or config.model.architecture["num_hidden_layers"]
    config.recipe.check(layers)


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launch_config_has_only_keys_that_accelerate_knows(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))  # raises for unknown keys
    assert config.num_processes >= 2


def test_zero3_can_write_a_checkpoint():
    settings = read_yaml(CONFIGS / "accelerate" / "zero3.yaml")["deepspeed_config"]
    assert settings["zero3_save_16bit_model"] is True


def test_every_config_is_in_the_readme():
    readme = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in (*RUNS, *LAUNCHES) if f"`{path.stem}" not in readme] == []


def test_llama2_7b_has_the_papers_numbers():
    config = load_config(CONFIGS / "llama2-7b.yaml")  # Elhoushi et al. 2024, tables 8 and 9
    recipe, optim = config.recipe, config.optim
    assert (recipe.max_dropout, recipe.exit_loss_scale, recipe.curriculum_stride) == (0.1, 0.2, 8)
    assert (optim.max_steps, optim.learning_rate, optim.global_batch_size) == (50_000, 3e-5, 64 * 4)
