"""`push`: upload a run with its model card to the Hugging Face Hub."""

import argparse
from pathlib import Path

from infer.errors import InputError
from infer.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="folder of a finished run, or of any saved model")
    add("--repo", metavar="OWNER/NAME", required=True, help="repository to upload to; made if it is not there")
    add("--private", action="store_true", help="make the repository private, if it is made")
    add("--revision", metavar="BRANCH", help="branch to upload to; made if it is not there (default: main)")
    add("--license", metavar="NAME", help="for the model card, as the Hub names it, such as apache-2.0")
    add("--dry-run", action="store_true", help="only list the files; needs no token and no network")


def run(arguments: argparse.Namespace) -> int:
    """Upload, or list what would be; returns the exit code."""
    from layerskip import hub
    from layerskip.card import model_card

    run_dir: Path = arguments.run_dir.expanduser()
    try:
        hub.check_repo_id(arguments.repo)
        if arguments.dry_run:
            files = hub.upload_files(run_dir)
            return dry_run(run_dir, arguments.repo, files, model_card(run_dir, arguments.repo))
        address = hub.upload(
            run_dir,
            arguments.repo,
            private=arguments.private or None,
            revision=arguments.revision,
            license=arguments.license,
        )
    except hub.HubError as error:
        raise InputError(str(error)) from None
    print(f"uploaded to {address}")
    return 0


def dry_run(run_dir: Path, repo_id: str, files: list[Path], card: str) -> int:
    """List what would be uploaded, with sizes; returns the exit code, 0."""
    sizes = {path.relative_to(run_dir).as_posix(): path.stat().st_size for path in files}
    sizes.setdefault("README.md", len(card.encode()))  # written before an upload if it is not there
    rows = [[name, f"{size:,}"] for name, size in sorted(sizes.items())]
    title = f"{run_dir.name} to {repo_id}: {len(sizes)} files"
    Terminal().table(title, ("file", "bytes"), [*rows, ["all", f"{sum(sizes.values()):,}"]])
    return 0
