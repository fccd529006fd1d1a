"""torchrun, which adds no stack trace of its own where a process has told of the user's error.

Before any process starts, a model that is named by its id on the hub is fetched.
"""

from __future__ import annotations

import sys

from timelyfreeze.cli.hub import with_fetched_model

USER_ERROR = 2


def main() -> None:
    """Run torchrun with the arguments of this process; exit with 2 if the first failure did."""
    try:
        sys.argv = with_fetched_model(sys.argv)
    except ValueError as error:
        print(f"error: {error}", flush=True)
        sys.exit(USER_ERROR)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            raise
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
