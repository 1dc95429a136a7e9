"""`push`: upload a run with its model card to the Hugging Face Hub."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from infer.errors import InputError
from infer.terminal import Terminal

if TYPE_CHECKING:
    from layerskip.share.shared_files import SharedFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="folder of a finished run, or of any saved model")
    add("--repo", metavar="OWNER/NAME", required=True, help="repository to upload to; made if it is not there")
    add("--private", action="store_true", help="make the repository private; one that is public already is refused")
    add("--revision", metavar="BRANCH", help="branch to upload to; made if it is not there (default: main)")
    add(
        "--license",
        metavar="NAME",
        help="for the model card, as the Hub names it, such as apache-2.0 (default: the base model's, where its card "
        "lies beside it)",
    )
    add("--base-model", metavar="OWNER/NAME", help="for the model card, where the run began from a local folder")
    add(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave files out, such as 'prompts/*'; may be given several times",
    )
    add("--dry-run", action="store_true", help="only list the files; needs no token and no network")


def run(arguments: argparse.Namespace) -> int:
    """Upload, or list what would be; returns the exit code."""
    from layerskip.share import hub
    from layerskip.share.card import is_own_card

    run_dir: Path = arguments.run_dir.expanduser()
    try:
        hub.check_repo_id(arguments.repo)
        if arguments.revision is not None:
            hub.check_revision(arguments.revision)
        if arguments.base_model is not None:
            hub.check_repo_id(arguments.base_model)
        if (arguments.license or arguments.base_model) and is_own_card(run_dir):
            Terminal().note("README.md is your own and goes as it is: --license and --base-model are not put into it")
        if arguments.dry_run:
            return dry_run(run_dir, arguments)
        address = hub.upload(
            run_dir,
            arguments.repo,
            private=arguments.private or None,
            revision=arguments.revision,
            license=arguments.license,
            base_model=arguments.base_model,
            exclude=arguments.exclude,
        )
    except hub.HubError as error:
        raise InputError(str(error)) from None
    print(f"uploaded to {address}")
    return 0


def dry_run(run_dir: Path, arguments: argparse.Namespace) -> int:
    """List what would be uploaded, with sizes, and write nothing; returns the exit code, 0."""
    from layerskip.share.card import is_own_card, model_card
    from layerskip.share.shared_files import check_checkpoint, shared_files

    check_checkpoint(run_dir)
    card = None
    if not is_own_card(run_dir):
        card = model_card(run_dir, arguments.repo, arguments.license, arguments.base_model)
    files: list[SharedFile] = shared_files(run_dir, arguments.exclude, card)
    rows = [
        [file.name, f"{file.size:,}", "as it is" if file.text is None else "read for local paths"] for file in files
    ]
    total = f"{sum(file.size for file in files):,}"
    terminal = Terminal()
    title = f"{run_dir.name} to {arguments.repo}: {len(files)} files"
    terminal.table(title, ("file", "bytes", ""), [*rows, ["all", total, ""]])
    if card is not None and "\nlicense:" not in card:
        terminal.note("the card names no licence: give --license, such as apache-2.0")
    return 0
