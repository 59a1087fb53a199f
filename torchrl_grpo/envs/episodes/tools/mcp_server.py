"""A server of tools that speaks the Model Context Protocol (MCP): a program that is started, or a URL.

The connection lives in the event loop of its process. The server answers one call at a time, and what it
sends may use a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from torchrl_grpo.config.remote import command, is_url, place

# Memory that this process may use for what a server sends, beyond what it has when it connects.
_MEMORY_BYTES = 512 * 2**20
# Pages of the list of tools that are read.
_MOST_PAGES = 16


class McpServer:
    """A server of tools. Each object has a connection of its own, and for a command a process of its own.

    Args:
        name: name as in ``env.tools``.
        shows_errors: whether what a started program writes on its standard error goes to the log.
    """

    def __init__(self, name: str, shows_errors: bool = False) -> None:
        self._where, self._shows_errors = place(name), shows_errors
        self._client: Client | None = None
        self._connection: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Connect, unless there is a connection.

        Raises:
            MCPError: the server refuses, or speaks another protocol.
            OSError: the program cannot be started.
        """
        if self._client is None:
            connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            # The task also leaves what it has entered.
            self._connection = asyncio.create_task(self._stay_connected(connected))
            self._client = await connected

    async def tools(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool."""
        await self.connect()
        assert self._client is not None
        tools: list[dict[str, Any]] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += [
                {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                break
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool.

        Returns:
            The text of the result, and whether it is an error.
        """
        await self.connect()
        assert self._client is not None
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            # The next call connects anew: the server may have ended.
            await self._disconnect()
            return str(error), True
        parts = [
            part.text if part.type == "text" else f"({part.type}, which is not shown)"
            for part in result.content
        ]
        if not parts and result.structured_content is not None:
            parts = [str(result.structured_content)]
        return "\n".join(parts), bool(result.is_error)

    async def _disconnect(self) -> None:
        self._client = None
        if self._connection is not None:
            self._connection.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connection

    async def _stay_connected(self, connected: asyncio.Future[Client]) -> None:
        try:
            async with Client(self._transport(), cache=None) as client:
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if connected.done():
                raise
            connected.set_exception(_only(error))

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        _limit_memory(None)
        if is_url(self._where):
            _limit_memory(_MEMORY_BYTES)
            async with streamable_http_client(self._where) as streams:
                yield streams
            return
        program, *words = command(self._where)
        # It gets a few variables such as PATH, and none that holds a key.
        parameters = StdioServerParameters(command=program, args=words)
        with Path(os.devnull).open("w") as null:
            async with stdio_client(parameters, sys.stderr if self._shows_errors else null) as streams:
                # Not before: the program may need more.
                _limit_memory(_MEMORY_BYTES)
                yield streams


def _limit_memory(more: int | None) -> None:
    """Bound the address space of this process to what it has and ``more``; None lifts the bound."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard
    if more is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _only(error: Exception) -> Exception:
    """Return the error in a group that has only one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
