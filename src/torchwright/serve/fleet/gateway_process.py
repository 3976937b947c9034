"""The gateway's process: `python -m torchwright.serve.fleet.gateway_process`, which reads SMG's options from its input.

They hold keys, which a command line would show to every user of the machine. It ends with the fleet.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    given = json.loads(sys.stdin.buffer.read())
    from smg.launch_router import parse_router_args  # pyright: ignore[reportMissingImports]
    from smg.router import Router  # pyright: ignore[reportMissingImports]

    # Without SMG's own command, which writes a banner and another name of the process.
    Router.from_args(parse_router_args(given)).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
