"""Settings by which lists of URLs are cleaned, and their pages fetched."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tokamake.config.fields import Matching, Settings


class FetchUrlsSettings(Settings):
    """Lists of URLs, urls:PATH in the table of corpora: which URLs are left out, and how the login
    node fetches the pages of the rest."""

    user_agent: Annotated[
        str,
        Matching(
            r"^[A-Za-z_-]+(/[!-~ ]*)?$",
            "NAME or NAME/VERSION in ASCII; letters, '_' or '-' in NAME",
        ),
    ] = "tokamake/0.1"
    """Name that servers see: NAME/VERSION and, better, an address of yours: mylab/1.0
    (+https://example.org/crawl). Rules of robots.txt for NAME apply."""
    blacklist: Path | None = None
    """File of domains and extensions to leave out: a line is example.org, which means its
    subdomains too, or .pdf. # opens a comment."""
    default_blacklist: bool = True
    """Also leave out domains and extensions of media, social networks, shops, shared files and
    paywalls (lib/tokamake/data/urls/default_blacklist.py)."""
    urls_per_shard: Annotated[int, Field(ge=1)] = 10_000
    """URLs whose pages make a WARC file."""
    max_page_bytes: Annotated[int, Field(ge=1, le=1 << 24)] = 1 << 23
    """Maximum bytes of a page as the server sends it."""
    page_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30
    """Maximum time of a request."""
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 5
    """Maximum redirects of a URL."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Attempts if a server does not answer, or answers 429 or 5xx. The waits between them are 1, 2,
    4, ... seconds, or Retry-After."""
    host_failures: Annotated[int, Field(ge=1)] = 5
    """Failures of a host in a row (no answer, too slow, 429 or 5xx) after which its other URLs in
    the WARC file are not requested: host unavailable."""
    max_wait_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60
    """Longest wait for a server, or for this machine's network. A URL whose server asks for more
    (Retry-After, Crawl-delay) counts as failed; without a network, the job ends."""
    connections: Annotated[int, Field(ge=1, le=1000)] = 32
    """Requests at the same time."""
    connections_per_host: Annotated[int, Field(ge=1, le=16)] = 1
    """Requests at the same time to one host."""
    host_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1
    """Time from one request to a host to the next; Crawl-delay in robots.txt may be longer."""
    allow_private_addresses: bool = False
    """Also fetch from addresses of this machine and of private networks."""
