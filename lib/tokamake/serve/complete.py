"""Stage `complete`: continue prompts through a server."""

import http.client
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokamake.errors import TemporaryError, UserError, of_system
from tokamake.serve.options import read_token

_TIMEOUT_SECONDS = 600.0


def complete(
    server: str,
    /,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    seed: int | None = None,
    token_file: Path | None = None,
) -> None:
    """Continue prompts through a server: of `tokamake serve`, or of Megatron-LM.

    Prompts come from a file, or from a person at the terminal.

    Args:
        server: HOST:PORT of the server, or its address with http:// or https://.
        prompts: text file with a prompt on each line; by default, standard input.
        max_new_tokens: maximum tokens to add to a prompt.
        temperature: softmax temperature, above 0.
        top_k: number of most likely tokens to sample from; 0 for all, 1 for the most likely one.
        top_p: sample from the most likely tokens whose probabilities add up to this; 0: not set.
        seed: seed of the draws; by default, each answer differs.
        token_file: file with the token of the server.
    """
    url = urlsplit(server if "://" in server else f"http://{server}")
    try:
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is no number
        is_address = False
    if not is_address:
        raise UserError(f"server: {server!r}: not an address; give HOST:PORT")
    settings: dict[str, Any] = {
        "tokens_to_generate": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        # Megatron's server takes only a float.
        "top_p": float(top_p),
    }
    if seed is not None:
        settings["random_seed"] = seed
    token = read_token(token_file)
    is_terminal = prompts is None and sys.stdin.isatty()
    for prompt in _prompts(prompts):
        try:
            body = {"prompts": [prompt], **settings}
            print(_ask(url, body, token=token), flush=True)
        except UserError as error:
            if not is_terminal:
                raise
            print(error, file=sys.stderr)
        print(flush=True)


def _prompts(path: Path | None) -> Iterator[str]:
    """Lines of a file or of standard input, without empty ones."""
    if path is None and sys.stdin.isatty():
        import readline  # noqa: F401, people can edit their line

        while True:
            try:
                line = input("prompt: ")
            except EOFError:
                print()
                return
            if line:
                yield line
    try:
        with path.open(encoding="utf-8") if path else sys.stdin as file:
            yield from filter(None, (line.rstrip("\r\n") for line in file))
    except OSError as error:
        raise UserError(f"prompts: {of_system(error)}; fix the path") from None
    except UnicodeDecodeError:
        raise UserError(f"prompts: {path or 'standard input'}: not UTF-8; convert it") from None


def _ask(url: Any, body: dict[str, Any], *, token: str) -> str:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection = kind(url.hostname, url.port, timeout=_TIMEOUT_SECONDS)
    path = url.path.rstrip("/")
    path = path if path.endswith("/api") else f"{path}/api"
    try:
        connection.request("PUT", path, json.dumps(body), headers)
        reply = connection.getresponse()
        content = reply.read()
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TemporaryError(f"{url.netloc}: {reason}; is the server running there?") from None
    finally:
        connection.close()
    try:
        answer = json.loads(content)
        if reply.status == 200:
            return str(answer["text"][0])
        message = answer["message"] if isinstance(answer, dict) else answer
    except (ValueError, LookupError, TypeError):
        message = f"no answer of a text generation server: {content[:80]!r}"
    raise UserError(f"{url.netloc}: status {reply.status}: {message}")
