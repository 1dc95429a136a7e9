"""One upload, in the process that does it: `python -m train.upload JOB`, whose last line says how it went.

Without what a training imports: it begins at once, and needs little memory beside one.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from layerskip.share.hub import HubError, UnreachableError, upload


@dataclass(frozen=True)
class Job:
    """One upload, as the process that does it is told."""

    run_dir: str
    repo_id: str
    private: bool
    revision: str | None
    license: str | None
    waits: tuple[float, ...]


def upload_job(job: Job) -> dict[str, str]:
    """Do one upload, again after each of its waits while the Hub cannot be reached: {"address"} or {"error"}."""
    for wait in (*job.waits, None):
        try:
            address = upload(Path(job.run_dir), job.repo_id, job.private, job.revision, license=job.license)
            return {"address": address}
        except UnreachableError as error:
            if wait is None:
                return {"error": str(error)}
            time.sleep(wait)
        except HubError as error:
            return {"error": str(error)}
    raise AssertionError("the last try has returned")


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(5)  # the training goes first
    print(json.dumps(upload_job(Job(**json.loads(sys.argv[1])))))
