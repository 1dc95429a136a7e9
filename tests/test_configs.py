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
    known = {"llama3.2-1b": 16, "llama2-7b": 32, "smollm2-finetune": 30, "smollm2-domain": 30, "assistant": 30}
    known |= {"llama2-13b": 40, "llama3-8b": 32, "llama1-7b-code": 32}
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


# Elhoushi et al. 2024, tables 8 and 9: p_max, e_scale, R; steps, learning rate, GPUs x sequences.
PAPER = {
    "llama2-7b": (0.1, 0.2, 8, 50_000, 3e-5, 64 * 4),
    "llama2-13b": (0.1, 0.1, 39, 50_000, 2e-5, 64 * 4),
    "llama1-7b-code": (0.1, 1.0, 16, 10_000, 1e-4, 32 * 4),
    "llama-1.5b-scratch": (0.1, 0.2, None, 50_000, 8e-4, 32 * 4),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    recipe, optim = config.recipe, config.optim
    numbers = (recipe.max_dropout, recipe.exit_loss_scale, recipe.curriculum_stride)
    assert (*numbers, optim.max_steps, optim.learning_rate, optim.global_batch_size) == PAPER[name]
    assert (recipe.exit_weights, recipe.dropout_depth, recipe.curriculum) == ("paper", "exponential", "rotational")
    assert (recipe.exit_loss_positions, recipe.self_distillation) == (1, 0)
    assert recipe.dropout_time == ("rising" if "scratch" in name else "constant")
