"""Change the times, memory and messages of schedules in a browser, and see the effect.

The playground's page runs this package in the browser. `zero-bubble playground` serves the page's files to this
machine alone, until Ctrl-C; the page needs no network. With `--output DIR`, `zero-bubble playground` writes the page's
files to a folder, for any web server, and serves nothing.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.invocation import at_least, command, raise_on_sigterm
from megatron.zero_bubble.cli.playground.site_files import PYODIDE, write_site
from megatron.zero_bubble.cli.shared_flags import CommandFlags
from megatron.zero_bubble.session.flag_parser import flag


@dataclass(frozen=True)
class PlaygroundFlags(CommandFlags):
    """the page"""

    port: int | None = flag(
        "port on 127.0.0.1; 0 takes a free port (default: 0)", parse=at_least(0, 65535), metavar="PORT"
    )
    no_browser: bool = flag("open no browser, only print the address", False)
    output: Path | None = flag("write the page to DIR instead of serving it", metavar="DIR")
    pyodide: Path | None = flag("folder of the npm package pyodide (default: the copy in this package)", metavar="DIR")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None:
            self.refuse(("port", "no_browser"), f"--output {self.output}, which serves nothing")


@command("zero-bubble playground", PlaygroundFlags, __doc__)
def main(flags: PlaygroundFlags) -> None:
    if flags.output is not None:
        write_site(flags.output, flags.pyodide or PYODIDE)
        print(f"wrote {flags.output}")
        return
    raise_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="zero-bubble-playground-") as folder:
        write_site(Path(folder), flags.pyodide or PYODIDE)
        with PlaygroundServer(folder, flags.port or 0) as server:
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            print(f"the playground is at {address} (Ctrl-C ends it)", flush=True)
            if not flags.no_browser:
                webbrowser.open(address)
            server.serve_forever()


class _Handler(SimpleHTTPRequestHandler):
    """Serves the playground's files with the MIME types that browsers require, and prints no line for a request."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for an HTTP request."""


class PlaygroundServer(ThreadingHTTPServer):
    """An HTTP server on this machine's loopback address; prints no error if a browser closes a connection.

    Args:
        folder: the folder that is served.
        port: the TCP port; with 0, the operating system chooses a free port.

    Raises:
        ValueError: the port is in use, or this user may not open it.
    """

    def __init__(self, folder: str, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), partial(_Handler, directory=folder))
        except OSError as error:
            raise ValueError(f"argument --port {port}: {error.strerror}: --port 0 takes a free port") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error other than a closed connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
