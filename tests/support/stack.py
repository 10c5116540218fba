"""Runs a command with everything up: `python -m support.stack --cwd real/js -- node --test`.

The command finds the addresses in its environment:
    TIDEGATE_URL       the gateway in front of llama.cpp (with TIDEGATE_BIN=direct: llama.cpp itself)
    LLAMA_URL          llama.cpp itself
    LLAMA_LOG          what it prints
    FAKE_URL           the scripted server, and
    TIDEGATE_FAKE_URL  the gateway in front of it (neither with TIDEGATE_BIN=direct)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack

from support.fake import Fake
from support.gateway import Gateway, direct
from support.llama import Llama


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cwd", default=".")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with ExitStack() as stack:
        llama = stack.enter_context(Llama(slots=2))
        env = {"LLAMA_URL": llama.url, "LLAMA_LOG": str(llama.log_file), "TIDEGATE_URL": llama.url}
        servers = [llama]
        if not direct():
            gateway = stack.enter_context(Gateway("--upstream", llama.url, "--slots", "2", "--queue", "16"))
            fake = stack.enter_context(Fake())
            cors = f'[cors]\norigins = ["*"]\n[[upstreams]]\nurl = "{fake.url}"\n'
            front = stack.enter_context(Gateway(config=cors))
            servers += [gateway, fake, front]
            env |= {"TIDEGATE_URL": gateway.url, "TIDEGATE_FAKE_URL": front.url, "FAKE_URL": fake.url}
        code = subprocess.run(options.command, cwd=options.cwd, env=os.environ | env, check=False).returncode
        if code:
            for server in servers:
                print(f"--- end of the log of {server.name}\n{server.tail()}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
