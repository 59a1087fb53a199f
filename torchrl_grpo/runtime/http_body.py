"""Reads the body of an answer that may have no end."""

from __future__ import annotations

import aiohttp


class BodyTooLong(Exception):
    """An answer is longer than anything that was asked for."""


async def read_body(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        BodyTooLong: it is longer than ``most_bytes``. The rest is not read.
    """
    parts, size = [], 0
    async for part in answer.content.iter_chunked(2**16):
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise BodyTooLong(f"longer than {most_bytes:,} bytes")
    return b"".join(parts)
