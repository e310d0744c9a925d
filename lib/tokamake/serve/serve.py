"""Stage `serve`: models behind HTTP, for clients of OpenAI and Megatron, and for a page."""

import socket
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, Peers, peers
from tokamake.remote.addresses import is_remote
from tokamake.runtime.cores import num_threads
from tokamake.serve.options import Limits, read_token
from tokamake.train.stopping.stopping import on_signals

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.serve.served_model import ServedModel

_LIMITS = Limits()
_SMALL_MODEL = 100_000_000
"""Bytes of weights below which a step takes about as long as sending its tokens."""


class OpenedModel(NamedTuple):
    """A model that is ready for requests."""

    name: str
    model: "DrivenModel"
    tokenizer: "Tokenizer"
    end_tokens: frozenset[int]


def serve(
    checkpoints: tuple[str, ...],
    /,
    *,
    tokenizer: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 5000,
    token_file: Path | None = None,
    limits: Limits = _LIMITS,
    layout: InferenceLayout = WHOLE_MODEL,
) -> None:
    """Serve models over HTTP, for clients of OpenAI and Megatron, with a page to try prompts.

    Paths: `/` (the page), `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `PUT /api` (the
    text generation server of Megatron-LM), `/healthz`, `/metrics` (Prometheus), `/openapi.json`.
    The server continues many requests at the same time. SIGTERM or Ctrl-C lets them end.

    A model that is too large for one device is shared by several ranks, as for `evaluate`.

    Args:
        checkpoints: folders of checkpoints of any format, or of runs; NAME=FOLDER to name a model
            in requests. The page compares several.
        tokenizer: tokenizer of the models; by default as for `generate`.
        host: address to listen at; 0.0.0.0 for all, which other machines can then reach.
        port: port to listen at; 0 for a free one.
        token_file: file with the token that requests must send, as Authorization: Bearer TOKEN.
        limits: limits of requests.
        layout: how ranks share the model.
    """
    limits.check()
    with peers() as ranks, ExitStack() as stack:
        with ranks.together():
            folders = _names(checkpoints)
            if len(folders) > 1 and ranks.ranks.world_size > 1:
                raise UserError(
                    f"{len(folders)} checkpoints on {ranks.ranks.world_size} ranks: ranks share "
                    "one model; start a server for each"
                )
            token = read_token(token_file)
            listener = listen(host, port) if ranks.is_first else None
            if listener:
                stack.enter_context(listener)
        opened = open_models(folders, layout, tokenizer=tokenizer, limits=limits, ranks=ranks)
        # The first rank ends the other ranks, once the requests in flight have ended.
        ignoring = nullcontext() if ranks.is_first else on_signals(lambda *_: None)
        with ranks.together(), ignoring, ExitStack() as driven:
            if all(driven.enter_context(each.model.driven()) for each in opened):
                assert listener is not None
                served = with_engines(opened, limits)
                is_open = (
                    not token and not host.startswith("127.") and host not in ("localhost", "::1")
                )
                if is_open:
                    print(f"warning: no --token-file, so all that reach {host} can use the server")
                if max(each.model.num_bytes for each in opened) < _SMALL_MODEL:
                    _leave_core_to_http()
                _serve(served, limits, host=host, token=token, listener=listener)


