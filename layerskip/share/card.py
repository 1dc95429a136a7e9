"""The model card, from a run's own numbers. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from layerskip.checkpoint.whole_files import write_whole
from layerskip.share import card_numbers, card_text
from layerskip.share.card_metadata import metadata
from layerskip.share.run_record import HubError, read_run

__all__ = ["HubError", "is_own_card", "model_card", "write_model_card"]

_MARK = "<!-- Written from the run's own numbers. Remove this line, and your changes to the card are kept. -->"


def write_model_card(
    run_dir: Path, repo_id: str | None = None, license: str | None = None, base_model: str | None = None
) -> None:
    """Write README.md from the run's numbers, unless somebody has made it their own (see its comment).

    Whole or not at all: one that was cut short would lack its mark, and be kept as somebody's own.
    """
    if not is_own_card(run_dir):
        write_whole(run_dir / "README.md", model_card(run_dir, repo_id, license, base_model))


def is_own_card(run_dir: Path) -> bool:
    """Whether somebody has made the folder's card their own, so that it stays as it is."""
    path = run_dir / "README.md"
    return path.is_file() and _MARK not in path.read_text(encoding="utf-8")


def model_card(
    run_dir: Path, repo_id: str | None = None, license: str | None = None, base_model: str | None = None
) -> str:
    """The model card as text. What is not known of the run is left out; that a licence is missing is said.

    Args:
        repo_id: how the card's examples name the model; None is the folder's name.
        license: as the Hub names it; None is what an earlier card said, or the base model's.
        base_model: its Hub id; None is what an earlier card or the settings say.

    Raises:
        HubError: if a record of the run is damaged.
    """
    run = read_run(run_dir)
    name = repo_id or run_dir.resolve().name
    data = metadata(run, name.rpartition("/")[2], license, base_model)
    sections = (
        card_text.introduction(name, run, data.base_model),
        card_text.usage(name, run),
        card_text.training_data(run),
        card_text.recipe(run),
        card_numbers.quality(run),
        card_numbers.exits(run),
        card_numbers.speed(run),
        card_text.LIMITS,
        card_text.licence(data),
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_MARK}\n\n" + "\n\n".join(filter(None, sections)) + "\n"))
