"""The entry point of `braid`: how a command ends.

Exit codes: 0 done, 1 refused or failed, 2 wrong use (options, settings), 3 not finished in time, 130 interrupted. An error is
one line on standard error, never a traceback. The commands are imported late, so that an installation without the extra
`server` is told what is missing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NoReturn

from braid.cli.interrupt import Interrupted
from braid.cli.output import printable
from braid.errors import BraidError, ConfigError, DeadlineExceeded

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command and turn every expected failure into one line and an exit code."""
    try:
        from braid.cli.commands import app

        app(standalone_mode=True, prog_name="braid")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "braid":
            raise
        _fail(f"The braid command needs the package {error.name}; install Braid with its server: braidmq[server].", EXIT_FAILED)
    except (KeyboardInterrupt, asyncio.CancelledError, Interrupted):
        sys.exit(EXIT_INTERRUPTED)
    except ConfigError as error:
        _fail(error.message, EXIT_USAGE)
    except DeadlineExceeded as error:
        _fail(error.message, EXIT_TIMEOUT)
    except BraidError as error:
        _fail(error.message, EXIT_FAILED)


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {printable(' '.join(text.split()))}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