def _names(checkpoints: tuple[str, ...]) -> dict[str, Path]:
    """Folders by the names that the user gives; `#N` for folders without a name."""
    from tokamake.remote.local_copy import bring  # its modules of the network load slowly

    if not checkpoints:
        raise UserError("checkpoints: none given; name the folder of a checkpoint or a run")
    folders: dict[str, Path] = {}
    for number, text in enumerate(checkpoints):
        name, equals, folder = text.partition("=")
        if not equals or is_remote(text) or Path(text).exists():
            name, folder = f"#{number}", text
        if not name or name in folders:
            reason = f"another checkpoint has the name {name}" if name else "has no name"
            raise UserError(f"{text}: {reason}; give NAME=FOLDER with a name of its own")
        folders[name] = bring(folder) if is_remote(folder) else Path(folder)
    return folders


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address."""
    if not 0 <= port < 65536:
        raise UserError(f"port: {port}: not a port; give 1 to 65535, or 0 for a free one")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a name of a host"
        raise UserError(f"{host}:{port}: {reason}; give another --host or --port") from None
    return listener


def open_models(
    folders: dict[str, Path],
    layout: InferenceLayout,
    *,
    tokenizer: Path | None,
    limits: Limits,
    ranks: Peers,
) -> list[OpenedModel]:
    """Open each checkpoint; names that begin with # are replaced."""
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import end_tokens, tokenizer_of
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.memory import Needs
    from tokamake.inference.model import InferenceModel

    opened: list[OpenedModel] = []
    needed = 0.0
    for name, folder in folders.items():
        with ranks.together():
            checkpoint = open_any(folder)
            layout.check(checkpoint.architecture, world_size=ranks.ranks.world_size)
            text_tokenizer = tokenizer_of(checkpoint, tokenizer)
            if name.startswith("#"):
                name = _name(folder, checkpoint, taken=[other.name for other in opened])
        context = checkpoint.architecture.max_position_embeddings
        length = min(limits.max_length or context, context)
        needs = Needs(limits.batch_size * length, other_bytes=needed)
        part = InferenceModel(checkpoint, layout, peers=ranks, needs=needs)
        needed += needs.total(checkpoint.architecture, layout, world_size=ranks.ranks.world_size)
        model = DrivenModel(part, ranks.ranks.world_size)
        ends = end_tokens(checkpoint, text_tokenizer)
        opened.append(OpenedModel(name, model, text_tokenizer, ends))
    return opened


def _name(folder: Path, checkpoint: "Checkpoint", *, taken: list[str]) -> str:
    """Name of the run of a checkpoint, or of its folder; a number follows if it is taken."""
    from tokamake.checkpoint.load_model import run_of

    run = run_of(checkpoint)
    name = run.run if run else folder.resolve().name
    while name in taken:
        base, _, number = name.rpartition("-")
        name = f"{base}-{int(number) + 1}" if base and number.isdecimal() else f"{name}-2"
    return name


def with_engines(opened: list[OpenedModel], limits: Limits) -> "list[ServedModel]":
    """An engine for each model, on the first rank within the `driven` contexts."""
    from tokamake.inference.engine import InferenceEngine
    from tokamake.serve.served_model import ServedModel

    return [
        ServedModel(
            each.name,
            each.tokenizer,
            InferenceEngine(
                each.model,
                num_rows=limits.batch_size,
                vocab_size=each.tokenizer.vocab_size,
                # The last new token needs no place in the cache.
                capacity=limits.max_length and limits.max_length - 1,
            ),
            each.end_tokens,
        )
        for each in opened
    ]


def _serve(
    models: "list[ServedModel]", limits: Limits, *, host: str, token: str, listener: socket.socket
) -> None:
    """Answer requests until a signal, with the models in this thread and HTTP in another."""
    from tokamake.serve.app import HttpThread
    from tokamake.serve.engine_loop import EngineLoop
    from tokamake.serve.model_server import ModelServer
    from tokamake.serve.server_metrics import ServerMetrics

    metrics = ServerMetrics()
    engine_loop = EngineLoop([model.engine for model in models], metrics)
    server = ModelServer(models, engine_loop, limits, metrics)
    http = HttpThread(server, listener, host=host, token=token)
    with on_signals(lambda *_: http.stop()):
        http.start()
        _announce(models, listener)
        try:
            engine_loop.run()
        finally:
            http.end()


def _leave_core_to_http() -> None:
    """Let a small model compute with all cores but one, unless OMP_NUM_THREADS is set."""
    import torch

    # Threads of torch spin between operations: on all cores, they would delay the HTTP thread.
    if num_threads(1):
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _announce(models: "list[ServedModel]", listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    names = ", ".join(model.name for model in models)
    address = f"[{host}]" if ":" in host else host
    print(f"serves {names} at http://{address}:{port}; Ctrl-C stops it", flush=True)
